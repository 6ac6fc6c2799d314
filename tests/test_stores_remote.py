"""A store on a remote keeps the contract, and no failure of the remote reaches the caller."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import access
import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from kvcache_rag.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    InvalidInputError,
    MissingExtraError,
)
from kvcache_rag.stores import ChunkStore, DiskStore, RemoteStore, transport
from kvcache_rag.stores import remote as objects
from tests.contracts import LAYOUT, key_of, make_chunk, same
from tests.test_stores import FolderContract

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = make_chunk()
KEY = key_of(CHUNK)


def root(store: ChunkStore) -> Path:
    """Folder of a store on a folder."""
    assert isinstance(store, RemoteStore)
    return access.remote_root(store)


class TestRemoteStoreOnAFolder(FolderContract):
    def open(self, path: Path, *, max_bytes: int | None = None) -> RemoteStore:
        if max_bytes is not None:
            pytest.skip("a remote has no limit on its bytes")
        return RemoteStore(f"file://{path}")

    def root(self, store: ChunkStore) -> Path:
        return root(store)


@pytest.fixture
def store(tmp_path: Path) -> RemoteStore:
    return RemoteStore(f"file://{tmp_path}/store", retries=0, timeout=20)


def place(store: RemoteStore) -> Path:
    """File of the chunk."""
    return access.remote_path(store, KEY)


# Same files as on disk.


def test_a_disk_store_reads_what_a_remote_wrote_and_the_other_way_round(tmp_path: Path) -> None:
    remote, disk = RemoteStore(f"file://{tmp_path}"), DiskStore(tmp_path, durable=False)
    other = make_chunk(1)
    remote.put(KEY, CHUNK)
    disk.put(key_of(other), other)
    assert same(disk.get(KEY, LAYOUT).chunk, CHUNK)
    assert same(remote.get(key_of(other), LAYOUT).chunk, other)


def test_a_chunk_above_the_limit_of_an_object_is_not_kept(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    small = RemoteStore(url, max_object_bytes=CHUNK.nbytes)
    assert not small.put(KEY, CHUNK)
    assert "max_object_bytes" in small.stats().last_failure
    assert RemoteStore(url).put(KEY, CHUNK)
    with pytest.raises(ChunkNotFoundError):
        small.get(KEY, LAYOUT)


def test_a_killed_writer_leaves_no_object_and_its_torso_is_swept(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(self: LocalFileSystem, path: str, value: bytes, **_: Any) -> None:
        Path(path).write_bytes(value[:100])
        raise SystemExit  # as if the process ended here

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "pipe_file", torn)
        patch.setattr(LocalFileSystem, "rm_file", lambda *_: None)
        assert not store.put(KEY, CHUNK)
    (torso,) = [path for path in root(store).rglob("*") if path.is_file()]
    assert torso.name.startswith(".tmp-")
    assert not store.contains(KEY)
    store.sweep()
    assert torso.exists()
    os.utime(torso, (1, 1))
    store.sweep()
    assert not torso.exists()


# Damage.

HTML = b"<html><body>Please log in</body></html>"
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "HTML": lambda data: HTML,
    "truncated": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "much longer": lambda data: data + bytes(1 << 20),
    "a changed byte": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "a changed header": lambda data: data.replace(b'"start"', b'"stars"'),
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_object_is_a_miss_and_removed(store: RemoteStore, kind: str) -> None:
    store.put(KEY, CHUNK)
    place(store).write_bytes(DAMAGE[kind](place(store).read_bytes()))
    with pytest.raises(CorruptChunkError):
        store.get(KEY, LAYOUT)
    assert not store.contains(KEY)
    assert (store.stats().corrupt, store.stats().misses) == (1, 0)
    assert store.put(KEY, CHUNK)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_on_the_way_costs_one_more_read_and_no_object(
    store: RemoteStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, CHUNK)
    fetch, calls = LocalFileSystem.cat_file, []

    def damaged(self: LocalFileSystem, path: str, **kwargs: Any) -> Any:
        calls.append(path)
        data = fetch(self, path, **kwargs)
        return DAMAGE[kind](data) if len(calls) == 1 else data

    monkeypatch.setattr(LocalFileSystem, "cat_file", damaged)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)
    assert len(calls) == 2
    assert store.stats().corrupt == 0


# Failures.


class UnspeakableError(Exception):
    """An error that no driver was expected to raise, and that cannot be printed."""

    def __str__(self) -> str:
        raise TypeError("no text")


@pytest.mark.parametrize("error", [OSError, UnspeakableError, KeyError, SystemExit])
def test_whatever_a_driver_raises_is_a_miss(
    store: RemoteStore, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, CHUNK)

    def broken(*_: Any, **__: Any) -> None:
        raise error("no")

    for name in ("cat_file", "pipe_file", "info", "find", "rm_file"):
        monkeypatch.setattr(LocalFileSystem, name, broken)
    with pytest.raises(ChunkNotFoundError, match=error.__name__):
        store.get(KEY, LAYOUT)
    assert not store.put(KEY, CHUNK)
    assert not store.contains(KEY)
    assert not store.delete(KEY)
    assert store.sweep() == 0
    assert store.generation("") == 0
    with pytest.raises(OSError, match=error.__name__):
        store.delete_namespace("")
    stats = store.stats()
    assert (stats.misses, stats.put_failures) == (1, 1)
    assert stats.failures >= 7
    assert stats.last_failure


# A driver that answers with anything at all.

ANSWERS: dict[str, Any] = {
    "None": None,
    "a text": "text",
    "digits": "123",
    "no": False,
    "yes": True,
    "a number": 7,
    "a number below zero": -1,
    "as many bytes as there are not": 1 << 60,
    "a fraction": 0.5,
    "a list": [1, "x"],
    "a dictionary": {"type": 1},
    "an object": object(),
    "a class": int,
}

METHODS = ("cat_file", "pipe_file", "info", "find", "rm_file", "rm", "modified")


@pytest.fixture
def answering(tmp_path: Path) -> RemoteStore:
    """A store over a driver whose answers a test chooses."""
    store = RemoteStore(f"memory://{tmp_path}", retries=0, timeout=20, pause=0)
    assert store.put(KEY, CHUNK)
    return store


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize(
    "methods", [METHODS, *((name,) for name in METHODS)], ids=["all", *METHODS]
)
def test_whatever_a_driver_returns_is_a_miss_and_breaks_nothing_else(
    answering: RemoteStore, methods: tuple[str, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = answering
    with monkeypatch.context() as patch:
        for name in methods:
            patch.setattr(MemoryFileSystem, name, lambda *_, **__: ANSWERS[kind])
        if "cat_file" in methods:
            with pytest.raises(ChunkNotFoundError):
                store.get(KEY, LAYOUT)
            assert store.stats().misses == 1
            assert store.stats().failures > 0
            assert store.stats().last_failure
        else:
            assert same(store.get(KEY, LAYOUT).chunk, CHUNK)
        generation = store.generation("")
        assert isinstance(generation, int)
        store.put(KEY, CHUNK, generation)
        store.contains(KEY)
        store.delete(KEY)
        store.sweep()
        with suppress(OSError):  # it may say that it failed
            store.delete_namespace("")
    assert store.put(KEY, CHUNK)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK), "it is used as before when it answers again"


@pytest.mark.parametrize("kind", ["bytearray", "memoryview"])
def test_bytes_of_another_type_are_bytes(
    answering: RemoteStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = MemoryFileSystem.cat_file
    wrap = {"bytearray": bytearray, "memoryview": memoryview}[kind]
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *a, **k: wrap(fetch(*a, **k)))
    assert same(answering.get(KEY, LAYOUT).chunk, CHUNK)
    assert answering.stats().failures == 0


# Slowness.


def test_a_hanging_remote_is_given_up_on_once_and_then_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RemoteStore(f"file://{tmp_path}", timeout=0.2, pause=3600)
    other = RemoteStore(f"file://{tmp_path}")
    other.put(KEY, CHUNK)
    release, calls = threading.Event(), []

    def hang(*_: Any, **__: Any) -> None:
        calls.append(1)
        release.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "cat_file", hang)
        for _ in range(5):
            with pytest.raises(ChunkNotFoundError):
                store.get(KEY, LAYOUT)
        assert not store.contains(KEY)
        assert not store.put(KEY, CHUNK)
        release.set()
    assert len(calls) == 1
    with pytest.raises(ChunkNotFoundError, match="skipped for 3600 s"):
        store.get(KEY, LAYOUT)
    access.transport(store).breaker._until = 0.0  # the pause is over
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)
    assert store.contains(KEY)


def test_failures_in_a_row_open_the_breaker_and_answers_in_between_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("kvcache_rag.stores.transport.time.monotonic", lambda: clock[0])
    breaker = transport.Breaker(30.0)
    for _ in range(5):
        breaker.failed(late=False)
        breaker.failed(late=False)
        assert breaker.admits()
        breaker.succeeded()
    for _ in range(3):
        assert breaker.admits()
        breaker.failed(late=False)
    assert not breaker.admits()
    clock[0] += 30.0
    assert [breaker.admits() for _ in range(3)] == [True, False, False], "one tries again"
    breaker.failed(late=False)
    assert not breaker.admits()
    clock[0] += 30.0
    assert breaker.admits()
    breaker.succeeded()
    assert [breaker.admits() for _ in range(3)] == [True] * 3


def test_a_failed_call_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore(f"file://{tmp_path}", retries=2)
    store.put(KEY, CHUNK)
    fetch, calls = LocalFileSystem.cat_file, []

    def flaky(self: LocalFileSystem, path: str, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionResetError
        return fetch(self, path, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "cat_file", flaky)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)
    assert store.stats().failures == 0


def test_hung_calls_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_AT_ONCE", 8)
    store = RemoteStore(f"file://{tmp_path}", timeout=0.05, pause=0)
    release = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "info", lambda *_: release.wait(60))
        before = threading.active_count()
        for _ in range(transport._AT_ONCE + 4):
            assert not store.contains(KEY)
        assert threading.active_count() - before <= transport._AT_ONCE
        release.set()


def test_a_process_ends_although_a_call_hangs(tmp_path: Path) -> None:
    code = f"""
