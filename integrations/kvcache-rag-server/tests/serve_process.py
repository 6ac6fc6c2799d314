"""A server in a process of its own, or asked once; who waits to be told, and who reads nothing."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from serve_fakes import DEADLINE, Script, Scripted, answer, client, says_yes, scripted

from kvcache_rag_server.backend import BackendRequest, Event, Finished, Piece, Started

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

CHAT = "/v1/chat/completions"
_COMMAND = ("-m", "kvcache_rag.cli", "serve")


@contextmanager
def started(
    *words: str, command: tuple[str, ...] = _COMMAND, seconds: float = 2 * DEADLINE
) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """A server for so long, once it has said that it is there; what it said, and its log.

    A log in a pipe would stop it as soon as that is full.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        (log := Path(folder) / "log").open("w") as errors,
        subprocess.Popen(
            [sys.executable, *command, *words], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        killer = threading.Timer(seconds, process.kill)
        killer.start()
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise AssertionError(log.read_text())
            yield process, line, log
        finally:
            killer.cancel()
            if process.poll() is None:
                process.kill()


def url_of(line: str) -> str:
    found = re.search(r" at (http://[^ ]+)/v1,", line)
    assert found, line
    return found[1]


async def posted(
    body: Any, path: str = CHAT, script: Script = says_yes, **settings: Any
) -> tuple[httpx.Response, Scripted]:
    """The reply of a server that follows a script, and its backend."""
    app, backend = scripted(script, **settings)
    content = body if isinstance(body, str) else json.dumps(body)
    async with client(app) as http:
        headers = {"content-type": "application/json"}
        return await http.post(path, content=content, headers=headers), backend


class Paced:
    """A script that says a letter and waits until it is told to go on."""

    def __init__(self) -> None:
        self.go_on, self._begun = threading.Event(), threading.Semaphore(0)

    async def __call__(self, work: BackendRequest) -> AsyncGenerator[Event, None]:
        yield Started(0.0)
        yield Piece("y")
        self._begun.release()
        while not self.go_on.is_set():
            await asyncio.sleep(0.005)
        yield Piece("es")
        yield Finished(answer())

    def wait(self) -> None:
        """Until one more request has come so far."""
        assert self._begun.acquire(timeout=DEADLINE)


def send(url: str, body: dict[str, Any], path: str = CHAT) -> socket.socket:
    """Send a request and read nothing of the answer."""
    request = httpx.Request("POST", url + path, json=body)
    lines = [f"{name}: {value}" for name, value in request.headers.items()]
    head = "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""])
    connection = socket.create_connection(("127.0.0.1", httpx.URL(url).port), DEADLINE)
    connection.sendall(head.encode() + request.content)
    return connection
