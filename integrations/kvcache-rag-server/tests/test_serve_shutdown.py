"""The end of a server: nothing new is taken, what waits is refused, what runs has the grace."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from serve_fakes import DEADLINE, Scripted, chat, client, data_of, says_nothing, scripted, settings
from serve_process import CHAT, Paced, send, started, url_of
from serve_works import Valve, loaded, reader

from kvcache_rag_server import shutdown
from kvcache_rag_server.app import build_app
from kvcache_rag_server.backend import BackendRequest, Event, Piece, Started
from kvcache_rag_server.keys import new_key
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.startup import server_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path
    from subprocess import Popen

    from fastapi import FastAPI

LONG = 60.0  # seconds of grace that no test waits for
SHORT = 1.0  # seconds of grace that tests wait for
EXPLAIN = {"documents": ["A lamp."], "kvcache": {"policy": "reuse"}}


@pytest.fixture
def long_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a short grace is for telling: a tenth of a second is little on a busy machine."""
    monkeypatch.setattr(shutdown, "PART", 0.9)


class Served:
    """A server in a thread, told to end as by a signal."""

    def __init__(self, app: FastAPI) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.server, self.shutdown = server_of(app), app.state.context.shutdown
        self.told = 0.0
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve([self.listener]))
        )
        self._thread.start()

    def end(self) -> None:
        self.told = self.told or time.monotonic()
        self.server.handle_exit(signal.SIGTERM, None)

    def join(self) -> float:
        """Wait for the end; seconds since the signal."""
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        return time.monotonic() - self.told


@contextmanager
def served(app: FastAPI) -> Iterator[Served]:
    one = Served(app)
    try:
        yield one
    finally:
        one.end()
        one.end()
        one.join()


class Call(threading.Thread):
    """A request in a thread of its own.

    Attributes:
        seconds: When its answer was complete, on the monotonic clock.
    """

    def __init__(self, url: str, path: str = CHAT, **fields: Any) -> None:
        super().__init__()
        self._url, self._body = url + path, chat(**fields)
        self._got: httpx.Response | httpx.HTTPError | None = None
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        try:
            self._got = httpx.post(self._url, json=self._body, timeout=DEADLINE)
        except httpx.HTTPError as error:
            self._got = error
        self.seconds = time.monotonic()

    def done(self) -> httpx.Response:
        self.join(DEADLINE)
        assert isinstance(self._got, httpx.Response), self._got
        return self._got


def ensure_refused(reply: httpx.Response) -> None:
    """The one answer to what is not answered any more."""
    assert reply.status_code == 503, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")
    assert int(reply.headers["retry-after"]) > 0
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("server_error", "shutting_down")


def ensure_cut(reply: httpx.Response) -> list[Any]:
    """What a stream sent before it was told; it was told, and ended as streams do."""
    assert reply.status_code == 200
    *before, error, done = data_of(reply.text)
    assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")
    return before


