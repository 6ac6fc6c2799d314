"""What a store writes is its user's only, whatever the umask; what others may open is said once."""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

from kvcache_rag.cli import main
from kvcache_rag.commands import store as store_command
from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.kv.chunk import spec_digest
from kvcache_rag.stores import DiskStore, MemoryStore, RemoteStore, TieredStore
from kvcache_rag.stores.folder import Folder
from tests.contracts import LAYOUT, LAYOUTS, key_of, make_chunk, same
from tests.test_codecs_stores import finite_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    "disk": lambda path: DiskStore(path),
    "disk with limits": lambda path: DiskStore(
        path, durable=False, quota=1 << 20, max_bytes=1 << 22, ttl=1000, namespace="a"
    ),
    "remote": lambda path: RemoteStore(f"file://{path}"),
    "remote that makes folders": lambda path: RemoteStore(
        f"local://{path}", storage_options={"auto_mkdir": True}
    ),
    "tiers": lambda path: TieredStore(
        MemoryStore(),
        DiskStore(path / "disk"),
        RemoteStore(f"file://{path}/remote"),
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


@pytest.fixture
def stranger() -> Iterator[Path]:
    """A folder that everybody may reach; who we were comes back when the test ends."""
    before = os.geteuid()
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    if before == 0:
        os.seteuid(0)
    shutil.rmtree(folder)


@pytest.mark.skipif(os.name == "posix" and os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("kind", ["disk", "remote"])
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_files_of_another_user_are_said_and_missed_and_counted(
    stranger: Path, mode: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = make_chunk()
    key = key_of(chunk)
    assert DiskStore(stranger / "kv", durable=False).put(key, chunk)
    for path in (stranger / "kv").rglob("*"):
        if path.is_dir():
            path.chmod(mode)
    (stranger / "kv").chmod(0o711)
    os.seteuid(65534)
    for _ in range(3):
        store = STORES[kind](stranger / "kv")
        for _ in range(2):
            store.contains(key)
            with pytest.raises(ChunkNotFoundError):
                store.get(key, LAYOUT)
        assert not store.put(key, chunk)
        assert (store.stats().misses, store.stats().put_failures) == (2, 1)
    said = "may not be read" if kind == "disk" else "the remote failed"
    assert sum(said in record.getMessage() for record in caplog.records) == 3, "once per store"


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
    from kvcache_rag.stores.names import namespace_digest

    left = modes(folder)
    assert not [name for name in left if name.startswith(namespace_digest("a"))]
    assert [name for name in left if name.startswith(namespace_digest("b"))]
    assert "." in left


def test_what_was_restricted_more_stays(folder: Path) -> None:
    file = next(iter(folder.rglob("*.safetensors")))
    file.chmod(0o444)
    assert fixed(str(folder)) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o400


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


def test_a_folder_that_is_a_link_itself_is_meant(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "name").symlink_to(folder)
    assert fixed(str(tmp_path / "name")) == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(os.name == "posix" and os.geteuid() != 0, reason="only root can be two users")
def test_what_cannot_be_changed_is_said_and_the_rest_done(
    stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stranger / "kv"
    chunk = make_chunk()
    DiskStore(folder, durable=False).put(key_of(chunk), chunk)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        if not path.name.endswith(".safetensors"):
            os.chown(path, 65534, 65534)
    # All is imported by now: a stranger may not read where packages are installed.
    parser = argparse.ArgumentParser()
    store_command.add_arguments(parser)
    arguments = parser.parse_args(["fix-permissions", str(folder)])
    warm = stranger / "warm"
    warm.mkdir(0o700)
    assert fixed(str(warm)) == 0
    os.seteuid(65534)
    try:
        assert store_command.run(arguments) == 1
    finally:
        os.seteuid(0)
    assert list(modes(folder)) == [str(p.relative_to(folder)) for p in folder.rglob("*.saf*")]
    assert "Operation not permitted" in capsys.readouterr().out
