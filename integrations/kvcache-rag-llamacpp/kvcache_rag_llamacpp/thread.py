"""A thread that computes nothing else."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class OwnThread:
    """Calls functions in a separate thread.

    llama.cpp sets the AMX tiles once per thread. torch's layers in bfloat16 set them, too, and if
    one thread calls both, llama.cpp ends the process or computes wrong numbers.
    """

    def __init__(self) -> None:
        """Begin none before it is needed."""
        self._calls: SimpleQueue[_PendingCall | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = 0

    def __call__(self, function: Callable[..., int], *arguments: Any) -> int:
        """What a function gives; it has ended when this does, also by Ctrl-C."""
        call = _PendingCall(function, arguments)
        try:
            self._ready().put(call)
            call.ended.wait()
        except BaseException:
            while not (call.take() or call.ended.is_set()):
                with suppress(KeyboardInterrupt):
                    call.ended.wait()
            raise
        return call.result()

    def _ready(self) -> SimpleQueue[_PendingCall | None]:
        if self._process != os.getpid():  # a forked child has no threads
            self._calls, self._thread, self._process = SimpleQueue(), None, os.getpid()
            weakref.finalize(self, self._calls.put, None)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_serve, args=(self._calls,), name="llama.cpp", daemon=True
            )
            self._thread.start()
        return self._calls


class _PendingCall:
    """A function that one thread calls, unless another took that back before.

    Attributes:
        ended: Set when it was called.
    """

    def __init__(self, function: Callable[..., int], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._turn = [True]
        self._found: int | BaseException = 0
        self.ended = threading.Event()

    def take(self) -> bool:
        """Whether it is this caller's, which it is for the first one."""
        try:
            return self._turn.pop()
        except IndexError:
            return False

    def make(self) -> None:
        """Call the function."""
        try:
            self._found = self._function(*self._arguments)
        except BaseException as error:
            self._found = error
        self.ended.set()

    def result(self) -> int:
        """What it gave, or raised."""
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found


def _serve(calls: SimpleQueue[_PendingCall | None]) -> None:
    while (call := calls.get()) is not None:
        if call.take():
            call.make()
        del call  # not kept while the next one is waited for
