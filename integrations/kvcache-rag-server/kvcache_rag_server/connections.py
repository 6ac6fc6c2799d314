"""What speaks HTTP on a connection: one of uvicorn's classes, with bounds for what comes on it.

Uvicorn gives up idle connections only behind a first answer, and none whose request never ends;
with httptools it keeps whatever heads a client sends, trailers behind a body among them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from http import HTTPStatus
from typing import Any, ClassVar, Final

from kvcache_rag_server.backend import INVALID, Failed
from kvcache_rag_server.errors import body

AUTO: Final = "auto"

HEAD: Final = 64 << 10
"""Bytes of a request's head: its first line and its headers."""

_PIECE: Final = 4 << 10  # bytes of a head that h11 is given before it looks how long that is

# A client that still sends reads its answer only if the connection is not broken under it.
_LINGER: Final = 1.0  # seconds in which what it still sends is thrown away
_MOST: Final = 1 << 20  # bytes of it


class Connection(asyncio.Protocol):
    """A connection that may be silent for a while only; mixed into a class of uvicorn's.

    Attributes:
        patience: Seconds between two looks whether something is asked.
        transport: Uvicorn's.
        cycle: Uvicorn's name of a request and its answer; the last one stays when it is over.
        conn: Its parser, if that is h11.
    """

    patience: ClassVar[float]
    transport: asyncio.Transport
    cycle: Any
    conn: Any

    _timer: asyncio.TimerHandle | None = None
    _seen: object = None
    _thrown_away: int | None = None  # bytes, once the client was refused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and self._thrown_away is None:
            room = self._room()
            piece, data = data[:room], data[room:]
            self._parse(piece)
        if data:
            self._throw_away(len(data))

    def send_400_response(self, msg: str) -> None:
        """Uvicorn calls it, in its handler of the parser's error, for what is no HTTP."""
        del msg
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)  # h11 counts heads by itself
        self._refuse(_TOO_LONG if status == _TOO_LONG.status else _NO_HTTP)

    def _room(self) -> int:
        """Bytes to parse before it is looked how long a head is."""
        from h11 import IDLE  # where this is not httptools, it is h11

        return _PIECE if self.conn.their_state is IDLE else HEAD

    def _parse(self, piece: bytes) -> None:
        super().data_received(piece)

    def _refuse(self, failed: Failed) -> None:
        """Say what is wrong unless something else is being said, and close the connection."""
        self._thrown_away, cycle = 0, self.cycle
        if cycle is not None and not cycle.response_complete:
            # As when the client leaves: nothing is sent behind what is sent now.
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        self.transport.write(_written(failed))
        self.transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER, self.transport.close)

    def _throw_away(self, nbytes: int) -> None:
        self._thrown_away = (self._thrown_away or 0) + nbytes
        if self._thrown_away > _MOST:
            self.transport.abort()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.patience, self._look)

    def _look(self) -> None:
        is_asked = self.cycle is not None and not self.cycle.response_complete
        if not is_asked and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self._wait()


class CountedConnection(Connection):
    """One of httptools, which counts nothing by itself.

    What stands between two parts of a body and behind the last one is counted as a head is.
    """

    _head = 0  # bytes since the last head or part of a body was complete

    def on_headers_complete(self) -> None:
        self._head = 0
        super().on_headers_complete()  # type: ignore[misc]  # of the class this is mixed into

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)  # type: ignore[misc]  # as above

    def on_message_complete(self) -> None:
        self._head = 0
        super().on_message_complete()  # type: ignore[misc]  # as above

    def _room(self) -> int:
        return HEAD - self._head

    def _parse(self, piece: bytes) -> None:
        self._head += len(piece)
        super()._parse(piece)
        if self._head >= HEAD and self._thrown_away is None:
            self._refuse(_TOO_LONG)


def patient(limit: float, http: str = AUTO) -> type[Connection]:
    """What speaks HTTP and waits so long for a request: `uvicorn.Config(http=patient(15.0))`.

    h11 counts heads by itself: say `h11_max_incomplete_event_size=HEAD`, too.

    Args:
        limit: Seconds for which a connection may be silent, or take to send the head of a request;
            up to twice that behind an answer.  An answer takes as long as it takes.
        http: Name of uvicorn's implementation: "auto", "h11" or "httptools".
    """
    from uvicorn.config import HTTP_PROTOCOLS
    from uvicorn.importer import import_from_string

    places: dict[str, str] = dict(HTTP_PROTOCOLS)
    implementation: Any = import_from_string(places[http])
    kind: Any = CountedConnection if hasattr(implementation, "on_body") else Connection

    class Configured(kind, implementation):  # type: ignore[misc]  # known when run
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
