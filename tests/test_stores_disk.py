"""What a file on disk looks like, how it gets there, and what a sweep takes away."""

from __future__ import annotations

import ast
import errno
import os
import stat
import time
from io import FileIO
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from kvcache_rag.errors import CorruptChunkError, InvalidInputError
from kvcache_rag.stores import DiskStore, disk, filesystem, limits, runs
from kvcache_rag.stores import file as chunkfile
from kvcache_rag.stores.locks import ThreadLocks
from kvcache_rag.stores.object_names import SUFFIX, chunk_name
from tests.contracts import LAYOUT, LAYOUTS, bits, empty_chunk, flat, key_of, make_chunk, same
from tests.damage import SMALL, before_next, filled, header_size


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", durable=False)


# The file.


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tokens", [0, 3])
def test_any_safetensors_reader_reads_the_file(store: DiskStore, name: str, tokens: int) -> None:
    chunk = make_chunk(1, tokens=tokens, layout=LAYOUTS[name])
    key, raw = filled(store, chunk)
    assert header_size(raw) == 4096
    names = [name for group in chunk.layout.names() for name in group]
    with safe_open(store.path(key), "pt") as file:
        assert sorted(file.keys()) == sorted([*names, "tokens"])
        assert torch.equal(file.get_tensor("tokens"), chunk.tokens)
        for name, tensor in zip(names, flat(chunk), strict=True):
            assert bits(file.get_tensor(name)) == bits(tensor)
        metadata = file.metadata()
    assert metadata["format"] == "kvcache-rag/1"
    assert metadata["key"] == key.digest
    assert metadata["codec"] == "native"
    assert metadata["start"] == "3"
    assert metadata["xxh3_128"] == xxhash.xxh3_128_hexdigest(raw[4096:])
    assert metadata["provenance"].startswith("kvcache-rag")


def test_a_long_header_still_ends_at_a_page(store: DiskStore) -> None:
    layout = type(LAYOUT)(LAYOUT.groups * 60, LAYOUT.dtype)
    chunk = make_chunk(tokens=2, layout=layout)
    key, raw = filled(store, chunk)
    assert header_size(raw) == 8192
    assert same(store.get(key, layout).chunk, chunk)
    store.path(key).write_bytes(raw[:5000])
    with pytest.raises(CorruptChunkError):
        store.get(key, layout)


def test_a_dtype_that_the_format_does_not_know_is_refused(store: DiskStore) -> None:
    chunk = make_chunk(layout=type(LAYOUT)(LAYOUT.groups, torch.complex64))
    with pytest.raises(InvalidInputError, match="complex64"):
        store.put(key_of(chunk), chunk)


def test_nothing_here_can_unpickle() -> None:
    source = Path(disk.__file__).parent
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not names & {"pickle", "shelve", "marshal", "dill", "joblib", "diskcache"}
    assert not any("torch.load" in path.read_text() for path in source.rglob("*.py"))


# Writing.


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_root_that_is_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="folder"):
        DiskStore(tmp_path / name)


def test_a_write_that_fails_half_way_is_cleaned_up(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torso(descriptor: int, _: object) -> None:
        os.write(descriptor, b"half")
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "write_all", torso)
        assert not store.put(key_of(SMALL), SMALL)
    assert "no space left" in store.stats().last_failure
    assert not [path for path in store.root.rglob("*") if path.is_file()]
    filled(store)


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_put_syncs_the_file_before_and_the_folder_after_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    store = DiskStore(tmp_path, durable=durable)
    events: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def replaced(source: str, target: str) -> None:
        events.append("publish")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    filled(store)
    assert events == (["file", "publish", "folder"] if durable else ["publish"])


# Sweeping.


def test_leftovers_of_killed_writers_are_swept_and_foreign_names_left(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, durable=False, max_bytes=1 << 20)
    key, _ = filled(store)
    folder = store.path(key).parent
    old, manifest, new = folder / ".tmp-a", folder.parent / ".tmp-b", folder / ".tmpB"
    names = (
        "notes.txt",
        f"{key.digest}.owner",
        f"{key.digest}.released",
        f"{key.digest}{SUFFIX}-0",
    )
    foreign = [folder / name for name in names]
    for path in (old, manifest, new, *foreign):
        path.write_text("x")
    for path in (old, manifest, *foreign):
        os.utime(path, (0, 0))
    assert store.sweep() == 0
    assert not old.exists()
    assert not manifest.exists()
    assert new.exists()
    assert all(path.exists() for path in foreign)
    assert store.contains(key)


def test_a_whole_file_that_took_the_place_of_a_damaged_one_stays(store: DiskStore) -> None:
    key, raw = filled(store)
    store.path(key).write_bytes(b"damaged")
    with FileIO(store.path(key)) as found:
        filled(store)  # a reader computed it anew while it was being checked
        store.place.delete([chunk_name(key)], damaged=found)
    assert store.path(key).read_bytes()[4096:] == raw[4096:]


def test_a_lock_is_kept_while_a_thread_wants_it_and_no_longer() -> None:
    locks = ThreadLocks()
    with locks.hold(["one", "two"]), locks.hold(["one"], patience=0.01) as is_held:
        assert not is_held
        assert {*locks._named} == {"one", "two"}
    assert not locks._named


def test_one_sweep_at_a_time(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = filled(store)
    other = DiskStore(store.root, max_bytes=1)
    inner: list[int] = []
    before_next(monkeypatch, limits.Sweeper, "_looked", lambda: inner.append(other.sweep()))
    store.sweep()
    assert inner == [0]
    assert store.contains(key)
    assert other.sweep() == 1


def test_a_file_that_is_being_read_may_be_dropped(store: DiskStore) -> None:
    chunk = make_chunk()
    key, _ = filled(store, chunk)
    spec = chunkfile.file_spec(key, LAYOUT, store.codec)
    with store.path(key).open("rb") as file:
        store.delete(key)
        out = empty_chunk(16)
        size = os.fstat(file.fileno()).st_size
        chunkfile.read_file(runs.positional(file.fileno()), size, spec, store.codec, lambda: out)
    assert same(out, chunk)


@pytest.mark.parametrize("call", ["get", "touch"])
def test_use_is_marked_once_a_minute(store: DiskStore, call: str) -> None:
    key, _ = filled(store)
    use = {"get": lambda: store.get(key, LAYOUT), "touch": lambda: store.touch(key)}[call]
    now = time.time()
    for age, marked in ((30, False), (90, True)):
        os.utime(store.path(key), (now - age, now - age))
        use()
        assert (store.path(key).stat().st_mtime >= now - 1) is marked
