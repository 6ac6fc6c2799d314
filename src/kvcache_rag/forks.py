"""Open objects in other processes: locks in a forked child, and objects reopened after pickling.

Threads that may have held a lock do not exist in a forked child, so the child can take it.  Every
lock of the package is made here, so that none is forgotten (`tests/test_forks.py`).
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from kvcache_rag.errors import NamedArguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

_Renewing = TypeVar("_Renewing", bound="Callable[[], object]")

_Lock = TypeVar("_Lock")

_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()

_AFTER: list[Callable[[], object]] = []


def new_lock() -> threading.Lock:
    """A lock of threads, free in a forked child."""
    return _kept(threading.Lock())


def new_rlock() -> threading.RLock:
    """The same, which its thread may take again; in a child it is held if the thread forked."""
    return _kept(threading.RLock())


def new_condition() -> threading.Condition:
    """A condition with a lock of its own, for which nobody waits in a forked child."""
    return _kept(threading.Condition())


def new_slots(count: int) -> threading.BoundedSemaphore:
    """A semaphore of which a forked child has all slots."""
    return _kept(threading.BoundedSemaphore(count))


def in_child(renew: _Renewing) -> _Renewing:
    """Call a function in every forked child, where locks can be taken again."""
    _AFTER.append(renew)
    return renew


def _kept(lock: _Lock) -> _Lock:
    _LOCKS.add(lock)
    return lock


def _renew() -> None:
    for lock in _LOCKS:
        if isinstance(lock, threading.Semaphore):
            lock._cond._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does
            lock._value = lock._initial_value  # type: ignore[attr-defined]
        # Who forks with a lock that can be taken again, in a callback say, still has it.
        elif not (hasattr(lock, "_is_owned") and lock._is_owned()):
            lock._at_fork_reinit()
    for renew in _AFTER:
        renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class Reopened(NamedArguments):
    """An object that is pickled as the arguments it was opened with.

    Locks, threads and connections cannot be sent, and content kept only in memory stays behind.  In
    this process a copy is the same object, because a second one would only have less.
    """

    _opened: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        self = super().__new__(cls, *arguments, **options)
        self._opened = arguments, options
        return self

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (type(self), *self._opened)


def _open(kind: type[Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return kind(*arguments, **options)
