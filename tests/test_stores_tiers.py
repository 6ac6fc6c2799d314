"""Tiers: what each keeps, what all of them forget, and whose locks are taken."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import access
import pytest
from fsspec.implementations.local import LocalFileSystem

from kvcache_rag.codecs import Int8
from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError, InvalidInputError
from kvcache_rag.stores import DiskStore, MemoryStore, RemoteStore, TieredStore
from tests.contracts import LAYOUT, key_of, make_chunk, same

if TYPE_CHECKING:
    from pathlib import Path

CHUNK = make_chunk()
KEY = key_of(CHUNK, namespace="a")


def disk_at(path: Path, **settings: Any) -> DiskStore:
    return DiskStore(path, durable=False, **settings)


class Tiers:
    """Memory, a disk and a remote of one process; another one has `another_disk` and so on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory = MemoryStore()
        self.disk, self.remote = self.another_disk(), self.another_remote()
        self.store = TieredStore(self.memory, self.disk, self.remote)

    def another_disk(self) -> DiskStore:
        return disk_at(self.folder / "disk")

    def another_remote(self) -> RemoteStore:
        return RemoteStore(f"file://{self.folder}/remote", retries=0)

    def files(self) -> list[Path]:
        return list(self.folder.rglob("*.safetensors"))

    def check_gone(self) -> None:
        """The chunk is nowhere, from the next question on."""
        with pytest.raises(ChunkNotFoundError):
            self.store.get(KEY, LAYOUT)
        assert not self.memory.contains(KEY)
        assert not self.disk.contains(KEY)


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(tmp_path)


