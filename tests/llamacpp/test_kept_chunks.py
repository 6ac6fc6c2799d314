"""Chunks of llama.cpp in stores: found, missed, refused, deleted, and never another one's."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import access
import pytest
from damage import header_size
from laws import QUESTION, TEXTS, error
from llamacpp.asking import FixedScorer, ids_of, opened, parts, rounding
from llamacpp.own import caches

from kvcache_rag import (
    CacheClip,
    DiskStore,
    Engine,
    FullRecompute,
    LegoLink,
    MemoryStore,
    Reuse,
    TieredStore,
)
from kvcache_rag.codecs import Int4, Int8
from kvcache_rag.generation import StoredChunk
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag_llamacpp.binding import LlamaCpp
from kvcache_rag_llamacpp.cells import FIRST

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llamacpp.conftest import Decoder, Files

    from kvcache_rag.stores import ChunkStore

FAMILIES = ["llama", "cohere2", "phi3"]
STORES: dict[str, Callable[[Path], ChunkStore]] = {
    "memory": lambda folder: MemoryStore(),
    "disk": lambda folder: DiskStore(folder, durable=False),
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
    """Law: of any store the logits are the same, and what was computed once is found again."""
    engine = opened(files(family), store=STORES[name](tmp_path))
    first = asked(engine).metrics
    assert (first.misses, first.reused_tokens) == (3, 0)
    again = asked(engine).metrics
    assert again.misses == (3 if name == "nowhere" else 0)
    found = engine.logits(QUESTION, TEXTS, policy=Reuse())
    assert error(found, own(files(family)).stitched(*parts(ids_of(engine)))) < rounding(family)


def test_they_are_prefilled_ahead_and_known_by_their_keys(family: str, files: Files) -> None:
    engine = opened(files(family))
    keys = engine.add(TEXTS)
    assert keys == engine.keys(TEXTS)
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


def test_of_a_damaged_file_nothing_reaches_llama_cpp(
    family: str, files: Files, tmp_path: Path, states: list[bytes]
) -> None:
    """Law: wherever a byte is another one, or missing, the chunk is a miss, and computed again."""
    store = DiskStore(tmp_path, durable=False)
    engine = opened(files(family), store=store, prompt_memory=0)
    expected = asked(engine).token_ids
    states.clear()
    asked(engine)
    right, key = {*states}, engine.keys(TEXTS)[1]
    path = store.path(key)
    raw = path.read_bytes()
    head = header_size(raw)
    places = [*range(0, head, 61), *range(head, len(raw), len(raw) // 6)]
    broken = [raw[:place] + bytes([raw[place] ^ 0x41]) + raw[place + 1 :] for place in places]
    broken += [raw[:place] for place in places] + [raw + b"0", raw * 2, b""]
    misses = 0
    for spoilt in broken:
        path.write_bytes(spoilt)
        states.clear()
        answer = asked(engine)
        misses += answer.metrics.misses
        assert answer.token_ids == expected
        # Of a chunk that is computed again, the prefix is handed over as well.
        assert {*states} == right
    assert misses >= len(broken) - 3, "padding in a header says nothing"


def _renamed(raw: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A file whose header says something else."""
    size = header_size(raw)
    header = json.loads(raw[8:size])
    change(header)
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + raw[size:]


def _shape(wanted: Callable[[list[int]], list[int]]) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        for name, one in header.items():
            if name != "__metadata__" and len(one["shape"]) > 2:
                one["shape"] = wanted(one["shape"])

    return change


def test_of_a_file_that_lies_nothing_reaches_llama_cpp(
    family: str, files: Files, tmp_path: Path, states: list[bytes]
) -> None:
    """Law: other shapes, lengths, ids, and other chunks' files are misses."""
    store = DiskStore(tmp_path, durable=False)
    engine = opened(files(family), store=store, prompt_memory=0)
    expected = asked(engine).token_ids
    states.clear()
    asked(engine)
    right, key = {*states}, engine.keys(TEXTS)[1]
    path = store.path(key)
    raw, other = path.read_bytes(), store.path(engine.keys(TEXTS)[2]).read_bytes()
    layout = access.chunk_layout(engine)
    chunk = store.get(key, layout).chunk
    swapped = replace(chunk, tokens=chunk.tokens.flip(0))
    shorter = ChunkKV(
        layout,
        chunk.tokens[:-1],
        chunk.start,
        tuple(tuple(one[..., :-1, :] for one in group) for group in chunk.tensors),
    )
    lies: list[bytes | ChunkKV] = [
        other,
        _renamed(raw, _shape(lambda shape: shape[::-1])),
        _renamed(raw, _shape(lambda shape: [shape[0], *shape[2:], shape[1]])),
        _renamed(raw, _shape(lambda shape: [*shape[:-2], shape[-2] * 2, shape[-1] // 2])),
        _renamed(raw, _shape(lambda shape: [*shape[:-1], 1 << 40])),
        _renamed(raw, _shape(lambda shape: [*shape[:-1], -1])),
        swapped,
        shorter,
    ]
    for lie in lies:
        if isinstance(lie, bytes):
            path.write_bytes(lie)
        else:  # whoever may write to the folder writes checksums that fit
            store.delete(key)
            store.put(replace(key, tokens=len(lie)), lie)
            store.path(replace(key, tokens=len(lie))).replace(path)
        states.clear()
        answer = asked(engine)
        assert answer.metrics.misses == 1
        assert answer.token_ids == expected
        assert {*states} == right
