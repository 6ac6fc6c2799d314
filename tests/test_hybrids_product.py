"""All of the product over models with recurrent layers: stores, codecs, conversations, adapters."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import LONG_QUESTION, QUESTION, TEMPLATE, TEXTS, error
from peft import LoraConfig, get_peft_model
from recurrent_reference import reference_logits
from safetensors.torch import load_file
from test_undisturbed import SWITCHED, traces
from zoo import HYBRIDS, build, byte_tokenizer

from kvcache_rag import (
    BestLast,
    CacheBlend,
    Combination,
    DiskStore,
    Engine,
    FullRecompute,
    LegoLink,
    MemoryStore,
    Message,
    PromptTemplate,
    ProphetKV,
    Reuse,
    TieredStore,
    cli,
)
from kvcache_rag.codecs import Codec, Int8
from kvcache_rag.errors import CorruptChunkError, UnsupportedModelError
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.models import pack_weights
from kvcache_rag.models.attention import few_queries
from kvcache_rag.models.weights import unwrapped
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag.stores import RemoteStore
from tests.damage import header_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvcache_rag.stores import ChunkStore

if not HYBRIDS:
    pytest.skip("this transformers keeps no states as 5.23", allow_module_level=True)

# One of each kind: gated delta, Mamba2, short convolution, a state beside keys and values, no
# attention at all, a scan whose state has to be carried.
KINDS = [
    name for name in ("qwen3_5", "bamba", "lfm2", "falcon_h1", "mamba2", "jamba") if name in HYBRIDS
]
# Where one reference after the other is computed, token by token.
few = pytest.mark.parametrize("model", [KINDS[0], *KINDS[-2:]], indirect=True)
ORDER = [TEXTS[2], TEXTS[0], TEXTS[1]]
SECRET = b"s" * 32


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


def over(model: Any, store: ChunkStore | None = None, **options: Any) -> Engine:
    options = {"template": TEMPLATE, "policy": Reuse(), **options}
    return Engine(model, byte_tokenizer(), store=store or MemoryStore(), **options)


@pytest.fixture(scope="module")
def engine(model: Any) -> Engine:
    return over(model)


def hits(engine: Engine, texts: list[str] = ORDER, **options: Any) -> dict[str, int]:
    answer = engine.generate(QUESTION, texts, max_new_tokens=2, **options)
    return dict(answer.metrics.hits)


# ---------------------------------------------------------------------------- stores
STORES: dict[str, Callable[[Path], ChunkStore]] = {
    "memory": lambda folder: MemoryStore(),
    "signed": lambda folder: DiskStore(folder / "disk", durable=False, signing_key=SECRET),
    "remote": lambda folder: RemoteStore(f"file://{folder}/far"),
    "tiers": lambda folder: TieredStore(
        MemoryStore(),
        DiskStore(folder / "disk", durable=False),
        RemoteStore(f"file://{folder}/far", signing_key=SECRET),
    ),
}


@pytest.mark.parametrize("place", STORES)
def test_a_restarted_engine_answers_from_what_is_stored(
    model: Any, engine: Engine, place: str, tmp_path: Path
) -> None:
    first = over(model, STORES[place](tmp_path))
    assert hits(first) == {}
    logits = first.logits(QUESTION, ORDER)
    store = first.store if place == "memory" else STORES[place](tmp_path)
    again = over(model, store)
    assert sum(hits(again).values()) == 3
    assert error(again.logits(QUESTION, ORDER), logits) < 1e-6
    assert error(engine.logits(QUESTION, ORDER), logits) < 1e-6
    answer = again.generate(QUESTION, ORDER, max_new_tokens=8)
    assert answer.token_ids == engine.generate(QUESTION, ORDER, max_new_tokens=8).token_ids


def states_in(path: Path) -> list[str]:
    return [
        name
        for name in load_file(path)
        if name.split(".")[0] in ("state", "transition", "window", "head", "rest")
    ]


def test_a_damaged_byte_of_a_state_is_a_miss(model: Any, engine: Engine, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, durable=False)
    over(model, store).add(ORDER)
    key = engine.keys(ORDER)[0]
    path = store.path(over(model, store).keys(ORDER)[0])
    raw, names = path.read_bytes(), states_in(path)
    assert names
    begin = header_size(raw)
    offsets = json.loads(raw[8:begin])
    expected = engine.logits(QUESTION, ORDER)
    for name in names:
        damaged = bytearray(raw)
        damaged[begin + offsets[name]["data_offsets"][1] - 1] ^= 0x40
        path.write_bytes(damaged)
        asked = over(model, DiskStore(tmp_path, durable=False))
        answer = asked.generate(QUESTION, ORDER, max_new_tokens=1)
        assert [one.reason for one in answer.metrics.missed] == ["damaged"], name
        assert error(asked.logits(QUESTION, ORDER), expected) < 1e-6
        assert path.read_bytes() == raw, "it was computed again, to the same"
    path.write_bytes(bytes(damaged))
    with pytest.raises(CorruptChunkError):
        store.get(key, access.chunk_layout(engine))


def test_commands_know_such_files(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = over(model, DiskStore(tmp_path, durable=False))
    keys, layout = engine.add(ORDER), access.chunk_layout(engine)
    assert cli.main(["store", "ls", str(tmp_path), "--json"]) == 0
    ((spec,),) = [one["specs"] for one in json.loads(capsys.readouterr().out)["namespaces"]]
    assert spec["chunks"] == 4, "with the prefix"
    least = sum(layout.nbytes(tokens) for tokens in (11, *(key.tokens for key in keys)))
    assert least < spec["nbytes"] < least + 4 * 8192
    assert cli.main(["store", "ls", str(tmp_path), "--chunks"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert cli.main(["store", "du", str(tmp_path)]) == 0
    assert cli.main(["store", "check", str(tmp_path)]) == 0
    capsys.readouterr()
    path = engine.store.path(keys[1])  # type: ignore[attr-defined]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert cli.main(["store", "check", str(tmp_path)]) == 1
    assert keys[1].digest[:8] in "".join(capsys.readouterr())


def test_limits_count_states(model: Any, engine: Engine) -> None:
    layout, keys = access.chunk_layout(engine), engine.keys(ORDER)
    sizes = [layout.nbytes(key.tokens) + 4 * key.tokens for key in keys]
    assert all(size > layout.nbytes(0) > 0 for size in sizes)
    prefix = layout.nbytes(11) + 44
    store = MemoryStore(prefix + sum(sizes))
    over(model, store).add(ORDER)
    assert store.nbytes == prefix + sum(sizes)
    assert store.stats().evictions == 0
    small = MemoryStore(prefix + sum(sizes) - 1)
    over(model, small).add(ORDER)
    assert small.stats().evictions == 1
    none = over(model, MemoryStore(0))
    assert error(none.logits(QUESTION, ORDER), engine.logits(QUESTION, ORDER)) < 1e-6


# ---------------------------------------------------------------------------- codecs
CODECS: dict[str, Codec | str] = {"int8": Int8(), "int4": "int4"}


def off(model: Any, codec: Codec | str, folder: Path) -> float:
    """Error of stitched logits, of two orders, by a codec, in standard deviations."""
    exact, coded = over(model), over(model, DiskStore(folder, codec=codec, durable=False))
    return max(
        error(coded.logits(QUESTION, texts), exact.logits(QUESTION, texts))
        for texts in (ORDER, TEXTS)
    )


@pytest.fixture(scope="module")
def bounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Of a model that attends alone, which has all of its layers in keys and values."""
    llama = build("llama")
    return {
        name: 1.5 * off(llama, codec, tmp_path_factory.mktemp(name))
        for name, codec in CODECS.items()
    }


