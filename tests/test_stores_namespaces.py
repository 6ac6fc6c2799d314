"""Tenants of one folder: what each may touch and hold, and how all of one is deleted."""

from __future__ import annotations

import os
import string
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import access
import pytest

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.stores import DiskStore, RemoteStore, limits, locks
from tests.contracts import LAYOUT, key_of, same
from tests.tenants import KEY, SIZE, SMALL, fill, held

if TYPE_CHECKING:
    from collections.abc import Callable


ROOT = Path(__file__).parents[1]


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", durable=False)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder with size and time."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in [folder, *folder.rglob("*")]
    }


# Isolation.

# Prints every path that the operations on tenant "a" touched.  Hooks see open, listdir, scandir,
# mkdir, rename, remove, rmdir, utime, flock; they see no stat and nothing that Rust does, hence
# the wrappers.  What DirEntry.stat() looks at lies in a folder whose scandir was seen.
WATCHED = """
import os, sys
from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.stores import DiskStore
from tests.contracts import LAYOUT, key_of, make_chunk

chunk = make_chunk(tokens=4)
key = key_of(chunk, namespace="a")
size = 4096 + chunk.nbytes + 16
limits = {"bound": {"namespace": "a", "max_bytes": 3 * size}, "quota": {"quota": 3 * size},
          "operator": {"max_bytes": 3 * size}}[sys.argv[2]]

def work(root, whole):
    store = DiskStore(root, durable=True, **limits)
    store.get(key_of(make_chunk(9, tokens=4), namespace="a"), LAYOUT)
    for seed in range(6):
        one = make_chunk(seed, tokens=4)
        with store.locked([key_of(one, namespace="a")]):
            assert store.put(key_of(one, namespace="a"), one)
    store.put(key, chunk)
    os.utime(store.path(key), (1, 1))
    store.get(key, LAYOUT), store.contains(key), store.touch(key), store.locate(key)
    store._dues["a"] = 0.0
    import threading
    for thread in threading.enumerate():
        if thread.name == "kvcache-rag-sweep":
            thread.join()
    if whole:
        store.sweep()
    store.path(key).write_bytes(b"damaged")
    try:
        store.get(key, LAYOUT)
    except ChunkNotFoundError:
        pass
    store.delete(key), store.generation("a")
    assert store.stats().evictions
    store.delete_namespace("a")

real_get = DiskStore.get
def get(self, *args):
    try:
        return real_get(self, *args)
    except ChunkNotFoundError:
        return None
DiskStore.get = get

work(sys.argv[1] + "-before", True)  # imports what is imported late
seen, busy = set(), []

def note(path):
    if isinstance(path, int):
        busy.append(1)
        path = os.readlink(f"/proc/self/fd/{path}")
        busy.pop()
    seen.add(os.fsdecode(path))

def hook(event, args):
    if busy:
        return
    if event in ("open", "fcntl.flock") or event.startswith("os."):
        for value in args[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
            note(value)

def wrapped(call):
    def looked(path, *args, **kwargs):
        if not busy:
            note(path)
        return call(path, *args, **kwargs)
    return looked

os.stat, os.lstat = wrapped(os.stat), wrapped(os.lstat)
sys.addaudithook(hook)
work(sys.argv[1], sys.argv[2] == "bound")
busy.append(1)
print("\\n".join(sorted(seen)))
"""


@pytest.mark.parametrize(("kind", "isolated"), [("bound", 1), ("quota", 1), ("operator", 0)])
def test_a_tenant_touches_nothing_outside_its_own_folder(
    store: DiskStore, kind: str, isolated: int
) -> None:
    fill(store, "b", 2)
    theirs = Path(access.namespace_folder(store.root, "b"))
    before = contents(theirs)
    command = [sys.executable, "-W", "ignore", "-c", WATCHED, str(store.root), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    own = access.namespace_folder(store.root, "a")
    seen = done.stdout.split("\n")[:-1]
    inside = [path for path in seen if path == own or path.startswith(f"{own}/")]
    kinds = [".safetensors", ".lock", "quarantine", "generation", ".deleted-", ".tmp"]
    kinds += ["used"] * isolated  # of a limit for all there is one above
    assert all(any(kind in path for path in inside) for kind in kinds)
    # The folders above are looked at to resolve the path of a lock file.
    outside = set(seen) - set(inside) - set(map(str, [store.root, *store.root.parents]))
    if isolated:
        assert outside == set()
        assert contents(theirs) == before
    else:  # a limit for all has to look at all
        assert any(path.startswith(str(theirs)) for path in outside)


@pytest.mark.parametrize("namespace", ["../..", "/", "..\\..", "a/../../b", "\0", "é" * 300, "~"])
@pytest.mark.parametrize("kind", ["disk", "remote"])
def test_a_namespace_never_leaves_the_root(tmp_path: Path, kind: str, namespace: str) -> None:
    root = tmp_path / "kv"
    store = DiskStore(root) if kind == "disk" else RemoteStore(f"file://{root}")
    key = key_of(SMALL, namespace=namespace)
    assert store.put(key, SMALL)
    with store.locked([key]):
        assert same(store.get(key, LAYOUT).chunk, SMALL)
    store.delete_namespace(namespace)
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]
    names = "".join(str(path.relative_to(root)) for path in root.rglob("*"))
    assert names
    assert set(names) <= set(f"{string.ascii_lowercase}{string.digits}/.-")