def until(true: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, "it never came so far"
        time.sleep(0.005)


# ---------------------------------------------------------------------- nothing new
@pytest.mark.parametrize("path", ["/ready", "/v1/models", "/", "/metrics", "/nothing"])
async def test_from_the_signal_on_everything_is_refused(path: str) -> None:
    app, backend = scripted()
    async with client(app) as http:
        assert (await http.get(path)).status_code in (200, 404)
        app.state.context.shutdown.signal()
        ensure_refused(await http.get(path))
        ensure_refused(await http.post(CHAT, json=chat()))
        assert (await http.get("/health")).json() == {"status": "ok"}
    assert not backend.works


async def test_strangers_learn_nothing_of_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = new_key(file, "acme")
    app, _ = scripted(api_keys=file)
    app.state.context.shutdown.signal()
    async with client(app) as http:
        assert (await http.post(CHAT, json=chat())).status_code == 401
        ensure_refused(
            await http.post(CHAT, json=chat(), headers={"authorization": f"Bearer {key}"})
        )


def test_no_connection_is_accepted_and_silent_ones_are_closed() -> None:
    pace = Paced()
    app, _ = scripted(pace, grace=LONG)
    with served(app) as server:
        idle = socket.create_connection(server.address, DEADLINE)
        running = Call(server.url, stream=True)
        pace.wait()
        server.end()
        assert idle.recv(1) == b""
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/ready")
        assert running.is_alive()
        pace.go_on.set()
        assert data_of(running.done().text)[-1] == "[DONE]"
        idle.close()


# ---------------------------------------------------------------------- what runs
@pytest.mark.parametrize("stream", [True, False])
def test_what_runs_may_finish(stream: bool) -> None:
    pace = Paced()
    app, backend = scripted(pace, grace=LONG)
    with served(app) as server:
        running = Call(server.url, stream=stream)
        pace.wait()
        server.end()
        until(lambda: server.shutdown.is_begun)
        pace.go_on.set()
        reply = running.done()
        assert server.join() < LONG / 2
    assert reply.status_code == 200
    if stream:
        events = data_of(reply.text)
        said = "".join(one["choices"][0]["delta"].get("content") or "" for one in events[:-1])
        assert (said, events[-1]) == ("yes", "[DONE]")
    else:
        assert reply.json()["choices"][0]["message"]["content"] == "yes"
    assert not backend.was_taken_back.is_set()


def test_what_does_not_finish_is_told_before_the_grace_ends() -> None:
    pace = Paced()
    app, backend = scripted(pace, grace=5)
    with served(app) as server:
        calls = [Call(server.url, stream=stream) for stream in (True, False, True)]
        for _ in calls:
            pace.wait()
        server.end()
        streamed, whole, other = (call.done() for call in calls)
        seconds = [call.seconds - server.told for call in calls]
        server.join()
    ensure_refused(whole)
    for reply in (streamed, other):
        begun = ensure_cut(reply)
        assert begun[-1]["choices"][0]["delta"] == {"content": "y"}
    assert backend.was_taken_back.is_set()
    assert all(2.5 < one < 5 for one in seconds), seconds


@pytest.mark.usefixtures("long_margin")
@pytest.mark.parametrize(("path", "stream"), [(CHAT, True), ("/v1/completions", False)])
def test_what_never_began_is_told_as_well(path: str, stream: bool) -> None:
    backend = Scripted(says_nothing)
    app = build_app(backend, settings(grace=SHORT))
    body = chat() if path == CHAT else {"model": "tiny", "prompt": "Who?"}

    def end() -> None:
        backend.has_begun.wait(DEADLINE)
        server.end()

    with served(app) as server, httpx.Client(timeout=DEADLINE) as http:
        threading.Thread(target=end).start()
        ensure_refused(http.post(server.url + path, json={**body, "stream": stream}))


@pytest.mark.usefixtures("long_margin")
def test_a_stream_of_which_only_comments_were_sent_is_told_by_an_event() -> None:
    app, _ = scripted(says_nothing, grace=SHORT, heartbeat=0.02)
    with (
        served(app) as server,
        httpx.stream("POST", server.url + CHAT, json=chat(stream=True), timeout=DEADLINE) as reply,
    ):
        lines = []
        for line in reply.iter_lines():
            if line == ": waiting" and not server.told:
                server.end()
            lines.append(line)
    error, done = data_of("\n".join(lines))[-2:]
    assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")


@pytest.mark.usefixtures("long_margin")
def test_a_body_that_does_not_come_is_refused_by_then() -> None:
    app, backend = scripted(grace=SHORT)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
    with served(app) as server, socket.create_connection(server.address, DEADLINE) as connection:
        connection.sendall(f"{head}{{".encode())
        until(lambda: server.server.server_state.tasks)
        server.end()
        got = b""
        while more := connection.recv(4096):
            got += more
    head, _, body = got.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 503 ")
    assert "x-request-id: req_" in head
    assert json.loads(body)["error"]["code"] == "shutting_down"
    assert not backend.works


class Deaf(Scripted):
    """A backend that hears nothing of an end, and explains for ever."""

    def __init__(self) -> None:
        super().__init__(says_nothing)
        self.explains = threading.Event()

    async def explain(self, work: BackendRequest) -> Any:
        self.explains.set()
        await asyncio.Event().wait()

    async def drain(self) -> None:
        raise RuntimeError("no replica hears")


@pytest.mark.usefixtures("long_margin")
def test_a_backend_that_hears_nothing_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    backend = Deaf()
    with served(build_app(backend, settings(grace=SHORT))) as server:
        explained = Call(server.url, "/v1/explain", **EXPLAIN)
        assert backend.explains.wait(DEADLINE)
        server.end()
        ensure_refused(explained.done())
        server.join()
    assert "no replica hears" in caplog.text


@pytest.mark.usefixtures("long_margin")
def test_a_client_that_reads_nothing_holds_nobody_up() -> None:
    """Its connection breaks off: what it did not read cannot be followed by an event."""
    is_full = threading.Event()

    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        yield Started(0.0)
        for _ in range(20_000):
            yield Piece("x" * 1000)
        is_full.set()
        await asyncio.Event().wait()

    app, _ = scripted(script, grace=SHORT)
    with served(app) as server, send(server.url, chat(stream=True)):
        assert is_full.wait(DEADLINE)
        server.end()
        server.join()
    assert server.shutdown.is_complete


@pytest.mark.parametrize(("grace", "signals"), [(LONG, 2), (0, 1)])
def test_at_a_second_signal_or_without_a_grace_what_runs_is_told_at_once(
    grace: float, signals: int
) -> None:
    pace = Paced()
    app, _ = scripted(pace, grace=grace)
    with served(app) as server:
        calls = [Call(server.url, stream=stream) for stream in (True, False)]
        for _ in calls:
            pace.wait()
        server.end()
        if signals == 2:
            time.sleep(0.2)
            assert all(call.is_alive() for call in calls)
            server.end()
        ensure_cut(calls[0].done())
        ensure_refused(calls[1].done())
        assert server.join() < LONG / 2


# ---------------------------------------------------------------------- a real model
@pytest.mark.usefixtures("long_margin")
def test_a_forward_pass_that_does_not_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutdown, "MODEL_WAIT", 0.2)
    valve = Valve(loaded()[0], monkeypatch)
    backend = LocalBackend(reader(), name="tiny")
    with served(build_app(backend, settings(grace=SHORT))) as server:
        until(lambda: httpx.get(f"{server.url}/ready", timeout=DEADLINE).status_code == 200)
        valve.close()
        running = Call(server.url)
        assert valve.held.wait(DEADLINE)
        server.end()
        ensure_refused(running.done())
        until(lambda: not server.shutdown.is_complete)
        valve.open.set()  # the loop's end waits for the thread; the command does not
        server.join()


