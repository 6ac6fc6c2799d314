"""Request bodies: how large and slow they may be, alone and together, and their JSON.

A body may be small in bytes and large in work: eight megabytes of `[],[],…` are 2.7 million lists.
Every value is made, and every error of a body collected, before anybody looks at one of them, so
the structure is counted in the bytes.  What is large is read by one thread beside the event loop.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from fastapi import Request
from fastapi.routing import APIRoute

from kvcache_rag_server.backend import INVALID, NOT_READY, OVERLOADED, Failed
from kvcache_rag_server.errors import AGAIN, ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from starlette.responses import Response
    from starlette.types import Message, Receive

MOST_VALUES: Final = 20_000
"""Values in one body: texts, numbers, lists, objects and the names in them."""

DEEPEST: Final = 32
"""Lists and objects around a value."""

SMALL: Final = 64 << 10
"""Bytes of a body that is read where it is, and for which room is kept beside large ones."""

BLOCK: Final = 64 << 10
"""Bytes that are looked at in one piece: between two of them other threads have their turn."""

_SPARED: Final = 4  # of the memory of all bodies, a fourth is for small ones

_BRACKETS: Final = b"[]{}"
_BLANKS: Final = b" \t\r\n"
_NO_BRACKETS: Final = bytes(set(range(256)) - set(_BRACKETS))


class Bodies:
    """The bodies of all connections: bounded one by one and together, large ones read one by one.

    One event loop uses it.

    Attributes:
        taken: Bytes of bodies whose requests are not over.
    """

    def __init__(self, limit: int, most: int = 8 << 20, seconds: float = 15.0) -> None:
        """Let bodies take `limit` bytes together; a fourth is for those that are small.

        Args:
            limit: Bytes of all.
            most: Bytes of one.
            seconds: Within which a whole body has to be there.
        """
        self.taken = 0
        self._limit, self._most, self._seconds = limit, most, seconds
        self._parser = ThreadPoolExecutor(1, "kvcache-rag-body")  # begins with the first large one

    @contextmanager
    def incoming(self, receive: Receive, length: str) -> Iterator[Receive]:
        """The body of a request while it comes; its memory is free when the request is over.

        Args:
            receive: Of ASGI.
            length: The header `Content-Length`, whatever it says.

        Raises:
            ApiError: 413 or 503, here if that is known by the length, else as the body comes; 408
                if it does not.
        """
        self._check(0, int(length[:19]) if length.isascii() and length.isdigit() else 0)
        until: float | None = asyncio.get_running_loop().time() + self._seconds
        nbytes = 0

        async def counted() -> Message:
            nonlocal nbytes, until
            message = await self._next(receive, until)
            if message["type"] == "http.request":
                more = len(message.get("body", b""))
                self._check(nbytes, more)
                nbytes += more
                self.taken += more
            if not message.get("more_body", False):
                until = None  # what comes behind the body may take its time
            return message

        try:
            yield counted
        finally:
            self.taken -= nbytes

    async def _next(self, receive: Receive, until: float | None) -> Message:
        left = None if until is None else until - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(receive(), left)
        except asyncio.TimeoutError as error:
            message = (
                f"the body was not there within {self._seconds:g} seconds, the limit body_seconds; "
                "send it whole"
            )
            # What is still sent is not waited for: the connection ends with the answer.
            closing = {"connection": "close"}
            raise ApiError(
                Failed(408, INVALID, message, code="request_timeout"), closing
            ) from error

    def _check(self, nbytes: int, more: int) -> None:
        """Refuse a body of `nbytes` that would be `more` bytes larger than it may be.

        Raises:
            ApiError: 413, or 503 where other bodies have the room.
        """
        if nbytes + more > self._most:
            message = (
                f"the body has more than the {self._most} bytes that are allowed; send fewer "
                "documents"
            )
            raise ApiError(Failed(413, INVALID, message, code="request_too_large"))
        limit = self._limit
        large = limit - limit // _SPARED
        if self.taken + more > (large if nbytes + more > SMALL else limit):
            message = (
                f"the bodies of all requests may have {limit} bytes together, the limit "
                "total_body_bytes; repeat the request when others are answered"
            )
            raise ApiError(Failed(NOT_READY, OVERLOADED, message, AGAIN))

    async def parse(self, raw: bytes) -> Any:
        """A body as JSON.

        Raises:
            ApiError: 400 if it is too deep or too much, or no UTF-8.
            ValueError: If it is no JSON.
        """
        if len(raw) <= SMALL:
            return _parsed(raw)
        return await asyncio.get_running_loop().run_in_executor(self._parser, _parsed, raw)


class CheckedRequest(Request):
    """A request whose JSON, read by the app's `Bodies`, is neither too deep nor too many values."""

    async def json(self) -> Any:
        """The body as JSON.

        Raises:
            ApiError: 400 if it is too deep or too much.
            ValueError: If it is no JSON.
        """
        bodies: Bodies = self.app.state.bodies
        return await bodies.parse(await self.body())


