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
from hybrid_reader import DOCUMENTS, FOLDER, IS_READ, asked
from laws import LONG_QUESTION, QUESTION, TEMPLATE, TEXTS, error
from peft import LoraConfig, get_peft_model
from recurrent_reference import reference_logits
from safetensors.torch import load_file
from test_eval_mode import SWITCHED, traces
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
from kvcache_rag.codecs import Int8
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.integration import open_engine
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.models import pack_weights
from kvcache_rag.models.attention import few_queries
from kvcache_rag.models.weights import unwrapped
from kvcache_rag.policies.default import UNTRAINED
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag.stores import RemoteStore
from tests.damage import header_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvcache_rag.policies import ReusePolicy
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


def hits(engine: Engine) -> dict[str, int]:
    return dict(engine.generate(QUESTION, ORDER, max_new_tokens=2).metrics.hits)


# ---------------------------------------------------------------------------- stores
STORES: dict[str, Callable[[Path], ChunkStore]] = {
    "signed": lambda folder: DiskStore(folder / "disk", durable=False, signing_key=SECRET),
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
    again = over(model, STORES[place](tmp_path))
    assert sum(hits(again).values()) == 3
    assert error(again.logits(QUESTION, ORDER), logits) < 1e-6
    assert error(engine.logits(QUESTION, ORDER), logits) < 1e-6


def test_a_damaged_byte_of_a_state_is_a_miss(model: Any, engine: Engine, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, durable=False)
    path = store.path(over(model, store).add(ORDER)[0])
    parts = ("state", "transition", "window", "head", "rest")
    raw, names = path.read_bytes(), [one for one in load_file(path) if one.startswith(parts)]
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


def test_limits_count_states(model: Any, engine: Engine) -> None:
    layout, keys = access.chunk_layout(engine), engine.keys(ORDER)
    assert layout.nbytes(0) > 0
    tokens = [11, *(key.tokens for key in keys)]
    needed = sum(layout.nbytes(count) + 4 * count for count in tokens)
    for limit, evictions in ((needed, 0), (needed - 1, 1)):
        store = MemoryStore(limit)
        over(model, store).add(ORDER)
        assert store.stats().evictions == evictions
    none = over(model, MemoryStore(0))
    assert error(none.logits(QUESTION, ORDER), engine.logits(QUESTION, ORDER)) < 1e-6


# ---------------------------------------------------------------------------- codecs
CODECS = ["int8", "int4"]


def stored(model: Any, store: ChunkStore) -> Engine:
    """An engine whose chunks were put into a store before."""
    over(model, store).add(ORDER)
    return over(model, store)


@pytest.fixture(scope="module")
def bounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Of a model that attends alone, which has all of its layers in keys and values."""
    llama, found = build("llama"), {}
    exact = over(llama).logits(QUESTION, ORDER)
    for codec in CODECS:
        store = DiskStore(tmp_path_factory.mktemp(codec), codec=codec, durable=False)
        found[codec] = 1.5 * error(stored(llama, store).logits(QUESTION, ORDER), exact)
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_round_keys_and_values_alone(
    model: Any, engine: Engine, codec: str, bounds: dict[str, float], tmp_path: Path
) -> None:
    store, layout = DiskStore(tmp_path, codec=codec, durable=False), access.chunk_layout(engine)
    coded = stored(model, store)
    found, expected = (one.logits(QUESTION, ORDER) for one in (coded, engine))
    assert torch.equal(found, expected) == (not layout.groups)
    assert error(found, expected) < bounds[codec]
    tensors = load_file(store.path(coded.keys(ORDER)[0]))
    exact = engine.store.get(engine.add(ORDER)[0], layout).chunk
    assert isinstance(exact, ChunkKV)
    for index, states in enumerate(exact.states):
        for part, tensor in states.items():
            kept = tensors[f"{part}.{index}"]
            assert (kept.dtype, tuple(kept.shape)) == layout.states[index].parts[part]
            assert torch.equal(kept, tensor), "no codec rounds a state further"


def test_states_of_bfloat16_are_kept_in_float16(model: Any, engine: Engine) -> None:
    rounded = over(copy.deepcopy(model).to(torch.bfloat16))
    for group in access.chunk_layout(rounded).states:
        assert group.state is None or group.state[0] == torch.float16
        if group.transition is not None:
            is_numbers = group.form == "scale"
            assert group.transition[0] == (torch.float32 if is_numbers else torch.float16)
    off, noise = (
        error(*(one.logits(QUESTION, ORDER, policy=policy) for one in (rounded, engine)))
        for policy in (Reuse(), FullRecompute())
    )
    # What rounding does to a plain pass, it may do to a stitched one.
    assert off < max(0.3, 1.5 * noise)


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
    copied, held = (over(model, store, rotation=one) for one in ("copied", "auto"))
    answer = held.generate(QUESTION, ORDER, max_new_tokens=5)
    assert answer.metrics.rotation == "deferred", answer.metrics.not_deferred
    assert torch.equal(held.logits(QUESTION, ORDER), copied.logits(QUESTION, ORDER))
    assert answer.token_ids == copied.generate(QUESTION, ORDER, max_new_tokens=5).token_ids


# ---------------------------------------------------------------------------- answers
TURNS = (
    Message("user", "Is it wet?"),
    Message("assistant", "No."),
    Message("user", "Is it dry?"),
    Message("assistant", "Yes, very."),
)


def test_beams_are_those_of_generate(engine: Engine) -> None:
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 8}
    text = ORDER[:1]  # by itself a chunk is exact
    ids = torch.tensor([engine.tokenize(QUESTION, text).all])
    with torch.no_grad():
        plain = engine.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    expected = plain[0, ids.shape[1] :].tolist()
    full = engine.generate(QUESTION, text, policy=FullRecompute(), **options)
    assert list(full.token_ids) == expected
    if not access.chunk_layout(engine).groups:  # no keys and values at all
        with pytest.raises(UnsupportedModelError, match="leave out the other options, or use Full"):
            engine.generate(QUESTION, text, **options)
        return
    rows = [(QUESTION, text), (LONG_QUESTION, ORDER)]
    batch = engine.generate_batch(rows, **options)
    for row, answer in zip(rows, batch, strict=True):
        assert answer.token_ids == engine.generate(*row, **options).token_ids
    assert list(batch[0].token_ids) == expected


@pytest.mark.parametrize("name", ["qwen3_5", "jamba"])
def test_a_prompt_may_be_computed_in_several_passes(name: str) -> None:
    """transformers' own scan begins anew in each of them."""
    engine = over(build(name))
    options: dict[str, Any] = {"policy": FullRecompute(), "max_new_tokens": 8}
    whole = engine.generate(QUESTION, ORDER, **options)
    pieces = engine.generate(QUESTION, ORDER, prefill_chunk_size=7, **options)
    assert pieces.token_ids == whole.token_ids


def test_batches_with_rows_of_a_prefix_alone(engine: Engine) -> None:
    rows: list[Any] = [
        ("x", []),
        (QUESTION, ORDER, TURNS),
        ("y", [], TURNS[:2]),
        (LONG_QUESTION, [ORDER[0]] * 2),
    ]
    for several in (rows, [("x", []), ("yes, is it?", [])]):
        batch = engine.generate_batch(several, max_new_tokens=5)
        for (question, texts, *turns), answer in zip(several, batch, strict=True):
            options = {"history": turns[0]} if turns else {}
            alone = engine.generate(question, texts, max_new_tokens=5, **options)
            assert answer.token_ids == alone.token_ids


@few
def test_combinations_and_the_best_last(engine: Engine) -> None:
    ids = engine.tokenize(QUESTION, ORDER)
    joint = engine.logits(QUESTION, ORDER, policy=Combination())
    together = [token for chunk in ids.chunks for token in chunk]
    plain = reference_logits(engine.model, ids.prefix, [together], ids.query)
    assert error(joint, plain) < 5e-4
    answer = engine.generate(QUESTION, ORDER, policy=Combination(), max_new_tokens=2)
    assert answer.metrics.hits == {"combinations": 1}
    # The best one is computed with the question, behind the others as they are.
    wanted = BestLast().plan(Retrieved("", tuple(ORDER)))
    others = [ids.chunks[place] for place in wanted.brought]
    fresh = [ids.chunks[place] for place in wanted.order[len(others) :]]
    assert fresh[-1] == ids.chunks[0]
    query = [*(token for chunk in fresh for token in chunk), *ids.query]
    expected = reference_logits(engine.model, ids.prefix, others, query)
    best = engine.logits(QUESTION, ORDER, policy=BestLast())
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
    settings = LoraConfig(r=4, target_modules=linears(model), init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), settings).eval()
    other = over(adapted, engine.store)
    assert not {*other.add(ORDER)} & {*engine.add(ORDER)}
    found = other.logits(QUESTION, ORDER)
    assert error(found, engine.logits(QUESTION, ORDER)) > 0.01
    ids = other.tokenize(QUESTION, ORDER)
    plain = reference_logits(unwrapped(adapted), ids.prefix, ids.chunks, ids.query)
    assert error(found, plain) < 5e-4
    with adapted.disable_adapter():
        off = other.logits(QUESTION, ORDER)
    assert error(off, engine.logits(QUESTION, ORDER)) < 5e-4
    assert hits(other) == {"memory": 3}, "and it is on again"


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