@pytest.mark.parametrize("name", CODECS)
def test_codecs_round_keys_and_values_alone(
    model: Any, engine: Engine, name: str, bounds: dict[str, float], tmp_path: Path
) -> None:
    codec, layout = CODECS[name], access.chunk_layout(engine)
    found = off(model, codec, tmp_path)
    assert found < bounds[name]
    assert (found == 0) == (not layout.groups)
    coded = over(model, DiskStore(tmp_path, codec=codec, durable=False))
    store = coded.store
    stored = load_file(store.path(coded.keys(ORDER)[0]))  # type: ignore[attr-defined]
    exact = engine.store.get(engine.add(ORDER)[0], layout).chunk
    assert isinstance(exact, ChunkKV)
    for index, states in enumerate(exact.states):
        for part, tensor in states.items():
            spec = layout.states[index].parts[part]
            kept = stored[f"{part}.{index}"]
            assert (kept.dtype, tuple(kept.shape)) == spec
            assert torch.equal(kept, tensor), "no codec rounds a state further"


@pytest.fixture(scope="module")
def low(model: Any) -> Any:
    """The same parameters in bfloat16."""
    return copy.deepcopy(model).to(torch.bfloat16)


def test_states_of_bfloat16_are_kept_in_float16(engine: Engine, low: Any) -> None:
    rounded = over(low)
    for group in access.chunk_layout(rounded).states:
        assert group.state is None or group.state[0] == torch.float16
        if group.transition is not None:
            is_numbers = group.form == "scale"
            assert group.transition[0] == (torch.float32 if is_numbers else torch.float16)
    found = rounded.logits(QUESTION, ORDER)
    plain = rounded.logits(QUESTION, ORDER, policy=FullRecompute())
    expected = engine.logits(QUESTION, ORDER)
    # What rounding does to a plain pass, it may do to a stitched one.
    noise = error(plain, engine.logits(QUESTION, ORDER, policy=FullRecompute()))
    assert error(found, expected) < max(0.3, 1.5 * noise)


