"""What is reused where nobody says it: what a model, or its adapter, was trained for."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from laws import (
    QUESTION,
    TEMPLATE,
    TEXTS,
    TOLERANCE,
    error,
)
from peft import LoraConfig, get_peft_model
from reader_file import reader_data
from transformers import AutoModelForCausalLM
from zoo import build, byte_tokenizer

from kvcache_rag import (
    BestFew,
    BestLast,
    CacheBlend,
    Combination,
    Engine,
    FullRecompute,
    InvalidInputError,
    LegoLink,
    MemoryStore,
    Reuse,
)
from kvcache_rag.engine import like, unwarned
from kvcache_rag.models.adapters import (
    BLOCKS,
    TRAINING,
    TRAINING_FILE,
    merged,
    note_training,
    trained_for_blocks,
    with_adapter,
    write_training,
)
from kvcache_rag.models.weights import model_identity
from kvcache_rag.policies.default import UNTRAINED, WIDE, default_policy
from kvcache_rag_lab.finetune import FinetuneConfig, finetune
from kvcache_rag_lab.reader import model_path
from kvcache_rag_server.local import LocalBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# peft asks transformers by a name that transformers is about to drop,
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    # and looks for the vocabulary of the model that an adapter was made for.
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
]

WARNING = "was asked for on a model that was not trained for it"


def untrained(name: str = "qwen2", **options: Any) -> Engine:
    model = build(name)
    note_training(model.config, blocks=False)
    options.setdefault("store", MemoryStore())
    return Engine(model, byte_tokenizer(), template=TEMPLATE, **options)


def told(call: Callable[[], object]) -> list[str]:
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if WARNING in str(one.message)]


# ---------------------------------------------------------------------- what a model says
def test_the_default_follows_what_the_model_was_trained_for() -> None:
    assert (default_policy(trained=True), default_policy(trained=False)) == (Reuse(), UNTRAINED)
    assert default_policy(trained=True, width=WIDE) == Reuse()


@pytest.mark.parametrize(("family", "default"), [("qwen2", BestLast(0.5)), ("gpt2", BestFew())])
def test_a_wide_model_reads_all_chunks_where_they_can_be_moved(family: str, default: Any) -> None:
    model = build(family, width=WIDE // 4)
    assert model.config.hidden_size == WIDE
    note_training(model.config, blocks=False)
    engine = Engine(model, byte_tokenizer(), template=TEMPLATE)
    assert engine.policy == default
    engine = untrained()
    assert engine.policy == UNTRAINED
    note_training(engine.model.config, blocks=True)
    assert like(engine, policy=None).policy == Reuse()
    assert like(engine, policy=LegoLink(4)).policy == LegoLink(4)
    assert Engine.from_pretrained("tiny").policy == Reuse()


@pytest.mark.parametrize("said", [None, "blocks", {}, {"trained_for": "chat"}, ["trained_for"]])
def test_a_config_that_says_something_else_says_nothing(said: object) -> None:
    model = build("qwen2")
    setattr(model.config, TRAINING, said)
    assert not trained_for_blocks(model)


def test_the_word_survives_a_folder_and_is_no_part_of_a_chunks_address(tmp_path: Path) -> None:
    model = build("qwen2")
    assert trained_for_blocks(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[TRAINING] == BLOCKS
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert trained_for_blocks(again)
    before = model_identity(again)
    note_training(again.config, blocks=False)
    again.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not trained_for_blocks(again)
    assert model_identity(again) == before


# ---------------------------------------------------------------------- what an adapter says
@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    adapted = get_peft_model(build("qwen2"), LoraConfig(r=2, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("says", [False, True])
def test_an_adapter_speaks_for_the_model_that_it_is_in(
    adapter: Path, says: bool, base: bool
) -> None:
    """The last training counts, of the adapter in force and of the merged one."""
    if says:
        write_training(adapter)
    model = build("qwen2")
    note_training(model.config, blocks=base)
    adapted = with_adapter(model, adapter, "model")
    assert trained_for_blocks(adapted) == says
    assert Engine(adapted, byte_tokenizer()).policy == default_policy(trained=says)
    together = merged(adapted)
    assert not hasattr(together, "peft_config")
    assert trained_for_blocks(together) == says


def test_of_several_adapters_the_active_one_speaks(adapter: Path) -> None:
    write_training(adapter)
    adapted = with_adapter(build("qwen2"), adapter, "model")
    note_training(adapted.config, blocks=False)
    adapted.add_adapter("other", LoraConfig(r=2))
    engine = Engine(adapted, byte_tokenizer(), template=TEMPLATE)
    assert engine.policy == Reuse()

    def used() -> str:
        return engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.policy

    assert used() == repr(Reuse())
    adapted.set_adapter("other")
    assert used() == repr(UNTRAINED) == repr(engine.policy)
    adapted.set_adapter("default")
    assert used() == repr(Reuse())
    with adapted.disable_adapter():
        assert used() == repr(UNTRAINED)
    engine.policy = LegoLink(4)  # what somebody says stays
    adapted.set_adapter("other")
    assert used() == repr(LegoLink(4))


def test_peft_loads_an_adapter_that_says_so_without_a_word(adapter: Path, tmp_path: Path) -> None:
    from peft import PeftConfig

    write_training(adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PeftConfig.from_pretrained(str(adapter))
    for silent in ("[]", '"blocks"'):
        (adapter / TRAINING_FILE).write_text(silent)
        assert not trained_for_blocks(with_adapter(build("qwen2"), adapter, "model"))
    for damaged in ("", "{"):  # it might say that the adapter acts on questions alone
        (adapter / TRAINING_FILE).write_text(damaged)
        with pytest.raises(InvalidInputError, match="cannot be read"):
            with_adapter(build("qwen2"), adapter, "model")


# ---------------------------------------------------------------------- what fine-tuning writes
@pytest.mark.parametrize(
    ("lora", "recipe", "says"),
    [
        (0, {}, True),
        (2, {}, True),
        (2, {"block_share": 0.0}, False),
        (2, {"block_share": 0.0, "both_masks": True}, True),
    ],
)
def test_fine_tuning_under_the_block_mask_says_so(
    tmp_path: Path, lora: int, recipe: dict[str, Any], says: bool
) -> None:
    out = tmp_path / "out"
    config = FinetuneConfig(
        "tiny", out, reader_data(), steps=1, batch_tokens=700, holdout=1, lora=lora, device="cpu",
        keep_adapter=bool(lora), **recipe,
    )  # fmt: skip
    finetune(config)
    assert (out / TRAINING_FILE).is_file() == (says and bool(lora))
    assert Engine.from_pretrained(out).policy == default_policy(trained=says)
    assert Engine.from_pretrained(model_path()).policy == Reuse()


# ---------------------------------------------------------------------- the untrained default
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_untrained_default_answers_over_any_number_of_chunks(count: int) -> None:
    engine, texts = untrained(), TEXTS[:count]
    engine.add(texts)
    assert told(lambda: engine.generate(QUESTION, texts, max_new_tokens=2)) == []
    metrics = engine.generate(QUESTION, texts, max_new_tokens=2).metrics
    sizes = [key.tokens for key in engine.keys(texts)]
    assert metrics.policy == repr(UNTRAINED)
    few = metrics.answered_from
    assert few == tuple(range(len(few)))  # the first is the best
    assert metrics.unused_chunks == count - len(few)
    assert metrics.reused_tokens == sum(sizes[:1])
    assert metrics.fresh_tokens == sum(sizes[1 : len(few)])
    plain = engine.logits(QUESTION, texts[: len(few)], policy=FullRecompute())
    assert error(engine.logits(QUESTION, texts), plain) < TOLERANCE


@pytest.mark.parametrize("scheme", ["reordered", "composite"])
def test_a_single_chunk_of_the_best_last_is_reused_in_place(scheme: Any) -> None:
    engine = untrained(rotation="deferred")
    engine.add(TEXTS)
    for texts in (TEXTS[:1], TEXTS):
        policy = BestLast(positions=scheme)
        metrics = engine.generate(QUESTION, texts, policy=policy, max_new_tokens=1).metrics
        assert (metrics.rotation, metrics.not_deferred) == ("deferred", "")


def test_a_model_that_keeps_nothing_answers_by_full_prefill_with_one_warning() -> None:
    engine = untrained("recurrent_gemma")
    assert engine.policy == UNTRAINED
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            answer = engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    assert [str(one.message).count("full prefill") for one in caught] == [1]
    assert answer.metrics.policy == repr(FullRecompute())


# ---------------------------------------------------------------------- who asks for plain reuse
def test_who_asks_for_plain_reuse_is_told_once() -> None:
    engine = untrained()

    def ask() -> None:
        engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=1)

    (said,) = told(ask)
    assert repr(UNTRAINED) in said
    assert "kvcache-rag finetune" in said
    other = engine.in_namespace("other")
    assert (
        told(ask)
        == told(lambda: other.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=1))
        == []
    )
    own = untrained(policy=Reuse("composite"))
    assert len(told(lambda: own.generate(QUESTION, TEXTS, max_new_tokens=1))) == 1
    streamed = untrained(policy=Reuse())
    assert len(told(lambda: list(streamed.stream(QUESTION, TEXTS, max_new_tokens=1)))) == 1
    batch = untrained(policy=Reuse())
    assert len(told(lambda: batch.generate_batch([(QUESTION, TEXTS)], max_new_tokens=1))) == 1


@pytest.mark.parametrize(
    "policy",
    [Combination(), CacheBlend(0.0), LegoLink(0), FullRecompute(), BestLast(0.5), BestFew(2), None],
)
def test_other_policies_are_not_warned_of(policy: Any) -> None:
    engine = untrained()
    assert told(lambda: engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1)) == []


def test_nobody_is_warned_who_is_trained_compares_checks_or_has_one_chunk() -> None:
    engine = untrained()
    calls: tuple[Callable[[], object], ...] = (
        lambda: engine.generate(QUESTION, TEXTS[:1], policy=Reuse(), max_new_tokens=1),
        lambda: engine.logits(QUESTION, TEXTS, policy=Reuse()),
        lambda: engine.explain(QUESTION, TEXTS, policy=Reuse()),
        lambda: unwarned(engine).generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=1),
    )
    assert [told(call) for call in calls] == [[]] * len(calls)
    trained = Engine(build("qwen2"), byte_tokenizer(), template=TEMPLATE)
    assert told(lambda: trained.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=1)) == []


# ---------------------------------------------------------------------- what a server says of it
@pytest.mark.parametrize("policy", [Reuse(), Reuse("composite")], ids=["reuse", "composite"])
async def test_a_server_says_what_reuse_may_cost_in_the_words_of_the_engine(policy: Reuse) -> None:
    engine = untrained()
    backend = LocalBackend(engine)
    try:
        own = await backend.own_policy()
    finally:
        await backend.close()
    assert own.name == UNTRAINED.name
    assert set(own.warnings) == {"reuse", "composite"}
    said = own.warnings["composite" if policy == Reuse("composite") else "reuse"]
    assert told(lambda: engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1)) == [said]


async def test_a_server_says_a_policy_that_has_a_name_and_no_other() -> None:
    for policy, name in ((CacheBlend(0.3), "cacheblend:0.3"), (LegoLink(4, "composite"), "")):
        backend = LocalBackend(untrained(policy=policy))
        try:
            assert (await backend.own_policy()).name == name
        finally:
            await backend.close()
