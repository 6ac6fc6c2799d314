"""Chunks end a time after they were written; a clock that goes back changes little."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import access
import pytest

from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError, InvalidInputError
from kvcache_rag.stores import DiskStore, MemoryStore, filesystem
from tests.contracts import LAYOUT, key_of, make_chunk, same

if TYPE_CHECKING:
    from pathlib import Path

SMALL = make_chunk(tokens=4)
KEY = key_of(SMALL)
SIZE = 4096 + SMALL.nbytes + 16
YEAR = 365 * 86400.0


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    store = DiskStore(tmp_path, ttl=1000, durable=False)
    assert store.put(KEY, SMALL)
    return store


def age(path: Path, seconds: float) -> None:
    """Let the file have been written and used that much earlier (later, if negative)."""
    status = path.stat()
    os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))


def is_held(store: DiskStore | MemoryStore) -> bool:
    """Whether every way of asking gives the same answer."""
    held = store.contains(KEY)
    assert (store.locate(KEY) is not None) is held
    if held:
        assert same(store.get(KEY, LAYOUT).chunk, SMALL)
        return True
    with pytest.raises(ChunkNotFoundError) as caught:
        store.get(KEY, LAYOUT)
    assert caught.type is ChunkNotFoundError
    return False


def test_a_chunk_ends_a_time_after_it_was_written(store: DiskStore) -> None:
    age(store.path(KEY), 900)
    assert is_held(store)
    assert store.sweep() == 0
    age(store.path(KEY), 101)
    assert not is_held(store)
    assert store.path(KEY).exists(), "dropped by a sweep"
    assert store.sweep() == 1
    assert not store.path(KEY).exists()
    assert (store.stats().evictions, store.stats().misses) == (1, 1)
    assert store.put(KEY, SMALL), "and it begins anew"
    assert is_held(store)
    assert store.sweep() == 0


def test_use_does_not_lengthen_the_life_of_a_chunk(store: DiskStore) -> None:
    written = time.time() - 990
    os.utime(store.path(KEY), (written, written))
    for use in (lambda: store.get(KEY, LAYOUT), lambda: store.touch(KEY)):
        use()
        status = store.path(KEY).stat()
        assert status.st_mtime == pytest.approx(written, abs=1e-3)
        assert status.st_atime > time.time() - 60
        os.utime(store.path(KEY), (written, written))
    age(store.path(KEY), 20)
    store.touch(KEY)
    assert not is_held(store)
    assert store.sweep() == 1


def test_use_saves_a_chunk_from_eviction_all_the_same(store: DiskStore) -> None:
    other = make_chunk(1, tokens=4)
    store.put(key_of(other), other)
    age(store.path(KEY), 500)
    age(store.path(key_of(other)), 400)
    store.get(KEY, LAYOUT)
    assert DiskStore(store.root, ttl=1000, max_bytes=SIZE).sweep() == 1
    assert store.contains(KEY)
    assert not store.contains(key_of(other))


def test_what_was_put_aside_ends_too(store: DiskStore) -> None:
    store.path(KEY).write_bytes(b"damaged")
    with pytest.raises(CorruptChunkError):
        store.get(KEY, LAYOUT)
    (aside,) = (store.path(KEY).parents[2] / "quarantine").iterdir()
    store.sweep()
    assert aside.exists()
    age(aside, 2000)
    DiskStore(store.root).sweep()
    assert aside.exists()
    store.sweep()
    assert not aside.exists()


def test_old_chunks_go_in_the_background(store: DiskStore) -> None:
    age(store.path(KEY), 2000)
    store._due = 0.0  # as a while later
    other = make_chunk(1, tokens=4)
    store.put(key_of(other), other)
    for thread in threading.enumerate():
        if thread.name == "kvcache-rag-sweep":
            thread.join(60)
    assert not store.path(KEY).exists()
    assert store.contains(key_of(other))


@pytest.mark.parametrize("ttl", [0, -1.0, float("nan")])
def test_a_ttl_is_above_zero(tmp_path: Path, ttl: float) -> None:
    for opened in (lambda: DiskStore(tmp_path, ttl=ttl), lambda: MemoryStore(ttl=ttl)):
        with pytest.raises(InvalidInputError, match="ttl"):
            opened()


# A clock that was ahead and went back: files of the future.


def test_a_chunk_of_the_future_is_served_and_ends_like_any_other(store: DiskStore) -> None:
    age(store.path(KEY), -YEAR)
    assert is_held(store)
    assert store.sweep() == 0
    assert store.path(KEY).stat().st_mtime < time.time() + 1, "dated anew"
    age(store.path(KEY), 900)
    assert store.sweep() == 0
    assert is_held(store)
    age(store.path(KEY), 101)
    assert store.sweep() == 1


def test_a_clock_that_goes_back_drops_nothing(store: DiskStore) -> None:
    for seed in range(1, 5):
        chunk = make_chunk(seed, tokens=4)
        store.put(key_of(chunk), chunk)
    for path in store.root.rglob("*.safetensors"):
        age(path, -YEAR)
    assert DiskStore(store.root, ttl=1000, max_bytes=5 * SIZE).sweep() == 0
    assert DiskStore(store.root, ttl=1000, max_bytes=3 * SIZE).sweep() == 2


def test_a_little_ahead_is_another_machines_clock(store: DiskStore) -> None:
    age(store.path(KEY), -30)
    before = store.path(KEY).stat().st_mtime
    store.sweep()
    assert store.path(KEY).stat().st_mtime == before


@pytest.mark.parametrize("ttl", [None, 1e9])
def test_a_use_in_the_future_is_not_the_last_use_for_ever(tmp_path: Path, ttl: float) -> None:
    store = DiskStore(tmp_path, ttl=ttl, durable=False)
    chunks = [make_chunk(seed, tokens=4) for seed in range(3)]
    for chunk in chunks:
        store.put(key_of(chunk), chunk)
    age(store.path(key_of(chunks[0])), -YEAR)
    store.sweep()
    for chunk in chunks:
        age(store.path(key_of(chunk)), 5000)
    for chunk in chunks[1:]:
        store.get(key_of(chunk), LAYOUT)
    DiskStore(tmp_path, ttl=ttl, max_bytes=2 * SIZE).sweep()
    assert [store.contains(key_of(chunk)) for chunk in chunks] == [False, True, True]


def test_torsos_of_the_future_go_in_time(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, durable=False, temp_age=100)
    store.put(KEY, SMALL)
    torso = store.path(KEY).parent / ".tmp-torso"
    torso.write_text("x")
    age(torso, -YEAR)
    assert store.sweep() == 0
    assert torso.exists()
    age(torso, 101)
    assert store.sweep() == 0
    assert not torso.exists()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of day as seconds from now; files keep their own, as after a clock was set."""
    shift = [0.0]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])
    return shift


