"""The app's model stays the app's, and what the app switches on changes no chunk under its name."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

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
    model = build("qwen2")
    if way == "trained":
        model.train()
        model.model.layers[0].eval()
    before = traces(model)
    engine = make_engine(model, **WAYS[way])
    assert traces(model) == before
    seen: list[dict[str, Any]] = []
    engine.add(TEXTS)
    for options in ({}, {"policy": Ape(0.9, 0.9)}, {"do_sample": True, "temperature": 2.0}):
        engine.generate(
            QUESTION, TEXTS, max_new_tokens=3, emit=lambda _: seen.append(traces(model)), **options
        )
        assert traces(model) == before
    assert len(seen) > 3
    if way != "trained":  # it has to be in evaluation meanwhile
        assert all(one == before for one in seen)


def test_a_saved_model_runs_where_nobody_knows_us(tmp_path: Path) -> None:
    """huggingface/transformers#36889.  Saved in the middle of an answer, itself and a copy."""
    model = build("qwen2")
    engine = make_engine(model)
    saved: list[str] = []

    def midway(piece: str) -> None:
        if not saved:
            torch.save(model, tmp_path / "itself")
            torch.save(copy.deepcopy(model), tmp_path / "copied")
        saved.append(piece)

    engine.generate(QUESTION, TEXTS, max_new_tokens=2, emit=midway)
    code = (
        "import sys, torch\n"
        "for path in sys.argv[1:]:\n"
        "    model = torch.load(path, weights_only=False)\n"
        "    with torch.no_grad(): print(model(torch.tensor([[5, 6, 7]])).logits.sum().item())\n"
        "assert not any(name.startswith('kvcache_rag') for name in sys.modules)"
    )
    paths = [str(tmp_path / name) for name in ("itself", "copied")]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits.sum().item()
    assert [*map(float, done.stdout.split())] == pytest.approx([expected] * 2, rel=1e-4)


def test_the_apps_own_passes_and_copies_are_stock() -> None:
    model = build("qwen2")
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        expected = model(ids).logits
    engine = make_engine(model)
    found: list[Any] = []

    def elsewhere() -> None:
        with torch.no_grad():
            found.append(model(ids).logits)

    def midway(_: str) -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    engine.generate(QUESTION, TEXTS, max_new_tokens=2, emit=midway, policy=FullRecompute())
    with torch.no_grad():
        found += [model(ids).logits, copy.deepcopy(model)(ids).logits]
    assert len(found) > 2
    assert all(torch.equal(one, expected) for one in found)


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


WRAPPERS: dict[str, Any] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": torch.nn.DataParallel,
}


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("rotation", ["copied", "deferred"])
def test_law_a_wrapped_model_is_the_one_inside(wrap: str, rotation: Any) -> None:
    """It was answered by full prefill, as its forward pass names no argument."""
    model = build("llama")
    plain = make_engine(model, rotation=rotation)
    expected = plain.generate(QUESTION, TEXTS, max_new_tokens=4)
    engine = make_engine(WRAPPERS[wrap](model), rotation=rotation)
    assert engine.refusal == ""
    assert engine.keys(TEXTS) == plain.keys(TEXTS)
    found = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    assert found.token_ids == expected.token_ids
    assert found.metrics.rotation == expected.metrics.rotation == rotation
    found = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    assert found.metrics.misses == 0


def test_a_model_with_compiled_layers_is_refused_by_their_name() -> None:
    model = build("llama")
    model.model = torch.compile(model.model, backend="eager")
    with pytest.raises(
        InvalidInputError, match=r"^model of LlamaForCausalLM is compiled .*_orig_mod"
    ):
        make_engine(model)


def test_an_attention_that_an_app_put_behind_the_name_is_its_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = io.StringIO()

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.write(".")
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", own)
    model = build("qwen2")
    for rotation in ("copied", "deferred"):
        engine = make_engine(model, rotation=rotation)
        engine.generate(QUESTION, TEXTS, max_new_tokens=2)
        assert calls.getvalue()
        assert model.config._attn_implementation == "sdpa"


# --------------------------------------------------------------- what an app may have switched on
@contextmanager
def training_mode(model: Any) -> Iterator[None]:
    model.train()
    yield
    assert all(module.training for module in model.modules()), "the trainer goes on"


@contextmanager
def a_part_in_training(model: Any) -> Iterator[None]:
    model.model.layers[1].train()
    yield
    assert model.model.layers[1].self_attn.training
    assert not model.training


