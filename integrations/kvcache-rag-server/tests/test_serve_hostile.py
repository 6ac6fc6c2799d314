"""Requests that are made to break a server, as bytes over a socket: what 0.1.0 answered stays.

`tests/golden/hostile.json` was written once, from the answers of v0.1.0: whatever the server is
made of, each of these requests gets the status that it got then, by uvicorn's one HTTP parser or by
its other.  A request is a list of texts and how often each is repeated, in Latin-1.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from serve_fakes import DEADLINE
from serve_process import started, url_of

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "hostile.json"
REQUESTS: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
MOST = 256 << 20
"""Bytes by which all of them together may let a server grow: a body has 8 MiB, all have 64 MiB."""


class Server:
    """A server in a process of its own."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid, self.port = pid, port
        assert status_of(self.ask(HEALTH)) == 200
        self.before = self.peak

    @property
    def peak(self) -> int:
        """Bytes of memory that it had at most."""
        with open(f"/proc/{self.pid}/status", encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    def ask(self, *sent: bytes) -> bytes:
        """What it answers until it closes the connection, which it may do before all is sent."""
        found = b""
        with socket.create_connection(("127.0.0.1", self.port), DEADLINE) as connection:
            try:
                for one in sent:
                    connection.sendall(one)
            except (BrokenPipeError, ConnectionResetError):
                pass
            try:
                while got := connection.recv(1 << 16):
                    found += got
            except ConnectionResetError:
                pass
        return found


def status_of(answer: bytes) -> int | None:
    """Of an answer; None if the connection was closed without any."""
    return int(answer.split(None, 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    words = ("tiny", "--port", "0", "--max-body-seconds", "2")
    with started(*words, seconds=600) as (process, line, _):
        yield Server(process.pid, int(url_of(line).rpartition(":")[2]))


@pytest.mark.parametrize("request_", REQUESTS, ids=[one["name"] for one in REQUESTS])
def test_a_hostile_request_gets_the_status_that_it_always_got(
    server: Server, request_: dict[str, Any]
) -> None:
    sent = [text.encode("latin-1") * times for text, times in request_["sent"]]
    answer = server.ask(*sent)
    assert status_of(answer) in request_["statuses"], answer[:1000]
    assert b"Traceback" not in answer
    assert len(answer) < 8192  # nothing of it comes back
    assert status_of(server.ask(HEALTH)) == 200


def test_they_leave_memory_bounded(server: Server) -> None:
    sent = next(one["sent"] for one in REQUESTS if one["name"] == "body: lists")
    for _ in range(3):
        server.ask(*(text.encode("latin-1") * times for text, times in sent))
    assert server.peak - server.before < MOST