class CheckedRoute(APIRoute):
    """A route that reads its body as a `CheckedRequest`: `APIRouter(route_class=CheckedRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the check."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await handle(CheckedRequest(request.scope, request.receive))

        return checked


def _parsed(raw: bytes) -> Any:
    # In UTF-16 half of another character may look like a quote, and hide what comes behind it.
    if json.detect_encoding(raw) not in ("utf-8", "utf-8-sig"):
        raise _refused("the body is not UTF-8, in which JSON is written; send it as UTF-8")
    check_structure(raw)
    return json.loads(raw)


def check_structure(raw: bytes) -> None:
    """Refuse JSON that is too deep, or made of too many values, before any is made.

    What is no JSON may pass: up to its first error, where reading ends, it is counted as well.

    Args:
        raw: In UTF-8.

    Raises:
        ApiError: 400.
        ValueError: If more is closed than was opened.
    """
    count, depth, quotes, start, opened = 1, 0, 0, 0, b""
    while start < len(raw):
        block = raw[start : start + BLOCK]
        # An escape is not cut: of an odd number of backslashes, the last one is for the next block.
        cut = (len(block) - len(block.rstrip(b"\\"))) % 2
        start += max(len(block) - cut, 1)
        block = block[: len(block) - cut].replace(b"\\\\", b"").replace(b'\\"', b"")
        is_inside = quotes % 2
        quotes += block.count(b'"')
        if quotes > 2 * MOST_VALUES:
            raise _refused(_TOO_MANY)
        # Of a text a quote is left, of an empty list or object a digit; the next block may say
        # whether the last one is empty.
        outside = b'"'.join(block.split(b'"')[is_inside::2]) + b'"' * (quotes % 2)
        outside = (opened + outside.translate(None, _BLANKS)).replace(b"[]", b"0")
        outside = outside.replace(b"{}", b"0")
        opened = outside[-1:] if outside.endswith((b"[", b"{")) else b""
        outside = outside.removesuffix(opened)
        count += sum(map(outside.count, (b",", b":", b"[", b"{")))
        if count > MOST_VALUES:
            raise _refused(_TOO_MANY)
        depth = _depth_behind(outside.translate(None, _NO_BRACKETS), depth)


def _depth_behind(brackets: bytes, depth: int) -> int:
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            raise _refused(_TOO_DEEP)
        if depth < 0:
            raise json.JSONDecodeError("nothing is open that could be closed", "", 0)
    return depth


_TOO_DEEP: Final = (
    f"the body is nested deeper than the {DEEPEST} levels that are allowed; send it flatter"
)
_TOO_MANY: Final = (
    f"the body is made of more than the {MOST_VALUES} values that are allowed; send fewer messages "
    "or documents"
)


def _refused(message: str) -> ApiError:
    return ApiError(Failed(400, INVALID, message))
