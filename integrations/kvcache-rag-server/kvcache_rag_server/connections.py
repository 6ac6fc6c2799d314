"""HTTP on a connection: uvicorn's h11, with readable refusals and a limit on silence.

h11 counts the bytes of a head by itself.  Uvicorn says 400 in plain text to whatever h11 refuses,
breaks the connection under a client that still sends, which then never reads that, and closes an
idle connection only behind a first answer.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import sys
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Final

from h11 import IDLE
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcache_rag_server.backend import INVALID, Failed
from kvcache_rag_server.errors import body

if TYPE_CHECKING:
    from collections.abc import Mapping

HEAD: Final = 64 << 10
"""Bytes of a request's head: its first line and its headers."""

SETTINGS: Final[Mapping[str, Any]] = {"h11_max_incomplete_event_size": HEAD, "ws": "none"}
"""For `uvicorn.Config`, beside `http=patient(...)`."""

_LOG = logging.getLogger(__name__)

_SCARCE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TELL: Final = 60.0  # seconds between two lines

_PIECE: Final = 4 << 10  # bytes of a head that h11 is given before it looks how long that is

# A client that still sends reads its answer only if the connection is not broken under it.
_LINGER: Final = 1.0  # seconds in which what it still sends is thrown away
_MOST: Final = 1 << 20  # bytes of it


class Connection(H11Protocol):
    """A connection that may be silent for a while only.

    Attributes:
        patience: Seconds between two looks whether something is asked.
    """

    patience: ClassVar[float]

    _timer: asyncio.TimerHandle | None = None
    _seen: object = None
    _thrown_away: int | None = None  # bytes, once the client was refused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and self._thrown_away is None:
            room = _PIECE if self.conn.their_state is IDLE else HEAD
            piece, data = data[:room], data[room:]
            super().data_received(piece)
        if data:
            self._thrown_away = (self._thrown_away or 0) + len(data)
            if self._thrown_away > _MOST:
                self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong unless something else is being said, and close the connection.

        Uvicorn calls it in its handler of h11's error.
        """
        del msg
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        self._thrown_away, cycle = 0, self.cycle
        if cycle is not None and not cycle.response_complete:
            # As when the client leaves: nothing is sent behind what is sent now.
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        self.transport.write(_written(_TOO_LONG if status == _TOO_LONG.status else _NO_HTTP))
        self.transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER, self.transport.close)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.patience, self._look)

    def _look(self) -> None:
        is_asked = self.cycle is not None and not self.cycle.response_complete
        if not is_asked and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self._wait()


class AcceptErrors:
    """Handles what an event loop meets: of connections that have no room, one line a minute.

    While a process has no descriptor left, asyncio tries again once a second, and tells of it as
    often as there is room in the queue of connections.  They wait there until others end.
    """

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._told = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """As `loop.set_exception_handler` wants it."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _SCARCE:
            loop.default_exception_handler(context)
        elif loop.time() >= self._told + _TELL:
            self._told = loop.time()
            _LOG.warning(
                "connections wait until others end, as the system has no room for more (%s); "
                "raise the limit on open files (ulimit -n), or limit connections in a proxy",
                error.strerror,
            )


def patient(limit: float) -> type[Connection]:
    """What speaks HTTP and waits so long for a request: `uvicorn.Config(http=patient(15.0))`.

    Args:
        limit: Seconds for which a connection may be silent, or take to send the head of a request;
            up to twice that behind an answer.  An answer takes as long as it takes.
    """

    class Configured(Connection):
        patience = limit

    return Configured


_TOO_LONG: Final = Failed(
    431,
    INVALID,
    f"the head of the request has more than the {HEAD} bytes that are allowed; send fewer headers, "
    "or a shorter URL",
    code="headers_too_large",
)
_NO_HTTP: Final = Failed(400, INVALID, "this is no HTTP request; send one of HTTP/1.1")


def _written(failed: Failed) -> bytes:
    """The answer to a request that was not even read, on a connection that then ends."""
    content = json.dumps(body(failed)).encode()
    lines = (
        f"HTTP/1.1 {failed.status} {HTTPStatus(failed.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        f"x-request-id: req_{uuid.uuid4().hex}",
        "connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + content