def test_nothing_of_ours_is_in_a_model_nor_behind_trouble(model: Any, engine: Engine) -> None:
    before, expected = traces(model), engine.logits(QUESTION, ORDER)
    own = over(model)
    assert traces(model) == before
    seen: list[dict[str, Any]] = []

    def look(*_: Any) -> None:
        seen.append(traces(model))

    def breaks(*_: Any) -> None:
        raise Trouble

    policies = (Reuse(), FullRecompute(), BestLast())
    with hooking(model, look):
        hooked = traces(model)
        for policy in policies:
            own.generate(QUESTION, ORDER, policy=policy, max_new_tokens=2)
    assert len(seen) > 6
    assert all(one == hooked for one in seen), "nor while it computes"
    own.delete_namespace()
    with hooking(model, breaks):
        for policy in policies:
            with pytest.raises(Trouble):
                own.generate(QUESTION, ORDER, policy=policy, max_new_tokens=2)
    assert traces(model) == before
    with pytest.raises(Trouble):
        own.generate(QUESTION, ORDER, max_new_tokens=9, emit=breaks)
    assert traces(model) == before
    assert error(own.logits(QUESTION, ORDER), expected) < 1e-6


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
    used = over(model) if when == "before" else engine
    used.delete_namespace()
    assert error(used.logits(QUESTION, ORDER), expected) < 5e-4


