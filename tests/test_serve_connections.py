"""Connections that ask nothing are closed; those that wait for an answer are not."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import uvicorn
from serve_fakes import DEADLINE

from kvcache_rag.serve.startup import patient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Receive, Scope, Send

SECONDS = 0.2
ASK = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


class App:
    """Answers at once, and at /slow once it is told to."""

    def __init__(self) -> None:
        self.has_begun, self.go_on = threading.Event(), threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            self.has_begun.set()
            if not await asyncio.to_thread(self.go_on.wait, DEADLINE):
                raise TimeoutError
        length = (b"content-length", b"3")
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": b"yes"})


@contextmanager
def served(app: App, http: str) -> Iterator[int]:
    """Serve with uvicorn, which has two implementations; gives the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            ws="none",
            timeout_keep_alive=10_000,
            http=patient(SECONDS, http),
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(DEADLINE)
            assert not thread.is_alive()


def connected(port: int, *sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), DEADLINE)
    for one in sent:
        connection.sendall(one)
    return connection


def until_closed(connection: socket.socket) -> bytes:
    """What came until the server closed the connection; raises after `DEADLINE`."""
    found = b""
    with connection:
        while got := connection.recv(4096):
            found += got
    return found


@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (b"", 0),
        (ASK, 0),  # a header that does not end
        (ASK + b"\r\n", 1),  # one request, and no further one
        (ASK + b"\r\n" + ASK, 1),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{", 1),  # a body nobody reads
    ],
)
def test_a_connection_that_asks_nothing_is_closed(http: str, sent: bytes, answers: int) -> None:
    pytest.importorskip(http)
    with served(App(), http) as port:
        assert until_closed(connected(port, sent)).count(b"200 OK") == answers


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_one_that_waits_for_its_answer_is_not(http: str) -> None:
    pytest.importorskip(http)
    app = App()
    with served(app, http) as port:
        waiting = connected(port, b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert app.has_begun.wait(DEADLINE)
        for _ in range(3):  # longer than any silent one stays
            assert until_closed(connected(port)) == b""
        app.go_on.set()
        assert until_closed(waiting).endswith(b"yes")
