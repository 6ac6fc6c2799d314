"""A place of a user's own for bytes, in thirty lines, is a store with everything that stands above.

It is the one that docs/stores.md shows.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from small import make_model, make_tokenizer

from kvcache_rag import Engine
from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError
from kvcache_rag.stores import ByteStore, ChunkStore, MemoryBytes, StoredChunks
from kvcache_rag.stores.object_names import SUFFIX, chunk_name
from tests.contracts import LAYOUT, StoreContract, key_of, make_chunk, same

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).parent.parent / "docs/stores.md"
TEXTS = ["The cat sat on the mat.", "The dog sat on the rug."]
CHUNK = make_chunk()
KEY = key_of(CHUNK)


def shown() -> type[ByteStore]:
    """The class of the page."""
    (code,) = re.findall(r"```python\n(import threading.*?)```", PAGE.read_text("utf-8"), re.S)
    found: dict[str, Any] = {}
    exec(code, found)
    place: type[ByteStore] = found["Dictionary"]
    return place


Dictionary = shown()
PLACES: dict[str, Callable[[], ByteStore]] = {"own": Dictionary, "memory": MemoryBytes}


class Contract(StoreContract):
    place: Callable[[], ByteStore]

    def open(self, path: Path, *, max_bytes: int | None = None) -> StoredChunks:
        del path
        return StoredChunks(type(self).place(), max_bytes=max_bytes)

    def held(self, store: ChunkStore) -> set[str]:
        assert isinstance(store, StoredChunks)
        names = [entry.name for entry in store.place.list("")]
        return {name[-64 - len(SUFFIX) : -len(SUFFIX)] for name in names if name.endswith(SUFFIX)}


class TestOneOfAUser(Contract):
    place = staticmethod(Dictionary)


class TestMemoryBytes(Contract):
    place = staticmethod(MemoryBytes)


@pytest.mark.parametrize("place", PLACES)
def test_an_engine_answers_from_it(place: str) -> None:
    model, kept = make_model(), PLACES[place]()

    def make_engine(**options: Any) -> Engine:
        return Engine(model, make_tokenizer(), **options)

    engine = make_engine(store=StoredChunks(kept))
    engine.add(TEXTS)
    first = engine.generate("Where?", TEXTS, max_new_tokens=6)
    assert (first.metrics.misses, first.metrics.hits) == (0, {"stored": 2})
    again = make_engine(store=StoredChunks(kept, tier="again"))
    second = again.generate("Where?", TEXTS, max_new_tokens=6)
    assert second.metrics.hits == {"again": 2}
    assert (
        second.token_ids
        == first.token_ids
        == make_engine().generate("Where?", TEXTS, max_new_tokens=6).token_ids
    )


@pytest.mark.parametrize("place", PLACES)
def test_damage_in_it_is_a_miss_and_a_signature_is_asked_for(place: str) -> None:
    store = StoredChunks(PLACES[place](), signing_key=bytes(32))
    name = chunk_name(KEY)
    assert store.put(KEY, CHUNK)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)
    raw: Any = store.place.get(name)
    store.place.put(name, [raw[:-1]])
    with pytest.raises(CorruptChunkError):
        store.get(KEY, LAYOUT)
    assert not store.contains(KEY), "it was dropped"
    unsigned = StoredChunks(store.place)
    assert unsigned.put(KEY, CHUNK)
    assert not store.contains(KEY)
    with pytest.raises(ChunkNotFoundError):
        store.get(KEY, LAYOUT)
    assert store.stats().untrusted == 1


@pytest.mark.parametrize("place", PLACES)
def test_its_chunks_end_and_are_read_into_memory(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoredChunks(PLACES[place](), ttl=100)
    assert store.put(KEY, CHUNK)
    out = make_chunk(7)
    assert store.get(KEY, LAYOUT, out).chunk is out
    assert same(out, CHUNK)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 200)
    assert not store.contains(KEY)
    assert store.sweep() == 1
    assert list(store.place.list("")) == []
