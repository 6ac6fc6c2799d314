"""Tiers of which one is far away: writing back, forgetting, locks; the contract over all."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

import access
import pytest

from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError, InvalidInputError
from kvcache_rag.stores import (
    ChunkStore,
    DiskStore,
    MemoryStore,
    RemoteStore,
    TieredStore,
    writeback,
)
from kvcache_rag.stores.writeback import WriteBack
from tests.contracts import LAYOUT, LAYOUTS, StoreContract, empty_chunk, key_of, make_chunk, same

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV

GRACE = 100.0
CHUNK = make_chunk()
KEY = key_of(CHUNK, namespace="a")


class TestThreeTiers(StoreContract):
    write_back: tuple[str, ...] = ()

    def open(self, path: Path, *, max_bytes: int | None = None) -> TieredStore:
        if max_bytes is not None:
            pytest.skip("a remote has no limit on its bytes")
        return TieredStore(
            MemoryStore(release_grace=GRACE),
            DiskStore(path / "disk", durable=False, release_grace=GRACE),
            RemoteStore(f"file://{path}/remote", release_grace=GRACE),
            write_back=self.write_back,
        )

    def age(self, store: ChunkStore, seconds: float) -> None:
        memory, disk, _ = parts(store)
        for owners in access.owners(memory).values():
            for owner, released in owners.items():
                owners[owner] = None if released is None else released - seconds
        for path in disk.root.parent.rglob("*"):
            status = path.stat()
            os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))

    def held(self, store: ChunkStore) -> set[str]:
        memory, disk, _ = parts(store)
        found = {path.stem for path in disk.root.parent.rglob("*.safetensors")}
        return found | {key.digest for key in access.chunks(memory)}


class TestThreeTiersWrittenBack(TestThreeTiers):
    write_back = ("disk", "remote")


class TestOneTierWrittenBack(TestThreeTiers):
    """Nothing in front that would answer instead of the queue."""

    def open(self, path: Path, *, max_bytes: int | None = None) -> TieredStore:
        if max_bytes is not None:
            pytest.skip("a remote has no limit on its bytes")
        remote = RemoteStore(f"file://{path}/remote", release_grace=GRACE)
        return TieredStore(remote, write_back=["remote"])

    def age(self, store: ChunkStore, seconds: float) -> None:
        assert store.flush(60)
        assert isinstance(store, TieredStore)
        for path in Path(access.objects(store.tiers[0]).root).rglob("*"):
            status = path.stat()
            os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))

    def held(self, store: ChunkStore) -> set[str]:
        assert store.flush(60)
        assert isinstance(store, TieredStore)
        return {
            path.stem for path in Path(access.objects(store.tiers[0]).root).rglob("*.safetensors")
        }


def parts(store: ChunkStore) -> tuple[MemoryStore, DiskStore, RemoteStore]:
    """The three tiers, with nothing left to write."""
    assert store.flush(60)
    assert isinstance(store, TieredStore)
    return store.tiers


# Writing back.


class Gate(MemoryStore):
    """A slow store: a write waits until it is let through."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(tier="slow", **settings)
        self.entered, self.through = threading.Event(), threading.Event()
        self.written: list[ChunkKey] = []

    def put(self, key: ChunkKey, chunk: ChunkKV) -> bool:
        self.entered.set()
        assert self.through.wait(60)
        self.written.append(key)
        return super().put(key, chunk)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.through.set()


def test_a_put_does_not_wait_and_the_chunk_is_found_at_once(gate: Gate) -> None:
    store = TieredStore(gate, write_back=["slow"])
    chunk = make_chunk()
    assert store.put(KEY, chunk)
    chunk.tokens.zero_()  # the queue has a copy
    assert gate.entered.wait(60)
    assert not store.flush(0.05)
    out = empty_chunk(16)
    assert same(store.get(KEY, LAYOUT, out).chunk, CHUNK)
    assert store.locate(KEY) == "slow"
    assert not gate.contains(KEY)
    with pytest.raises(CorruptChunkError):
        store.get(KEY, LAYOUTS["fused-float16"])
    gate.through.set()
    assert store.flush(60)
    assert same(gate.get(KEY, LAYOUT).chunk, CHUNK)
    stats = store.stats()
    assert (stats.puts, stats.put_failures, stats.hits) == (1, 0, {"slow": 2})


