"""Over real sockets: clients that leave, streams that wait, pieces that arrive one by one."""

from __future__ import annotations

import asyncio
import socket
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
    data_of,
    running,
    says_nothing,
    scripted,
)

from kvcache_rag_server.backend import BackendRequest, Event, Failed, Finished, Piece, Started

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

CHAT = "/v1/chat/completions"


class Gate:
    """A script that goes on when it is told to."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        if not await asyncio.to_thread(self._open.wait, DEADLINE):
            raise TimeoutError


@contextmanager
def server(script: Any, **settings: Any) -> Iterator[tuple[str, Scripted]]:
    app, backend = scripted(script, **settings)
    with running(app) as url:
        yield url, backend


def send(url: str, body: dict[str, Any], path: str = CHAT) -> socket.socket:
    """Send a chat and read nothing."""
    request = httpx.Request("POST", url + path, json=body)
    port = httpx.URL(url).port
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in
             request.headers.items())]  # fmt: skip
    connection = socket.create_connection(("127.0.0.1", port), DEADLINE)
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + request.content)
    return connection


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


def test_a_client_that_leaves_in_the_middle_of_its_stream_takes_it_back() -> None:
    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        yield Started(0.0)
        yield Piece("y")
        await asyncio.Event().wait()

    with server(script) as (url, backend):
        with httpx.stream("POST", url + CHAT, json=chat(stream=True), timeout=DEADLINE) as reply:
            lines = reply.iter_lines()
            while "y" not in str(data_of(next(lines))):
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


def test_pieces_arrive_when_they_are_there() -> None:
    gate = Gate()

    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        yield Started(0.0)
        yield Piece("y")
        await gate.passed()
        yield Finished(answer("y"))

    with (
        server(script) as (url, _),
        httpx.stream("POST", url + CHAT, json=chat(stream=True), timeout=DEADLINE) as reply,
    ):
        lines = reply.iter_lines()
        text = ""
        while '"content":"y"' not in text:
            text = next(lines)
        gate.open()  # only now, so what was read did not wait for the end
        assert data_of("\n".join(lines))[-1] == "[DONE]"


def test_a_long_silence_is_bridged_by_comments() -> None:
    gate = Gate()

    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        await gate.passed()
        yield Started(0.5)
        yield Finished(answer())

    started = time.perf_counter()
    with (
        server(script, heartbeat=0.05) as (url, _),
        httpx.stream("POST", url + CHAT, json=chat(stream=True), timeout=DEADLINE) as reply,
    ):
        assert reply.status_code == 200
        seen: list[str] = []
        for line in reply.iter_lines():
            seen.append(line)
            if seen.count(": waiting") == 3:
                gate.open()
    assert seen.count(": waiting") >= 3
    assert time.perf_counter() - started >= 0.15
    first, last, done = data_of("\n".join(seen))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert (last["kvcache"]["queue_wait"], done) == (0.5, "[DONE]")


def test_a_failure_behind_a_long_silence_is_an_event() -> None:
    gate = Gate()

    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        await gate.passed()
        yield Failed(503, "overloaded", "the server stops")

    with (
        server(script, heartbeat=0.02) as (url, _),
        httpx.stream("POST", url + CHAT, json=chat(stream=True), timeout=DEADLINE) as reply,
    ):
        seen: list[str] = []
        for line in reply.iter_lines():
            seen.append(line)
            if line == ": waiting":
                gate.open()
    _, error, done = data_of("\n".join(seen))
    assert (error["error"]["message"], done) == ("the server stops", "[DONE]")


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
