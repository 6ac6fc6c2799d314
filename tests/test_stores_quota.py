"""A limit on disk holds at every moment, whoever writes; who finds no room in time does without."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import access
import pytest

from kvcache_rag.stores import DiskStore, MemoryStore, TieredStore, limits
from kvcache_rag.stores.locks import hold_file
from tests.contracts import LAYOUT, key_of, make_chunk, same
from tests.quotas import contend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV

SIZE = 4096 + make_chunk(tokens=4).nbytes + 16


def small(seed: int, namespace: str = "a") -> tuple[ChunkKey, ChunkKV]:
    chunk = make_chunk(seed, tokens=4)
    return key_of(chunk, namespace=namespace), chunk


def held(root: Path) -> int:
    """Bytes of all files below a folder but its count."""
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "used"]
    return sum(path.lstat().st_size for path in files)


def sweep_lock(root: Path, limit: str) -> str:
    folder = access.namespace_folder(root, "a") if limit == "quota" else str(root)
    os.makedirs(folder, exist_ok=True)
    return f"{folder}/sweep.lock"


@pytest.mark.parametrize(
    "options",
    [
        {"quota": 400_000, "writers": 4, "tokens": 512},
        {"quota": 2_000_000, "writers": 3, "tokens": 512, "limit": "max_bytes"},
        # Kills in the middle of chunks that are a quarter of the limit.
        {"quota": 24_000_000, "writers": 3, "tokens": 30_000, "kills": 100},
    ],
    ids=["a-namespace", "all-namespaces", "killed"],
)
def test_law_writers_stay_below_a_limit_at_every_moment(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    done = contend(tmp_path / "q", seconds=2, **options)
    done.check(options["quota"], options["writers"], options["tokens"])


@pytest.mark.parametrize("limit", ["quota", "max_bytes"])
@pytest.mark.parametrize("age", [0.0, 100.0])
@pytest.mark.parametrize("folder", [0, 1, 2], ids=["of chunks", "of a spec", "of a namespace"])
def test_what_killed_writers_left_counts_from_the_next_look_on(
    tmp_path: Path, folder: int, age: float, limit: str
) -> None:
    options: dict[str, Any] = {limit: 20 * SIZE}
    store = DiskStore(tmp_path, durable=False, **options)
    for seed in range(17):
        assert store.put(*small(seed))
    place = store.path(small(0)[0]).parents[folder]
    for number in range(10):
        path = place / f".tmp-{number:032x}"
        path.write_bytes(b"x" * SIZE)
        os.utime(path, (time.time() - age, time.time() - age))
    for seed in range(17, 20):  # a tenth of the limit is written before somebody looks around
        assert store.put(*small(seed))
    for seed in range(20, 60):
        assert store.put(*small(seed))
        assert held(tmp_path) <= 20 * SIZE
    left = list(tmp_path.rglob(".tmp*"))
    assert len(left) == (0 if age else 10), "who may still be writing is left alone"


# One process.


def test_a_process_alone_never_exceeds_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, durable=False, quota=10 * SIZE)
    seen: list[int] = []
    replace = os.replace

    def looked(source: str, target: str) -> None:
        if target.endswith(".safetensors"):
            seen.append(held(tmp_path))  # with the file that is finished and has not its name yet
        replace(source, target)

    monkeypatch.setattr(os, "replace", looked)
    for seed in range(40):
        assert store.put(*small(seed))
    assert len(seen) == 40
    assert 8 * SIZE <= max(seen) <= 10 * SIZE


# Room that is not there in time.


@pytest.mark.parametrize("limit", ["quota", "max_bytes"])
def test_room_is_waited_for_a_moment(
    tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, durable=False, **{limit: 2 * SIZE})  # type: ignore[arg-type]  # a limit
    path = sweep_lock(tmp_path, limit)
    with hold_file(path, os.listdir, 0):
        begin = time.monotonic()
        assert not store.put(*small(0))
        assert limits.PATIENCE * 0.9 < time.monotonic() - begin < limits.PATIENCE + 20
    stats = store.stats()
    assert (stats.declined, stats.puts, stats.put_failures) == (1, 0, 0)
    assert "room" in stats.last_failure
    assert not list(tmp_path.rglob(".tmp*"))
    monkeypatch.setattr(limits, "PATIENCE", 60.0)
    with ThreadPoolExecutor(1) as pool:
        with hold_file(path, os.listdir, 0):
            waiting = pool.submit(store.put, *small(1))
            time.sleep(0.05)
            assert not waiting.done()
        assert waiting.result(60)


def test_a_tier_that_declines_leaves_the_chunk_to_the_others(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, durable=False, quota=2 * SIZE)
    store = TieredStore(MemoryStore(), disk)
    key, chunk = small(0)
    with hold_file(sweep_lock(tmp_path, "quota"), os.listdir, 0), store.locked([key]):
        assert store.put(key, chunk)
    stats = store.stats()
    assert (stats.puts, stats.declined, stats.put_failures) == (1, 1, 1)
    assert same(store.get(key, LAYOUT).chunk, chunk)
    assert not disk.contains(key)


def test_a_folder_is_walked_only_when_the_count_says_that_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[int] = []
    looked = limits.Sweeper._looked

    def counted(*args: Any) -> limits.SweepResult:
        walks.append(1)
        return looked(*args)

    monkeypatch.setattr(limits.Sweeper, "_looked", counted)
    for seed in range(100):  # each as another process, one after the other
        assert DiskStore(tmp_path, durable=False, quota=50 * SIZE).put(*small(seed))
    assert len(walks) == 1 + 10, "without a count, and whenever a tenth was written"
    assert held(tmp_path) <= 50 * SIZE


# What counts.


def aside(store: DiskStore) -> None:
    """Damage a chunk, and have it put aside."""
    key, chunk = small(99)
    assert store.put(key, chunk)
    path = store.path(key)
    path.write_bytes(b"x" * (3 * SIZE))
    with pytest.raises(Exception, match="put aside"):
        store.get(key, LAYOUT)


def killed(store: DiskStore) -> None:
    """Leave what a writer leaves that is killed."""
    assert store.put(*small(0))
    path = store.path(small(0)[0]).with_name(".tmp-1")
    path.write_bytes(b"x" * (3 * SIZE))
    os.utime(path, (time.time() - 100, time.time() - 100))


@pytest.mark.parametrize("leave", [aside, killed])
def test_what_is_damaged_or_unfinished_counts(
    tmp_path: Path, leave: Callable[[DiskStore], None]
) -> None:
    leave(DiskStore(tmp_path, durable=False))
    store = DiskStore(tmp_path, durable=False, quota=6 * SIZE)
    for seed in range(1, 20):
        assert store.put(*small(seed))
        assert held(tmp_path) <= 6 * SIZE
    assert held(tmp_path) == 6 * SIZE
    assert not list(tmp_path.rglob(".tmp*"))  # older than the chunks: it went first
    chunks = len(list(tmp_path.rglob("*.safetensors")))
    assert chunks == 6
    assert store.stats().evictions == 19 - chunks + (leave is killed)


def test_a_file_that_cannot_be_removed_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = DiskStore(tmp_path, durable=False)
    for seed in range(4):
        assert fixed.put(*small(seed))
    names = {fixed.path(small(seed)[0]).name for seed in range(4)}
    unlink = os.unlink

    def refused(path: str) -> None:
        if os.path.basename(path) in names:
            raise PermissionError(path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", refused)
    store = DiskStore(tmp_path, durable=False, quota=6 * SIZE)
    for seed in range(4, 12):
        assert store.put(*small(seed))
        assert held(tmp_path) <= 6 * SIZE
    full = DiskStore(tmp_path, durable=False, quota=4 * SIZE)
    assert not full.put(*small(20))
    assert full.stats().declined == 1


def test_memory_stays_below_its_limit_at_every_moment() -> None:
    store = MemoryStore(20_000)
    over: list[int] = []
    end = threading.Event()

    def look() -> None:
        while not end.is_set():
            over.append(store.nbytes)

    with ThreadPoolExecutor(4) as pool:
        looking = pool.submit(look)
        kept = [*pool.map(lambda seed: store.put(*small(seed)), range(600))]
        end.set()
        looking.result(60)
    assert all(kept)
    assert 10_000 < max(over) <= 20_000