def test_a_full_queue_writes_through_and_drops_nothing(gate: Gate) -> None:
    size = CHUNK.nbytes + CHUNK.tokens.nbytes
    store = TieredStore(gate, write_back=["slow"], queue_bytes=2 * size)
    chunks = [make_chunk(seed) for seed in range(4)]
    for chunk in chunks[:2]:
        store.put(key_of(chunk), chunk)
    with futures.ThreadPoolExecutor(1) as pool:
        third = pool.submit(store.put, key_of(chunks[2]), chunks[2])
        with pytest.raises(futures.TimeoutError):
            third.result(timeout=0.1)
        gate.through.set()
        assert third.result(timeout=60)
    assert store.flush(60)
    assert store.put(key_of(chunks[3]), chunks[3])
    store.close()
    assert all(gate.contains(key_of(chunk)) for chunk in chunks)
    assert store._stores[0]._nbytes == 0


def test_the_newest_of_one_key_is_written(gate: Gate) -> None:
    store = TieredStore(gate, write_back=["slow"])
    other = make_chunk(9)
    store.put(key_of(other), other)
    assert gate.entered.wait(60)
    first, second = make_chunk(1), make_chunk(2)
    second.tokens.copy_(first.tokens)
    store.put(key_of(first), first)
    store.put(key_of(first), second)
    gate.through.set()
    assert store.flush(60)
    assert same(gate.get(key_of(first), LAYOUT).chunk, second)
    assert gate.written == [key_of(other), key_of(first)]


def test_what_waits_can_be_deleted(gate: Gate) -> None:
    store = TieredStore(gate, write_back=["slow"])
    other = make_chunk(9)
    store.put(key_of(other), other)
    assert gate.entered.wait(60)
    store.put(KEY, CHUNK)
    assert store.delete(KEY)
    assert not store.contains(KEY)
    gate.through.set()
    assert store.flush(60)
    assert gate.written == [key_of(other)]


def test_a_write_that_fails_in_the_background_is_counted(tmp_path: Path) -> None:
    small = DiskStore(tmp_path, durable=False, max_bytes=1)
    store = TieredStore(MemoryStore(), small, write_back=["disk"])
    assert store.put(KEY, CHUNK)
    assert store.flush(60)
    assert store.stats().put_failures == 1
    assert "max_bytes" in store.stats().last_failure


def test_a_store_that_raises_does_not_stop_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = MemoryStore(tier="slow")
    store = TieredStore(slow, write_back=["slow"])
    with monkeypatch.context() as patch:
        patch.setattr(slow, "put", lambda *_: 1 / 0)
        store.put(KEY, CHUNK)
        assert store.flush(60)
    assert "ZeroDivisionError" in store.stats().last_failure
    store.put(KEY, CHUNK)
    assert store.flush(60)
    assert slow.contains(KEY)


def test_after_close_writes_go_through_and_claims_too(tmp_path: Path) -> None:
    remote = RemoteStore(f"file://{tmp_path}", release_grace=-1)
    store = TieredStore(remote, write_back=["remote"])
    store.put(KEY, CHUNK)
    store.close()
    store.close()
    assert remote.contains(KEY)
    other = make_chunk(3)
    assert store.put(key_of(other), other)
    assert remote.contains(key_of(other))
    store.claim(KEY, "a")
    store.release(KEY, "a")
    assert store.sweep() == 1
    assert store._stores[0]._thread is None


EXIT = """
import sys, time
from fsspec.implementations.local import LocalFileSystem
from kvcache_rag import MemoryStore, RemoteStore, TieredStore
from tests.chunks import key_of, make_chunk
pipe = LocalFileSystem.pipe_file
LocalFileSystem.pipe_file = lambda *args: (time.sleep(0.2), pipe(*args))
store = TieredStore(MemoryStore(), RemoteStore(sys.argv[1]), write_back=["remote"])
for seed in range(4):
    chunk = make_chunk(seed)
    store.put(key_of(chunk), chunk)
"""


