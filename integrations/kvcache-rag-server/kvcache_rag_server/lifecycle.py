"""One request from its admission to the last byte of its answer, for every API.

An `AnswerResponse` refuses, counts, streams, keeps silent connections awake, and takes the work
back when the client goes away.  What an answer looks like is said by a `AnswerForm`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.responses import Response

from kvcache_rag_server.backend import Failed, Finished, Piece, Started
from kvcache_rag_server.errors import CLIENT_LEFT, ApiError, body, http_failure
from kvcache_rag_server.responses import HEARTBEAT, STREAM_HEADERS, frame
from kvcache_rag_server.traces import carried

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator

    from fastapi import Request
    from starlette.types import Receive, Scope, Send
    from typing_extensions import Self

    from kvcache_rag_server.auth import KeyReloader
    from kvcache_rag_server.backend import Backend, BackendRequest, Event
    from kvcache_rag_server.keys import Caller
    from kvcache_rag_server.limits import RequestLimiter
    from kvcache_rag_server.metrics import ServerTelemetry
    from kvcache_rag_server.packed import Recogniser
    from kvcache_rag_server.responses import AnswerForm
    from kvcache_rag_server.settings import ServerSettings
    from kvcache_rag_server.shutdown import Shutdown


_Got = TypeVar("_Got")


class Exchanges(set["_Exchange"]):
    """Requests that are being answered, so that some can be ended before their time."""

    def end(self, why: Callable[[Request, Caller], Failed | None]) -> None:
        """End requests: whole ones by this error, streams by an event that tells it.

        Args:
            why: What is told to the client of a request; None if it goes on.
        """
        for exchange in list(self):
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
        recogniser: Finds documents in messages; None for a server that leaves them there.
        keys: Reads the file of API keys again; None for a server without.
    """

    backend: Backend
    settings: ServerSettings
    authenticate: Callable[..., Awaitable[Caller]]
    limits: RequestLimiter
    telemetry: ServerTelemetry
    exchanges: Exchanges
    shutdown: Shutdown
    recogniser: Recogniser | None = None
    keys: KeyReloader | None = None


class AnswerResponse(Response):
    """Answers a request, streamed if its work says so.

    A stream's status is sent with its first piece of text, so a failure before it has its own
    status; but after `settings.heartbeat` seconds of silence it is sent all the same, and comments
    follow, so that no proxy gives the connection up.
    """

    def __init__(
        self,
        context: AppContext,
        request: Request,
        caller: Caller,
        work: BackendRequest,
        form: AnswerForm,
        *,
        route: str,
    ) -> None:
        """Nothing is asked yet.

        Args:
            context: The server's.
            request: As it came, its body read.
            caller: Who asks.
            work: What.
            form: Writes the answer.
            route: Its name in metrics.
        """
        super().__init__()
        work = replace(work, trace=carried(request.headers))
        self._silence = context.settings.heartbeat if work.streaming else None
        self._exchange, self._form = _Exchange(context, request, caller, work, route), form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer.

        Raises:
            ApiError: If there is no answer, before anything was sent.
        """
        async with self._exchange:
            if self._silence is None:
                await JSONResponse(await self._whole())(scope, receive, send)
                return
            async with aclosing(self._frames(self._silence)) as frames:
                data = await anext(frames)
                headers = Headers(STREAM_HEADERS).raw
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": data, "more_body": True})
                async for data in frames:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self) -> dict[str, Any]:
        started = Started(0.0)
        while True:
            event = await self._exchange.next()
            if isinstance(event, Started):
                started = event
            elif isinstance(event, Finished):
                return self._form.whole(started, event)

    async def _frames(self, silence: float) -> AsyncGenerator[bytes, None]:
        """The frames of a stream; a failure behind the first is the last one."""
        started, has_begun, is_over = Started(0.0), False, False
        loop = asyncio.get_running_loop()
        until = loop.time() + silence  # when the first frame is due, started or not
        try:
            while not is_over:
                seconds = silence if has_begun else max(until - loop.time(), 0.0)
                event = await self._exchange.next(seconds)
                is_over = isinstance(event, Finished)
                if isinstance(event, Started):
                    started = event
                    continue
                if not has_begun:
                    has_begun = True
                    for data in self._form.opening():
                        yield self._form.frame(data)
                for encoded in _written(self._form, event, started):
                    yield encoded
        except Exception as error:
            if not has_begun:
                raise
            yield frame(body(self._exchange.failure(error)))
            yield self._form.done


def _written(form: AnswerForm, event: Event | None, started: Started) -> Iterator[bytes]:
    """The frames of one event; a comment for too long a silence."""
    if event is None:
        yield HEARTBEAT
    elif isinstance(event, Piece):
        yield from map(form.frame, form.piece(event))
    elif isinstance(event, Finished):
        yield from map(form.frame, form.closing(started, event))
        yield form.done


class _Exchange:
    """Events of one request, read in a task of its own; a second one watches for the client's end.

    Left before its end, it takes the work back.
    """

    def __init__(
        self,
        context: AppContext,
        request: Request,
        caller: Caller,
        work: BackendRequest,
        route: str,
    ) -> None:
        self._context, self._request, self._caller = context, request, caller
        self._work, self._route = work, route
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = self._is_read = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        self._context.exchanges.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.exchanges.discard(self)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, seconds: float | None = None) -> Event | None:
        """The next event; None after so many seconds without one.

        Raises:
            ApiError: If the request failed, or its client went away.
        """
        try:
            event = await asyncio.wait_for(self._events.get(), seconds)
        except asyncio.TimeoutError:
            return None
        if isinstance(event, Failed):
            raise ApiError(event)
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

    def failure(self, error: Exception) -> Failed:
        """What the client reads of an error."""
        return http_failure(error, self._request.scope)

    def _told(self, event: Event) -> None:
        self._is_read = isinstance(event, Finished | Failed)
        self._context.telemetry.observe(self._route, self._caller, self._work, event)
        self._events.put_nowait(event)

    async def _read(self) -> None:
        work = self._work
        last: Event | None = None
        try:
            await self._context.limits.admit(work)
            async with aclosing(self._context.backend.answer(work)) as events:
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
            self._events.put_nowait(CLIENT_LEFT)


async def unless_left(request: Request, call: Coroutine[Any, Any, _Got]) -> _Got:
    """What a call gives; it is cancelled when the client goes away.

    Args:
        request: Its body read.
        call: What the client waits for.

    Raises:
        ApiError: If it went away.
    """
    tasks = asyncio.create_task(call), asyncio.create_task(_until_left(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ApiError(CLIENT_LEFT)
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
