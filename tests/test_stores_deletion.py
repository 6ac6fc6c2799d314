"""Deleting a namespace: nothing is left and nothing comes back, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import access
import forks
import pytest

from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError
from kvcache_rag.stores import DiskStore, MemoryStore, filesystem, memory, stored
from tests.contracts import LAYOUT, key_of, make_chunk, same
from tests.damage import before_next
from tests.tenants import KEY, SIZE, SMALL, fill, held


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", durable=False)


def crowd(store: DiskStore) -> Path:
    """Fill namespace "a" with everything that can lie there; return its folder."""
    fill(store, "a", 3)
    key = key_of(make_chunk(7, tokens=4), namespace="a")
    with store.locked([key]):
        fill(store, "a", 1, first=7)
    store.path(key).write_bytes(b"damaged")
    with pytest.raises(CorruptChunkError):
        store.get(key, LAYOUT)
    store.sweep()
    folder = store.path(KEY).parents[2]
    for place in (folder, store.path(KEY).parent, folder / "locks"):
        (place / ".tmp-torso").write_bytes(b"secret")
        (place / "notes.txt").write_bytes(b"secret")
    (folder / ".deleted-before").mkdir()
    (folder / ".deleted-before" / "x").write_bytes(b"secret")
    return folder


def test_a_deletion_leaves_nothing_but_its_count(store: DiskStore, tmp_path: Path) -> None:
    folder = crowd(store)
    fill(store, "b", 2)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (folder / "link").symlink_to(precious)
    (store.path(KEY).parent / "link").symlink_to(precious / "file")
    assert store.generation("a") == 0
    assert store.delete_namespace("a") == 3
    assert [path.name for path in folder.rglob("*")] == ["generation"]
    number = store.generation("a")
    assert (number > 0, store.generation("b")) == (True, 0)
    assert (precious / "file").read_text() == "x"
    assert held(store, "b") == 2
    assert store.stats().evictions == 0
    with pytest.raises(ChunkNotFoundError):
        store.get(KEY, LAYOUT)
    fill(store, "a", 1)
    assert same(store.get(KEY, LAYOUT).chunk, SMALL)
    assert DiskStore(store.root, namespace="a").delete_namespace("a") == 1
    assert store.generation("a") > number
    assert (folder / "generation").read_bytes() == b"%020d" % store.generation("a")


@pytest.mark.parametrize(
    ("where", "name"),
    [(stored, "file_pieces"), (DiskStore, "_is_current"), (filesystem, "make_folder")],
    ids=["before the file", "before the name", "before the folder"],
)
def test_what_is_written_during_a_deletion_is_not_kept(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    other = DiskStore(store.root, durable=False)

    def delete() -> None:
        other.delete_namespace("a")
        fill(other, "a", 1, first=5)  # somebody makes the folders anew

    before_next(monkeypatch, where, name, delete)
    assert not store.put(KEY, SMALL)
    assert not store.contains(KEY)
    assert held(store, "a") == 1
    assert not list(store.root.rglob(".tmp*"))
    assert store.stats().put_failures == 1
    assert store.put(KEY, SMALL)


def test_what_a_kill_leaves_behind_is_taken_away(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that is gone between its check and its rename: no later step can help."""
    fill(store, "a", 1)
    before_next(monkeypatch, os, "replace", lambda: DiskStore(store.root).delete_namespace("a"))
    assert not store.put(KEY, SMALL)
    assert held(store, "a") == 0


def test_what_is_computed_under_a_lock_during_a_deletion_is_not_kept(store: DiskStore) -> None:
    with store.locked([KEY]):
        begun = store.generation("a")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(store.delete_namespace, "a").result(60)
        assert not store.put(KEY, SMALL, begun)
        other = key_of(SMALL, namespace="b")
        assert store.put(other, SMALL, begun)
    assert store.put(KEY, SMALL)
    assert "deleted" in store.stats().last_failure


def test_deletions_at_once_both_end_with_nothing(store: DiskStore) -> None:
    number = 0
    for _ in range(10):
        fill(store, "a", 8)
        with ThreadPoolExecutor(3) as pool:
            counts = list(pool.map(store.delete_namespace, "aaa"))
        assert sum(counts) == 8
        folder = Path(access.namespace_folder(store.root, "a"))
        assert [path.name for path in folder.iterdir()] == ["generation"]
        number, before = store.generation("a"), number
        assert number > before


