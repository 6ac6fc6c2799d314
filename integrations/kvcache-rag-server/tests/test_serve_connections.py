"""Connections that ask nothing, or with too long a head, are closed; those that wait are not."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import uvicorn
from serve_fakes import DEADLINE

from kvcache_rag_server.connections import HEAD, SETTINGS, patient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Receive, Scope, Send

SECONDS = 0.2
PATIENT = 10.0  # so that a busy machine has the time to read it all
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
def served(app: App, seconds: float = SECONDS) -> Iterator[int]:
    """Serve with uvicorn; gives the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            timeout_keep_alive=10_000,
            http=patient(seconds),
            **SETTINGS,
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


def answered(connection: socket.socket) -> bool:
    """Whether an answer came whole; its parts may come apart."""
    found = b""
    while not found.endswith(b"yes") and (got := connection.recv(4096)):
        found += got
    return found.endswith(b"yes")


def until_closed(connection: socket.socket) -> bytes:
    """What came until the server closed the connection."""
    found = b""
    with connection:
        while got := connection.recv(4096):
            found += got
    return found


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
def test_a_connection_that_asks_nothing_is_closed(sent: bytes, answers: int) -> None:
    with served(App()) as port:
        assert until_closed(connected(port, sent)).count(b"200 OK") == answers


def test_one_that_waits_for_its_answer_is_not() -> None:
    app = App()
    with served(app) as port:
        waiting = connected(port, b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert app.has_begun.wait(DEADLINE)
        for _ in range(3):  # longer than any silent one stays
            assert until_closed(connected(port)) == b""
        app.go_on.set()
        assert until_closed(waiting).endswith(b"yes")


def head_of(size: int) -> bytes:
    """A request of so many bytes of head."""
    head = ASK + b"x-long: "
    return head + b"a" * (size - len(head) - 4) + b"\r\n\r\n"


def error_of(answer: bytes) -> dict[str, str]:
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"x-request-id: req_" in head
    assert b"connection: close" in head
    assert f"content-length: {len(content)}".encode() in head
    error: dict[str, str] = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def is_too_long(answer: bytes) -> bool:
    if not answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n"):
        return False
    error = error_of(answer)
    return error["code"] == "headers_too_large" and str(HEAD) in error["message"]


def is_no_http(answer: bytes) -> bool:
    return answer.startswith(b"HTTP/1.1 400 Bad") and "HTTP" in error_of(answer)["message"]


def flood(connection: socket.socket, line: bytes, most: int) -> int:
    """Send a line again and again; how many bytes, until the server closed the connection."""
    many, sent = line * 64, 0
    try:
        while sent < most:
            connection.sendall(many)
            sent += len(many)
    except OSError:
        pass
    return sent


def test_a_head_has_its_size_and_its_form() -> None:
    with served(App()) as port:
        for size in (1000, HEAD - 1000, HEAD):
            assert until_closed(connected(port, head_of(size))).endswith(b"yes")
        for sent in (
            head_of(HEAD + 5000),
            head_of(4 * HEAD),
            ASK + b"a:b\r\n" * 20_000 + b"\r\n",
            b"GET /" + b"a" * 2 * HEAD + b" HTTP/1.1\r\n\r\n",
            b"GET" * HEAD,
            b"\x16\x03\x01\x02\r\n\r\n",
            b"HELLO\r\n\r\n",
            b"GET / HTTP/x\r\n\r\n",
        ):
            answer = until_closed(connected(port, sent))
            assert is_too_long(answer) or is_no_http(answer), sent[:50]
        # Headers without end are not read, so they take no memory.
        with connected(port, ASK) as connection:
            assert flood(connection, b"x-long: " + b"a" * 1000 + b"\r\n", 64 << 20) < 32 << 20
        # Each request has a head of its own, and bodies and answers do not count.
        long = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n" + b"{" * 300_000
        requests = (head_of(HEAD - 1000), long, head_of(HEAD - 1000), head_of(2 * HEAD))
        with connected(port) as connection:
            for request in requests[:3]:
                connection.sendall(request)
                assert answered(connection)
            connection.sendall(requests[3])
            assert is_too_long(until_closed(connection))


def test_small_parts_of_a_body_do_not_count_and_what_stands_behind_them_does() -> None:
    chunked = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served(App(), PATIENT) as port:
        # More than a head has around the bytes, and read by h11 before anybody loses patience.
        parts = b"1\r\n{\r\n" * (HEAD // 4)
        with connected(port, chunked, parts, b"0\r\n\r\n") as connection:
            assert answered(connection)
            connection.sendall(ASK + b"\r\n")
            assert answered(connection)
        # Trailers without end: the request was answered before, so the connection just ends.
        with connected(port, chunked, b"1\r\n{\r\n0\r\n") as connection:
            sent = flood(connection, b"x-trailer: " + b"a" * 1000 + b"\r\n", 64 << 20)
        assert sent < 16 << 20  # what lies in the sockets' buffers included


def test_a_running_answer_is_not_mixed_with_a_refusal() -> None:
    app = App()
    post = b"POST /slow HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served(app) as port:
        connection = connected(port, post)
        assert app.has_begun.wait(DEADLINE)
        connection.sendall(b"no chunk\r\n")  # the body turns out to be none
        answer = b""
        while b"}}" not in answer and (got := connection.recv(1000)):
            answer += got
        app.go_on.set()
        answer += until_closed(connection)
        assert b"yes" not in answer
        assert error_of(answer)
