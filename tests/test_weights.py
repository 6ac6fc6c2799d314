"""What chunks are addressed by follows the weights, whoever changes them and however."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import access
import pytest
import torch
from laws import QUESTION, TEMPLATE, TEXTS, TOLERANCE, error
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from verdicts import REUSE, make_verdict
from zoo import FAMILIES, HYBRIDS, REFUSED, build, byte_tokenizer

from kvcache_rag import (
    Combination,
    Engine,
    FullRecompute,
    InvalidInputError,
    MemoryStore,
    Reuse,
)
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.generation import StoredChunk
from kvcache_rag.models.weights import Weights, unwrapped
from kvcache_rag.verdict import Gate

Change = Callable[[Any], Any]

# peft asks transformers by a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def adapted(seed: int = 0) -> PeftModel:
    """A model with two LoRA adapters that matter."""
    settings = LoraConfig(**LORA)
    model = get_peft_model(build("qwen2"), settings, adapter_name="one")
    model.add_adapter("two", settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.set_adapter("one")
    return model


def make_engine(model: Any, **options: Any) -> Engine:
    options = {"template": TEMPLATE, "store": MemoryStore(), "policy": Reuse(), **options}
    return Engine(model, byte_tokenizer(), **options)


def reused(engine: Engine, **options: Any) -> int:
    return engine.generate(QUESTION, TEXTS, max_new_tokens=1, **options).metrics.reused_tokens


def assert_as_new(engine: Engine) -> None:
    """The engine computes what one does that was made of its model as it is now."""
    fresh = make_engine(copy.deepcopy(engine.model))
    assert error(engine.logits(QUESTION, TEXTS), fresh.logits(QUESTION, TEXTS)) < TOLERANCE
    assert engine.spec == fresh.spec, "another process would not find the chunks"


def load_other(model: Any) -> None:
    state = model.state_dict()
    model.load_state_dict({k: v + 0.01 * torch.ones_like(v) for k, v in state.items()})


def assign_other(model: Any) -> None:
    state = {k: torch.nn.Parameter(v + 0.01) for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def optimiser_step(model: Any) -> None:
    parameter = next(p for n, p in model.named_parameters() if "lora_A.one" in n)
    parameter.requires_grad_(True)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1).step()


def scale(model: Any, to: float = 0.5) -> None:
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("one", to)


def write_in_place(model: Any) -> None:
    with torch.inference_mode():
        next(p for n, p in model.named_parameters() if "v_proj" in n).mul_(1.5)


def add_adapter(model: Any) -> None:
    settings = LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    model.add_adapter("three", settings)
    model.set_adapter("three")


def exchange_adapter(model: Any) -> None:
    """Another one of the same name, active as the one before was."""
    model.set_adapter("two")
    model.delete_adapter("one")
    model.add_adapter("one", LoraConfig(**LORA, init_lora_weights=False))
    model.set_adapter("one")


def put_adapters_in(model: Any) -> None:
    get_peft_model(model, LoraConfig(target_modules=["v_proj"], init_lora_weights=False))


def hotswap(model: Any) -> None:
    with TemporaryDirectory() as folder:
        adapted(seed=1).save_pretrained(folder)
        hotswap_adapter(model, f"{folder}/one", adapter_name="one")


CHANGES: dict[str, Change] = {
    "hotswap": hotswap,
    "exchange": exchange_adapter,
    "switch": lambda model: model.set_adapter("two"),
    "disable": lambda model: model.base_model.disable_adapter_layers(),
    "disable one layer": lambda model: next(
        part for part in model.modules() if hasattr(part, "lora_A")
    ).enable_adapters(False),
    "scale": scale,
    "merge": lambda model: model.merge_adapter(),
    "merge safely": lambda model: model.merge_adapter(safe_merge=True),
    "add": add_adapter,
    "adapters put in": put_adapters_in,
    "load_state_dict": load_other,
    "load_state_dict, assigned": assign_other,
    "optimiser": optimiser_step,
    "in place": write_in_place,
    "parameter exchanged": lambda model: setattr(
        model.get_base_model().model.norm, "weight", torch.nn.Parameter(torch.ones(64))
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_chunks_of_other_weights_are_never_reused(name: str) -> None:
    engine = make_engine(build("qwen2") if name == "adapters put in" else adapted())
    engine.add(TEXTS)
    assert reused(engine)
    before = engine.logits(QUESTION, TEXTS)
    CHANGES[name](engine.model)
    assert reused(engine) == 0, "a chunk of the weights before was reused"
    assert reused(engine), "chunks of the weights as they are now were not kept"
    matters = error(engine.logits(QUESTION, TEXTS), before) > TOLERANCE
    assert matters != (name in ("merge", "merge safely")), "merging only rounds; all else matters"
    assert_as_new(engine)


@pytest.mark.parametrize(
    ("there", "back"),
    [
        (CHANGES["switch"], lambda model: model.set_adapter("one")),
        (CHANGES["disable"], lambda model: model.base_model.enable_adapter_layers()),
        (scale, lambda model: scale(model, 1)),
    ],
    ids=["switch", "disable", "scale"],
)
def test_chunks_of_weights_that_are_back_are_found_again(there: Change, back: Change) -> None:
    engine = make_engine(adapted())
    keys = engine.add(TEXTS)
    there(engine.model)
    other = engine.add(TEXTS)
    assert not {*keys} & {*other}
    back(engine.model)
    assert engine.keys(TEXTS) == keys
    assert reused(engine)
    there(engine.model)
    assert engine.keys(TEXTS) == other
    assert_as_new(engine)


def test_a_write_to_a_hub_model_is_a_key_of_its_own_however_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its identity at load is a sample of its weights, which need not hold what was written."""
    monkeypatch.setattr("kvcache_rag.models.weights.SAMPLE", 8)  # else all of so small a model
    model = build("qwen2", dtype=torch.bfloat16)
    model.config._commit_hash, model.config._name_or_path = "abc", "some/model"
    engine = make_engine(model)
    specs = {engine.spec}
    for column in range(3):
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[1, column] += 1
        specs.add(engine.spec)
    assert len(specs) == 4