def test_the_end_of_the_process_waits_for_uploads(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", EXIT, f"file://{tmp_path}"], check=True, timeout=200)
    store = RemoteStore(f"file://{tmp_path}")
    assert all(store.contains(key_of(make_chunk(seed))) for seed in range(4))


def test_a_forked_child_begins_with_an_empty_queue(gate: Gate) -> None:
    store = TieredStore(gate, write_back=["slow"])
    store.put(KEY, CHUNK)
    assert gate.entered.wait(60)
    queue = store._stores[0]
    assert isinstance(queue, WriteBack)
    with queue._changed:  # as held by a thread of the parent
        queue._forget()
        assert queue.flush(1)


def test_names_of_tiers_are_checked() -> None:
    for wrong in (["disk"], "memory"):
        with pytest.raises(InvalidInputError, match="write_back"):
            TieredStore(MemoryStore(), write_back=wrong)


def test_a_thread_without_work_ends_and_the_next_write_starts_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writeback, "_IDLE", 0.01)
    disk = DiskStore(tmp_path, durable=False)
    store = TieredStore(disk, write_back=["disk"])
    queue = store._stores[0]
    assert isinstance(queue, WriteBack)
    for seed in range(3):
        chunk = make_chunk(seed)
        store.put(key_of(chunk), chunk)
        with queue._changed:
            assert queue._changed.wait_for(lambda: queue._thread is None, 60)
        assert disk.contains(key_of(chunk))


# Promotion.


def test_what_comes_from_afar_is_kept_here(tmp_path: Path) -> None:
    remote = RemoteStore(f"file://{tmp_path}/remote")
    remote.put(KEY, CHUNK)
    memory, disk = MemoryStore(), DiskStore(tmp_path / "disk", durable=False)
    store = TieredStore(memory, disk, remote)
    assert [store.get(KEY, LAYOUT).tier for _ in range(2)] == ["remote", "memory"]
    assert same(disk.get(KEY, LAYOUT).chunk, CHUNK)
    assert [path.name for path in disk.root.rglob("*.safe*")] == [f"{KEY.digest}.safetensors"]


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, OSError])
def test_a_promotion_that_fails_changes_nothing(
    tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = MemoryStore(), DiskStore(tmp_path, durable=False)
    disk.put(KEY, CHUNK)

    def broken(*_: Any) -> bool:
        raise error

    monkeypatch.setattr(memory, "put", broken)
    store = TieredStore(memory, disk)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)


# Locks.


def test_the_locks_are_those_of_the_last_tier_that_excludes_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = MemoryStore(), DiskStore(tmp_path / "disk", durable=False)
    remote = RemoteStore(f"file://{tmp_path}/remote")
    with TieredStore(memory, disk, remote).locked([KEY]):
        assert list((tmp_path / "disk").rglob("*.lock"))
        with remote.locked([KEY]):
            pass
    for tiers in ((memory, remote), (remote,)):
        with TieredStore(*tiers).locked([KEY]):
            pass


# Deleted namespaces.


def other_process(path: Path) -> DiskStore:
    """The same folder, as another process has it."""
    return DiskStore(path, durable=False)


def test_memory_forgets_what_another_process_deleted(tmp_path: Path) -> None:
    memory = MemoryStore()
    store = TieredStore(memory, DiskStore(tmp_path, durable=False), recheck=0)
    other = make_chunk(1)
    store.put(KEY, CHUNK)
    store.put(key_of(other, namespace="b"), other)
    assert store.get(KEY, LAYOUT).tier == "memory"
    other_process(tmp_path).delete_namespace("a")
    with pytest.raises(ChunkNotFoundError):
        store.get(KEY, LAYOUT)
    assert not memory.contains(KEY)
    assert store.get(key_of(other, namespace="b"), LAYOUT).tier == "memory"
    assert store.put(KEY, CHUNK)
    assert store.get(KEY, LAYOUT).tier == "memory"


def test_it_is_believed_for_the_stated_time_and_looked_at_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("kvcache_rag.stores.epochs.time.monotonic", lambda: clock[0])
    store = TieredStore(MemoryStore(), DiskStore(tmp_path, durable=False))
    store.put(KEY, CHUNK)
    clock[0] += 4.9
    other_process(tmp_path).delete_namespace("a")
    assert store.contains(KEY)
    clock[0] += 0.2
    assert not store.contains(KEY)


def test_memory_forgets_although_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache_rag.stores.tiered._IDLE_LOOK", 0.02)
    memory = MemoryStore()
    store = TieredStore(memory, DiskStore(tmp_path, durable=False), recheck=0)
    store.put(KEY, CHUNK)
    other_process(tmp_path).delete_namespace("a")
    deadline = time.monotonic() + 60
    while memory.contains(KEY) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not memory.contains(KEY)


def test_looking_does_not_keep_a_store_alive() -> None:
    store = TieredStore(MemoryStore(), MemoryStore())
    store.put(KEY, CHUNK)
    ghost = weakref.ref(store)
    del store
    gc.collect()
    assert ghost() is None


