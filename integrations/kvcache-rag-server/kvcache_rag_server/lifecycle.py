"""One request from its admission to the last byte of its answer, whatever API it came by.

`respond` refuses, counts, streams, keeps silent connections awake, and takes the work back when the
client goes away.  What an answer looks like is said by a `CompletionForm`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from fastapi.responses import JSONResponse
from starlette.responses import Response

from kvcache_rag_server.backend import Failed, Finished, Piece, Started
from kvcache_rag_server.errors import ApiError, body, http_failure
from kvcache_rag_server.responses import DONE, HEARTBEAT, EventStream, frame
from kvcache_rag_server.traces import carried

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Awaitable,
        Callable,
        Coroutine,
        Iterator,
        Sequence,
    )
    from contextlib import AbstractAsyncContextManager

    from fastapi import Request

    from kvcache_rag_server.auth import KeyReloader
    from kvcache_rag_server.backend import Backend, BackendRequest, Event
    from kvcache_rag_server.keys import Caller
    from kvcache_rag_server.responses import CompletionForm
    from kvcache_rag_server.settings import ServerSettings
    from kvcache_rag_server.shutdown import Shutdown


_Got = TypeVar("_Got")

CLIENT_LEFT: Final = 499
"""Status of an answer whose client went away (nginx's number)."""


class Limiter(Protocol):
    """Refuses what is too much (`serve/limits.py`)."""

    def check(self, work: BackendRequest) -> None:
        """Look at documents and the length of the answer, not at the prompt.

        Raises:
            ApiError: 4xx that says which limit, and how much was asked for.
        """

    def admitted(self, caller: Caller, work: BackendRequest) -> AbstractAsyncContextManager[None]:
        """Let a request in; entering checks documents, bytes and tokens.

        Raises:
            ApiError: 4xx that says which limit, and how much was asked for.
        """


class Telemetry(Protocol):
    """Counts what happens (`serve/metrics.py`)."""

    def observe(self, route: str, caller: Caller, work: BackendRequest, event: Event) -> None:
        """An event on its way to the client.

        Args:
            route: "chat" or "completions".
            caller: Who asked.
            work: What.
            event: `Started`, `Piece`, `Finished` or `Failed`.
        """

    def left(self, route: str, caller: Caller, work: BackendRequest) -> None:
        """The client went away before its answer was complete."""

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Everything counted, as Prometheus reads it, and its content type.

        Args:
            accept: The `Accept` header.
        """


class Exchanges:
    """Requests that are being answered, so that some can be ended before their time."""

    def __init__(self) -> None:
        self._open: set[_Exchange] = set()

    def add(self, exchange: _Exchange) -> None:
        self._open.add(exchange)

    def discard(self, exchange: _Exchange) -> None:
        self._open.discard(exchange)

    def end(self, why: Callable[[Request, Caller], Failed | None]) -> None:
        """End requests: whole ones by this error, streams by an event that tells it.

        Args:
            why: What is told to the client of a request; None if it goes on.
        """
        for exchange in list(self._open):
            exchange.end(why)


@dataclass(frozen=True)
class AppContext:
    """What every router of the server works with: `router(context) -> APIRouter`.

    Attributes:
        backend: Answers.
        settings: What the server was told.
        authenticate: FastAPI dependency: `caller: Annotated[Caller,
            Depends(context.authenticate)]`; raises `ApiError` 401.
        limits: Refuses what is too much.
        telemetry: Counts what happens.
        exchanges: Requests that are being answered.
        shutdown: How the server ends, once it is told to.
        keys: Reads the file of API keys again; None for a server without.
    """

    backend: Backend
    settings: ServerSettings
    authenticate: Callable[..., Awaitable[Caller]]
    limits: Limiter
    telemetry: Telemetry
    exchanges: Exchanges
    shutdown: Shutdown
    keys: KeyReloader | None = None


class ClientLeft(Exception):  # no error: there is no client to tell
    """The client went away before its answer was complete."""


async def respond(
    context: AppContext,
    request: Request,
    caller: Caller,
    work: BackendRequest,
    form: CompletionForm,
    *,
    route: str,
) -> Response:
    """Answer a request, streamed if its work says so.

    A stream's status is sent with its first piece of text, so a failure before it has its own
    status; but after `settings.heartbeat` seconds of silence it is sent all the same, and comments
    follow, so that no proxy gives the connection up.

    Args:
        context: The server's.
        request: As it came, its body read.
        caller: Who asks.
        work: What.
        form: Writes the answer.
        route: Its name in metrics.

    Raises:
        ApiError: If there is no answer.
    """
    work = replace(work, trace=carried(request.headers))
    exchange = _Exchange(context, request, caller, work, route)
    try:
        if not work.streaming:
            return await _whole(exchange, form)
        silence = context.settings.heartbeat
        first = await _until_text(exchange, silence)
        frames = _frames(exchange, form, first, silence)
        stream = EventStream(frames, exchange.close)
        exchange.is_handed_on = True
        return stream
    except ClientLeft:
        return Response(status_code=CLIENT_LEFT)
    finally:
        if not exchange.is_handed_on:
            await exchange.close()


async def unless_left(request: Request, call: Coroutine[Any, Any, _Got]) -> _Got:
    """What a call gives; it is cancelled when the client goes away.

    Args:
        request: Its body read.
        call: What the client waits for.

    Raises:
        ClientLeft: If it went away.
    """
    tasks = asyncio.create_task(call), asyncio.create_task(_until_left(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientLeft
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


class _Exchange:
    """Events of one request, read in a task of its own; a second one watches for the client's end.

    Attributes:
        is_handed_on: Whether a stream closes it.
    """

    def __init__(
        self,
        context: AppContext,
        request: Request,
        caller: Caller,
        work: BackendRequest,
        route: str,
    ) -> None:
        self.is_handed_on = False
        self._context, self._caller, self._work, self._route = context, caller, work, route
        self._request = request
        self._events: asyncio.Queue[Event | ClientLeft] = asyncio.Queue()
        self._ended = self._is_read = False
        self._tasks = [
            asyncio.create_task(self._read()),
            asyncio.create_task(self._watch()),
        ]
        context.exchanges.add(self)

    async def next(self, seconds: float | None = None) -> Event | None:
        """The next event; None after so many seconds without one.

        Raises:
            ApiError: If the request failed.
            ClientLeft: If its client went away.
        """
        try:
            event = await asyncio.wait_for(self._events.get(), seconds)
        except asyncio.TimeoutError:
            return None
        if isinstance(event, ClientLeft):
            raise event
        if isinstance(event, Failed):
            raise ApiError.of(event)
        self._ended = isinstance(event, Finished)
        return event

    def end(self, why: Callable[[Request, Caller], Failed | None]) -> None:
        """Tell the client `why`, unless that is None or the whole answer is there already."""
        failed = None if self._is_read else why(self._request, self._caller)
        if failed is None:
            return
        self._tasks[0].cancel()
        while not self._events.empty():  # of a client that reads slowly
            self._events.get_nowait()
        self._told(failed)

    def _told(self, event: Event) -> None:
        self._is_read = isinstance(event, Finished | Failed)
        self._context.telemetry.observe(self._route, self._caller, self._work, event)
        self._events.put_nowait(event)

    async def close(self) -> None:
        """Take the work back unless it is done."""
        self._context.exchanges.discard(self)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def failure(self, error: Exception) -> Failed:
        """What the client reads of an error."""
        return http_failure(error, self._request.scope)

    async def _read(self) -> None:
        context, caller, work = self._context, self._caller, self._work
        last: Event | None = None
        try:
            async with (
                context.limits.admitted(caller, work),
                aclosing(context.backend.answer(work)) as events,
            ):
                async for event in events:
                    last = event
                    self._told(event)
            if not isinstance(last, Finished | Failed):
                raise RuntimeError("the backend gave no answer")
        except Exception as error:
            self._events.put_nowait(self.failure(error))

    async def _watch(self) -> None:
        await _until_left(self._request)
        if not self._ended:
            self._context.telemetry.left(self._route, self._caller, self._work)
            self._events.put_nowait(ClientLeft())


async def _whole(exchange: _Exchange, form: CompletionForm) -> Response:
    started = Started(0.0)
    while True:
        event = await exchange.next()
        if isinstance(event, Started):
            started = event
        elif isinstance(event, Finished):
            return JSONResponse(dict(form.whole(started, event.answer)))


async def _until_text(exchange: _Exchange, silence: float) -> list[Event | None]:
    """Events up to the first that shows that there is an answer, or None for too long a silence."""
    loop = asyncio.get_running_loop()
    until = loop.time() + silence
    events: list[Event | None] = []
    while not events or isinstance(events[-1], Started):
        events.append(await exchange.next(max(until - loop.time(), 0.0)))
    return events


async def _frames(
    exchange: _Exchange, form: CompletionForm, first: Sequence[Event | None], silence: float
) -> AsyncGenerator[bytes, None]:
    """The frames of a stream; a failure is the last one, since the status has been sent."""
    try:
        started = Started(0.0)
        for data in form.opening():
            yield frame(data)
        waiting = list(first)
        while True:
            event = waiting.pop(0) if waiting else await exchange.next(silence)
            if isinstance(event, Started):
                started = event
            for encoded in _written(form, event, started):
                yield encoded
            if isinstance(event, Finished):
                return
    except ClientLeft:
        return
    except Exception as error:
        yield frame(body(exchange.failure(error)))
        yield DONE


def _written(form: CompletionForm, event: Event | None, started: Started) -> Iterator[bytes]:
    """The frames of one event; a comment for too long a silence."""
    if event is None:
        yield HEARTBEAT
    elif isinstance(event, Piece):
        if event.text:
            yield frame(form.piece(event.text))
    elif isinstance(event, Finished):
        yield from map(frame, form.closing(started, event.answer))
        yield DONE