def test_a_store_for_one_namespace_refuses_other_keys(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, namespace="a", durable=False)
    other = key_of(SMALL, namespace="b")
    calls: list[Callable[[], object]] = [
        lambda: store.get(other, LAYOUT),
        lambda: store.put(other, SMALL),
        lambda: store.contains(other),
        lambda: store.locate(other),
        lambda: store.touch(other),
        lambda: store.delete(other),
        lambda: store.path(other),
        lambda: store.locked([KEY, other]).__enter__(),
        lambda: store.delete_namespace("b"),
        lambda: store.generation("b"),
        lambda: store.describe("0" * 64, "b", {}),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match="'b'"):
            call()
    assert not list(tmp_path.iterdir())
    fill(store, "a", 1)
    assert same(store.get(KEY, LAYOUT).chunk, SMALL)


# Quota.


@pytest.mark.parametrize(
    "limits", [{"quota": 10 * SIZE}, {"quota": {"a": 10 * SIZE}}, {"quota": 10 * SIZE, "ttl": 99}]
)
def test_a_quota_is_kept_per_namespace(tmp_path: Path, limits: dict[str, Any]) -> None:
    store = DiskStore(tmp_path, durable=False, **limits)
    others = 20 if isinstance(limits["quota"], dict) else 5  # who has no quota has no limit
    fill(store, "b", others)
    for seed in range(30):
        fill(store, "a", 1, first=seed)
        assert held(store, "a") <= 11
    assert held(store, "a") >= 8
    assert held(store, "b") == others
    assert store.stats().evictions == 30 - held(store, "a")


def test_max_bytes_of_a_tenants_store_is_the_tenants(tmp_path: Path) -> None:
    fill(DiskStore(tmp_path, durable=False), "b", 9)
    store = DiskStore(tmp_path, namespace="a", max_bytes=4 * SIZE, durable=False)
    for seed in range(9):
        fill(store, "a", 1, first=seed)
        assert held(store, "a") <= 4
    assert held(store, "b") == 9
    fill(DiskStore(tmp_path, durable=False), "a", 9)
    assert store.sweep() == 5
    assert (held(store, "a"), held(store, "b")) == (4, 9)
    both = DiskStore(tmp_path, namespace="a", max_bytes=4 * SIZE, quota=2 * SIZE, durable=False)
    assert both.sweep() == 2


def test_the_operators_sweep_keeps_every_limit(tmp_path: Path) -> None:
    unlimited = DiskStore(tmp_path, durable=False)
    for namespace in "abc":
        fill(unlimited, namespace, 6)
    quota = {"a": SIZE, "b": 3 * SIZE}
    assert DiskStore(tmp_path, quota=quota).sweep() == 8
    assert [held(unlimited, namespace) for namespace in "abc"] == [1, 3, 6]
    store = DiskStore(tmp_path, quota=quota, max_bytes=7 * SIZE)
    assert store.sweep() == 3
    assert sum(held(unlimited, namespace) for namespace in "abc") == 7


@pytest.mark.parametrize("quota", [SIZE - 17, {"a": SIZE - 17}])
def test_a_chunk_above_the_quota_is_not_kept(tmp_path: Path, quota: Any) -> None:
    store = DiskStore(tmp_path, quota=quota, durable=False)
    assert not store.put(KEY, SMALL)
    assert "quota" in store.stats().last_failure
    assert not list(tmp_path.iterdir())


def test_a_sweep_of_one_namespace_does_not_wait_for_another(store: DiskStore) -> None:
    fill(store, "a", 3)
    fill(store, "b", 3)
    folder = access.namespace_folder(store.root, "b")
    with locks.hold_file(f"{folder}/sweep.lock", os.listdir, 0) as ours:
        assert ours
        assert DiskStore(store.root, quota=SIZE).sweep() == 2
    assert (held(store, "a"), held(store, "b")) == (1, 3)


def test_nothing_waits_for_a_sweep(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, "a", 2)
    store = DiskStore(store.root, durable=False, quota=SIZE)
    entered, leave = threading.Event(), threading.Event()
    looked = limits.Sweeper._looked

    def slow(*args: Any) -> limits.SweepResult:
        entered.set()
        assert leave.wait(60)
        return looked(*args)

    monkeypatch.setattr(limits.Sweeper, "_looked", slow)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(store.sweep)
        assert entered.wait(60)
        assert same(store.get(KEY, LAYOUT).chunk, SMALL)
        with store.locked([KEY]):
            assert not store.put(KEY, SMALL)  # there is no room before the sweep has ended
        assert store.sweep() == 0
        assert not running.done()
        leave.set()
        assert running.result(60) == 1