@pytest.mark.parametrize("merge", ["merge", "merge safely"])
def test_what_unmerging_leaves_is_digested_anew(merge: str) -> None:
    """It is not bit by bit what was there before, so its chunks have keys of their own."""
    engine = make_engine(adapted())
    engine.add(TEXTS)
    CHANGES[merge](engine.model)
    engine.add(TEXTS)
    engine.model.unmerge_adapter()
    assert_as_new(engine)
    assert reused(engine)


def test_a_merged_adapter_that_is_disabled_is_unmerged_by_the_forward_pass_itself() -> None:
    engine = make_engine(adapted())
    engine.model.merge_adapter()
    engine.add(TEXTS)
    engine.model.base_model.disable_adapter_layers()
    assert reused(engine) == 0
    assert_as_new(engine)


def test_merge_and_unload_makes_another_model_of_the_first_one() -> None:
    model = adapted()
    inner = unwrapped(model)
    engine = make_engine(inner)
    engine.add(TEXTS)
    assert model.merge_and_unload() is inner
    assert reused(engine) == 0
    assert_as_new(engine)


def test_who_tells_of_a_write_has_no_wrong_answer() -> None:
    engine = make_engine(build("qwen2"))
    engine.add(TEXTS)
    engine.model.get_input_embeddings().weight.data[-3:] *= 2  # no count of writes tells of it
    engine.weights_changed()
    assert reused(engine) == 0
    assert_as_new(engine)
    spec = engine.spec
    engine.weights_changed()
    assert engine.spec == spec, "nothing was written in fact"


def switched_while_planned(engine: Engine, *asks: Callable[[], Any]) -> list[Any]:
    """What is found where the weights change between a plan and its turn at the model."""
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(ask() for ask in asks))
    with access.lock(engine):
        waiting.start()
        time.sleep(0.3)  # until the first is planned
        engine.model.set_adapter("two")
    waiting.join(30)
    return found


def test_what_waited_for_another_answer_is_planned_anew() -> None:
    engine = make_engine(adapted())
    (key, *_) = engine.add(TEXTS)
    once: Any = iter(TEXTS)  # can be looked at for one plan only
    first, batched = switched_while_planned(
        engine,
        lambda: engine.generate(QUESTION, once, max_new_tokens=2),
        lambda: engine.generate_batch([(QUESTION, TEXTS)], max_new_tokens=1)[0],
    )
    expected = make_engine(engine.model).generate(QUESTION, TEXTS, max_new_tokens=2)
    assert first.token_ids == expected.token_ids
    assert first.metrics.prefilled_tokens == expected.metrics.prefilled_tokens
    assert first.metrics.reused_tokens == 0
    assert batched.metrics.reused_tokens > 0
    assert_as_new(engine)
    assert engine.store.contains(key), "the chunk of the other weights is as right as before"
    engine.model.set_adapter("one")
    assert reused(engine) > 0
    assert_as_new(engine)


def test_a_check_that_waited_for_another_answer_is_planned_anew() -> None:
    engine = make_engine(adapted())
    engine.add(TEXTS)
    (found,) = switched_while_planned(engine, lambda: engine.explain(QUESTION, TEXTS))
    assert found.reused_tokens == 0
    engine.model.set_adapter("one")
    (found,) = switched_while_planned(engine, lambda: engine.logits(QUESTION, TEXTS))
    assert error(found, make_engine(engine.model).logits(QUESTION, TEXTS)) < TOLERANCE


class Between(threading.Event):
    """Is asked before each batch, and once does something then."""

    def __init__(self, at: int, act: Callable[[], Any]) -> None:
        super().__init__()
        self.left, self.act = at, act

    def is_set(self) -> bool:
        self.left -= 1
        if not self.left:
            self.act()
        return False


