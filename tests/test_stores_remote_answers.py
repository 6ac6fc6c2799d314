"""A driver that answers with anything at all: a miss that is counted, never a failed question."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.stores import DiskStore, MemoryStore, RemoteStore, TieredStore
from tests.contracts import LAYOUT, key_of, make_chunk, same

if TYPE_CHECKING:
    from pathlib import Path

CHUNK = make_chunk()
KEY = key_of(CHUNK)

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


class UnspeakableError(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        raise TypeError("no text")


@pytest.fixture
def store(tmp_path: Path) -> RemoteStore:
    store = RemoteStore(f"memory://{tmp_path}", retries=0, timeout=20, pause=0)
    assert store.put(KEY, CHUNK)
    return store


def used(store: RemoteStore) -> None:
    """Every call of the contract; of a remote, deleting a namespace may say that it failed."""
    with pytest.raises(ChunkNotFoundError):
        store.get(KEY, LAYOUT)
    store.put(KEY, CHUNK)
    store.contains(KEY)
    store.delete(KEY)
    store.sweep()
    assert isinstance(store.generation(""), int)
    with suppress(OSError):
        store.delete_namespace("")


@pytest.mark.parametrize("kind", ANSWERS)
def test_whatever_a_driver_returns_is_a_miss(
    store: RemoteStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in METHODS:
        monkeypatch.setattr(MemoryFileSystem, name, lambda *_, **__: ANSWERS[kind])
    before = store.stats().failures
    used(store)
    stats = store.stats()
    assert stats.misses == 1
    assert stats.failures > before
    assert stats.last_failure


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("method", METHODS)
def test_one_method_that_returns_anything_breaks_nothing_else(
    store: RemoteStore, method: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, method, lambda *_, **__: ANSWERS[kind])
        if method == "cat_file":
            used(store)
        else:
            assert same(store.get(KEY, LAYOUT).chunk, CHUNK)
            store.put(KEY, CHUNK)
            store.sweep()
    assert store.put(KEY, CHUNK)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK), "it is used as before when it answers again"


@pytest.mark.parametrize("kind", ["bytearray", "memoryview"])
def test_bytes_of_another_type_are_bytes(
    store: RemoteStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = MemoryFileSystem.cat_file
    wrap = {"bytearray": bytearray, "memoryview": memoryview}[kind]
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *a, **k: wrap(fetch(*a, **k)))
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)
    assert store.stats().failures == 0


def test_an_error_without_a_text_is_a_miss(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise UnspeakableError

    monkeypatch.setattr(MemoryFileSystem, "cat_file", broken)
    with pytest.raises(ChunkNotFoundError, match="UnspeakableError"):
        store.get(KEY, LAYOUT)
    assert (store.stats().misses, store.stats().failures) == (1, 1)


@pytest.mark.parametrize("kind", ["None", "yes", "as many bytes as there are not"])
def test_a_question_goes_on_over_tiers(
    store: RemoteStore, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in METHODS:
        monkeypatch.setattr(MemoryFileSystem, name, lambda *_, **__: ANSWERS[kind])
    tiers = TieredStore(MemoryStore(), DiskStore(tmp_path / "kv", durable=False), store)
    with pytest.raises(ChunkNotFoundError):
        tiers.get(KEY, LAYOUT)
    assert tiers.put(KEY, CHUNK)
    assert same(tiers.get(KEY, LAYOUT).chunk, CHUNK)
    assert tiers.stats().failures