@contextmanager
def checkpointing(model: Any) -> Iterator[None]:
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    with training_mode(model):
        yield


@contextmanager
def default_dtype(_: Any) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic(_: Any) -> Iterator[None]:
    """Memory that is read before it is written is NaN then."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def eager(model: Any) -> Iterator[None]:
    model.set_attn_implementation("eager")
    yield
    assert model.config._attn_implementation == "eager"


@contextmanager
def config_said_eager(model: Any) -> Iterator[None]:
    model.config._attn_implementation = "eager"
    yield


@contextmanager
def generation_settings(model: Any) -> Iterator[None]:
    model.generation_config.repetition_penalty = 3.0
    yield


SWITCHED: dict[str, Callable[[Any], Any]] = {
    "train()": training_mode,
    "train() of a part": a_part_in_training,
    "gradient checkpointing": checkpointing,
    "autocast": lambda _: torch.autocast("cpu", torch.bfloat16),
    "inference mode": lambda _: torch.inference_mode(),
    "gradients": lambda _: torch.enable_grad(),
    "default dtype": default_dtype,
    "default device": lambda _: torch.device("meta"),
    "deterministic": deterministic,
    "eager": eager,
    "eager in the config": config_said_eager,
    "generation config": generation_settings,
    "requires_grad": lambda model: model.requires_grad_(True) and nullcontext(),
    "use_cache": lambda model: setattr(model.config, "use_cache", False) or nullcontext(),
    "output_hidden_states": lambda model: (
        setattr(model.config, "output_hidden_states", True) or nullcontext()
    ),
}


@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.parametrize("rotation", ["copied", "deferred"])
def test_what_an_app_switches_on_changes_no_number_under_a_name(name: str, rotation: Any) -> None:
    """huggingface/trl#155 and its kind."""
    stock = make_engine(dropping(), rotation=rotation)
    keys = stock.add(TEXTS)
    expected = stock.logits(QUESTION, TEXTS)
    said = stock.generate(QUESTION, TEXTS, max_new_tokens=4).text
    engine = make_engine(dropping(), rotation=rotation)
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
            assert all(error(a, b) < TOLERANCE for a, b in zip(one, other, strict=True))


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
def hooked(model: Any) -> Callable[[], None]:
    return model.model.layers[0].register_forward_hook(more).remove


def more(_: Any, __: Any, output: Any) -> Any:
    return (output[0] + 1, *output[1:]) if isinstance(output, tuple) else output + 1


def hooked_before(model: Any) -> Callable[[], None]:
    return model.model.layers[0].register_forward_pre_hook(twice).remove


def twice(_: Any, given: Any) -> Any:
    return (given[0] * 2, *given[1:])


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
    "a hook": hooked,
    "a hook before": hooked_before,
    "a hook of all modules": hooked_everywhere,
    "a forward pass of its own": other_pass,
}


@pytest.mark.parametrize("name", NAMED)
def test_hooks_make_other_chunks(name: str) -> None:
    engine = make_engine(build("qwen2"))
    keys, before = engine.add(TEXTS), engine.logits(QUESTION, TEXTS)
    undo = NAMED[name](engine.model)
    try:
        steered = engine.add(TEXTS)
        found = engine.logits(QUESTION, TEXTS)
        fresh = make_engine(engine.model)
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
    expected = make_engine(copy.deepcopy(model).eval())
    engine = make_engine(model)
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


def other_numbers(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 0.7


def test_who_tells_of_another_number_in_a_module_has_no_wrong_answer() -> None:
    engine = make_engine(build("qwen2"))
    keys = engine.add(TEXTS)
    other_numbers(engine.model)
    engine.weights_changed()
    assert not {*engine.keys(TEXTS)} & {*keys}
    fresh = make_engine(build("qwen2"))
    other_numbers(fresh.model)
    assert error(engine.logits(QUESTION, TEXTS), fresh.logits(QUESTION, TEXTS)) < TOLERANCE


# ----------------------------------------------------------------------------- what is refused
def test_an_activated_lora_is_refused_whenever_it_comes() -> None:
    """huggingface/peft#2609."""
    activated = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3, 4]
    )
    with pytest.raises(InvalidInputError, match=r"'default' is an activated LoRA .*; delete it"):
        make_engine(get_peft_model(build("qwen2"), activated))
    plain = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
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


def halved(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("qwen2", exchanged, "rotary frequencies"),
        ("qwen2", halved, "rotary frequencies"),
        (
            "mistral window",
            lambda model: setattr(model.config, "sliding_window", 9),
            "windows",
        ),
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
