"""Files read layer by layer: what is counted, and what stops nobody."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, NoReturn

import pytest

from kvcache_rag.stores import DiskStore, TieredStore
from tests.chunks import LAYOUT, empty_chunk, key_of, make_chunk, same

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKV
    from kvcache_rag.stores.base import ChunkReader


def read(reader: ChunkReader | None) -> ChunkKV:
    assert reader is not None
    out = empty_chunk(len(reader.tokens))
    out.tokens.copy_(reader.tokens)
    reader.read(out)
    reader.finish()
    reader.close()
    return out


def test_the_seconds_of_hits_are_those_spent_on_each(tmp_path: Path) -> None:
    store, chunks = DiskStore(tmp_path, durable=False), [make_chunk(seed) for seed in range(3)]
    for chunk in chunks:
        store.put(key_of(chunk), chunk)
    readers = [store.reader(key_of(chunk), LAYOUT) for chunk in chunks]
    time.sleep(0.4)  # the forward pass, or the other chunks of the prompt
    for reader, chunk in zip(readers, chunks, strict=True):
        assert same(read(reader), chunk)
    stats = store.stats()
    assert stats.hits == {"disk": 3}
    assert 0 < stats.seconds["disk"] < 0.4


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice at all")
def test_a_system_that_takes_no_advice_reads_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSYS, "not implemented")

    store, chunk = DiskStore(tmp_path, durable=False), make_chunk()
    store.put(key_of(chunk), chunk)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert same(read(store.reader(key_of(chunk), LAYOUT)), chunk)
    assert (store.stats().misses, store.stats().hits) == (0, {"disk": 1})


@pytest.mark.parametrize("harm", ["damaged", "gone meanwhile"])
def test_what_a_slower_tier_has_is_no_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    fast, slow = (DiskStore(tmp_path / tier, durable=False, tier=tier) for tier in ("a", "b"))
    store, chunk = TieredStore(fast, slow), make_chunk()
    key = key_of(chunk)
    store.put(key, chunk)
    if harm == "damaged":
        os.truncate(fast.path(key), 100)
    else:
        monkeypatch.setattr(fast, "contains", lambda key: True)
        fast.delete(key)
    assert store.reader(key, LAYOUT) is None, "only `get` asks all tiers"
    assert same(store.get(key, LAYOUT).chunk, chunk)
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.corrupt) == ({"b": 1}, 0, int(harm == "damaged"))
