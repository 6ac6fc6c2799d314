"""Released chunks go by themselves, in the background of a process that lives long enough."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvcache_rag.stores import DiskStore
from tests.contracts import key_of, make_chunk

if TYPE_CHECKING:
    from pathlib import Path


def wait_for(store: DiskStore, evictions: int) -> None:
    deadline = time.monotonic() + 20
    while store.stats().evictions < evictions and time.monotonic() < deadline:
        time.sleep(0.01)


def test_released_chunks_go_in_the_background(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, durable=False, release_grace=0)
    chunk = make_chunk(tokens=4)
    key = key_of(chunk)
    assert store.put(key, chunk)
    store.claim(key, "a")
    store._due = 0.0  # as a while later
    store.release(key, "a")
    wait_for(store, 1)
    assert not store.contains(key)


def test_a_new_store_does_not_look_at_once(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, durable=False, release_grace=0)
    chunk = make_chunk(tokens=4)
    key = key_of(chunk)
    store.put(key, chunk)
    store.claim(key, "a")
    store.release(key, "a")
    time.sleep(0.1)
    assert store.contains(key)
