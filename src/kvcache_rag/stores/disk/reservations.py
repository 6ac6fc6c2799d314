"""Room under the limits of a folder, reserved before a file is written.

A process holds an allowance: bytes that it may write before it looks at the folder again, at most a
tenth of the limit, or one chunk where that is more.  It is renewed only under the lock of whoever
drops chunks, by looking at all files and dropping what is above the limit.  Between two looks every
process can add its allowance and no more, files that are not finished yet included; so at every
moment the folder holds at most the limit and one allowance per process that writes.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_rag.stores.disk import eviction, folders
from kvcache_rag.stores.locks import may_wait, try_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_rag.stores.disk.eviction import DiskLimits, Swept

PATIENCE = 0.5  # seconds that a `put` waits while another process drops chunks

_SHARE = 10  # an allowance is a tenth of the limit

_EARLY = 4  # who found others in the way looks around when a quarter of its allowance is left


@dataclass
class _Allowance:
    """What this process may write under one limit.

    Attributes:
        folder: What the limit is for: a namespace, or the root for all of them.
        limit: In bytes.
        free: Bytes that may be written before the next look.
        pending: Bytes of the files that are being written.
        reserved: Bytes that were ever reserved.
        early: With fewer bytes free it is renewed, if nobody else looks around just then.
    """

    folder: str
    limit: int
    free: int = 0
    pending: int = 0
    reserved: int = 0
    early: int = 0

    def take(self, nbytes: int, least: int = 0) -> bool:
        """Reserve bytes if as many are free, and at least `least`."""
        if self.free < max(nbytes, least):
            return False
        self.free -= nbytes
        self.pending += nbytes
        self.reserved += nbytes
        return True


class Reservations:
    """The allowances of a store in this process, by namespace and for all of them."""

    def __init__(self, root: str, limits: DiskLimits, dropped: Callable[[int], None]) -> None:
        """Nothing may be written before the first look.

        Args:
            root: The store's folder.
            limits: What it may hold.
            dropped: Told how many chunks were dropped to make room.
        """
        self._root = root
        self._limits = limits
        self._dropped = dropped
        self.forget()
        _ALL.add(self)

    def forget(self) -> None:
        """Begin anew, in a forked child: the allowance is the parent's."""
        self._changed = threading.Condition()
        self._allowances: dict[str, _Allowance] = {}

    @contextmanager
    def room(self, namespace: str, nbytes: int) -> Iterator[bool]:
        """Reserve bytes for the length of a block that writes them; False if there is no room.

        Whoever holds locks of chunks does not wait, since others may wait for these, nor does who
        copies what a question has found.

        Raises:
            OSError: If there is no such folder, and it cannot be made.
        """
        deadline = time.monotonic() + (PATIENCE if may_wait() else 0.0)
        with ExitStack() as stack:
            yield all(
                stack.enter_context(self._reserved(allowance, nbytes, deadline))
                for allowance in self._of(namespace)
            )

    def _of(self, namespace: str) -> Iterator[_Allowance]:
        folder = folders.namespace_folder(self._root, namespace)
        for place, limit in (
            (folder, self._limits.of(namespace)),
            (self._root, self._limits.total),
        ):
            if limit is not None:
                yield self._allowances.setdefault(place, _Allowance(place, limit))

    @contextmanager
    def _reserved(self, allowance: _Allowance, nbytes: int, deadline: float) -> Iterator[bool]:
        is_ours = self._reserve(allowance, nbytes, deadline)
        try:
            yield is_ours
        finally:
            if is_ours:
                with self._changed:
                    allowance.pending -= nbytes
                    self._changed.notify_all()

    def _reserve(self, allowance: _Allowance, nbytes: int, deadline: float) -> bool:
        with self._changed:
            if allowance.take(nbytes, allowance.early):
                return True
        patience = 0.0
        while True:
            is_alone = not allowance.pending
            looked, taken = self._renew(allowance, nbytes, patience)
            with self._changed:
                if taken or allowance.take(nbytes):
                    return True
                patience = deadline - time.monotonic()
                # Room comes of files that this process finishes, and of others that had no turn.
                if patience <= 0 or (looked and is_alone and not allowance.pending):
                    return False
                if looked and allowance.pending:
                    self._changed.wait(patience)

    def _renew(self, allowance: _Allowance, nbytes: int, patience: float) -> tuple[bool, bool]:
        """Look around and reserve; whether it was our turn, and whether there was room."""
        folders.make_folder(self._root, allowance.folder)
        with try_file(folders.sweep_lock(allowance.folder), patience) as is_ours:
            if not is_ours:
                allowance.early = allowance.limit // _SHARE // _EARLY
                return False, False
            most = max(allowance.limit // _SHARE, nbytes)
            with self._changed:
                if allowance.take(nbytes, allowance.early):
                    return True, True  # another thread has looked
                # Files of our other threads may or may not be seen.
                unseen = allowance.pending - allowance.reserved
            swept = eviction.evict(self._look(allowance.folder), allowance.limit - most)
            self._dropped(swept.dropped)
            with self._changed:
                unseen += allowance.reserved
                allowance.free = min(allowance.limit - swept.nbytes, most) - unseen
                return True, allowance.take(nbytes)

    def _look(self, folder: str) -> Swept:
        """Drop what is too old, and find out how much there is."""
        when = self._limits.deadlines()
        if folder == self._root:
            places = folders.namespaces(self._root)
            return eviction.Swept.joined(eviction.sweep(place, when) for place in places)
        return eviction.sweep(folders.NamespaceFolder(os.path.basename(folder), folder), when)


_ALL: weakref.WeakSet[Reservations] = weakref.WeakSet()


def _in_child() -> None:
    for reservations in _ALL:
        reservations.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