def test_a_state_beyond_float16_is_told() -> None:
    model = build("bamba", dtype=torch.bfloat16)
    engine = over(model)
    engine.add(TEXTS[:1])
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer, "mamba"):
                layer.mamba.in_proj.weight.mul_(3000)
    says = "layers .* have states of up to .*, which torch.float16 does not hold; load the model in"
    with pytest.raises(UnsupportedModelError, match=says):
        engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    assert engine.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=1)


@pytest.mark.skipif(
    few_queries.library() is None, reason="no compiled kernel, or no CPU with AVX-512 for bfloat16"
)
@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_chunks_in_8_bits_are_attended_to_in_place(name: str, tmp_path: Path) -> None:
    model = build(name, dtype=torch.bfloat16, width=32)
    store = DiskStore(tmp_path, codec=Int8(), durable=False)
    over(model, store).add(ORDER)
    copied, held = (over(model, store, rotation=one) for one in ("copied", "auto"))
    expected = copied.logits(QUESTION, ORDER)
    answer = held.generate(QUESTION, ORDER, max_new_tokens=5)
    assert answer.metrics.rotation == "deferred", answer.metrics.not_deferred
    assert torch.equal(held.logits(QUESTION, ORDER), expected)
    assert answer.token_ids == copied.generate(QUESTION, ORDER, max_new_tokens=5).token_ids
    memory = over(model, MemoryStore(codec="int8"))
    assert torch.equal(memory.logits(QUESTION, ORDER), expected)


# ---------------------------------------------------------------------------- conversations
TURNS = (
    Message("user", "Is it wet?"),
    Message("assistant", "No."),
    Message("user", "Is it dry?"),
    Message("assistant", "Yes, very."),
)


def bare(engine: Engine) -> bool:
    """Whether the model keeps no keys and values at all."""
    return not access.chunk_layout(engine).groups


BEAMS: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 8}


