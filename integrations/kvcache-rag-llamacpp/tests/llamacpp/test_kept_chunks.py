"""Chunks of llama.cpp in stores: found, missed, refused, deleted, and never another one's."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import access
import pytest
from damage import header_size
from laws import QUESTION, TEXTS, error
from llamacpp.asking import FixedScorer, ids_of, opened, parts, rounding
from llamacpp.ggufs import LENGTH
from llamacpp.own import caches

from kvcache_rag import (
    CacheClip,
    DiskStore,
    Engine,
    FullRecompute,
    LegoLink,
    MemoryStore,
    PromptTemplate,
    Reuse,
    TieredStore,
)
from kvcache_rag.codecs import Int4, Int8
from kvcache_rag.errors import FingerprintMismatchError
from kvcache_rag.generation import StoredChunk
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag_llamacpp import model as llamacpp
from kvcache_rag_llamacpp.binding import LlamaCpp
from kvcache_rag_llamacpp.sequence_cache import FIRST

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llamacpp.conftest import Decoder, Files

    from kvcache_rag.stores import ChunkStore

FAMILIES = ["llama", "cohere2", "phi3"]
STORES: dict[str, Callable[[Path], ChunkStore]] = {
    "tiers": lambda folder: TieredStore(MemoryStore(20_000), DiskStore(folder, durable=False)),
    "nowhere": lambda folder: MemoryStore(0),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def asked(engine: Engine, texts: Any = TEXTS, **options: Any) -> Any:
    return engine.generate(QUESTION, texts, max_new_tokens=2, **{"policy": Reuse(), **options})


# ---------------------------------------------------------------------- places
@pytest.mark.parametrize("name", STORES)
def test_wherever_they_are_kept(
    family: str, files: Files, own: Decoder, name: str, tmp_path: Path
) -> None:
    engine = opened(files(family), store=STORES[name](tmp_path))
    for misses in (3, 3 if name == "nowhere" else 0):
        assert asked(engine).metrics.misses == misses
    found = engine.logits(QUESTION, TEXTS, policy=Reuse())
    assert error(found, own(files(family)).stitched(*parts(ids_of(engine)))) < rounding(family)


def test_they_are_prefilled_ahead_and_known_by_their_keys(family: str, files: Files) -> None:
    engine = opened(files(family))
    keys = engine.add(TEXTS)
    expected = asked(engine)
    for chunks in (keys, [StoredChunk(key, text) for key, text in zip(keys, TEXTS, strict=True)]):
        answer = asked(engine, chunks)
        assert (answer.token_ids, answer.metrics.misses) == (expected.token_ids, 0)
    answer = asked(engine, policy=LegoLink(4)).metrics
    told = engine.explain(QUESTION, TEXTS, policy=LegoLink(4))
    assert told.recomputed_tokens == answer.recomputed_tokens == 8
    assert told.reused_tokens == answer.reused_tokens


@pytest.mark.parametrize(("codec", "allowed"), [(Int8(), 0.3), (Int4(), 3.0)], ids=["8", "4"])
def test_in_fewer_bits(
    family: str, files: Files, own: Decoder, codec: Any, allowed: float, tmp_path: Path
) -> None:
    """Law: what a codec rounds is all that changes, wherever a chunk stands.

    Measured: 0.02 to 0.13 standard deviations in 8 bits, 0.4 to 1.4 in 4, of random weights.
    """
    store = DiskStore(tmp_path, durable=False, codec=codec)
    engine = opened(files(family), store=store)
    expected = own(files(family)).stitched(*parts(ids_of(engine)))
    asked(engine)
    assert asked(engine).metrics.misses == 0
    found = engine.logits(QUESTION, TEXTS, policy=Reuse())
    assert 1e-4 < error(found, expected) < allowed
    for policy in (LegoLink(5), CacheClip(FixedScorer(), ratio=0.4)):
        assert engine.logits(QUESTION, TEXTS, policy=policy).isfinite().all()


def test_of_a_deleted_namespace_nothing_is_left(
    family: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: neither in its store nor in the cells, whose memory is overwritten."""
    engine = opened(files(family))
    asked(engine)
    llama, wiped = access.adapter(engine).llama, list[bool]()
    real = llama.lib.llama_memory_clear

    def clear(memory: Any, data: bool) -> None:
        wiped.append(data)
        real(memory, data)

    held = caches(llama.context, llama.sequences)
    assert max(map(len, held)) > 1000
    monkeypatch.setattr(llama.lib, "llama_memory_clear", clear)
    assert engine.delete_namespace() == len(TEXTS) + 1  # and the prefix
    assert wiped == [True]
    assert llama.context is None
    assert engine.generate(QUESTION, max_new_tokens=1, policy=FullRecompute()).token_ids
    held = caches(llama.context, llama.sequences)
    alone = len(engine.tokenize(QUESTION).all)
    assert [len(one) > 100 for one in held].count(True) == 1, "sequences of before"
    assert struct.unpack_from("<I", held[FIRST], 12)[0] == alone
    assert asked(engine).metrics.misses == len(TEXTS)


