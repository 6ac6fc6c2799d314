"""What a store writes is its user's only, whatever the umask; what others may open is said once."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

from kvcache_rag.cli import main
from kvcache_rag.kv.chunk import spec_digest
from kvcache_rag.stores import DiskStore, MemoryStore, RemoteStore, TieredStore
from kvcache_rag.stores.folder import Folder
from kvcache_rag.stores.object_names import namespace_digest
from tests.contracts import LAYOUT, LAYOUTS, key_of, make_chunk, same
from tests.contracts_codecs import finite_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKV
    from kvcache_rag.stores import ChunkStore

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")


@pytest.fixture(params=["000", "077"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(int(request.param, 8))
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """Everything in a folder, and itself, that others may do anything with."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        wanted = 0o700 if stat.S_ISDIR(status.st_mode) else 0o600
        if stat.S_IMODE(status.st_mode) != wanted:
            found[str(path.relative_to(folder))] = oct(status.st_mode)
    return found


STORES: dict[str, Callable[[Path], ChunkStore]] = {
    "disk": DiskStore,
    "disk with limits": lambda path: DiskStore(
        path, durable=False, quota=1 << 20, max_bytes=1 << 22, ttl=1000, namespace="a"
    ),
    "remote": lambda path: RemoteStore(f"file://{path}"),
    "remote that makes folders": lambda path: RemoteStore(
        f"local://{path}", storage_options={"auto_mkdir": True}
    ),
    "tiers": lambda path: TieredStore(
        MemoryStore(), DiskStore(path / "disk"), RemoteStore(f"file://{path}/remote")
    ),
}


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("kind", STORES)
def test_files_are_0600_and_folders_0700(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(0o700)
    store = STORES[kind](folder)
    for seed, layout in enumerate(LAYOUTS.values()):
        chunk = finite_chunk(seed, tokens=40, layout=layout)
        key = key_of(chunk, namespace="a")
        store.describe(key.spec, "a", {"model": "x"})
        with store.locked([key]):
            assert store.put(key, chunk)
        store.get(key, layout)
    damaged = next(iter(folder.rglob("*.safetensors")))
    damaged.write_bytes(b"damaged")
    store.sweep()
    names = {path.name for path in folder.rglob("*")}
    for part in (".safetensors", "spec.json" if "disk" in kind else "."):
        assert any(part in name for name in names)
    assert modes(folder) == {}
    store.delete_namespace("a")
    assert modes(folder) == {}
    store.close()


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("kind", ["disk", "remote"])
def test_the_folder_that_a_store_makes_is_0700(tmp_path: Path, kind: str) -> None:
    store = STORES[kind](tmp_path / "new" / "kv")
    chunk = make_chunk()
    assert store.put(key_of(chunk), chunk)
    assert modes(tmp_path / "new") == {}


USES: dict[str, Callable[[ChunkStore, ChunkKV], object]] = {
    "put": lambda store, chunk: store.put(key_of(chunk), chunk),
    "locked": lambda store, chunk: store.locked([key_of(chunk)]).__enter__(),
    "sweep": lambda store, _: store.sweep(),
    "delete": lambda store, chunk: store.delete(key_of(chunk)),
    "delete_namespace": lambda store, _: store.delete_namespace(""),
}


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("use", USES)
def test_a_folder_that_was_removed_in_use_is_0700_again(tmp_path: Path, use: str) -> None:
    """And so is all above it that went with it."""
    store = DiskStore(tmp_path / "new" / "of" / "kv", max_bytes=1 << 22, quota=1 << 20)
    chunk = make_chunk()
    assert store.put(key_of(chunk), chunk)
    shutil.rmtree(tmp_path / "new")
    USES[use](store, chunk)
    if (tmp_path / "new").exists():
        assert modes(tmp_path / "new") == {}
    assert store.put(key_of(chunk), chunk)
    assert modes(tmp_path / "new") == {}


@pytest.mark.usefixtures("umask")
def test_a_folder_that_goes_while_a_lock_is_waited_for_is_0700_again(tmp_path: Path) -> None:
    place = Folder(str(tmp_path / "new" / "kv"))
    with place.lock("a/b") as is_held:
        assert is_held

    def wait() -> bool:
        with place.lock("a/b", 10.0) as is_held:
            return is_held

    # As another process holds it: of this one threads wait for each other.
    with FileLock(place.path("a/b.lock")), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        time.sleep(0.1)
        shutil.rmtree(tmp_path / "new")
        assert waiting.result()
    assert modes(tmp_path / "new") == {}


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("kind", ["disk", "remote"])
def test_no_file_is_open_to_others_while_it_is_written(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = STORES[kind](tmp_path / "kv")
    replace, rename, seen = os.replace, os.rename, []

    def looked(call: Callable[..., None]) -> Callable[..., None]:
        def wrapped(source: str, *args: object, **options: object) -> None:
            seen.append(stat.S_IMODE(os.lstat(source).st_mode))
            call(source, *args, **options)

        return wrapped

    monkeypatch.setattr(os, "replace", looked(replace))
    monkeypatch.setattr(os, "rename", looked(rename))
    chunk = make_chunk()
    assert store.put(key_of(chunk), chunk)
    assert seen
    assert set(seen) == {0o600}


# ---------------------------------------------------------------------- fix-permissions
def fixed(*words: str) -> int:
    return main(["store", "fix-permissions", *words])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store as an earlier version wrote it to `file://`, and what is none of its business."""
    folder = tmp_path / "kv"
    store = DiskStore(folder, durable=False)
    for seed, namespace in enumerate(("a", "b")):
        chunk = make_chunk(seed)
        key = key_of(chunk, namespace=namespace, spec=spec_digest({"test": 1}))
        store.describe(key.spec, namespace, {"model": "x"})
        with store.locked([key]):
            store.put(key, chunk)
        (folder / f"{namespace * 32}.epoch").write_bytes(b"1")
    (folder / "mine").mkdir()
    (folder / "mine" / "file").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def test_permissions_are_restricted_and_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = modes(folder)
    assert fixed(str(folder)) == 0
    left = modes(folder)
    assert left.keys() == {"mine", "mine/file", "notes.txt"}, "only what is the store's"
    said = capsys.readouterr().out
    changed = before.keys() - left.keys()
    for name in changed:
        path = folder / name
        assert f"{'0755 -> 0700' if path.is_dir() else '0644 -> 0600'}  {path}\n" in said
    assert said.count("->") == len(changed)
    assert f"{len(changed)} restricted" in said
    assert fixed(str(folder)) == 0
    assert capsys.readouterr().out == "nothing was open to others\n"
    chunk = make_chunk()
    assert same(DiskStore(folder).get(key_of(chunk, namespace="a"), LAYOUT).chunk, chunk)


def test_only_one_tenant_is_restricted(folder: Path) -> None:
    assert fixed(str(folder), "--namespace", "a") == 0
    left = modes(folder)
    first = {name.split("/")[0] for name in left}
    assert namespace_digest("a") not in first
    assert {namespace_digest("b"), "."} <= first


def test_what_was_restricted_more_stays_and_a_folder_that_is_a_link_is_meant(
    folder: Path, tmp_path: Path
) -> None:
    file = next(iter(folder.rglob("*.safetensors")))
    file.chmod(0o444)
    (tmp_path / "name").symlink_to(folder)
    assert fixed(str(tmp_path / "name")) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o400
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_no_link_and_no_second_name_is_followed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    for path in (outside, outside / "file"):
        path.chmod(0o755)
    stripe = next(iter(folder.rglob("*.safetensors"))).parent
    (stripe / "link").symlink_to(outside / "file")
    (stripe.parent / "ff").symlink_to(outside)
    (folder / ("c" * 32)).symlink_to(outside)
    os.link(outside / "file", stripe / "second")
    os.mkfifo(stripe / "pipe", 0o644)
    assert fixed(str(folder)) == 1
    assert stat.S_IMODE(outside.stat().st_mode) == 0o755
    assert stat.S_IMODE((outside / "file").stat().st_mode) == 0o755
    said = capsys.readouterr().out
    for name in ("link", "ff", "second", "pipe"):
        assert f"/{name}: " in said
    assert stat.S_IMODE((stripe / "pipe").lstat().st_mode) == 0o644


def test_what_cannot_be_changed_is_said_and_the_rest_done(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fchmod = os.fchmod

    def refused(descriptor: int, mode: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        fchmod(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", refused)
    assert fixed(str(folder)) == 1
    left = {name for name in modes(folder) if not (folder / name).is_dir()}
    assert left == {"mine/file", "notes.txt"}
    assert "Operation not permitted" in capsys.readouterr().out
