"""A store on a disk without room, and in folders of somebody else."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError
from kvcache_rag.stores import DiskStore, RemoteStore
from tests.contracts import LAYOUT, key_of, make_chunk, same
from tests.damage import SMALL, filled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_rag.kv.chunk import ChunkKV

OTHER = make_chunk(7)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    mounted: list[Path] = []

    def make(options: str) -> Path:
        path = tmp_path / f"mount{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting needs root")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("options", ["size=40k", "size=1m,nr_inodes=12"])
def test_nothing_fails_on_a_disk_that_fills_up(mount: Callable[[str], Path], options: str) -> None:
    store = DiskStore(mount(options) / "kv", max_bytes=1 << 20)
    chunks = [make_chunk(seed, tokens=64) for seed in range(12)]
    kept = []
    for chunk in chunks:
        key = key_of(chunk)
        with store.locked([key]):
            if store.put(key, chunk):
                kept.append(chunk)
    assert 0 < len(kept) < len(chunks)
    for chunk in chunks:
        assert store.contains(key_of(chunk)) is (chunk in kept)
    for chunk in kept:
        assert same(store.get(key_of(chunk), LAYOUT).chunk, chunk)
    assert not list(store.root.rglob(".tmp*"))
    assert store.stats().put_failures == len(chunks) - len(kept)
    assert store.delete(key_of(kept[0]))
    assert store.put(key_of(kept[0]), kept[0]), "room that was made is used again"


@pytest.fixture
def stranger() -> Iterator[Path]:
    """A folder that everybody may reach; who we were comes back when the test ends."""
    before = os.geteuid()
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        if before == 0:
            os.seteuid(0)
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir():
                path.chmod(0o700)
        shutil.rmtree(folder)


def give_up_rights() -> None:
    """Root ignores permissions, so it becomes somebody else; others keep what they are."""
    if os.geteuid() == 0:
        os.seteuid(65534)


def denied(store: DiskStore, chunk: ChunkKV) -> None:
    """Nothing can be read or written, nothing raises but a miss, and all of it is counted."""
    key = key_of(chunk)
    with pytest.raises(ChunkNotFoundError) as caught:
        store.get(key, LAYOUT)
    assert not isinstance(caught.value, CorruptChunkError)
    with store.locked([key]):
        assert not store.put(key, chunk)
    store.touch(key)
    assert not store.delete(key)
    assert store.sweep() == 0
    stats = store.stats()
    assert (stats.misses, stats.put_failures, stats.puts) == (1, 1, 0)
    assert stats.last_failure


def test_a_read_only_folder_is_read(mount: Callable[[str], Path]) -> None:
    small = mount("size=200k")
    key, _ = filled(DiskStore(small / "kv"))
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    store = DiskStore(small / "kv", max_bytes=1000)
    assert same(store.get(key, LAYOUT).chunk, SMALL)
    denied(store, OTHER)
    denied(DiskStore(small / "other"), OTHER)
    assert store.contains(key)
    assert not store.delete(key)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EMFILE])
def test_a_folder_in_which_nothing_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    existing = DiskStore(tmp_path / "kv")
    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(os, "open", refuse)
    denied(existing, OTHER)
    denied(DiskStore(tmp_path / "new"), OTHER)


def test_a_folder_of_another_user_is_a_miss_and_counted(stranger: Path) -> None:
    filled(DiskStore(stranger / "kv", durable=False))
    (stranger / "below").mkdir(mode=0o555)
    (stranger / "kv").chmod(0)
    give_up_rights()
    denied(DiskStore(stranger / "kv"), SMALL)
    denied(DiskStore(stranger / "below" / "new"), SMALL)


def test_files_that_may_not_be_read_are_a_miss_and_stay(stranger: Path) -> None:
    key, raw = filled(DiskStore(stranger / "kv", durable=False))
    path = DiskStore(stranger / "kv").path(key)
    path.chmod(0)
    for folder in (stranger / "kv", *(p for p in (stranger / "kv").rglob("*") if p.is_dir())):
        folder.chmod(0o555)
    before = sorted((stranger / "kv").rglob("*"))
    give_up_rights()
    store = DiskStore(stranger / "kv", max_bytes=1000)
    denied(store, SMALL)
    assert store.stats().corrupt == 0
    assert sorted((stranger / "kv").rglob("*")) == before
    if os.geteuid() == 65534:
        os.seteuid(0)
    path.chmod(0o400)
    assert path.read_bytes() == raw


@pytest.mark.skipif(os.name == "posix" and os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("kind", ["disk", "remote"])
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_files_of_another_user_are_said_once(
    stranger: Path, mode: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = stranger / "kv"
    key, _ = filled(DiskStore(folder, durable=False))
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(mode)
    folder.chmod(0o711)
    os.seteuid(65534)
    for _ in range(3):
        store = DiskStore(folder) if kind == "disk" else RemoteStore(f"file://{folder}")
        for _ in range(2):
            store.contains(key)
            with pytest.raises(ChunkNotFoundError):
                store.get(key, LAYOUT)
        assert not store.put(key, SMALL)
        assert (store.stats().misses, store.stats().put_failures) == (2, 1)
    said = "may not be read" if kind == "disk" else "the remote failed"
    assert sum(said in record.getMessage() for record in caplog.records) == 3, "once per store"
