"""Noticing that another process deleted a namespace."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.stores.base import ChunkStore


class EpochWatch:
    """The epochs of a store's namespaces, as last seen.

    Attributes:
        store: The store that is asked.
        recheck: Seconds after which a number is looked at again.
    """

    def __init__(self, store: ChunkStore, recheck: float) -> None:
        self.store = store
        self.recheck = recheck
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}  # when, and which number
        self._undone: set[str] = set()  # what a change asked for could not be done

    def look(self, namespace: str) -> tuple[int | None, int]:
        """The number seen before, None when there was none, and the one of now.

        The two are equal when the last look is young enough; of several threads that look at once,
        one is told of a change.  After `undone` the one before is -1.
        """
        with self._lock:
            seen = self._seen.get(namespace)
        if seen is not None and time.monotonic() - seen[0] < self.recheck:
            return seen[1], seen[1]
        now = self.store.epoch(namespace)
        with self._lock:
            before = self._seen.get(namespace)
            self._seen[namespace] = (time.monotonic(), now)
            if namespace in self._undone:
                self._undone.discard(namespace)
                return -1, now
        return (None if before is None else before[1]), now

    def number(self, namespace: str) -> int:
        """The number as last seen, however long ago."""
        with self._lock:
            seen = self._seen.get(namespace)
        return self.store.epoch(namespace) if seen is None else seen[1]

    def accept(self, namespace: str) -> None:
        """Take the number of now for seen: the deletion was this process's own."""
        now = self.store.epoch(namespace)
        with self._lock:
            self._seen[namespace] = (time.monotonic(), now)

    def undone(self, namespace: str) -> None:
        """Look anew when next asked, and tell of a change whatever is seen."""
        with self._lock:
            self._seen.pop(namespace, None)
            self._undone.add(namespace)

    def namespaces(self) -> list[str]:
        """Those that were looked at."""
        with self._lock:
            return list(self._seen)


class IdleLooks:
    """Calls a method of an object every `seconds`, in a daemon thread, for as long as it lives."""

    def __init__(self, look: Callable[[], None], seconds: float) -> None:
        """Take a bound method; nothing runs yet."""
        self.seconds = seconds
        self._look = weakref.WeakMethod(look)
        self._process = 0

    def start(self) -> None:
        """Start the thread unless this process has it."""
        if self._process != os.getpid():  # threads do not survive a fork
            self._process = os.getpid()
            thread = threading.Thread(
                target=_repeat,
                args=(self._look, self.seconds),
                name="kvcache-rag-epochs",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:  # no more threads: who asks next tries again
                self._process = 0


def _repeat(method: weakref.WeakMethod[Callable[[], None]], seconds: float) -> None:
    while True:
        time.sleep(seconds)
        look = method()
        if look is None:
            return
        look()
        del look  # or the object would live until the next round