import time
from fsspec.implementations.local import LocalFileSystem
from kvcache_rag import RemoteStore
from tests.chunks import key_of, make_chunk
LocalFileSystem.info = lambda *_: time.sleep(600)
print(RemoteStore("file://{tmp_path}", timeout=0.1).contains(key_of(make_chunk())))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=os.getcwd()
    )
    assert done.stdout.strip() == "False", done.stderr


def test_a_late_upload_does_not_bring_a_deleted_namespace_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RemoteStore(f"file://{tmp_path}", timeout=0.3, retries=0)
    release, done = threading.Event(), threading.Event()
    move, remove, moved = LocalFileSystem.mv, objects._remove, []

    def late(self: LocalFileSystem, source: str, target: str) -> None:
        if target.endswith(".safetensors"):
            release.wait(60)
            Path(source).parent.mkdir(parents=True, exist_ok=True)  # the deletion took it away
            Path(source).write_bytes(b"late")
            moved.append(target)
        move(self, source, target)

    def noted(*args: Any) -> None:
        remove(*args)
        done.set()

    monkeypatch.setattr(LocalFileSystem, "mv", late)
    monkeypatch.setattr(objects, "_remove", noted)
    assert not store.put(KEY, CHUNK)  # nobody waits for it any more
    store.delete_namespace("")
    release.set()
    assert done.wait(60)
    assert moved
    assert not list(tmp_path.rglob("*.safetensors"))


