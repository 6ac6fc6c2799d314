"""How a server ends: waiting requests are refused at once, running ones may finish for a while.

    signal                                          the grace ends
      |---------------- grace -----------------|-- margin --|--- for the model ---|
      `/ready` false, nothing accepted,         what runs     connections break    exit, with 1 if
      what waits gets 503                       is told       off                  it computes still

A second signal moves all of it to now.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Final

from kvcache_rag_server.errors import SHUT_DOWN

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from uvicorn.server import ServerState

    from kvcache_rag_server.backend import Backend
    from kvcache_rag_server.lifecycle import Exchanges

_LOG: Final = logging.getLogger("kvcache_rag_server")

MARGIN, PART = 1.0, 0.1
"""Seconds, and part of the grace, that answers have to end once they are told; the lesser."""

MODEL_WAIT: Final = 5.0
"""Seconds beyond the grace in which a forward pass may end."""

FORCED_MARGIN, FORCED_MODEL_WAIT = 0.5, 0.3
"""The same after a second signal; the first one is also the shortest time in which all is told."""

NEVER: Final = float("inf")

_LOOK: Final = 0.02  # seconds between two looks whether all is over

_FAILURE: Final = 1  # exit status


class Shutdown:
    """Whether a server ends, and by when; made before it starts, used by its event loop.

    Attributes:
        grace: Seconds from the signal in which answers may end.
        is_cutting: Whether what has not ended is being cancelled.
        is_complete: Whether the backend has ended, too; of a server that was not told to end, True.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.is_cutting = False
        self.is_complete = True
        self._begun = self._forced = NEVER

    @property
    def is_begun(self) -> bool:
        """Whether nothing more is accepted."""
        return self._begun < NEVER

    def signal(self) -> None:
        """Begin; or, if it was begun, come to the end.  May be called by a signal's handler."""
        if not self.is_begun:
            self._begun = time.monotonic()
        else:
            self._forced = min(self._forced, time.monotonic())

    async def run(self, asked: ServerState, backend: Backend, exchanges: Exchanges) -> None:
        """End what runs, and the backend.

        Args:
            asked: Connections and requests that there are; no new ones come.
            backend: Answers; it is drained, then closed.
            exchanges: Requests that it answers.
        """
        if not self.is_begun:
            self.signal()
        draining = asyncio.create_task(backend.drain())
        await self._until(self._margin_begins, asked)
        closing = asyncio.create_task(backend.close())
        exchanges.end(lambda *_: SHUT_DOWN)
        await self._until(lambda: (self._margin_begins() + self._grace_ends()) / 2, asked)
        self.is_cutting = True
        for task in list(asked.tasks):
            task.cancel()
        await self._until(self._grace_ends, asked)
        for connection in list(asked.connections):
            connection.transport.abort()
        while not closing.done() and time.monotonic() < self._model_wait_ends():
            await asyncio.sleep(_LOOK)
        self.is_complete = closing.done()
        for task in (draining, closing):
            task.cancel()
        for ended in await asyncio.gather(draining, closing, return_exceptions=True):
            if isinstance(ended, Exception):
                _LOG.error("the backend did not end well", exc_info=ended)

    async def _until(self, when: Callable[[], float], asked: ServerState) -> None:
        """Wait until a time, or until nobody asks any more."""
        while asked.connections or asked.tasks:
            if time.monotonic() >= when():
                return
            await asyncio.sleep(_LOOK)

    def _margin_begins(self) -> float:
        return min(self._begun + self.grace - min(MARGIN, PART * self.grace), self._forced)

    def _grace_ends(self) -> float:
        return min(self._begun + max(self.grace, FORCED_MARGIN), self._forced + FORCED_MARGIN)

    def _model_wait_ends(self) -> float:
        return min(
            self._begun + self.grace + MODEL_WAIT,
            self._forced + FORCED_MARGIN + FORCED_MODEL_WAIT,
        )


def leave() -> NoReturn:
    """End the process while a thread still computes, for which the interpreter would wait."""
    _LOG.warning("what is still computed ends with the process")
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(_FAILURE)