# ---------------------------------------------------------------------- what is damaged, or lies
@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All that is handed to llama.cpp as a state."""
    found: list[bytes] = []
    real = LlamaCpp.set_state

    def noted(self: LlamaCpp, sequence: int, state: bytearray) -> None:
        found.append(bytes(state))
        real(self, sequence, state)

    monkeypatch.setattr(LlamaCpp, "set_state", noted)
    return found


class Held:
    """An engine over a folder, and what it says and hands over while all chunks are whole."""

    def __init__(self, path: Path, folder: Path, states: list[bytes]) -> None:
        self.store = DiskStore(folder, durable=False)
        self.engine = opened(path, store=self.store, prompt_memory=0)
        self.states, self.expected = states, asked(self.engine).token_ids
        states.clear()
        asked(self.engine)
        self.right = {*states}
        self.key = self.engine.keys(TEXTS)[1]
        self.path = self.store.path(self.key)

    def misses(self) -> int:
        """Of a question that is answered right, whatever stands in a file now."""
        self.states.clear()
        answer = asked(self.engine)
        assert answer.token_ids == self.expected
        # Of a chunk that is computed again, the prefix is handed over as well.
        assert {*self.states} == self.right
        return int(answer.metrics.misses)


def test_of_a_damaged_file_nothing_reaches_llama_cpp(
    family: str, files: Files, tmp_path: Path, states: list[bytes]
) -> None:
    held = Held(files(family), tmp_path, states)
    raw = held.path.read_bytes()
    head = header_size(raw)
    places = [*range(0, head, 61), *range(head, len(raw), len(raw) // 6)]
    broken = [raw[:place] + bytes([raw[place] ^ 0x41]) + raw[place + 1 :] for place in places]
    broken += [raw[:place] for place in places] + [raw + b"0", raw * 2, b""]
    misses = 0
    for spoilt in broken:
        held.path.write_bytes(spoilt)
        misses += held.misses()
    assert misses >= len(broken) - 3, "padding in a header says nothing"


def _reshaped(raw: bytes, wanted: Callable[[list[int]], list[int]]) -> bytes:
    """A file whose header says other shapes."""
    size = header_size(raw)
    header = json.loads(raw[8:size])
    for name, one in header.items():
        if name != "__metadata__" and len(one["shape"]) > 2:
            one["shape"] = wanted(one["shape"])
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + raw[size:]


def test_of_a_file_that_lies_nothing_reaches_llama_cpp(
    family: str, files: Files, tmp_path: Path, states: list[bytes]
) -> None:
    held = Held(files(family), tmp_path, states)
    store, key, layout = held.store, held.key, access.chunk_layout(held.engine)
    raw, chunk = held.path.read_bytes(), store.get(key, layout).chunk
    shapes: list[Callable[[list[int]], list[int]]] = [
        lambda shape: shape[::-1],
        lambda shape: [shape[0], *shape[2:], shape[1]],
        lambda shape: [*shape[:-2], shape[-2] * 2, shape[-1] // 2],
        lambda shape: [*shape[:-1], 1 << 40],
        lambda shape: [*shape[:-1], -1],
    ]
    other = store.path(held.engine.keys(TEXTS)[2]).read_bytes()
    for lie in (other, *(_reshaped(raw, shape) for shape in shapes)):
        held.path.write_bytes(lie)
        assert held.misses() == 1
    shorter = tuple(tuple(one[..., :-1, :] for one in group) for group in chunk.tensors)
    for liar in (
        replace(chunk, tokens=chunk.tokens.flip(0)),
        ChunkKV(layout, chunk.tokens[:-1], chunk.start, shorter),
    ):
        # Whoever may write to the folder writes checksums that fit.
        written = replace(key, tokens=len(liar))
        store.delete(key)
        store.put(written, liar)
        store.path(written).replace(held.path)
        assert held.misses() == 1


# ---------------------------------------------------------------------- whose chunks are found
@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", durable=False)


def misses(engine: Engine) -> int:
    found: int = engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=1).metrics.misses
    return found


@pytest.fixture
def first(files: Files, store: DiskStore) -> Engine:
    """Whose chunks are in the store."""
    engine = opened(files("phi3"), store=store)
    engine.add(TEXTS)
    return engine


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"model_kwargs": {"flash_attn": True}},
        {"context_window": LENGTH},
        {"template": PromptTemplate(system="Look here.\n", chunk_start="<d>", chunk_end="</d>")},
        {"namespace": "other"},
        {"backend": "transformers"},
    ],
    ids=str,
)
def test_what_was_computed_otherwise_is_not_found(
    first: Engine, files: Files, store: DiskStore, options: dict[str, Any]
) -> None:
    other = opened(files("phi3"), store=store, **options)
    assert other.keys(TEXTS) != first.keys(TEXTS)
    assert (other.spec == first.spec) is ("namespace" in options)
    assert misses(other) == len(TEXTS)
    assert misses(first) == 0
    if "namespace" not in options:
        key = first.keys(TEXTS)[0]
        with pytest.raises(FingerprintMismatchError):
            other.reference(key.digest, key.spec, key.tokens)


def test_of_another_file_or_version_nothing_is_found(
    first: Engine, files: Files, store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: one byte of its bytes is enough, wherever it is; its name and place are nothing."""
    path = tmp_path / "elsewhere.gguf"
    shutil.copy(files("phi3"), path)
    assert misses(opened(path, store=store)) == 0
    path.write_bytes(path.read_bytes().replace(b"random", b"Random"))
    for other in (path, files("phi3@1")):
        assert misses(opened(other, store=store)) == len(TEXTS)
    monkeypatch.setattr(llamacpp, "installed_version", lambda: "0.3.37 (b99999)")
    assert misses(opened(files("phi3"), store=store)) == len(TEXTS)


@pytest.mark.parametrize(
    "options",
    [{}, {"model_kwargs": {"n_threads": 2}}, {"context_window": 400}, {"policy": Reuse()}],
    ids=str,
)
def test_the_same_is_found(
    first: Engine, files: Files, store: DiskStore, options: dict[str, Any]
) -> None:
    other = opened(files("phi3"), store=store, **options)
    assert other.keys(TEXTS) == first.keys(TEXTS)
    assert misses(other) == 0


def test_another_side_of_longropes_length_needs_a_model_of_its_own(files: Files) -> None:
    """Law: contexts have one set of frequencies, so engines of one model agree on it."""
    engine = opened(files("phi3"))
    with pytest.raises(ValueError, match="load the file once more"):
        Engine(engine.model, engine.tokenizer, context_window=LENGTH)
    same = Engine(engine.model, engine.tokenizer, template=engine.template, context_window=300)
    assert same.spec == engine.spec