@pytest.mark.parametrize("shift", [-1e9, -3600.0, 3600.0, 1e9])
def test_a_clock_that_was_set_changes_no_tensor(
    store: DiskStore, clock: list[float], shift: float
) -> None:
    forever = DiskStore(store.root, durable=False)
    clock[0] = shift
    assert same(forever.get(KEY, LAYOUT).chunk, SMALL)
    forever.touch(KEY)
    assert forever.sweep() == 0
    assert forever.contains(KEY)
    assert forever.put(KEY, SMALL)


def test_a_clock_that_jumps_ahead_costs_a_writer_its_write_and_no_more(
    store: DiskStore, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = filesystem.write_all

    def swept_meanwhile(*arguments: Any) -> None:
        write(*arguments)
        clock[0] = 1e9
        DiskStore(store.root).sweep()
        clock[0] = 0.0

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "write_all", swept_meanwhile)
        assert not store.put(KEY, SMALL)
    assert store.stats().put_failures == 1
    assert store.put(KEY, SMALL)


# Memory.


def test_a_chunk_in_memory_ends_a_time_after_it_was_put(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store = MemoryStore(3 * (SMALL.nbytes + 16), ttl=1000)
    store.put(KEY, SMALL)
    now[0] += 999
    assert is_held(store)
    now[0] += 1
    assert not is_held(store)
    assert store.sweep() == 1
    assert (store.stats().evictions, store.stats().hits) == (1, {"memory": 1})
    store.put(KEY, SMALL)
    assert is_held(store)
    for seed in range(1, 9):
        chunk = make_chunk(seed, tokens=4)
        store.put(key_of(chunk), chunk)
    assert len(access.chunks(store)) == 3
    now[0] += 1000
    store.put(KEY, SMALL)
    assert [*access.chunks(store)] == [KEY]
    assert store.nbytes == SMALL.nbytes + 16
    assert store.stats().evictions == 1 + 6 + 3, "without a sweep"


def test_what_has_expired_in_memory_is_deleted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store = MemoryStore(ttl=1000)
    for seed in range(3):
        chunk = make_chunk(seed, tokens=4)
        store.put(key_of(chunk), chunk)
        other = key_of(chunk, namespace="b")
        store.put(other, chunk)
    now[0] += 1000
    assert store.delete(KEY)
    assert not store.delete(KEY)
    assert KEY not in access.chunks(store)
    assert store.delete_namespace("") == 2
    assert store.delete_namespace("") == 0
    assert store.stats().evictions == 0
    assert store.delete(other)
    assert store.sweep() == store.stats().evictions == 2, "other namespaces are as they were"
    assert store.nbytes == 0


@pytest.mark.parametrize("ttl", [None, 1000])
def test_a_dropped_store_keeps_no_chunks(ttl: float | None) -> None:
    store = MemoryStore(ttl=ttl)
    store.put(KEY, SMALL)
    store.get(KEY, LAYOUT)
    kept = weakref.ref(store.get(KEY, LAYOUT).chunk)
    gc.disable()  # which would find it in the end
    try:
        del store
        assert kept() is None
    finally:
        gc.enable()