# Mistakes, and what must not be said.


def test_a_url_that_cannot_be_used_is_one_sentence() -> None:
    for url in ("bucket/folder", "", "nonsense://x"):
        with pytest.raises(InvalidInputError):
            RemoteStore(url)
    for wrong in ({"timeout": 0}, {"retries": -1}, {"pause": -1}):
        with pytest.raises(InvalidInputError):
            RemoteStore("memory://x", **wrong)  # type: ignore[arg-type]  # numbers, all of them


@pytest.mark.parametrize(
    ("url", "extra"), [("s3://b/x", "s3"), ("gs://b/x", "gcs"), ("az://b/x", "azure")]
)
def test_a_missing_driver_names_the_extra(
    url: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(protocol: str) -> None:
        raise ImportError(protocol)

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(MissingExtraError, match=rf"kvcache-rag\[{extra}\]"):
        RemoteStore(url)


def test_secrets_are_in_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"auto_mkdir": True, "client_kwargs": {"keys": ["hunter22"]}, "secret": "swordfish"}
    store = RemoteStore(f"file://{tmp_path}", storage_options=options, retries=0)

    def told(*_: Any, **__: Any) -> None:
        raise OSError("swordfish hunter22 https://x/?sig=abc%2Fdef&token=ghi 'secret=jkl'")

    for name in ("cat_file", "info"):
        monkeypatch.setattr(LocalFileSystem, name, told)
    with pytest.raises(ChunkNotFoundError) as caught:
        store.get(KEY, LAYOUT)
    store.contains(KEY)
    url = "s3://user:" + "opensesame@bucket/x?key=letmein"
    texts = [str(caught.value), store.stats().last_failure, repr(store), repr(RemoteStore(url))]
    for secret in ("swordfish", "hunter22", "abc", "ghi", "jkl", "opensesame", "letmein"):
        assert not [text for text in texts if secret in text]
    assert "***" in texts[1]
    assert caught.value.__cause__ is None


def test_a_forked_child_makes_its_own_connections(store: RemoteStore) -> None:
    store.put(KEY, CHUNK)
    first = access.transport(store)._filesystem()
    access.transport(store)._opened = (-1, first)  # as after a fork
    assert access.transport(store)._filesystem() is not first
    assert store.contains(KEY)