def test_beams_are_those_of_generate(engine: Engine) -> None:
    text = ORDER[:1]  # by itself a chunk is exact
    ids = torch.tensor([engine.tokenize(QUESTION, text).all])
    with torch.no_grad():
        plain = engine.model.generate(ids, attention_mask=torch.ones_like(ids), **BEAMS)
    expected = plain[0, ids.shape[1] :].tolist()
    if bare(engine):
        with pytest.raises(UnsupportedModelError, match="leave out the other options, or use Full"):
            engine.generate(QUESTION, text, **BEAMS)
    else:
        assert list(engine.generate(QUESTION, text, **BEAMS).token_ids) == expected
        rows = [(QUESTION, text), (LONG_QUESTION, ORDER)]
        batch = engine.generate_batch(rows, **BEAMS)
        assert list(batch[0].token_ids) == expected
        assert batch[1].token_ids == engine.generate(*rows[1], **BEAMS).token_ids
    full = engine.generate(QUESTION, text, policy=FullRecompute(), **BEAMS)
    assert list(full.token_ids) == expected


@pytest.mark.parametrize("name", ["qwen3_5", "jamba"])
def test_a_prompt_may_be_computed_in_several_passes(name: str) -> None:
    """transformers' own scan begins anew in each of them."""
    engine = over(build(name))
    options: dict[str, Any] = {"policy": FullRecompute(), "max_new_tokens": 8}
    whole = engine.generate(QUESTION, ORDER, **options)
    pieces = engine.generate(QUESTION, ORDER, prefill_chunk_size=7, **options)
    assert pieces.token_ids == whole.token_ids


OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "min_new_tokens": 3},
    {"do_sample": True, "top_k": 5},
    {"prompt_lookup_num_tokens": 4},
    {"bad_words_ids": [[70], [80, 81]]},
]


@few
@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: "-".join(one))
def test_options_do_what_they_do_without_us(engine: Engine, options: dict[str, Any]) -> None:
    settings = {"max_new_tokens": 8, "do_sample": False, **options}
    is_ours = "prompt_lookup_num_tokens" in options
    ids = torch.tensor([engine.tokenize(QUESTION, ORDER[:1]).all])
    settings |= {"attention_mask": torch.ones_like(ids)}
    torch.manual_seed(11)
    plain = {name: value for name, value in settings.items() if not name.startswith("prompt_")}
    expected = engine.model.generate(ids, **plain)[0, ids.shape[1] :].tolist()
    if bare(engine) and not is_ours:
        with pytest.raises(UnsupportedModelError, match="leave out the other options, or use Full"):
            engine.generate(QUESTION, ORDER[:1], max_new_tokens=8, **options)
        return
    torch.manual_seed(11)
    answer = engine.generate(QUESTION, ORDER[:1], max_new_tokens=8, **options)
    assert list(answer.token_ids) == expected


def test_batches_with_rows_of_a_prefix_alone(engine: Engine) -> None:
    rows: list[Any] = [
        ("x", []),
        (QUESTION, ORDER, TURNS),
        (QUESTION, ORDER),
        ("y", [], TURNS[:2]),
        (LONG_QUESTION, [ORDER[0]] * 2),
    ]
    batch = engine.generate_batch(rows, max_new_tokens=5)
    for row, answer in zip(rows, batch, strict=True):
        options = {"history": row[2]} if len(row) > 2 else {}
        alone = engine.generate(*row[:2], max_new_tokens=5, **options)
        assert answer.token_ids == alone.token_ids
    only = engine.generate_batch([("x", []), ("yes, is it?", [])], max_new_tokens=5)
    assert only[0].token_ids == batch[0].token_ids