@pytest.fixture
def no_recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote is asked each time what was deleted."""
    monkeypatch.setattr("kvcache_rag.stores.remote._RECHECK", 0.0)


def called_after(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, call: Any) -> None:
    """Let `call` run in another thread right after a method of `target`, once."""
    method = getattr(target, name)

    def both(*args: Any) -> Any:
        result = method(*args)
        monkeypatch.setattr(target, name, method)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return result

    monkeypatch.setattr(target, name, both)


# What each keeps.


def test_a_chunk_that_only_one_tier_keeps_is_kept(tmp_path: Path) -> None:
    small_memory = TieredStore(MemoryStore(0), disk_at(tmp_path / "a"))
    assert small_memory.put(KEY, CHUNK)
    assert small_memory.get(KEY, LAYOUT).tier == "disk"
    assert small_memory.stats().put_failures == 0
    small_disk = TieredStore(MemoryStore(), disk_at(tmp_path / "b", max_bytes=1))
    assert small_disk.put(KEY, CHUNK)
    assert small_disk.get(KEY, LAYOUT).tier == "memory"
    assert small_disk.stats().put_failures == 1
    assert "max_bytes=1" in small_disk.stats().last_failure


def test_damage_below_is_told_from_absence(tmp_path: Path) -> None:
    disk = disk_at(tmp_path)
    both = TieredStore(MemoryStore(), disk)
    disk.put(KEY, CHUNK)
    disk.path(KEY).write_bytes(b"x")
    with pytest.raises(CorruptChunkError):
        both.get(KEY, LAYOUT)
    with pytest.raises(ChunkNotFoundError) as caught:
        both.get(KEY, LAYOUT)
    assert type(caught.value) is ChunkNotFoundError
    assert (both.stats().corrupt, both.stats().misses) == (1, 2)


def test_tiers_nest(tmp_path: Path) -> None:
    slow = TieredStore(MemoryStore(tier="ram"), disk_at(tmp_path))
    store = TieredStore(MemoryStore(tier="hbm"), slow)
    slow.put(KEY, CHUNK)
    assert [store.get(KEY, LAYOUT).tier for _ in range(2)] == ["ram", "hbm"]
    assert store.stats().hits == {"hbm": 1, "ram": 1}
    assert store.codec.name == "native"


def test_tiers_of_different_codecs_or_none_are_refused(tmp_path: Path) -> None:
    other = DiskStore(tmp_path / "b", codec=Int8())
    with pytest.raises(InvalidInputError, match="one codec, not int8-kc-vt, native"):
        TieredStore(MemoryStore(), DiskStore(tmp_path / "a"), other)
    assert TieredStore(MemoryStore(), other).codec == Int8()
    with pytest.raises(InvalidInputError):
        TieredStore()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, OSError])
def test_a_promotion_that_fails_changes_nothing(
    tiers: Tiers, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.disk.put(KEY, CHUNK)

    def broken(*_: Any) -> bool:
        raise error

    monkeypatch.setattr(tiers.memory, "put", broken)
    assert same(tiers.store.get(KEY, LAYOUT).chunk, CHUNK)


def test_the_locks_are_those_of_the_last_tier_that_excludes_processes(tiers: Tiers) -> None:
    with tiers.store.locked([KEY]):
        assert list(tiers.disk.root.rglob("*.lock"))
        with tiers.remote.locked([KEY]):
            pass
    for without in ((tiers.memory, tiers.remote), (tiers.remote,)):
        with TieredStore(*without).locked([KEY]):
            pass


# Deleted namespaces.


def test_memory_forgets_what_another_process_deleted(tiers: Tiers) -> None:
    store, other = TieredStore(tiers.memory, tiers.disk), make_chunk(1)
    store.put(KEY, CHUNK)
    store.put(key_of(other, namespace="b"), other)
    assert store.get(KEY, LAYOUT).tier == "memory"
    tiers.another_disk().delete_namespace("a")
    with pytest.raises(ChunkNotFoundError):
        store.get(KEY, LAYOUT)
    assert not tiers.memory.contains(KEY)
    assert store.get(key_of(other, namespace="b"), LAYOUT).tier == "memory"
    assert store.put(KEY, CHUNK)
    assert store.get(KEY, LAYOUT).tier == "memory"


def test_a_remote_is_believed_for_some_seconds(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    store = TieredStore(tiers.memory, tiers.remote)
    monkeypatch.setattr("kvcache_rag.stores.remote.time.monotonic", lambda: clock[0])
    store.put(KEY, CHUNK)
    clock[0] += 4.9
    tiers.another_remote().delete_namespace("a")
    assert store.contains(KEY)
    clock[0] += 0.2
    assert not store.contains(KEY)


def test_a_disk_that_missed_the_deletion_forgets_at_its_first_look_only(tiers: Tiers) -> None:
    tiers.store.put(KEY, CHUNK)
    tiers.remote.delete_namespace("a")  # by another machine, while this one is down
    restarted = Tiers(tiers.folder)
    restarted.check_gone()
    assert not tiers.files()
    assert restarted.store.put(KEY, CHUNK)
    assert Tiers(tiers.folder).store.get(KEY, LAYOUT).tier == "disk"


def test_what_was_begun_before_a_deletion_is_kept_nowhere(tiers: Tiers) -> None:
    with tiers.store.locked([KEY]):
        begun = tiers.store.generation("a")
        tiers.another_disk().delete_namespace("a")
        assert not tiers.store.put(KEY, CHUNK, begun)
    assert not tiers.memory.contains(KEY)
    assert not tiers.files()
    with tiers.store.locked([KEY]):
        assert tiers.store.put(KEY, CHUNK)
    assert tiers.memory.contains(KEY)


def test_a_promotion_during_a_deletion_leaves_no_copy(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.disk.put(KEY, CHUNK)
    called_after(monkeypatch, tiers.disk, "get", lambda: tiers.another_disk().delete_namespace("a"))
    assert same(tiers.store.get(KEY, LAYOUT).chunk, CHUNK)
    assert not tiers.memory.contains(KEY)


def test_a_deletion_that_cannot_reach_the_remote_says_so_and_does_the_rest(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.store.put(KEY, CHUNK)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "find", lambda *_, **__: 1 / 0)
        with pytest.raises(OSError, match="ZeroDivisionError"):
            tiers.store.delete_namespace("a")
    assert not tiers.memory.contains(KEY)
    assert not tiers.disk.contains(KEY)
    assert tiers.store.delete_namespace("a") == 1
    assert not tiers.files()


@pytest.mark.usefixtures("no_recheck")
def test_memory_is_not_filled_again_from_a_disk_that_is_about_to_forget(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.store.put(KEY, CHUNK)
    tiers.another_remote().delete_namespace("a")
    # Another thread asks between the two tiers.
    called_after(monkeypatch, tiers.memory, "delete_namespace", lambda: tried(tiers))
    tiers.check_gone()


def test_a_deleted_chunk_is_not_promoted_from_a_tier_that_still_holds_it(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.store.put(KEY, CHUNK)
    called_after(monkeypatch, tiers.memory, "delete", lambda: tried(tiers))
    assert tiers.store.delete(KEY)
    assert not tiers.store.contains(KEY)


def tried(tiers: Tiers) -> None:
    with suppress(ChunkNotFoundError):
        tiers.store.get(KEY, LAYOUT)


@pytest.mark.usefixtures("no_recheck")
def test_a_remote_that_is_down_at_first_costs_no_local_chunks(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.store.delete_namespace("a")  # long ago
    tiers.store.put(KEY, CHUNK)
    restarted = Tiers(tiers.folder)

    def down(*_: Any, **__: Any) -> Any:
        raise OSError("down")

    with monkeypatch.context() as patch:
        patch.setattr(access.transport(restarted.remote), "run", down)
        assert restarted.store.get(KEY, LAYOUT).tier == "disk"
    assert restarted.store.get(KEY, LAYOUT).tier == "memory"
    assert restarted.disk.contains(KEY)


@pytest.mark.usefixtures("no_recheck")
def test_a_tier_that_could_not_forget_is_asked_again(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.store.put(KEY, CHUNK)
    tiers.another_remote().delete_namespace("a")

    def denied(*_: Any) -> None:
        raise PermissionError("denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", denied)
        tiers.store.contains(KEY)
        assert tiers.disk.contains(KEY)
    tiers.check_gone()


def test_a_namespace_that_a_tier_refuses_is_deleted_in_none(tiers: Tiers) -> None:
    foreign = key_of(CHUNK, namespace="b")
    tiers.remote.put(foreign, CHUNK)
    bound = disk_at(tiers.folder / "bound", namespace="a")
    store = TieredStore(MemoryStore(), bound, tiers.remote)
    for delete in (lambda: store.delete_namespace("b"), lambda: store.delete(foreign)):
        with pytest.raises(InvalidInputError):
            delete()
    assert tiers.remote.contains(foreign)
