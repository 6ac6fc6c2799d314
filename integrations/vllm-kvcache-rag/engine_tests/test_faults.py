"""A load that fails behind its promise: the answer is that of vLLM without the connector."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from conftest import SmallEngine, apart, random_case, reused, saved, tokens
from kvcache_rag.stores import DiskStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKey

TOLERANCE, LENGTH, TIMEOUT = 1e-3, 16, 2.0
# Their pieces have sizes of their own, by which the one that is struck is known.
CASE, HEALTHY, PLAIN = random_case(150), random_case(151, (13, 60, 41, 9)), random_case(152)
# How vLLM schedules, and whether a prompt is computed in one step.
ENGINES: dict[str, dict[str, Any]] = {
    "ahead": {"async_scheduling": True},
    "step by step": {"async_scheduling": False},
    "in parts": {"max_num_batched_tokens": 64},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return saved("llama", tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    """Answers to `CASE` and `PLAIN` of vLLM without the connector."""
    made = SmallEngine(model, None)
    found = [tokens(made.plain(case, max_tokens=LENGTH)) for case in (CASE, PLAIN)]
    made.stop()
    return found


@pytest.fixture(scope="module", params=ENGINES)
def made(
    request: pytest.FixtureRequest, model: Path, alone: Any, tmp_path_factory: Any
) -> Iterator[SmallEngine]:
    folder = tmp_path_factory.mktemp("kv")
    made = SmallEngine(model, folder, {"load_timeout": TIMEOUT}, **ENGINES[request.param])
    assert made.law() == ""
    yield made
    made.stop()


released = threading.Event()


def halve(store: DiskStore, key: ChunkKey) -> None:
    file = store.path(key)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change(store: DiskStore, key: ChunkKey) -> None:
    bad = bytearray(store.path(key).read_bytes())
    bad[-9] ^= 1
    store.path(key).write_bytes(bad)


def fail(store: DiskStore, key: ChunkKey) -> None:
    raise OSError("the share is gone")


def stumble(store: DiskStore, key: ChunkKey) -> None:
    raise ZeroDivisionError


def hang(store: DiskStore, key: ChunkKey) -> None:
    assert released.wait(60)


FAULTS: dict[str, Callable[[DiskStore, ChunkKey], None]] = {
    "vanishes": lambda store, key: store.path(key).unlink(),
    "is halved": halve,
    "changes": change,
    "cannot be read": fail,
    "meets a bug": stumble,
    "hangs": hang,
}


def ask(made: SmallEngine) -> list[Any]:
    """Three requests at once: of the chunk with the fault, of others, and of none."""
    asked = [(CASE.ids, CASE.params, ""), (HEALTHY.ids, HEALTHY.params, ""), (PLAIN.ids, None, "")]
    return made.many(asked, max_tokens=LENGTH)


@pytest.mark.parametrize("place", [0, -1], ids=["the first piece", "the last"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_chunk_that_fails_behind_its_promise(
    made: SmallEngine, alone: Any, fault: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    released.clear()
    for case in (CASE, HEALTHY):
        made.keep(case)
    made.forget()
    healthy = tokens(made.ask(HEALTHY, max_tokens=LENGTH))
    made.forget()
    struck = (CASE.prefix, *CASE.chunks)[place]
    get, met = DiskStore.get, []

    def through(store: DiskStore, key: ChunkKey, *given: Any) -> Any:
        if key.tokens == len(struck) and not met:
            met.append(key)
            FAULTS[fault](store, key)
        return get(store, key, *given)

    monkeypatch.setattr(DiskStore, "get", through)
    failed, other, plain = ask(made)
    assert met, "it was announced, and loading began"
    assert tokens(failed) == alone[0]
    assert failed.outputs[0].finish_reason == "length"
    said = failed.kv_transfer_params["kvcache_rag"]
    assert said == {"reused": 0, "why": "what is stored could not be loaded"}
    assert (tokens(other), reused(other)) == (healthy, HEALTHY.params.context)
    assert tokens(plain) == alone[1]
    # What was computed in place of it is found by plain requests, and is right.
    assert tokens(made.plain(CASE, max_tokens=LENGTH)) == alone[0]
    released.set()
    made.keep(CASE)
    made.forget()
    answer = made.ask(CASE, max_tokens=LENGTH)
    assert reused(answer) == CASE.params.context
    assert apart(answer, made.stitched(CASE)) < TOLERANCE


def test_a_chunk_that_fails_again_and_again(
    made: SmallEngine, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.keep(CASE)
    made.forget()
    get = DiskStore.get

    def through(store: DiskStore, key: ChunkKey, *given: Any) -> Any:
        if key.tokens == len(CASE.chunks[1]):
            raise OSError("the share is gone")
        return get(store, key, *given)

    monkeypatch.setattr(DiskStore, "get", through)
    asked = [(CASE.ids, CASE.params, "")] * 3
    for _ in range(3):
        for answer in made.many(asked, max_tokens=LENGTH):
            assert (tokens(answer), reused(answer)) == (alone[0], 0)


@pytest.mark.parametrize("fault", ["cannot be read", "meets a bug", "hangs"])
def test_a_store_that_cannot_be_asked(
    made: SmallEngine, alone: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    released.clear()
    made.keep(CASE)
    made.forget()
    contains = DiskStore.contains

    def through(store: DiskStore, key: ChunkKey) -> bool:
        FAULTS[fault](store, key)
        return contains(store, key)

    monkeypatch.setattr(DiskStore, "contains", through)
    answer = made.ask(CASE, max_tokens=LENGTH)
    released.set()
    assert (tokens(answer), reused(answer)) == (alone[0], 0)
    why = answer.kv_transfer_params["kvcache_rag"]["why"]
    assert why.startswith("the store has not answered" if fault == "hangs" else "the store failed")