@few
def test_combinations_and_the_best_last(engine: Engine) -> None:
    joint = engine.logits(QUESTION, ORDER, policy=Combination())
    ids = engine.tokenize(QUESTION, ORDER)
    together = [token for chunk in ids.chunks for token in chunk]
    plain = reference_logits(engine.model, ids.prefix, [together], ids.query)
    assert error(joint, plain) < 5e-4
    engine.add_combination([ORDER])
    answer = engine.generate(QUESTION, ORDER, policy=Combination(), max_new_tokens=2)
    assert answer.metrics.hits == {"combinations": 1}
    best = engine.logits(QUESTION, ORDER, policy=BestLast())
    # The best one is computed with the question, behind the others as they are.
    wanted = BestLast().plan(Retrieved("", tuple(ORDER)))
    others = [ids.chunks[place] for place in wanted.brought]
    fresh = [ids.chunks[place] for place in wanted.order[len(others) :]]
    assert fresh[-1] == ids.chunks[0]
    query = [*(token for chunk in fresh for token in chunk), *ids.query]
    expected = reference_logits(engine.model, ids.prefix, others, query)
    assert error(best, expected[-len(ids.query) :]) < 5e-4


# ---------------------------------------------------------------------------- the app's model
# peft asks transformers by a name that transformers is about to drop.
quiet = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def linears(model: Any) -> list[str]:
    """The last names of linear layers inside the recurrent layers, and of attention."""
    names = ("in_proj", "in_proj_qkv", "q_proj", "x_proj")
    found = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return sorted(found & set(names))


@quiet
@few
def test_adapters_have_chunks_of_their_own(model: Any, engine: Engine) -> None:
    torch.manual_seed(0)
    settings = LoraConfig(
        r=4, lora_dropout=0.5, target_modules=linears(model), init_lora_weights=False
    )
    adapted = get_peft_model(copy.deepcopy(model), settings)
    adapted.train()
    other = over(adapted, engine.store)
    keys = other.add(ORDER)
    assert not {*keys} & {*engine.add(ORDER)}
    found = other.logits(QUESTION, ORDER)
    assert adapted.training, "the trainer goes on"
    assert error(found, engine.logits(QUESTION, ORDER)) > 0.01
    adapted.eval()
    assert torch.equal(other.logits(QUESTION, ORDER), found)
    ids = other.tokenize(QUESTION, ORDER)
    plain = reference_logits(unwrapped(adapted), ids.prefix, ids.chunks, ids.query)
    assert error(found, plain) < 5e-4
    with adapted.disable_adapter():
        off = other.logits(QUESTION, ORDER)
    assert error(off, engine.logits(QUESTION, ORDER)) < 5e-4
    assert hits(other) == {"memory": 3}, "and it is on again"
    merged = over(adapted.merge_and_unload(), engine.store)
    assert error(merged.logits(QUESTION, ORDER), found) < 5e-4


def first_layer(model: Any) -> Any:
    count = model.config.num_hidden_layers
    lists = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    return next(one for one in lists if len(one) == count)[0]


