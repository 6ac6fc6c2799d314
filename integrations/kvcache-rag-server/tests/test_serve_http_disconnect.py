"""Over real sockets: clients that leave, streams that wait, pieces that arrive one by one."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from serve_fakes import (
    DEADLINE,
    Scripted,
    answer,
    chat,
    client,
    data_of,
    running,
    says_nothing,
    scripted,
)
from serve_process import CHAT, Paced, send

from kvcache_rag_server.backend import BackendRequest, Event, Failed, Finished, Piece, Started

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator


@contextmanager
def server(script: Any, **settings: Any) -> Iterator[tuple[str, Scripted]]:
    app, backend = scripted(script, **settings)
    with running(app) as url:
        yield url, backend


def streamed(url: str) -> Any:
    return httpx.stream("POST", url + CHAT, json=chat(stream=True), timeout=DEADLINE)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_takes_its_work_back(streaming: bool) -> None:
    with server(says_nothing) as (url, backend):
        connection = send(url, chat(stream=streaming))
        assert backend.has_begun.wait(DEADLINE)
        assert not backend.was_taken_back.is_set()
        connection.close()
        assert backend.was_taken_back.wait(DEADLINE)
        metrics = httpx.get(f"{url}/metrics").text
    assert 'kvcache_rag_cancelled_requests_total{route="chat"} 1.0' in metrics


def test_a_client_that_leaves_takes_its_explanation_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def explain(backend: Scripted, work: BackendRequest) -> dict[str, Any]:
        backend.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            backend.was_taken_back.set()
        return {}

    monkeypatch.setattr(Scripted, "explain", explain)
    with server(says_nothing) as (url, backend):
        connection = send(url, chat(documents=["A text."]), "/v1/explain")
        assert backend.has_begun.wait(DEADLINE)
        connection.close()
        assert backend.was_taken_back.wait(DEADLINE)


def test_pieces_arrive_at_once_and_who_leaves_behind_one_takes_the_rest_back() -> None:
    with server(Paced()) as (url, backend):
        with streamed(url) as reply:
            lines = reply.iter_lines()
            while '"content":"y"' not in next(lines):  # which does not wait for the end
                continue
            assert not backend.was_taken_back.is_set()
        assert backend.was_taken_back.wait(DEADLINE)


def test_an_answered_request_is_not_taken_back() -> None:
    app, backend = scripted()
    with running(app) as url:
        for streaming in (True, False):
            assert httpx.post(url + CHAT, json=chat(stream=streaming)).status_code == 200
        metrics = httpx.get(f"{url}/metrics").text
    assert not backend.was_taken_back.is_set()
    assert "cancelled_requests_total{" not in metrics


@pytest.mark.parametrize(
    "end",
    [[Started(0.5), Finished(answer())], [Failed(503, "overloaded", "the server stops")]],
    ids=["an answer", "a failure"],
)
def test_a_long_silence_is_bridged_by_comments_and_ends_in_events(end: list[Event]) -> None:
    gate = threading.Event()

    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        assert await asyncio.to_thread(gate.wait, DEADLINE)
        for event in end:
            yield event

    began = time.perf_counter()
    with server(script, heartbeat=0.05) as (url, _), streamed(url) as reply:
        assert reply.status_code == 200
        seen: list[str] = []
        for line in reply.iter_lines():
            seen.append(line)
            if seen.count(": waiting") == 3:
                gate.set()
    assert time.perf_counter() - began >= 0.15
    first, last, done = data_of("\n".join(seen))
    assert (first["choices"][0]["delta"]["role"], done) == ("assistant", "[DONE]")
    if len(end) == 1:
        assert last["error"]["message"] == "the server stops"
    else:
        assert last["kvcache"]["queue_wait"] == 0.5


async def test_a_beginning_is_no_answer_and_puts_off_no_comment() -> None:
    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        for _ in range(40):
            yield Started(0.5)
            await asyncio.sleep(0.01)
        yield Finished(answer())

    app, _ = scripted(script, heartbeat=0.2)
    async with client(app) as http:
        reply = await http.post(CHAT, json=chat(stream=True))
    assert ": waiting" in reply.text.splitlines()


def test_a_slow_client_keeps_nobody_waiting() -> None:
    """What a client does not read lies in the server; the model goes on with the others."""
    is_over = threading.Event()

    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        yield Started(0.0)
        for _ in range(20_000):
            yield Piece("x" * 1000)
        is_over.set()
        yield Finished(answer())

    with server(script) as (url, backend):
        connection = send(url, chat(stream=True))
        assert is_over.wait(DEADLINE)
        assert httpx.get(f"{url}/health").status_code == 200
        connection.close()
    assert backend.works