# ---------------------------------------------------------------------- a process
# From SIGUSR1 on, every forward pass of its model takes as long as the first argument says.
SLOW = """
import functools, signal, sys, threading, time
from kvcache_rag_server import startup
is_slow = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: is_slow.set())
seconds, open_engine = float(sys.argv.pop(1)), startup.open_engine
def opened(settings):
    engine = open_engine(settings)
    forward = engine.model.forward
    @functools.wraps(forward)
    def slow(*arguments, **options):
        time.sleep(seconds if is_slow.is_set() else 0)
        return forward(*arguments, **options)
    engine.model.forward = slow
    return engine
startup.open_engine = opened
from kvcache_rag.cli import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""


@contextmanager
def process(seconds: float, *words: str) -> Iterator[tuple[Popen[str], str, Path]]:
    command = ("-c", SLOW, str(seconds), "tiny", "--port", "0")
    with started(*words, command=command) as (found, line, log):
        found.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        yield found, url_of(line), log


@contextmanager
def begun(url: str, key: str) -> Iterator[Iterator[str]]:
    """The lines of a stream of which the first text has come."""
    body = chat("Tell a long story.", stream=True, max_tokens=60, temperature=2, seed=1)
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream("POST", url + CHAT, json=body, headers=headers, timeout=DEADLINE) as reply:
        lines = reply.iter_lines()
        while not re.search(r'"content":"[^"]', next(lines)):
            continue
        yield lines


def test_by_sighup_a_process_reads_its_keys_again_and_by_sigterm_it_ends_well(
    tmp_path: Path,
) -> None:
    """A revoked key ends its stream, a new one is known; whoever waits at the end is told."""
    file = tmp_path / "keys"
    key = new_key(file, "acme")
    with process(0.2, "--grace", "2", "--api-keys", str(file)) as (server, url, log):

        def status(one: str) -> int:
            server.send_signal(signal.SIGHUP)
            headers = {"authorization": f"Bearer {one}"}
            return httpx.get(f"{url}/v1/models", headers=headers, timeout=DEADLINE).status_code

        with begun(url, key) as lines:
            file.write_text("")
            file.chmod(0o600)
            other = new_key(file, "globex")
            until(lambda: status(key) == 401)
            assert status(other) == 200
            error, done = data_of("\n".join(lines))[-2:]
        assert (error["error"]["code"], done) == ("invalid_api_key", "[DONE]")
        file.unlink()
        assert [status(other) for _ in range(5)] == [200] * 5
        with begun(url, other) as lines:
            server.send_signal(signal.SIGTERM)
            error, done = data_of("\n".join(lines))[-2:]
        assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")
        server.wait(DEADLINE)
        complaints = log.read_text()
    assert server.returncode == 0
    assert "stay as they were" in complaints
    assert key not in complaints


def test_a_second_signal_ends_a_process_whose_model_is_stuck() -> None:
    with process(DEADLINE, "--grace", str(LONG)) as (server, url, log):
        running = Call(url)
        time.sleep(1.0)
        server.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert running.is_alive()
        assert server.poll() is None
        server.send_signal(signal.SIGTERM)
        ensure_refused(running.done())
        server.wait(LONG / 2)
        complaints = log.read_text()
    assert server.returncode == 1
    assert "Traceback" not in complaints
    assert "ends with the process" in complaints
