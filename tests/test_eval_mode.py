"""The app's model stays the app's, and what the app switches on changes no chunk under its name."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import access
import pytest
import torch
from laws import QUESTION, TEMPLATE, TEXTS, TOLERANCE, error
from peft import LoraConfig, get_peft_model
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from zoo import build, byte_tokenizer

from kvcache_rag import Ape, Engine, FullRecompute, InvalidInputError, MemoryStore, Reuse
from kvcache_rag.models.weights import unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# peft asks transformers by a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def make_engine(model: Any, **options: Any) -> Engine:
    options = {"template": TEMPLATE, "store": MemoryStore(), "policy": Reuse(), **options}
    return Engine(model, byte_tokenizer(), **options)


def dropping(name: str = "qwen2") -> Any:
    """A model that forgets half of its attention in training mode."""
    model = build(name)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    return model


# ------------------------------------------------------------------- nothing of ours in the model
def traces(model: Any) -> dict[str, Any]:
    """All that an app can find in its model, tensors by where they lie."""
    found: dict[str, Any] = {"config": model.config.to_dict(), "keys": [*model.state_dict()]}
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name != "_modules"}
        config = own.pop("config", None)
        found[path] = (type(module), id(config), repr(vars(config)) if config else "", repr(own))
    return {**found, "generation": model.generation_config.to_dict()}


WAYS: dict[str, dict[str, Any]] = {
    "copied": {"rotation": "copied"},
    "deferred": {"rotation": "deferred"},
    "trained": {},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_as_it_was_during_and_after_an_answer(way: str) -> None:
    model, ids = build("qwen2"), torch.arange(5, 40)[None]
    with torch.no_grad():
        expected = model(ids).logits
    if way == "trained":
        model.train()
        model.model.layers[0].eval()
    before = traces(model)
    engine = make_engine(model, **WAYS[way])
    assert traces(model) == before
    seen: list[dict[str, Any]] = []
    passes: list[Any] = []

    def elsewhere() -> None:
        with torch.no_grad():
            passes.append(model(ids).logits)

    def midway(_: str) -> None:
        seen.append(traces(model))
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    for options in (
        {},
        {"policy": Ape(0.9, 0.9)},
        {"policy": FullRecompute()},
        {"do_sample": True, "temperature": 2.0},
    ):
        engine.generate(QUESTION, TEXTS, max_new_tokens=3, emit=midway, **options)
        assert traces(model) == before
    assert len(seen) > 3
    if way != "trained":  # it has to be in evaluation meanwhile
        assert all(one == before for one in seen)
    with torch.no_grad():
        passes.append(copy.deepcopy(model)(ids).logits)
    assert all(torch.equal(one, expected) for one in passes), "the app's own are stock"


def test_a_saved_model_runs_where_nobody_knows_us(tmp_path: Path) -> None:
    """huggingface/transformers#36889.  Saved in the middle of an answer, itself and a copy."""
    model, paths = build("qwen2"), [tmp_path / "itself", tmp_path / "copied"]

    def midway(_: str) -> None:
        torch.save(model, paths[0])
        torch.save(copy.deepcopy(model), paths[1])

    make_engine(model).generate(QUESTION, TEXTS, max_new_tokens=2, emit=midway)
    code = (
        "import sys, torch\n"
        "for path in sys.argv[1:]:\n"
        "    model = torch.load(path, weights_only=False)\n"
        "    with torch.no_grad(): print(model(torch.tensor([[5, 6, 7]])).logits.sum().item())\n"
        "assert not any(name.startswith('kvcache_rag') for name in sys.modules)"
    )
    command = [sys.executable, "-c", code, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits.sum().item()
    assert [*map(float, done.stdout.split())] == pytest.approx([expected] * 2, rel=1e-4)


def test_an_app_may_compile_its_model_whole() -> None:
    """What stands behind "sdpa" is there for every model of the process."""
    make_engine(build("falcon alibi"))  # a placed mask
    make_engine(build("qwen2"))
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward
    model = build("llama")
    ids = torch.arange(5, 40)[None]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert error(compiled(ids, use_cache=False).logits[0], model(ids).logits[0]) < TOLERANCE


@pytest.mark.parametrize(
    "wrap",
    [lambda model: torch.compile(model, backend="eager"), torch.nn.DataParallel],
    ids=["compiled", "data parallel"],
)
@pytest.mark.parametrize("rotation", ["copied", "deferred"])
def test_law_a_wrapped_model_is_the_one_inside(wrap: Any, rotation: Any) -> None:
    """It was answered by full prefill, as its forward pass names no argument."""
    model = build("llama")
    plain, engine = (make_engine(one, rotation=rotation) for one in (model, wrap(model)))
    assert engine.refusal == ""
    assert engine.keys(TEXTS) == plain.keys(TEXTS)
    expected = plain.generate(QUESTION, TEXTS, max_new_tokens=4)
    for misses in (len(TEXTS), 0):
        found = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
        assert found.token_ids == expected.token_ids
        assert (found.metrics.rotation, found.metrics.misses) == (rotation, misses)


def test_a_model_with_compiled_layers_is_refused_by_their_name() -> None:
    model = build("llama")
    model.model = torch.compile(model.model, backend="eager")
    with pytest.raises(
        InvalidInputError, match=r"^model of LlamaForCausalLM is compiled .*_orig_mod"
    ):
        make_engine(model)


@pytest.mark.parametrize("rotation", ["copied", "deferred"])
def test_an_attention_that_an_app_put_behind_the_name_is_its_models(
    rotation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Mock(wraps=sdpa_attention_forward)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", own)
    model = build("qwen2")
    make_engine(model, rotation=rotation).generate(QUESTION, TEXTS, max_new_tokens=2)
    assert own.called
    assert access.attention(model.config) == "sdpa"


# --------------------------------------------------------------- what an app may have switched on
def set_to(
    change: Callable[[Any], Any], holds: Callable[[Any], bool] = lambda _: True
) -> Callable[[Any], Any]:
    """Of the model, which is still so behind an answer."""

    @contextmanager
    def switched(model: Any) -> Iterator[None]:
        change(model)
        yield
        assert holds(model), "the trainer goes on"

    return switched


def meanwhile(switch: Callable[[Any], Any], on: Any, off: Any) -> Callable[[Any], Any]:
    """Of the whole process."""

    @contextmanager
    def switched(_: Any) -> Iterator[None]:
        switch(on)
        try:
            yield
        finally:
            switch(off)

    return switched


def trains(model: Any) -> bool:
    return all(module.training for module in model.modules())


SWITCHED: dict[str, Callable[[Any], Any]] = {
    "train()": set_to(lambda model: model.train(), trains),
    "train() of a part": set_to(
        lambda model: model.model.layers[1].train(),
        lambda model: model.model.layers[1].self_attn.training and not model.training,
    ),
    "gradient checkpointing": set_to(
        lambda model: (
            model.gradient_checkpointing_enable(),
            model.enable_input_require_grads(),
            model.train(),
        ),
        trains,
    ),
    "autocast": lambda _: torch.autocast("cpu", torch.bfloat16),
    "inference mode": lambda _: torch.inference_mode(),
    "gradients": lambda _: torch.enable_grad(),
    "default dtype": meanwhile(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda _: torch.device("meta"),
    # Memory that is read before it is written is NaN then.
    "deterministic": meanwhile(torch.use_deterministic_algorithms, True, False),
    "eager": set_to(
        lambda model: model.set_attn_implementation("eager"),
        lambda model: access.attention(model.config) == "eager",
    ),
    "eager in the config": set_to(
        lambda model: setattr(model.config, "_attn_implementation", "eager")
    ),
    "generation config": set_to(
        lambda model: setattr(model.generation_config, "repetition_penalty", 3.0)
    ),
    "requires_grad": set_to(lambda model: model.requires_grad_(True)),
    "use_cache": set_to(lambda model: setattr(model.config, "use_cache", False)),
    "output_hidden_states": set_to(
        lambda model: setattr(model.config, "output_hidden_states", True)
    ),
}


@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.parametrize("rotation", ["copied", "deferred"])
def test_what_an_app_switches_on_changes_no_number_under_a_name(name: str, rotation: Any) -> None:
    """huggingface/trl#155 and its kind."""
    stock, engine = (make_engine(dropping(), rotation=rotation) for _ in range(2))
    keys, expected = stock.add(TEXTS), stock.logits(QUESTION, TEXTS)
    said = stock.generate(QUESTION, TEXTS, max_new_tokens=4).text
    with SWITCHED[name](engine.model):
        assert engine.add(TEXTS) == keys
        answer = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
        found = engine.logits(QUESTION, TEXTS)
        streamed = "".join(engine.stream(QUESTION, TEXTS, max_new_tokens=4))
    if name != "generation config":
        assert answer.text == said == streamed
    assert error(found, expected) < TOLERANCE
    # What was stored meanwhile is what the name promises.
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.reused_tokens
    for key in keys:
        mine, theirs = (
            one.store.get(key, access.chunk_layout(one)).chunk for one in (engine, stock)
        )
        for one, other in zip(mine.tensors, theirs.tensors, strict=True):
            assert max(map(error, one, other)) < TOLERANCE


def test_an_engine_made_while_things_are_switched_on_is_any_other() -> None:
    expected = make_engine(dropping())
    with ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        stack.enter_context(torch.inference_mode())
        model = dropping().train()
        engine = make_engine(model)
        assert engine.add(TEXTS) == expected.add(TEXTS)
    assert error(engine.logits(QUESTION, TEXTS), expected.logits(QUESTION, TEXTS)) < TOLERANCE
    assert model.training


def test_chunks_that_were_computed_while_a_trainer_began_are_not_kept() -> None:
    model = dropping()
    engine = make_engine(model)

    def begins(module: Any, given: Any, output: Any) -> None:
        model.train()

    begins.__module__ = "transformers"  # looks on only, as far as anybody knows
    engine.keys(TEXTS)
    hook = model.model.layers[0].mlp.register_forward_hook(begins)
    keys = engine.add(TEXTS[:1])
    hook.remove()
    assert not engine.store.contains(keys[0])
    assert model.training


# ------------------------------------------------------------------ what is part of a chunk's name


def more(_: Any, __: Any, output: Any) -> Any:
    return (output[0] + 1, *output[1:]) if isinstance(output, tuple) else output + 1


def hooked_everywhere(_: Any) -> Callable[[], None]:
    register = torch.nn.modules.module.register_module_forward_hook
    return register(
        lambda module, _, output: output * 2 if isinstance(module, torch.nn.Linear) else None
    ).remove


def other_pass(model: Any) -> Callable[[], None]:
    norm = model.model.norm
    own = norm.forward
    norm.forward = lambda states: 3 * own(states)
    return lambda: delattr(norm, "forward")


NAMED: dict[str, Callable[[Any], Callable[[], None]]] = {
    "a hook": lambda model: model.model.layers[0].register_forward_hook(more).remove,
    "a hook before": lambda model: (
        model.model.layers[0]
        .register_forward_pre_hook(lambda _, given: (given[0] * 2, *given[1:]))
        .remove
    ),
    "a hook of all modules": hooked_everywhere,
    "a forward pass of its own": other_pass,
}


@pytest.mark.parametrize("name", NAMED)
def test_hooks_make_other_chunks(name: str) -> None:
    engine = make_engine(build("qwen2"))
    keys, before = engine.add(TEXTS), engine.logits(QUESTION, TEXTS)
    undo = NAMED[name](engine.model)
    try:
        fresh = make_engine(engine.model)
        steered, found = engine.add(TEXTS), engine.logits(QUESTION, TEXTS)
        assert not {*steered} & {*keys}
        assert not {*steered} & {*fresh.add(TEXTS)}, "nobody else can know what it does"
        assert error(found, before) > TOLERANCE
        assert error(found, fresh.logits(QUESTION, TEXTS)) < TOLERANCE
        assert engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.reused_tokens
    finally:
        undo()
    assert engine.keys(TEXTS) == keys
    assert torch.equal(engine.logits(QUESTION, TEXTS), before)


def test_an_adapter_in_training_mode_drops_nothing() -> None:
    settings = LoraConfig(
        r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    model = get_peft_model(build("qwen2"), settings)
    expected, engine = make_engine(copy.deepcopy(model).eval()), make_engine(model)
    for module in unwrapped(model).modules():
        if hasattr(module, "lora_dropout"):
            module.train()
    assert engine.add(TEXTS) == expected.add(TEXTS)
    assert error(engine.logits(QUESTION, TEXTS), expected.logits(QUESTION, TEXTS)) < TOLERANCE


def test_how_float32_is_multiplied_is_part_of_the_name() -> None:
    engine, low = make_engine(build("qwen2")), make_engine(build("qwen2", dtype=torch.bfloat16))
    keys, rounded = engine.add(TEXTS), low.keys(TEXTS)
    torch.set_float32_matmul_precision("medium")
    try:
        assert not {*engine.keys(TEXTS)} & {*keys}
        assert low.keys(TEXTS) == rounded, "of a model in bfloat16 it says nothing"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert engine.keys(TEXTS) == keys


def test_what_a_config_says_during_a_pass_is_part_of_the_name() -> None:
    engine = make_engine(build("olmoe"))
    keys = engine.add(TEXTS)
    before = engine.logits(QUESTION, TEXTS)
    own, engine.model.config.clip_qkv = engine.model.config.clip_qkv, 0.05
    assert not {*engine.keys(TEXTS)} & {*keys}
    assert error(engine.logits(QUESTION, TEXTS), before) > TOLERANCE
    engine.model.config.clip_qkv = own
    assert engine.keys(TEXTS) == keys


@pytest.mark.parametrize("entry", ["pad_token_id", "eos_token_id"])
def test_what_says_nothing_of_keys_and_values_is_not(entry: str) -> None:
    engine = make_engine(build("qwen2"))
    spec = engine.spec
    setattr(engine.model.config, entry, 7)
    assert engine.spec == spec


def test_who_tells_of_another_number_in_a_module_has_no_wrong_answer() -> None:
    engine, fresh = make_engine(build("qwen2")), make_engine(build("qwen2"))
    keys = engine.add(TEXTS)
    for one in (engine, fresh):
        one.model.model.layers[0].self_attn.scaling = 0.7
    engine.weights_changed()
    assert not {*engine.keys(TEXTS)} & {*keys}
    assert error(engine.logits(QUESTION, TEXTS), fresh.logits(QUESTION, TEXTS)) < TOLERANCE


# ----------------------------------------------------------------------------- what is refused
def test_an_activated_lora_is_refused_whenever_it_comes() -> None:
    """huggingface/peft#2609."""
    plain, activated = (
        LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **options)
        for options in ({}, {"alora_invocation_tokens": [3, 4]})
    )
    with pytest.raises(InvalidInputError, match=r"'default' is an activated LoRA .*; delete it"):
        make_engine(get_peft_model(build("qwen2"), activated))
    model = get_peft_model(build("qwen2"), plain)
    engine = make_engine(model)
    engine.add(TEXTS)
    model.add_adapter("later", activated)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="'later' is an activated LoRA"):
            engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    model.delete_adapter("later")
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=1).text is not None


def exchanged(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("qwen2", exchanged, "rotary frequencies"),
        ("qwen2", lambda model: model.model.rotary_emb.inv_freq.mul_(0.5), "rotary frequencies"),
        ("mistral window", lambda model: setattr(model.config, "sliding_window", 9), "windows"),
        (
            "qwen2",
            lambda model: model.config.rope_parameters.update(rope_theta=5.0),
            "rotary parameters",
        ),
    ],
)
def test_what_was_measured_and_holds_no_longer_is_refused(
    name: str, change: Callable[[Any], None], what: str
) -> None:
    engine = make_engine(build(name))
    engine.add(TEXTS)
    change(engine.model)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=f"{what}.*; make a new engine of it"):
            engine.generate(QUESTION, TEXTS, max_new_tokens=1)


def test_frequencies_that_only_moved_are_the_same() -> None:
    engine = make_engine(build("qwen2"))
    keys = engine.add(TEXTS)
    engine.model.share_memory()
    assert engine.keys(TEXTS) == keys
