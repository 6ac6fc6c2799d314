"""Locks by name, within a process and across the processes of a machine.

A file lock alone is not enough: on some file systems (NFS) it excludes processes but not threads.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.forks import in_child, new_lock
from kvcache_rag.stores.filesystem import check_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_POLL = 0.005  # seconds between two tries for a lock file

_ALL: weakref.WeakSet[ThreadLocks] = weakref.WeakSet()


@dataclass(eq=False)
class _Named:
    """A lock that has a name.

    Attributes:
        lock: The lock.
        users: Threads that hold it or wait for it.
        holder: The thread that holds it, or None.
    """

    lock: threading.Lock = field(default_factory=new_lock)
    users: int = 0
    holder: int | None = None


class ThreadLocks:
    """Locks by name among the threads of a process; one is there while a thread wants it."""

    def __init__(self) -> None:
        self._guard = new_lock()
        self._named: dict[str, _Named] = {}
        _ALL.add(self)

    @contextmanager
    def hold(self, names: Iterable[str], patience: float | None = None) -> Iterator[bool]:
        """Hold every named lock, taken in sorted order; gives whether they are held.

        Args:
            names: Which.
            patience: Seconds to wait for each; None for as long as it takes.

        Raises:
            InvalidInputError: If this thread holds one of them already, which would never end.
        """
        with ExitStack() as stack:
            # All or none: the first that cannot be had ends it.
            yield all(stack.enter_context(self._one(name, patience)) for name in sorted(set(names)))

    def forget(self) -> None:
        """Know no holders, in a forked child: a thread there may have the number of one of them."""
        self._named = {}

    @contextmanager
    def _one(self, name: str, patience: float | None) -> Iterator[bool]:
        with self._wanted(name) as named:
            if patience is None and named.holder == threading.get_ident():
                raise InvalidInputError("locked() must not be nested: leave the first one before")
            if not named.lock.acquire(timeout=-1 if patience is None else patience):
                yield False
                return
            named.holder = threading.get_ident()
            try:
                yield True
            finally:
                named.holder = None
                named.lock.release()

    @contextmanager
    def _wanted(self, name: str) -> Iterator[_Named]:
        with self._guard:
            named = self._named.setdefault(name, _Named())
            named.users += 1
        try:
            yield named
        finally:
            with self._guard:
                named.users -= 1
                if not named.users and self._named.get(name) is named:
                    del self._named[name]


_PROCESS = ThreadLocks()


@in_child
def _in_child() -> None:
    for locks in _ALL:
        locks.forget()


@contextmanager
def hold_file(
    path: str, prepare: Callable[[str], None], patience: float | None = None
) -> Iterator[bool]:
    """Hold the lock file at an absolute path, which is made; gives whether it is held.

    Where none can be made, threads of this process still exclude each other.

    Args:
        path: The file.
        prepare: Called with its folder; makes it, or raises `OSError`.
        patience: Seconds to wait; None for as long as it takes.

    Raises:
        InvalidInputError: If this thread holds it already and would wait for ever.
    """
    with _PROCESS.hold([path], patience) as is_ours:
        if not is_ours:
            yield False
            return
        lock = FileLock(path, mode=0o600)
        try:
            is_held = _acquired(lock, prepare, patience)
        except (OSError, NotImplementedError):  # the latter: a file system without locks
            yield True
            return
        if not is_held:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


def _acquired(lock: FileLock, prepare: Callable[[str], None], patience: float | None) -> bool:
    end = None if patience is None else time.monotonic() + patience
    path = lock.lock_file
    while True:
        # Before each try: a folder that has gone meanwhile filelock would make as the umask has it.
        prepare(os.path.dirname(path))
        check_lock(path)  # some versions of filelock empty what they lock
        with suppress(Timeout):
            lock.acquire(timeout=0)
            return True
        if end is not None and time.monotonic() >= end:
            return False
        time.sleep(_POLL)