def test_what_is_added_on_while_a_question_has_followed_other_weights_is_not_kept() -> None:
    engine = make_engine(adapted())
    texts = [f"{number} {'is a number. ' * 80}" for number in range(6)]  # a batch for every two

    def ask_with_others() -> None:
        engine.model.set_adapter("two")
        engine.generate(QUESTION, ["Another text."], max_new_tokens=1)

    keys = engine.add(texts, cancelled=Between(2, ask_with_others))
    held = [engine.store.contains(key) for key in keys]
    assert any(held)
    assert not all(held)
    engine.model.set_adapter("one")
    for text, is_held in zip(texts, held, strict=True):
        assert engine.generate(QUESTION, [text], max_new_tokens=1).metrics.misses == (not is_held)
        new = make_engine(engine.model).logits(QUESTION, [text])
        assert error(engine.logits(QUESTION, [text]), new) < TOLERANCE


def test_batches_namespaces_and_combinations_follow() -> None:
    engine = make_engine(adapted())
    tenant = engine.in_namespace("tenant")
    batch = [(QUESTION, TEXTS), (QUESTION, TEXTS[:1])]
    for asked in (engine, tenant):
        asked.add(TEXTS)
        asked.add_combination([TEXTS])
        assert reused(asked, policy=Combination())
    engine.model.set_adapter("two")
    for asked in (engine, tenant):
        assert asked.needed(TEXTS, Reuse()) == asked.keys(TEXTS)
        assert reused(asked, policy=Combination()) == 0
        found = asked.generate_batch(batch, max_new_tokens=1)
        assert found[0].metrics.reused_tokens == 0
        assert reused(asked, policy=Combination())
    assert engine.spec == tenant.spec == engine.in_namespace("third").spec


def test_references_follow() -> None:
    engine = make_engine(adapted())
    one = engine.add(TEXTS[:1])[0]
    engine.model.set_adapter("two")
    two = engine.add(TEXTS[:1])[0]
    engine.model.set_adapter("one")
    assert engine.reference(one.digest, one.spec, one.tokens) == one
    answer = engine.generate(QUESTION, [StoredChunk(two, TEXTS[0])], max_new_tokens=1)
    assert answer.metrics.reused_tokens == one.tokens
    assert engine.explain(QUESTION, [one]).reused_tokens == one.tokens


def test_a_verdict_counts_for_the_weights_that_it_is_about() -> None:
    model = adapted()
    verdict = make_verdict(make_engine(model).identity, {REUSE: 1.0})
    engine = make_engine(model, gate=Gate(verdict))
    engine.add(TEXTS)
    assert reused(engine)
    model.set_adapter("two")
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    assert "fell back to FullRecompute()" in answer.metrics.gate
    model.set_adapter("one")
    assert reused(engine)


def test_an_auxiliary_model_follows() -> None:
    engine = make_engine(adapted())
    auxiliary = Auxiliary(engine)
    before = auxiliary.scores(QUESTION, TEXTS)
    engine.model.set_adapter("two")
    after = auxiliary.scores(QUESTION, TEXTS)
    fresh = Auxiliary(make_engine(copy.deepcopy(engine.model))).scores(QUESTION, TEXTS)
    assert all(map(torch.allclose, after, fresh))
    assert not all(map(torch.allclose, before, after))


def test_an_auxiliary_that_is_the_model_itself_never_waits_for_its_own_answer() -> None:
    engine = make_engine(adapted())
    auxiliary = Auxiliary(engine)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(auxiliary.scores(QUESTION, TEXTS)))
    with access.lock(engine):  # an answer in progress
        engine.model.set_adapter("two")
        thread.start()
        thread.join(30)
        assert found


def test_a_model_that_was_cast_is_refused_in_one_sentence() -> None:
    engine = make_engine(build("qwen2"))
    engine.model.to(torch.bfloat16)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=r"float32 on cpu .*bfloat16 on cpu now"):
            engine.generate(QUESTION, TEXTS, max_new_tokens=1)


def test_learned_prompts_are_refused_in_one_sentence() -> None:
    model = get_peft_model(
        build("qwen2"), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    with pytest.raises(InvalidInputError, match="learned tokens before every prompt"):
        make_engine(model)


def test_a_peft_model_answers_as_its_own_forward_pass() -> None:
    model = adapted()
    engine = make_engine(model)
    ids = engine.tokenize(QUESTION, TEXTS[:1])
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([ids.all])).logits[0, -len(ids.query) :].float()
    assert error(engine.logits(QUESTION, TEXTS[:1]), plain) < TOLERANCE


# transformers' RWKV divides its own weights when it first evaluates; no chunk of it is kept.
@pytest.mark.parametrize("name", [one for one in (*FAMILIES, *HYBRIDS, *REFUSED) if one != "rwkv"])
def test_answering_changes_no_weights(name: str) -> None:
    """A family whose forward pass wrote its buffers would be digested before every question."""
    model = build(name)
    weights = Weights(model)
    identity = weights.identity
    engine = make_engine(model)
    engine.generate(QUESTION, TEXTS, max_new_tokens=2, policy=FullRecompute())
    assert weights.are_unchanged()
    assert weights.follow() is identity


def test_weights_made_in_inference_mode_have_no_count_of_writes() -> None:
    with torch.inference_mode():
        model = build("qwen2")
    engine = make_engine(model)
    engine.add(TEXTS)
    assert reused(engine)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(64))
    assert reused(engine) == 0