@contextmanager
def hooking(model: Any, hook: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Call a function behind the first layer of each pass; chunks keep their names."""
    hook.__module__ = "transformers"  # looks on only, as far as anybody knows
    handle = first_layer(model).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_nothing_of_ours_is_in_a_model(model: Any) -> None:
    before = traces(model)
    engine = over(model)
    assert traces(model) == before
    seen: list[dict[str, Any]] = []

    def look(_: Any, __: Any, output: Any) -> Any:
        seen.append(traces(model))
        return output

    with hooking(model, look):
        hooked = traces(model)
        engine.add(ORDER)
        for options in ({}, {"policy": FullRecompute()}, {"policy": BestLast()}):
            engine.generate(QUESTION, ORDER, max_new_tokens=2, **options)
    assert len(seen) > 6
    assert all(one == hooked for one in seen), "nor while it computes"
    assert traces(model) == before


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "jamba"])
def test_an_app_may_wrap_a_forward_function(name: str, when: str) -> None:
    model = build(name)
    engine = over(model)
    expected = engine.logits(QUESTION, ORDER)
    for module in model.modules():
        if "Mamba" in type(module).__name__ or "DeltaNet" in type(module).__name__:

            def wrapped(*args: Any, own: Any = module.forward, **kwargs: Any) -> Any:
                return own(*args, **kwargs)

            wrapped.__module__ = "accelerate.hooks"
            module.forward = wrapped
    used = over(model, MemoryStore()) if when == "before" else over(model, engine.store)
    for one in (used, engine):
        one.delete_namespace()
        assert error(one.logits(QUESTION, ORDER), expected) < 5e-4


class Trouble(Exception):
    """An app's own."""


def test_trouble_inside_leaves_nothing_either(model: Any, engine: Engine) -> None:
    before, expected = traces(model), engine.logits(QUESTION, ORDER)
    own = over(model)

    def breaks(_: Any, __: Any, ___: Any) -> None:
        raise Trouble

    with hooking(model, breaks):
        for ask in (
            lambda: own.add(ORDER),
            lambda: own.logits(QUESTION, ORDER),
            lambda: own.generate(QUESTION, ORDER, policy=FullRecompute(), max_new_tokens=2),
        ):
            with pytest.raises(Trouble):
                ask()
    assert traces(model) == before
    assert error(own.logits(QUESTION, ORDER), expected) < 1e-6

    def cancel(_: str) -> None:
        raise Trouble

    with pytest.raises(Trouble):
        own.generate(QUESTION, ORDER, max_new_tokens=9, emit=cancel)
    assert torch.equal(own.logits(QUESTION, ORDER), own.logits(QUESTION, ORDER))
    assert error(own.logits(QUESTION, ORDER), expected) < 1e-6


def test_the_app_runs_its_model_meanwhile(model: Any, engine: Engine) -> None:
    """Its own passes are stock, and so are copies that it makes in the middle of ours."""
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        expected = model(ids).logits
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    said = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    answer = engine.generate(QUESTION, ORDER, max_new_tokens=4).token_ids
    found: list[Any] = []

    def elsewhere() -> None:
        with torch.no_grad():
            found.append(model(ids).logits)
            if not found[1:]:
                copied = copy.deepcopy(model)
                found.append(copied(ids).logits)
                first_layer(copied)._forward_hooks.clear()  # this test's, which cannot be pickled
                found.append(pickle.loads(pickle.dumps(copied))(ids).logits)

    def midway(_: Any, __: Any, ___: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

    own = over(model)
    with hooking(model, midway):
        own.add(ORDER)
    assert len(found) > 3
    assert all(torch.equal(one, expected) for one in found)
    asked: list[Any] = []
    stop = threading.Event()

    def asking() -> None:
        while not stop.is_set():
            asked.append(own.generate(QUESTION, ORDER, max_new_tokens=4).token_ids)
            asked.append(over(model).generate(QUESTION, ORDER, max_new_tokens=4).token_ids)

    thread = threading.Thread(target=asking)
    thread.start()
    try:
        for _ in range(4):
            again = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            assert torch.equal(again, said)
    finally:
        stop.set()
        thread.join()
    assert {*asked} == {answer}


@few
@pytest.mark.parametrize(
    "name", ["train()", "autocast", "default device", "default dtype", "gradients", "use_cache"]
)
def test_what_an_app_switches_on_changes_nothing(model: Any, engine: Engine, name: str) -> None:
    keys, expected = engine.add(ORDER), engine.logits(QUESTION, ORDER)
    said = engine.generate(QUESTION, ORDER, max_new_tokens=3).token_ids
    own = over(copy.deepcopy(model))
    with SWITCHED[name](own.model):
        if name != "use_cache":
            assert own.add(ORDER) == keys
        assert own.generate(QUESTION, ORDER, max_new_tokens=3).token_ids == said
        assert error(own.logits(QUESTION, ORDER), expected) < 5e-4


def test_an_app_may_compile_its_model_whole() -> None:
    model = build(KINDS[0])
    over(model).add(ORDER)
    ids = torch.arange(5, 40)[None]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert error(compiled(ids, use_cache=False).logits[0], model(ids).logits[0]) < 1e-4


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_weights_of_few_bits(form: Any) -> None:
    """In them and in bfloat16 rounding sends one of the probe's tokens to another expert."""
    model = pack_weights(build("nemotron_h", dtype=torch.bfloat16), form)
    engine, store = over(model), MemoryStore()
    assert not engine.refusal
    logits = over(model, store).logits(QUESTION, ORDER)
    assert torch.equal(over(model, store).logits(QUESTION, ORDER), logits)
    assert hits(over(model, store)) == {"memory": 3}
    exact = engine.logits(QUESTION, ORDER[:1])
    full = engine.logits(QUESTION, ORDER[:1], policy=FullRecompute())
    off = (exact - full).abs().amax(-1) / full.std()
    assert float(off.median()) < 0.3


# ---------------------------------------------------------------------------- commands
SAYS = {
    "qwen3_5": (
        "layers          4, 3 with a state, 1 with keys and values",
        "cache           256 bytes per token and 26880 bytes per chunk; a chunk of more than 105 "
        "tokens is mostly keys and values",
        "layers 0-2; window 112x4 float32; state 4x16x12 float32; transition 4x16x16 float32 "
        "(a matrix from the left)",
    ),
    "lfm2": ("2 with a state, 2 with keys and values", "layers 0,3; window 64x3 float32\n"),
    "falcon_h1": ("4, 4 with a state beside keys and values", "8x1x1 float32 (numbers)"),
    "mamba2": ("4, 4 with a state", "cache           26752 bytes per chunk, however long it is"),
}


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a checkpoint."""
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_check_tells_what_chunks_keep(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = json.loads((saved / "config.json").read_text())["model_type"].removesuffix("_text")
    assert cli.main(["models", "check", str(saved)]) == 0
    out = capsys.readouterr().out
    for line in (*SAYS.get(name, ()), "verdict         supported", "transitions of states)"):
        assert line in out


# ---------------------------------------------------------------------------- edges
def test_without_instruction_and_template(model: Any) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.bos_token = None
    template = PromptTemplate(system="", chunk_start="", chunk_end="")
    engine = Engine(model, tokenizer, template=template, store=MemoryStore(), policy=Reuse())
    for texts in (["q", "q", *TEXTS[:2]], []):
        ids = engine.tokenize("?", texts)
        assert not ids.prefix
        expected = reference_logits(model, ids.prefix, ids.chunks, ids.query)
        assert error(engine.logits("?", texts), expected) < 5e-4
    assert engine.generate("?", ["q"], max_new_tokens=2).metrics.prefix_tokens == 0
    batch = engine.generate_batch([("?", ["q"]), ("??", ORDER), ("x", [])], max_new_tokens=3)
    alone = [
        engine.generate(*one, max_new_tokens=3) for one in [("?", ["q"]), ("??", ORDER), ("x", [])]
    ]
    assert [one.token_ids for one in batch] == [one.token_ids for one in alone]


def test_policies_that_choose_tokens_are_refused(engine: Engine) -> None:
    refused: list[Any] = [CacheBlend(0.2), ProphetKV(0.2)]
    if access.chunk_layout(engine).states[0].form != "none":  # else they can be cut anywhere
        refused.append(LegoLink(4))
    for policy in refused:
        with pytest.raises(UnsupportedModelError, match=r"is recurrent.* use .*Reuse\(\)"):
            engine.generate(QUESTION, ORDER, policy=policy, max_new_tokens=1)


@few
def test_verify_compares_what_a_hybrid_can_do(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("kvcache_rag_lab.commands.verify")
    row = {"question": "Who?", "documents": TEXTS, "answers": ["x"]}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    asked = ["--data", str(tmp_path / "mine.jsonl"), "--max-new-tokens", "2"]
    out = tmp_path / "verdict.json"
    assert cli.main(["verify", str(saved), *asked, "--out", str(out)]) == 0
    capsys.readouterr()
    names = [one["policy"] for one in json.loads(out.read_text())["policies"]]
    assert [name.split("(")[0] for name in names] == ["Reuse", "BestFew", "BestLast", "Combination"]
    gated = Engine.from_pretrained(saved, gate=out)
    assert gated.generate(QUESTION, ORDER, max_new_tokens=1).metrics.gate