def test_a_disk_that_missed_the_deletion_forgets_at_its_first_look_only(tmp_path: Path) -> None:
    remote = RemoteStore(f"file://{tmp_path}/remote")
    before = TieredStore(DiskStore(tmp_path / "disk", durable=False), remote)
    before.put(KEY, CHUNK)
    remote.delete_namespace("a")  # by another machine, while this one is down

    def started() -> TieredStore:
        there = RemoteStore(f"file://{tmp_path}/remote")
        return TieredStore(MemoryStore(), DiskStore(tmp_path / "disk", durable=False), there)

    store = started()
    with pytest.raises(ChunkNotFoundError):
        store.get(KEY, LAYOUT)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert store.put(KEY, CHUNK)
    assert started().get(KEY, LAYOUT).tier == "disk"


def test_a_deletion_takes_what_waits_and_what_is_under_way(gate: Gate) -> None:
    memory = MemoryStore()
    store = TieredStore(memory, gate, write_back=["slow"])
    waiting = make_chunk(1)
    store.put(KEY, CHUNK)
    assert gate.entered.wait(60)
    store.put(key_of(waiting, namespace="a"), waiting)
    with futures.ThreadPoolExecutor(1) as pool:
        deletion = pool.submit(store.delete_namespace, "a")
        with pytest.raises(futures.TimeoutError):
            deletion.result(timeout=0.1)
        gate.through.set()
        deletion.result(timeout=60)
    assert store.flush(60)
    assert gate.written == [KEY]
    for key in (KEY, key_of(waiting, namespace="a")):
        assert not store.contains(key)
    assert store.put(KEY, CHUNK)
    assert store.flush(60)
    assert gate.contains(KEY)


def test_a_queued_write_of_a_namespace_that_another_machine_deleted_is_dropped(
    tmp_path: Path,
) -> None:
    url = f"file://{tmp_path}/remote"
    gate = Gate()
    store = TieredStore(gate, RemoteStore(url), write_back=["remote"])
    gate.through.set()
    queue = store._stores[1]
    assert isinstance(queue, WriteBack)
    store.put(key_of(CHUNK), CHUNK)
    assert store.flush(60)
    with queue._changed:  # the thread cannot take it before the deletion
        store.put(KEY, CHUNK)
        store.claim(KEY, "owner")
        RemoteStore(url).delete_namespace("a")
    assert store.flush(60)
    left = [path.name for path in Path(tmp_path, "remote").rglob("*") if KEY.digest in path.name]
    assert left == []


def test_what_was_begun_before_a_deletion_is_kept_nowhere(tmp_path: Path) -> None:
    memory = MemoryStore()
    disk = DiskStore(tmp_path / "disk", durable=False)
    store = TieredStore(memory, disk, RemoteStore(f"file://{tmp_path}/remote"))
    with store.locked([KEY]):
        other_process(tmp_path / "disk").delete_namespace("a")
        assert not store.put(KEY, CHUNK)
    assert not memory.contains(KEY)
    assert not list(tmp_path.rglob("*.safetensors"))
    with store.locked([KEY]):
        assert store.put(KEY, CHUNK)
    assert memory.contains(KEY)


def test_a_promotion_during_a_deletion_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = MemoryStore(), DiskStore(tmp_path, durable=False)
    disk.put(KEY, CHUNK)
    store = TieredStore(memory, disk)
    get = disk.get

    def read_and_deleted(*args: Any) -> Any:
        hit = get(*args)
        other_process(tmp_path).delete_namespace("a")
        return hit

    monkeypatch.setattr(disk, "get", read_and_deleted)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)
    assert not memory.contains(KEY)


def test_a_deletion_that_cannot_reach_the_remote_says_so_and_does_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.local import LocalFileSystem

    memory, disk = MemoryStore(), DiskStore(tmp_path / "disk", durable=False)
    store = TieredStore(memory, disk, RemoteStore(f"file://{tmp_path}/remote", retries=0))
    store.put(KEY, CHUNK)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "find", lambda *_: 1 / 0)
        with pytest.raises(OSError, match="ZeroDivisionError"):
            store.delete_namespace("a")
    assert not memory.contains(KEY)
    assert not disk.contains(KEY)
    assert store.delete_namespace("a") == 1
    assert not list(tmp_path.rglob("*.safetensors"))
