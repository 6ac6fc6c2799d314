"""Tiers of which one is far away: writing back, forgetting, locks; the contract over all."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.stores import (
    DiskStore,
    MemoryStore,
    RemoteStore,
    TieredStore,
)
from tests.contracts import LAYOUT, key_of, make_chunk, same

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV

CHUNK = make_chunk()
KEY = key_of(CHUNK, namespace="a")


class Gate(MemoryStore):
    """A slow store: a write waits until it is let through."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(tier="slow", **settings)
        self.entered, self.through = threading.Event(), threading.Event()
        self.written: list[ChunkKey] = []

    def put(self, key: ChunkKey, chunk: ChunkKV, generation: int | None = None) -> bool:
        self.entered.set()
        assert self.through.wait(60)
        self.written.append(key)
        return super().put(key, chunk, generation)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.through.set()


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
    store = TieredStore(memory, DiskStore(tmp_path, durable=False))
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


def test_a_remote_is_believed_for_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    store = TieredStore(MemoryStore(), RemoteStore(f"file://{tmp_path}"))
    monkeypatch.setattr("kvcache_rag.stores.remote.time.monotonic", lambda: clock[0])
    store.put(KEY, CHUNK)
    clock[0] += 4.9
    RemoteStore(f"file://{tmp_path}").delete_namespace("a")
    assert store.contains(KEY)
    clock[0] += 0.2
    assert not store.contains(KEY)


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


def test_what_was_begun_before_a_deletion_is_kept_nowhere(tmp_path: Path) -> None:
    memory = MemoryStore()
    disk = DiskStore(tmp_path / "disk", durable=False)
    store = TieredStore(memory, disk, RemoteStore(f"file://{tmp_path}/remote"))
    with store.locked([KEY]):
        begun = store.generation("a")
        other_process(tmp_path / "disk").delete_namespace("a")
        assert not store.put(KEY, CHUNK, begun)
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
        patch.setattr(LocalFileSystem, "find", lambda *_, **__: 1 / 0)
        with pytest.raises(OSError, match="ZeroDivisionError"):
            store.delete_namespace("a")
    assert not memory.contains(KEY)
    assert not disk.contains(KEY)
    assert store.delete_namespace("a") == 1
    assert not list(tmp_path.rglob("*.safetensors"))