def test_what_is_put_aside_during_a_deletion_goes_too(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, "a", 1)
    store.path(KEY).write_bytes(b"damaged")

    def put_aside() -> None:
        with pytest.raises(CorruptChunkError):
            store.get(KEY, LAYOUT)
        assert list(store.root.glob("*/quarantine/*"))

    before_next(monkeypatch, os, "rename", put_aside)
    store.delete_namespace("a")
    assert [path.name for path in store.root.rglob("*") if path.is_file()] == ["generation"]


def test_the_number_grows_before_and_after_the_files_go(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a copy made of a chunk that was read in between would count as new."""
    fill(store, "a", 1)
    seen: list[int] = []
    before_next(monkeypatch, os, "rename", lambda: seen.append(store.generation("a")))
    store.delete_namespace("a")
    assert 0 < seen[0] < store.generation("a")


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_the_number_grows_when_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store = DiskStore(tmp_path, durable=False) if kind == "disk" else MemoryStore()
    begin = time.time_ns()
    store.delete_namespace("a")
    number = store.generation("a")
    assert begin <= number <= time.time_ns() + 10, "the time, so that stores can be compared"
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    store.delete_namespace("a")
    assert store.generation("a") > number


def test_an_interrupted_deletion_is_ended_by_a_sweep(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = crowd(store)
    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "remove", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.delete_namespace("a")
    assert not store.contains(KEY), "out of sight at once"
    assert list(folder.glob(".deleted-*"))
    store.sweep()
    assert sorted(path.name for path in folder.iterdir()) == ["generation", "sweep.lock"]


def test_a_full_disk_can_be_emptied(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = crowd(store)
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if held(store, "a"):
            raise OSError(errno.ENOSPC, "no space left")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    assert store.delete_namespace("a") == 3
    assert [path.name for path in folder.iterdir()] == ["generation"]


@pytest.mark.parametrize("call", ["rename", "unlink", "rmdir", "write"])
def test_a_deletion_that_fails_says_so(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    crowd(store)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "not allowed")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(OSError, match="not allowed"):
            store.delete_namespace("a")
    store.delete_namespace("a")
    assert held(store, "a") == 0


def write_generations(root: str, worker: int, shared: Any, paused: Any) -> None:
    """Write chunks of the current generation, that of the time at which the lock was taken."""
    store = DiskStore(root, durable=False)
    step = 0
    while shared[0] >= 0:
        if shared[1]:
            paused[worker] = 1
            time.sleep(0.001)
            continue
        paused[worker] = 0
        key = key_of(make_chunk(worker, tokens=4), namespace="a")
        with store.locked([key]):
            begun, generation = store.generation("a"), shared[0]
            chunk = make_chunk(1000 * generation + step % 7, tokens=64)
            step += 1
            store.put(key_of(chunk, namespace="a"), chunk, begun)


def test_nothing_older_than_a_deletion_is_left_by_two_writers(tmp_path: Path) -> None:
    context = forks.forkserver()
    shared, paused = context.Array("i", [1, 0]), context.Array("i", [0, 0])
    arguments = [(str(tmp_path), worker, shared, paused) for worker in range(2)]
    writers = [context.Process(target=write_generations, args=one) for one in arguments]
    for writer in writers:
        writer.start()
    store = DiskStore(tmp_path, durable=False, namespace="a", max_bytes=5 * SIZE)
    dropped = number = 0
    try:
        for generation in range(2, 27):
            while held(store, "a") < 3:
                time.sleep(0.001)
            shared[0] = generation
            with ThreadPoolExecutor(1) as pool:
                evictor = pool.submit(store.sweep)
                dropped += store.delete_namespace("a")
                evictor.result(60)
            shared[1] = 1
            while not (paused[0] and paused[1]):
                time.sleep(0.001)
            keys = {
                key_of(make_chunk(1000 * generation + step, tokens=64), namespace="a").digest
                for step in range(7)
            }
            left = [path for path in tmp_path.rglob("*") if path.is_file()]
            names = {path.name[:64] for path in left if path.suffix != ".lock"}
            names -= {"generation", "used"}
            assert names <= keys
            number, before = store.generation("a"), number
            assert number > before
            paused[0] = paused[1] = 0
            shared[1] = 0
    finally:
        shared[0] = -1
        for writer in writers:
            writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert dropped > 25


def test_what_memory_copies_during_a_deletion_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    before_next(monkeypatch, memory, "private_copy", lambda: store.delete_namespace("a"))
    assert not store.put(KEY, SMALL)
    assert not store.contains(KEY)
    assert store.put(KEY, SMALL)
