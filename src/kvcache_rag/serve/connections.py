"""Connections on which nothing is asked: closed after a while, so that they cannot pile up.

Of itself uvicorn gives up idle connections only behind a first answer, and none whose request never
ends.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

AUTO: Final = "auto"


class Patient(asyncio.Protocol):
    """Hands everything on to uvicorn, and looks from time to time whether something is asked.

    Attributes:
        seconds: Between two looks.
        implementation: Uvicorn's class.
    """

    seconds: ClassVar[float]
    implementation: ClassVar[Any]

    def __init__(self, **options: Any) -> None:
        """Take a connection; uvicorn says with which `options`."""
        self._inner = self.implementation(**options)
        self._transport: asyncio.BaseTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._seen: object = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait."""
        self._transport = transport
        self._inner.connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand on."""
        self._inner.data_received(data)

    def eof_received(self) -> None:
        """Hand on."""
        self._inner.eof_received()

    def pause_writing(self) -> None:
        """Hand on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Hand on."""
        self._inner.resume_writing()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.seconds, self._look)

    def _look(self) -> None:
        # Uvicorn's name of a request and its answer; the last one stays when it is over.
        cycle = self._inner.cycle
        is_asked = cycle is not None and not cycle.response_complete
        if not is_asked and cycle is self._seen and self._transport is not None:
            self._transport.close()
            return
        self._seen = cycle
        self._wait()


def patient(limit: float, http: str = AUTO) -> type[Patient]:
    """What speaks HTTP and waits so long for a request: `uvicorn.Config(http=patient(15.0))`.

    Args:
        limit: Seconds for which a connection may be silent, or take to send the head of a request;
            up to twice that behind an answer.  An answer takes as long as it takes.
        http: Name of uvicorn's implementation: "auto", "h11" or "httptools".
    """
    from uvicorn.config import HTTP_PROTOCOLS
    from uvicorn.importer import import_from_string

    places: dict[str, str] = dict(HTTP_PROTOCOLS)

    class Configured(Patient):
        seconds = limit
        implementation = import_from_string(places[http])

    return Configured
