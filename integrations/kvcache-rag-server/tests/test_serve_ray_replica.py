"""What runs in a replica's process, here in this one: a backend, and what Ray Serve asks of it."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag import Answer, Metrics
from kvcache_rag.errors import InvalidInputError
from kvcache_rag_server.backend import BackendRequest, Dequeued, Finished, Piece, Started
from kvcache_rag_server.ray import replica as ray_replica
from kvcache_rag_server.ray.launch import _absolute, _visible, launch
from kvcache_rag_server.ray.replica import Replica
from kvcache_rag_server.settings import ServerSettings
from kvcache_rag_server.startup import local_backend

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from kvcache_rag_server.backend import Event

pytestmark = pytest.mark.timeout(60)
WORK = BackendRequest("w", "Who?", ("A text.",))
DONE = Finished(Answer("Ada", Metrics()))


class Local:
    """A backend of one process that notes what it is asked."""

    def __init__(self) -> None:
        self.readiness = [False, False]
        self.prefetched: list[BackendRequest] = []
        self.was_closed = False

    async def ready(self) -> bool:
        return self.readiness.pop(0) if self.readiness else True

    async def followed(self, work: BackendRequest) -> AsyncGenerator[Event | Dequeued, None]:
        try:
            yield Dequeued()
            yield Started(0.5, batch=2)
            yield Piece(work.question)
            yield DONE
        finally:
            self.was_closed = True

    async def count(self, work: BackendRequest) -> int:
        return len(work.chunks)

    async def explain(self, work: BackendRequest) -> dict[str, Any]:
        return {"question": work.question}

    async def prefetch(self, work: BackendRequest) -> bool:
        self.prefetched.append(work)
        return len(self.prefetched) == 1

    async def drain(self) -> None:
        self.readiness = [False] * 100

    async def stats(self) -> dict[str, Any]:
        return {"replicas": [{"replica": "", "waiting": 3}]}


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Local:
    found = Local()
    monkeypatch.setattr(ray_replica, "LOOK", 0.001)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")  # so that none is left behind
    return found


@pytest.fixture
def replica(local: Local) -> Replica:
    return Replica(ServerSettings("tiny"), lambda settings: local, 0)


async def test_a_replica_is_well_once_its_model_has_answered(
    replica: Replica, local: Local
) -> None:
    await replica.check_health()
    assert not local.readiness, "it did not wait for the first token"
    local.readiness = [False]
    with pytest.raises(RuntimeError, match="does not answer"):
        await replica.check_health()


async def test_a_replica_that_drains_is_not_taken_for_ill(replica: Replica, local: Local) -> None:
    """Serve would end it, and with it what it still answers."""
    await replica.check_health()
    await replica.drain()
    await replica.check_health()
    assert not await local.ready()


async def test_a_model_that_never_answers_is_given_up(
    replica: Replica, local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_replica, "WARMING", 0.01)
    local.readiness = [False] * 100_000
    with pytest.raises(RuntimeError, match="does not answer"):
        await replica.check_health()


async def test_events_say_which_process_they_come_from(replica: Replica, local: Local) -> None:
    events = [event async for event in replica.answer(WORK)]
    turn, started, *rest = events
    assert turn == Dequeued()
    assert isinstance(started, Started)
    assert started.replica.endswith(f":{os.getpid()}")
    assert (started.queue_wait, started.batch) == (0.5, 2)
    assert rest == [Piece("Who?"), DONE]
    assert local.was_closed


async def test_cancelling_a_call_closes_the_answer(replica: Replica, local: Local) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in replica.answer(WORK):
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while not local.was_closed:
        await asyncio.sleep(0)


async def test_the_rest_is_handed_on(replica: Replica, local: Local) -> None:
    assert await replica.count(WORK) == 1
    assert await replica.explain(WORK) == {"question": "Who?"}
    assert [await replica.prefetch(WORK) for _ in range(2)] == [True, False]
    assert local.prefetched == [WORK, WORK]
    stats = await replica.stats()
    assert (stats["waiting"], stats["pid"]) == (3, os.getpid())
    assert stats["replica"].endswith(f":{os.getpid()}")


def test_a_folder_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    settings = ServerSettings(str(tmp_path / "nothing"), replicas=2)
    with (
        pytest.raises(InvalidInputError, match="there is no model folder"),
        launch(settings, local_backend),
    ):
        raise AssertionError("it was started")


def test_a_replica_finds_files_wherever_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    found = _absolute(ServerSettings("model", store="kv", gate="verdict.json", template="t"))
    assert found.model == str(tmp_path / "model")
    assert found.store == str(tmp_path / "kv")
    assert found.gate == str(tmp_path / "verdict.json")
    assert found.template == str(tmp_path / "t")
    kept = ServerSettings("org/name", store="s3://bucket/kv")
    assert _absolute(kept) == kept


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        (None, 0.0, None),
        (None, 0.5, "cuda"),
        ("cuda:1", 1.0, "cuda"),
        ("cpu", 1.0, "cpu"),
        ("cpu", 0.0, "cpu"),
    ],
)
def test_a_process_sees_only_the_gpu_it_was_given(
    device: str | None, gpus: float, expected: str | None
) -> None:
    assert _visible(device, gpus) == expected
