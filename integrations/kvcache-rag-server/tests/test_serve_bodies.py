"""Bodies that are small in bytes and large in work hold nobody up, and all of them have room."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import HTTPException
from pace import seconds_to_make
from serve_fakes import DEADLINE, chat, client, says_nothing, scripted

from kvcache_rag_server import bodies, startup
from kvcache_rag_server.bodies import DEEPEST, MOST_VALUES, SMALL, Bodies, check_structure
from kvcache_rag_server.settings import RequestLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    import httpx
    from fastapi import FastAPI

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
MEBIBYTE = 1 << 20

TICK = 0.01
"""Seconds between two looks at the clock."""
VALUES = 500_000
"""An event loop may look at nothing for as long as the machine takes to make so many lists."""
SOON = 3.0
"""Seconds of computing: more than any answer takes."""
TRIES = 5
"""A machine that is busy may stall any of them; a server that stalls, stalls all."""


class Ticker:
    """How many seconds an event loop did nothing else, at most.

    Time in which this process did not compute does not count: other processes had its cores.
    """

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        before = (time.perf_counter(), time.process_time())
        while True:
            await asyncio.sleep(TICK)
            now = (time.perf_counter(), time.process_time())
            passed, computed = now[0] - before[0], now[1] - before[1]
            self.longest = max(self.longest, min(passed - TICK, computed))
            before = now


@pytest.fixture(scope="module")
def as_served() -> Iterator[None]:
    """What other tests left behind is no more walked by the garbage collector than in a server."""
    with startup.frozen():
        yield


@asynccontextmanager
async def ticking() -> AsyncIterator[Ticker]:
    ticker = Ticker()
    task = asyncio.create_task(ticker.run())
    await asyncio.sleep(2 * TICK)
    try:
        yield ticker
        await asyncio.sleep(2 * TICK)  # it looks once more
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def dumped(body: Any) -> bytes:
    return json.dumps(body).encode()


def ending(body: Any, rest: str) -> bytes:
    """A body with a further field, which is too large to make it of Python's values."""
    return (json.dumps(body)[:-1] + f", {rest}}}").encode()


# ---------------------------------------------------------------------- the structure
def is_refused(raw: bytes) -> bool:
    try:
        check_structure(raw)
    except HTTPException as error:
        return error.status_code == 400
    return False


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_the_structure_is_counted_up_to_its_bounds() -> None:
    for raw in (
        b"",
        b"7",
        b'""',
        nested(DEEPEST + 1),
        b'{"a":' * DEEPEST + b"1" + b"}" * DEEPEST,
        b"[" + b",".join([b"1"] * (MOST_VALUES - 1)) + b"]",
        b"[" + b",".join([nested(DEEPEST)] * 600) + b"]",
    ):
        assert not is_refused(raw), raw[:50]
    for raw in (
        nested(DEEPEST + 2),
        b"[" * DEEPEST + b"[1" + b"]" * (DEEPEST + 1),
        b'{"a":' * (DEEPEST + 2),
        b"[" + b",".join([b"1"] * MOST_VALUES) + b"]",
        b"{" + b",".join([b'"":1'] * MOST_VALUES) + b"}",
        b'{"a":1,' * MOST_VALUES,
    ):
        assert is_refused(raw), raw[:50]


def counted(value: Any) -> tuple[int, int]:
    """Values of JSON that was read, the names in objects among them, and levels around one."""
    if isinstance(value, dict):
        parts = [counted(one) for one in value.values()]
        return 1 + len(value) + sum(n for n, _ in parts), max((d + 1 for _, d in parts), default=0)
    if isinstance(value, list):
        parts = [counted(one) for one in value]
        return 1 + sum(n for n, _ in parts), max((d + 1 for _, d in parts), default=0)
    return 1, 0


