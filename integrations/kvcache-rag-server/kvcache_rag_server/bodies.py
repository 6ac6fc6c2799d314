"""Bodies of requests: how much memory they take together, and reading their JSON.

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

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute

from kvcache_rag_server.backend import NOT_READY, OVERLOADED, Failed
from kvcache_rag_server.errors import AGAIN, FailedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from starlette.responses import Response

MOST_VALUES: Final = 20_000
"""Values in one body: texts, numbers, lists, objects and the names in them."""

DEEPEST: Final = 32
"""Lists and objects around a value."""

SMALL: Final = 64 << 10
"""Bytes of a body that is read where it is, and for which room is kept beside large ones."""

BLOCK: Final = 64 << 10
"""Bytes that are looked at in one piece: between two of them other threads have their turn."""

_SPARED: Final = 4  # of the memory of all bodies, a fourth is for small ones

_SCOPE: Final = "kvcache_rag.bodies"

_BRACKETS: Final = b"[]{}"
_BLANKS: Final = b" \t\r\n"
_NO_BRACKETS: Final = bytes(set(range(256)) - set(_BRACKETS))


class Bodies:
    """The bodies of all connections: bounded together, and read one after the other.

    One event loop uses it.

    Attributes:
        taken: Bytes of bodies whose requests are not over.
    """

    def __init__(self, limit: int) -> None:
        """Let bodies take `limit` bytes together; a fourth is for those that are small."""
        self.taken = 0
        self._limit = limit
        self._parser = ThreadPoolExecutor(1, "kvcache-rag-body")  # begins with the first large one

    @contextmanager
    def held(self) -> Iterator[HeldBody]:
        """Memory for the body of a request, until that is over."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self.taken -= body.nbytes

    def ensure_room(self, nbytes: int, more: int) -> None:
        """Refuse a body of `nbytes` that would be `more` bytes larger than there is room for.

        Raises:
            FailedRequest: 503.
        """
        limit = self._limit
        large = limit - limit // _SPARED
        if self.taken + more > (large if nbytes + more > SMALL else limit):
            raise FailedRequest(
                Failed(
                    NOT_READY,
                    OVERLOADED,
                    f"the bodies of all requests may have {limit} bytes together, the limit "
                    "total_body_bytes; repeat the request when others are answered",
                    AGAIN,
                )
            )

    async def parse(self, raw: bytes) -> Any:
        """A body as JSON.

        Raises:
            HTTPException: 400 if it is too deep or too much, or no UTF-8.
            ValueError: If it is no JSON.
        """
        if len(raw) <= SMALL:
            return _parsed(raw)
        return await asyncio.get_running_loop().run_in_executor(self._parser, _parsed, raw)


class HeldBody:
    """Memory of one body.

    Attributes:
        nbytes: How much it has.
    """

    def __init__(self, bodies: Bodies) -> None:
        self.nbytes = 0
        self._bodies = bodies

    def expect(self, nbytes: int) -> None:
        """Refuse a body of this size where there is no room now; none is taken.

        Raises:
            FailedRequest: 503.
        """
        self._bodies.ensure_room(0, nbytes)

    def grow(self, nbytes: int) -> None:
        """Take memory for further bytes.

        Raises:
            FailedRequest: 503 if there is none.
        """
        self._bodies.ensure_room(self.nbytes, nbytes)
        self.nbytes += nbytes
        self._bodies.taken += nbytes


def share(scope: Any, bodies: Bodies) -> None:
    """Let the routes that answer a request read its body by `bodies`."""
    scope[_SCOPE] = bodies


class CheckedRequest(Request):
    """A request whose JSON is neither too deep nor made of too many values."""

    async def json(self) -> Any:
        """The body as JSON.

        Raises:
            HTTPException: 400 if it is too deep or too much; FastAPI lets no other error pass.
            ValueError: If it is no JSON.
        """
        bodies: Bodies = self.scope[_SCOPE]
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
        HTTPException: 400.
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


def _refused(message: str) -> HTTPException:
    return HTTPException(400, message)