class Trouble(Exception):
    """An app's own."""


def test_the_app_runs_its_model_meanwhile(model: Any, engine: Engine) -> None:
    """Its own passes are stock, and so are copies that it makes in the middle of ours."""
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        expected = model(ids).logits
    logits, found = engine.logits(QUESTION, ORDER), []

    def elsewhere() -> None:
        with torch.no_grad():
            found.append(model(ids).logits)
            if not found[1:]:
                copied = copy.deepcopy(model)
                found.append(copied(ids).logits)
                first_layer(copied)._forward_hooks.clear()  # this test's, which cannot be pickled
                found.append(pickle.loads(pickle.dumps(copied))(ids).logits)

    def midway(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

    own = over(model)
    with hooking(model, midway):
        assert error(own.logits(QUESTION, ORDER), logits) < 1e-6
    assert len(found) > 3
    assert all(torch.equal(one, expected) for one in found)


def test_app_and_engine_answer_at_the_same_time(model: Any) -> None:
    ids = torch.arange(5, 40)[None]
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    settings["attention_mask"] = torch.ones_like(ids)
    said, engine = model.generate(ids, **settings), over(model)
    answer = engine.generate(QUESTION, ORDER, max_new_tokens=4).token_ids
    asked: list[Any] = []
    stop = threading.Event()

    def asking() -> None:
        while not stop.is_set():
            asked.append(engine.generate(QUESTION, ORDER, max_new_tokens=4).token_ids)
            asked.append(over(model).generate(QUESTION, ORDER, max_new_tokens=4).token_ids)

    thread = threading.Thread(target=asking)
    thread.start()
    try:
        for _ in range(4):
            assert torch.equal(model.generate(ids, **settings), said)
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
    engine = over(pack_weights(build("nemotron_h", dtype=torch.bfloat16), form))
    assert not engine.refusal
    exact = engine.logits(QUESTION, ORDER[:1])
    full = engine.logits(QUESTION, ORDER[:1], policy=FullRecompute())
    assert torch.equal(engine.logits(QUESTION, ORDER[:1]), exact)
    off = (exact - full).abs().amax(-1) / full.std()
    assert float(off.median()) < 0.3


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a checkpoint."""
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


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
    rows: list[Any] = [("?", ["q"]), ("??", ORDER), ("x", [])]
    batch = engine.generate_batch(rows, max_new_tokens=3)
    alone = [engine.generate(*row, max_new_tokens=3) for row in rows]
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


# ---------------------------------------------------------------------- a trained model
pytestmark = pytest.mark.skipif(not IS_READ, reason="this transformers keeps no states as 5.23")


@pytest.mark.parametrize("policy", [BestLast(), Reuse(), LegoLink()], ids=repr)
def test_it_answers_in_any_order_after_a_restart(policy: ReusePolicy, tmp_path: Path) -> None:
    def opened() -> Engine:
        store = DiskStore(tmp_path, durable=False)
        return Engine.from_pretrained(FOLDER, store=store, policy=policy)

    opened().add(DOCUMENTS)
    engine = opened()
    for documents, entity, value in asked():
        full = engine.generate(entity, documents, policy=FullRecompute(), max_new_tokens=1)
        answer = engine.generate(entity, documents, max_new_tokens=1)
        assert answer.text.strip() == full.text.strip() == value
        fresh = policy == BestLast()  # the best one is computed with the question
        assert answer.metrics.hits == {"disk": len(documents) - fresh}


def test_without_its_documents_it_does_not_know() -> None:
    engine = Engine.from_pretrained(FOLDER)
    right = [
        engine.generate(entity, max_new_tokens=1).text.strip() == value
        for _, entity, value in asked()
    ]
    assert sum(right) < len(right) / 4


def test_settings_cut_chunks_for_the_policy_that_will_be_asked_for(tmp_path: Path) -> None:
    def opened(policy: ReusePolicy | None) -> Engine:
        return open_engine(FOLDER, kv_dir=str(tmp_path), policy=policy)

    engine = opened(LegoLink(4))
    assert engine.policy == LegoLink(4)
    documents, entity, value = asked()[0]
    for _ in range(2):
        answer = engine.generate(entity, documents, policy=LegoLink(4), max_new_tokens=1)
        assert answer.text.strip() == value
    assert answer.metrics.misses == 0
    assert opened(Reuse()).policy == opened(None).policy == UNTRAINED
