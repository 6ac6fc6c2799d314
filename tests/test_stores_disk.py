"""What a file on disk looks like, and what a folder can do to a store: no room, no rights."""

from __future__ import annotations

import ast
import errno
import json
import os
import stat
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xxhash
from safetensors import safe_open

from kvcache_rag.codecs import Codec
from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError, InvalidInputError
from kvcache_rag.stores import DiskStore, disk, filesystem, limits, runs
from kvcache_rag.stores import file as chunkfile
from tests.contracts import LAYOUT, LAYOUTS, bits, empty_chunk, flat, key_of, make_chunk, same
from tests.damage import SMALL, filled, header_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout


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


def test_the_file_lies_where_its_digests_say(store: DiskStore) -> None:
    chunk = make_chunk()
    key = key_of(chunk, namespace="../../tenant")
    store.put(key, chunk)
    namespace, spec, shard, name = store.path(key).relative_to(store.root).parts
    assert len(namespace) == 32
    assert (spec, shard, name) == (key.spec[:16], key.digest[:2], f"{key.digest}.safetensors")


def test_every_dtype_lies_in_the_order_of_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneOfEach, "expected", _expected, raising=False)
    store = DiskStore(tmp_path, durable=False, codec=OneOfEach())
    key, raw = filled(store)
    names = [name for name in json.loads(raw[8:4096]) if name != "__metadata__"]
    spec = chunkfile.file_spec(key, LAYOUT, store.codec)
    assert names == list(spec.tensors)
    assert len(names) == len(chunkfile._DTYPES) + 1
    assert same(store.get(key, LAYOUT).chunk, SMALL)


def _expected(self: Codec, layout: ChunkLayout, tokens: int) -> dict[str, Any]:
    del self, layout, tokens
    return {f"x{index}": (dtype, (3,)) for index, dtype in enumerate(reversed(chunkfile._DTYPES))}


class OneOfEach(Codec):
    """A codec whose tensors are not the chunk's: it has to be decoded."""

    name = "test"

    def expected(self, layout: ChunkLayout, tokens: int) -> dict[str, Any]:
        raise NotImplementedError

    def encode(self, chunk: ChunkKV) -> dict[str, Tensor]:
        del chunk
        return {n: torch.ones(s).to(d) for n, (d, s) in self.expected(LAYOUT, 4).items()}

    def decode(self, stored: dict[str, Tensor], out: ChunkKV) -> None:
        assert all(
            (tensor.float() == 1).all() for name, tensor in stored.items() if name != "tokens"
        )
        out.copy_from(SMALL)


def test_another_codec_does_not_read_the_file(store: DiskStore) -> None:
    class Renamed(type(store.codec)):
        name = "renamed"

    key, _ = filled(store)
    with pytest.raises(CorruptChunkError):
        DiskStore(store.root, codec=Renamed()).get(key, LAYOUT)


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


# Folders that cannot be used.


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_root_that_is_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="folder"):
        DiskStore(tmp_path / name)


def mounted(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "small", "size=200k")


def test_a_read_only_folder_is_read(small_disk: Path) -> None:
    key, _ = filled(DiskStore(small_disk / "kv"))
    missing = key_of(make_chunk(7))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    store = DiskStore(small_disk / "kv", max_bytes=1000)
    assert same(store.get(key, LAYOUT).chunk, SMALL)
    nothing_works(store, missing)
    nothing_works(DiskStore(small_disk / "other"), missing)
    assert store.contains(key)
    assert not store.delete(key)


def nothing_works(store: DiskStore, key: ChunkKey) -> None:
    """Everything that writes fails, and none of it raises."""
    chunk = make_chunk(7)
    with pytest.raises(ChunkNotFoundError):
        store.get(key, LAYOUT)
    assert not store.contains(key)
    with store.locked([key]):
        assert not store.put(key, chunk if len(chunk) == key.tokens else SMALL)
    store.touch(key)
    assert store.sweep() == 0
    assert store.stats().put_failures == 1
    assert store.stats().last_failure


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EMFILE])
def test_a_folder_in_which_nothing_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    existing = DiskStore(tmp_path / "kv")
    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(os, "open", refuse)
    nothing_works(existing, key_of(make_chunk(7)))
    nothing_works(DiskStore(tmp_path / "new"), key_of(make_chunk(7)))


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


def test_leftovers_of_killed_writers_are_swept(store: DiskStore) -> None:
    key, _ = filled(store)
    folder = store.path(key).parent
    old, new, foreign = folder / ".tmp-a", folder / ".tmpB", folder / "notes.txt"
    for path in (old, new, foreign):
        path.write_text("x")
    for path in (old, foreign):
        os.utime(path, (0, 0))
    assert store.sweep() == 0
    assert not old.exists()
    assert new.exists()
    assert foreign.exists(), "not a name of ours"
    assert store.contains(key)


def test_one_sweep_at_a_time(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = filled(store)
    other = DiskStore(store.root, max_bytes=1)
    inner: list[int] = []
    looked = limits.Sweeper._looked

    def nested(*args: Any) -> limits.Swept:
        monkeypatch.setattr(limits.Sweeper, "_looked", looked)
        inner.append(other.sweep())
        return looked(*args)

    monkeypatch.setattr(limits.Sweeper, "_looked", nested)
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
