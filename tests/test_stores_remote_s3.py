"""The contract over a real S3 API, and a real engine while that API fails in every way."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any

import access
import pytest

from kvcache_rag import Engine
from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.stores import ChunkStore, DiskStore, MemoryStore, RemoteStore, TieredStore
from tests.contracts import LAYOUT, StoreContract, key_of, make_chunk
from tests.s3 import BUCKET, REPLY, SECRET, Server, impostor, options
from tests.small import make_model, make_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHUNK = make_chunk()
KEY = key_of(CHUNK)
TEXTS = ["The mill stands by the river.", "The smith lives in Oslo.", "Bread costs two coins."]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def opened(server: Server, folder: str = "", **settings: Any) -> RemoteStore:
    """A store in a folder of its own; all share one connection, which takes long to make."""
    store = RemoteStore(
        f"s3://{BUCKET}/{folder or uuid.uuid4().hex}",
        storage_options=options(server.endpoint),
        **settings,
    )
    if server.filesystem is None:
        server.filesystem = access.transport(store)._filesystem()
    access.transport(store)._opened = (os.getpid(), server.filesystem)
    return store


class TestRemoteStoreOnS3(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server

    def open(self, path: Path, *, max_bytes: int | None = None) -> RemoteStore:
        if max_bytes is not None:
            pytest.skip("a remote has no limit on its bytes")
        return opened(self.server)

    def age(self, store: ChunkStore, seconds: float) -> None:
        self.server.age(folder_of(store), seconds)

    def held(self, store: ChunkStore) -> set[str]:
        names = [name for name in self.server.objects if name.startswith(folder_of(store))]
        return {name[-76:-12] for name in names if name.endswith(".safetensors")}


def folder_of(store: ChunkStore) -> str:
    assert isinstance(store, RemoteStore)
    return access.transport(store).root.removeprefix(f"{BUCKET}/")


def test_a_bucket_that_does_not_exist_is_a_miss(server: Server) -> None:
    store = RemoteStore(
        "s3://no-such-bucket/x", storage_options=options(server.endpoint), retries=0
    )
    with pytest.raises(ChunkNotFoundError):
        store.get(KEY, LAYOUT)
    assert not store.contains(KEY)
    assert not store.put(KEY, CHUNK)
    assert store.stats().put_failures == 1
    assert SECRET not in store.stats().last_failure + repr(store)


# The question never fails.


def engine_over(remote: RemoteStore, folder: Path) -> Engine:
    store = TieredStore(MemoryStore(), DiskStore(folder, durable=False), remote)
    # Each question asks the store.
    return Engine(make_model(), make_tokenizer(), store=store, prompt_memory=0)


@pytest.fixture(scope="module")
def expected() -> str:
    engine = Engine(make_model(), make_tokenizer(), store=MemoryStore())
    return engine.generate("Who?", chunks=TEXTS, max_new_tokens=8).text


def test_a_second_machine_answers_from_the_bucket(
    server: Server, tmp_path: Path, expected: str
) -> None:
    first = engine_over(opened(server, "engine"), tmp_path / "a")
    assert first.generate("Who?", chunks=TEXTS, max_new_tokens=8).text == expected
    second = engine_over(opened(server, "engine"), tmp_path / "b")
    assert second.generate("Who?", chunks=TEXTS, max_new_tokens=8).text == expected
    stats = second.store.stats()
    assert stats.hits["remote"] >= len(TEXTS)
    assert stats.puts == 0
    third = engine_over(RemoteStore("memory://nothing"), tmp_path / "b")
    assert third.generate("Who?", chunks=TEXTS, max_new_tokens=8).text == expected
    assert third.store.stats().hits["disk"] >= len(TEXTS), "what came from S3 is on this disk"


def check_answers(remote: RemoteStore, folder: Path, expected: str) -> TieredStore:
    """Ask with a remote that fails, on a machine that has nothing."""
    engine = engine_over(remote, folder)
    for _ in range(2):
        assert engine.generate("Who?", chunks=TEXTS, max_new_tokens=8).text == expected
    assert isinstance(engine.store, TieredStore)
    return engine.store


@pytest.mark.parametrize("kind", ["stopped", "silent", "a web page"])
def test_a_question_is_answered_without_the_server(
    tmp_path: Path, expected: str, kind: str
) -> None:
    with impostor(REPLY if kind == "a web page" else b"") as endpoint:
        if kind == "stopped":
            endpoint = endpoint.rsplit(":", 1)[0] + ":1"  # nobody listens there
        remote = RemoteStore(f"s3://{BUCKET}/x", storage_options=options(endpoint), timeout=0.5)
        stats = check_answers(remote, tmp_path, expected).stats()
    assert stats.failures + stats.corrupt > 0
    assert stats.hits["memory"] >= len(TEXTS)


def test_a_question_is_answered_while_the_server_stops_in_the_middle(
    tmp_path: Path, expected: str
) -> None:
    own = Server()
    engine = engine_over(opened(own, timeout=2, retries=0), tmp_path)
    engine.add(TEXTS[:1])
    own.stop()
    assert engine.generate("Who?", chunks=TEXTS, max_new_tokens=8).text == expected
    assert engine.store.stats().failures > 0


@pytest.mark.parametrize("kind", ["changed", "HTML"])
def test_a_question_is_answered_over_garbage(
    server: Server, tmp_path: Path, expected: str, kind: str
) -> None:
    folder = uuid.uuid4().hex
    engine_over(opened(server, folder), tmp_path / "a").add(TEXTS)
    remote = opened(server, folder)
    names = [name for name in server.objects if name.startswith(folder) and ".safe" in name]
    assert len(names) >= len(TEXTS)
    for name in names:
        path = f"{BUCKET}/{name}"
        data = server.filesystem.cat_file(path)
        garbage = {
            "changed": data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
            "HTML": b"<html>Log in</html>",
        }[kind]
        server.filesystem.pipe_file(path, garbage)
    store = check_answers(remote, tmp_path / "b", expected)
    assert store.stats().corrupt >= len(TEXTS)


def test_a_question_is_answered_with_wrong_credentials(
    server: Server, tmp_path: Path, expected: str
) -> None:
    remote = opened(server, retries=0)
    with server.refusing():
        with pytest.raises(ChunkNotFoundError, match="PermissionError"):
            remote.get(KEY, LAYOUT)
        stats = check_answers(remote, tmp_path, expected).stats()
    assert stats.failures > 0
    assert stats.put_failures > 0
    assert SECRET not in stats.last_failure
