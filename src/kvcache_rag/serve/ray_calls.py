"""Calls that may hang, of a database or of the cluster, away from the threads of everybody else."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

LOG = logging.getLogger(__name__)
NEVER: Final = float("-inf")


class Blocking:
    """Makes blocking calls in daemon threads, so many at a time.

    One that hangs keeps its place until it ends; nobody waits for it longer than `seconds`, and the
    process ends without it.

    Attributes:
        seconds: That a caller waits, for a place and for the result.
    """

    def __init__(self, name: str, at_once: int, seconds: float) -> None:
        """Start no thread yet.

        Args:
            name: Of the threads.
            at_once: Calls that may run at a time; others wait.
            seconds: See the attribute.
        """
        self.seconds = seconds
        self._name, self._places = name, asyncio.Semaphore(at_once)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns or raises.

        Raises:
            asyncio.TimeoutError: If it takes too long.
        """
        return await asyncio.wait_for(self._call(function, arguments), self.seconds)

    async def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def end(error: Exception | None, value: Any) -> None:
            self._places.release()
            if result.done():  # nobody waits any more
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        def work() -> None:
            error, value = None, None
            try:
                value = function(*arguments)
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(end, error, value)

        await self._places.acquire()
        threading.Thread(target=work, name=self._name, daemon=True).start()
        return await result


class Running:
    """How many replicas run; one question at a time, whoever wants to know."""

    def __init__(self, ask: Callable[[], int], seconds: float) -> None:
        """Ask nothing yet.

        Args:
            ask: Asks the cluster; called in threads, may hang and raise.
            seconds: That an answer is waited for.
        """
        self._ask, self._calls = ask, Blocking("kvcache-rag-status", 1, seconds)
        self._task: asyncio.Task[int] | None = None
        self._known, self._when = 0, NEVER

    async def count(self, age: float = 0.0) -> int:
        """The number, 0 if the cluster does not say.

        Args:
            age: Seconds for which an answer is believed.
        """
        if time.monotonic() - self._when < age:
            return self._known
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        return await asyncio.shield(self._task)  # others may wait for it too

    async def _look(self) -> int:
        try:
            self._known = int(await self._calls.call(self._ask))
        except Exception as error:
            LOG.warning("the cluster does not say which replicas run: %r", error)
            self._known = 0
        self._when = time.monotonic()
        return self._known
