"""Tiers under deletions, foreign names and a lack of threads: nothing comes back, nothing hangs."""

from __future__ import annotations

import os
import threading
from io import FileIO
from typing import TYPE_CHECKING, Any

import access
import pytest

from kvcache_rag.errors import ChunkNotFoundError, InvalidInputError
from kvcache_rag.stores import DiskStore, MemoryStore, RemoteStore, TieredStore
from kvcache_rag.stores.file import verify_file
from kvcache_rag.stores.locks import ThreadLocks
from kvcache_rag.stores.names import SUFFIX, chunk_name
from tests.contracts import LAYOUT, key_of, make_chunk

if TYPE_CHECKING:
    from pathlib import Path

CHUNK = make_chunk()
KEY = key_of(CHUNK, namespace="a")


def disk_at(path: Path, **settings: Any) -> DiskStore:
    return DiskStore(path, durable=False, **settings)


def remote_at(path: Path, **settings: Any) -> RemoteStore:
    return RemoteStore(f"file://{path}", **settings)


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


@pytest.fixture(autouse=True)
def no_recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_rag.stores.remote._RECHECK", 0.0)


# ---------------------------------------------------------------------- deleting
def test_memory_is_not_filled_again_from_a_disk_that_is_about_to_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = MemoryStore(), disk_at(tmp_path / "disk")
    store = TieredStore(memory, disk, remote_at(tmp_path / "remote"))
    store.put(KEY, CHUNK)
    remote_at(tmp_path / "remote").delete_namespace("a")
    # Another thread asks between the two tiers.
    called_after(
        monkeypatch, memory, "delete_namespace", lambda: _tried(lambda: store.get(KEY, LAYOUT))
    )
    with pytest.raises(ChunkNotFoundError):
        store.get(KEY, LAYOUT)
    assert not memory.contains(KEY)
    assert not disk.contains(KEY)


def test_a_deleted_chunk_is_not_promoted_from_a_tier_that_still_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryStore()
    store = TieredStore(memory, disk_at(tmp_path))
    store.put(KEY, CHUNK)
    called_after(monkeypatch, memory, "delete", lambda: _tried(lambda: store.get(KEY, LAYOUT)))
    assert store.delete(KEY)
    assert not store.contains(KEY)


def _tried(call: Any) -> None:
    try:
        call()
    except ChunkNotFoundError:
        return


def test_a_remote_that_is_down_at_first_costs_no_local_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> tuple[TieredStore, DiskStore, RemoteStore]:
        disk, remote = disk_at(tmp_path / "disk"), remote_at(tmp_path / "remote")
        return TieredStore(disk, remote), disk, remote

    first, _, _ = opened()
    first.delete_namespace("a")  # long ago
    first.put(KEY, CHUNK)
    store, disk, remote = opened()
    with monkeypatch.context() as patch:
        patch.setattr(access.transport(remote), "run", _down)
        store.get(KEY, LAYOUT)
    assert store.get(KEY, LAYOUT).tier == "disk"
    assert disk.contains(KEY)


def _down(*_: Any, **__: Any) -> Any:
    raise OSError("down")


def test_a_tier_that_could_not_forget_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = disk_at(tmp_path / "disk")
    store = TieredStore(disk, remote_at(tmp_path / "remote"))
    store.put(KEY, CHUNK)
    remote_at(tmp_path / "remote").delete_namespace("a")
    rename = os.rename

    def denied(*_: Any) -> None:
        raise PermissionError("denied")

    monkeypatch.setattr(os, "rename", denied)
    store.contains(KEY)
    assert disk.contains(KEY)
    monkeypatch.setattr(os, "rename", rename)
    assert not store.contains(KEY)
    assert not disk.contains(KEY)


# ---------------------------------------------------------------------- foreign namespaces
def test_a_namespace_that_a_tier_refuses_is_deleted_in_none(tmp_path: Path) -> None:
    foreign = key_of(CHUNK, namespace="b")
    remote = remote_at(tmp_path / "remote")
    remote.put(foreign, CHUNK)
    store = TieredStore(MemoryStore(), disk_at(tmp_path / "disk", namespace="a"), remote)
    with pytest.raises(InvalidInputError):
        store.delete_namespace("b")
    with pytest.raises(InvalidInputError):
        store.delete(foreign)
    assert remote.contains(foreign)


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["{}.owner", "{}.released"])
def test_names_that_only_look_like_ours_are_left_alone(tmp_path: Path, name: str) -> None:
    store = disk_at(tmp_path, max_bytes=1 << 20)
    store.put(KEY, CHUNK)
    folder = store.path(KEY).parent
    foreign = folder / name.format(KEY.digest)
    foreign.touch()
    copy = folder / f"{KEY.digest}{SUFFIX}-0123456789abcdef"
    store.sweep()
    assert foreign.exists()
    copy.touch()
    store.sweep()
    assert copy.exists()


def test_an_unfinished_manifest_goes_too(tmp_path: Path) -> None:
    store = disk_at(tmp_path, temp_age=-1.0)
    store.put(KEY, CHUNK)
    unfinished = store.path(KEY).parent.parent / f".tmp-{'0' * 32}"
    unfinished.touch()
    store.sweep()
    assert not unfinished.exists()
    assert store.contains(KEY)


def test_a_whole_file_that_took_the_place_of_a_damaged_one_stays(tmp_path: Path) -> None:
    store = disk_at(tmp_path)
    store.put(KEY, CHUNK)
    store.path(KEY).write_bytes(b"damaged")
    with FileIO(store.path(KEY)) as found:
        store.put(KEY, CHUNK)  # a reader computed it anew while it was being checked
        store.place.delete([chunk_name(KEY)], damaged=found)
    verify_file(str(store.path(KEY)), KEY.digest)


def test_a_lock_is_kept_while_a_thread_wants_it_and_no_longer() -> None:
    locks = ThreadLocks()
    with locks.hold(["one", "two"]), locks.hold(["one"], patience=0.01) as is_held:
        assert not is_held
        assert {*locks._named} == {"one", "two"}
    assert not locks._named