def test_the_count_is_that_of_the_values_whatever_the_text_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random bodies in blocks of a few bytes: refused as too much if and only if they are."""
    chance = random.Random(7)

    def some(depth: int) -> Any:
        kind = chance.randrange(6 if depth else 3)
        if kind < 2:
            return "".join(chance.choices('\\"[]{},: aé\u2222\n', k=chance.randrange(9)))
        if kind < 4 and depth:
            return [some(depth - 1) for _ in range(chance.randrange(5))]
        if kind == 4:
            names = ("".join(chance.choices('\\"[{,:a', k=3)) for _ in range(chance.randrange(4)))
            return {name: some(depth - 1) for name in names}
        return chance.choice([1, -2.5e3, True, None])

    monkeypatch.setattr(bodies, "BLOCK", 5)
    tried: Counter[int] = Counter()
    for _ in range(2000):
        value = some(5)
        raw = json.dumps(value, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1]))
        values, depth = counted(value)
        bounds = [(values, depth), (values - 1, depth), (values, depth - 1)]
        for most, deepest in bounds[: 2 + bool(depth)]:
            monkeypatch.setattr(bodies, "MOST_VALUES", most)
            monkeypatch.setattr(bodies, "DEEPEST", deepest)
            assert is_refused(raw.encode()) == ((most, deepest) != (values, depth)), raw
            tried[depth] += 1
    assert all(tried[depth] > 20 for depth in range(6))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-32-be", "utf-8-sig"])
async def test_only_utf_8_is_read_where_structure_could_hide(encoding: str) -> None:
    """In UTF-16 any character may look like a quote; the standard allows UTF-8 alone."""
    app, _ = scripted()
    async with client(app) as http:
        reply = await http.post(CHAT, content=json.dumps(chat()).encode(encoding), headers=JSON)
    assert reply.status_code == (200 if encoding == "utf-8-sig" else 400)
    assert ("UTF-8" in reply.text) is (reply.status_code == 400)


# ---------------------------------------------------------------------- the loop
HOSTILE: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b'{"x":[' + b"[]," * 2_700_000 + b"[]]}",
    "objects": lambda: b'{"x":[' + b"{}," * 2_700_000 + b"{}]}",
    "strings": lambda: b'{"x":[' + b'"",' * 2_700_000 + b'""]}',
    "numbers": lambda: b"[" + b"1," * 4_000_000 + b"1]",
    "names": lambda: ending(chat(), '"metadata": {' + '"":1,' * 1_500_000 + '"":1}'),
    "brackets": lambda: b"[" * 8_000_000,
    "closed": lambda: b"]" * 8_000_000,
    "quotes": lambda: b'"' * 8_000_000,
    "backslashes": lambda: b'{"x": "' + b"\\\\" * 4_000_000 + b'"}',
    "escapes": lambda: b'{"x": "' + b"\\n" * 4_000_000 + b'"}',
    "escaped quotes": lambda: b'{"x": "' + b'\\"a' * 2_700_000 + b'"}',
    "spaces": lambda: b'{"x":' + b" " * 8_000_000 + b"1}",
    "digits": lambda: b'{"x":1.' + b"1" * 8_000_000 + b"}",
    "empty parts": lambda: dumped(
        {**chat(), "messages": [{"role": "user", "content": [{"type": "text"}] * 6000}]}
    ),
    "empty messages": lambda: dumped({**chat(), "messages": [{}] * 9000}),
    "empty documents": lambda: dumped(chat(documents=[{}] * 9000)),
    "unknown fields": lambda: dumped({f"f{at}": at for at in range(9000)}),
    "long number": lambda: ending(chat(), f'"max_tokens": {"9" * 2_000_000}'),
    "deep": lambda: nested(4_000_000),
}


async def asked_in_time(app: FastAPI, body: bytes) -> httpx.Response:
    """The answer to a body that holds the loop up for no longer than it may."""
    stalls = []
    async with client(app) as http:
        assert (await http.get("/v1/models")).status_code == 200
        for _ in range(TRIES):
            before = time.process_time()
            async with ticking() as ticker:
                reply = await http.post(CHAT, content=body, headers=JSON)
            assert time.process_time() - before < SOON
            stalls.append(ticker.longest / seconds_to_make(VALUES))
            if stalls[-1] <= 1:
                break
    assert min(stalls) <= 1
    return reply


@pytest.mark.usefixtures("as_served")
@pytest.mark.parametrize("name", HOSTILE)
async def test_no_body_holds_the_loop_up(name: str) -> None:
    app, backend = scripted()
    reply = await asked_in_time(app, HOSTILE[name]())
    assert reply.status_code == 400, reply.text[:200]
    assert len(error_of(reply)["message"]) < 1000
    assert not backend.works


@pytest.mark.usefixtures("as_served")
async def test_a_document_that_is_json_is_answered_and_holds_nobody_up() -> None:
    limits = RequestLimits(max_document_bytes=8 * MEBIBYTE)
    app, backend = scripted(limits=limits)
    text = json.dumps([{"key": [at, "\\"]} for at in range(230_000)])
    body = dumped(chat(documents=[text]))
    assert 7_000_000 < len(body) < limits.max_body_bytes
    assert (await asked_in_time(app, body)).status_code == 200
    assert {work.chunks for work in backend.works} == {(text,)}


# ---------------------------------------------------------------------- their memory
def error_of(reply: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    return error


async def piecewise(size: int, go_on: asyncio.Event) -> AsyncIterator[bytes]:
    """A body of this size, all but its last bytes at once."""
    body = ending(chat(), '"metadata": {"x": "' + "x" * size + '"}')
    yield body[:size]
    await go_on.wait()
    yield body[size:]


async def until(condition: Callable[[], bool]) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), DEADLINE)


async def test_bodies_share_the_memory_of_all_connections() -> None:
    limits = RequestLimits(max_body_bytes=3 * MEBIBYTE, max_total_body_bytes=8 * MEBIBYTE)
    app, _ = scripted(limits=limits)
    held = memory_of(app)
    go_on, size = asyncio.Event(), 2 * MEBIBYTE - 10_000
    async with client(app) as http:

        async def post(size: int) -> httpx.Response:
            return await http.post(CHAT, content=piecewise(size, go_on), headers=JSON)

        first = [asyncio.create_task(post(size)) for _ in range(3)]
        await until(lambda: held.taken >= 3 * size)
        # Of unknown length, and of a length that is said: neither has room.
        more = piecewise(MEBIBYTE, asyncio.Event())
        refused = await http.post(CHAT, content=more, headers=JSON)
        told = await http.post(CHAT, content=b" " * MEBIBYTE, headers=JSON)
        for reply in (refused, told):
            assert reply.status_code == 503
            assert error_of(reply)["type"] == "overloaded"
            assert "total_body_bytes" in error_of(reply)["message"]
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.headers["x-request-id"].startswith("req_")
        # What is small has room of its own.
        assert (await http.post(CHAT, json=chat("?" * 10_000))).status_code == 200
        go_on.set()
        for reply in await asyncio.gather(*first):
            assert reply.status_code == 200
        assert held.taken == 0
        assert (await post(size)).status_code == 200


async def test_the_memory_is_free_when_a_request_ends_however_it_ends() -> None:
    app, backend = scripted(says_nothing)
    held = memory_of(app)
    async with client(app) as http:
        waiting = asyncio.create_task(http.post(CHAT, json=chat("?" * MEBIBYTE)))
        assert await asyncio.to_thread(backend.has_begun.wait, DEADLINE)
        assert held.taken > MEBIBYTE  # its text waits with it
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: held.taken == 0)
        assert (await http.post(CHAT, content=b"no JSON", headers=JSON)).status_code == 400
        assert held.taken == 0


def memory_of(app: FastAPI) -> Bodies:
    (found,) = (one.kwargs["bodies"] for one in app.user_middleware if "bodies" in one.kwargs)
    assert isinstance(found, Bodies)
    return found


async def test_one_thread_reads_all_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    names, at_once, most = set(), 0, 0
    whole = bodies.check_structure

    def noting(raw: bytes) -> None:
        nonlocal at_once, most
        names.add(threading.current_thread().name)
        at_once += 1
        most = max(most, at_once)
        whole(raw)
        at_once -= 1

    monkeypatch.setattr(bodies, "check_structure", noting)
    app, _ = scripted()
    async with client(app) as http:
        asked = [http.post(CHAT, json=chat("?" * (2 * SMALL))) for _ in range(8)]
        assert {reply.status_code for reply in await asyncio.gather(*asked)} == {200}
    assert most == 1
    assert len(names) == 1
    assert threading.main_thread().name not in names


# ---------------------------------------------------------------------- garbage collection
def test_what_is_loaded_is_not_walked_while_serving() -> None:
    gc.unfreeze()  # what the tests above froze
    before = gc.get_freeze_count()
    with startup.frozen():
        assert gc.get_freeze_count() > before + 1000
    assert gc.get_freeze_count() == before
