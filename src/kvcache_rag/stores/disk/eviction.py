"""Keeping a store on disk within its limits, one namespace at a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_rag.stores.disk import folders
from kvcache_rag.stores.disk.folders import USED_AGAIN, Deadlines
from kvcache_rag.stores.disk.locks import try_file

if TYPE_CHECKING:
    from typing import TypeAlias


Quota: TypeAlias = "int | Mapping[str, int] | None"

LEAST_PAUSE = 60.0  # seconds between two sweeps for what is too old

_ROOM = 10  # `put` sweeps when a tenth of a limit was written, and then frees a tenth

_ALL = ""  # no namespace has an empty digest


@dataclass(frozen=True)
class Limits:
    """What may stay in a folder.

    Attributes:
        namespace: The only namespace to look at, None for all.
        max_bytes: Bytes that all of them may hold together, None for no limit.
        quota: Bytes that each may hold: one number for all, or by namespace.
        ttl: Seconds from the writing of a chunk to its end, None for no end.
        release_grace: Seconds from the release of a chunk to its end.
        temp_age: Seconds after which unfinished files are left over.
    """

    namespace: str | None
    max_bytes: int | None
    quota: Quota
    ttl: float | None
    release_grace: float
    temp_age: float

    def of(self, namespace: str) -> int | None:
        """Bytes that one namespace may hold, None for no limit of its own."""
        quota = self.quota.get(namespace) if isinstance(self.quota, Mapping) else self.quota
        if self.namespace is None or self.max_bytes is None:
            return quota
        return self.max_bytes if quota is None else min(quota, self.max_bytes)

    def largest(self, namespace: str) -> int | None:
        """Bytes that a single chunk may have."""
        given = [limit for limit in (self.of(namespace), self.max_bytes) if limit is not None]
        return min(given, default=None)

    def deadlines(self) -> Deadlines:
        """What is too old at this moment."""
        now = time.time()
        return Deadlines(
            released=now - self.release_grace,
            temporary=now - self.temp_age,
            written=None if self.ttl is None else now - self.ttl,
            future=now + USED_AGAIN,
        )

    def pause(self) -> float:
        """Seconds between two sweeps for what is too old."""
        times = [self.release_grace] if self.ttl is None else [self.release_grace, self.ttl]
        return max(LEAST_PAUSE, min(times))


class Sweeper:
    """Sweeps the folders of one store, and knows how much may be written before the next time.

    A sweep looks at one namespace under that namespace's lock.  What was written to one namespace
    leads to a sweep of that namespace only; the other ones are looked at for a `max_bytes` of all.
    """

    def __init__(self, root: str, limits: Limits) -> None:
        """Look at nothing yet."""
        self._root = root
        self._limits = limits
        self._lock = threading.Lock()
        self._room: dict[str, int] = {}  # per digest of a namespace, in bytes
        own = limits.namespace
        known = limits.quota if isinstance(limits.quota, Mapping) else ()
        names = [*known] if own is None else [own]
        # A walk over all folders sees digests, not namespaces.
        self._quotas = {folders.namespace_digest(name): limits.of(name) for name in names}

    def written(self, namespace: str, nbytes: int) -> int:
        """Note bytes that were written; sweep when a limit may be exceeded.

        Returns:
            How many chunks were dropped.
        """
        dropped = 0
        folder = folders.namespace_folder(self._root, namespace)
        limit = self._limits.of(namespace)
        if limit is not None and self._is_used_up(os.path.basename(folder), nbytes):
            swept = self._one(folder, room=limit // _ROOM)
            dropped += swept.dropped if swept else 0
        total = self._total()
        if total is not None and self._is_used_up(_ALL, nbytes):
            dropped += self.sweep(room=total // _ROOM)
        return dropped

    def sweep(self, *, room: int = 0) -> int:
        """Sweep everything that this store may look at.

        Args:
            room: How far below `max_bytes` to go when it is exceeded.

        Returns:
            How many chunks were dropped.
        """
        total = self._total()
        swept = [one for folder in self._folders() if (one := self._one(folder, room=0))]
        if total is None:
            return sum(one.dropped for one in swept)
        everything = folders.Swept(
            sum(one.dropped for one in swept), [entry for one in swept for entry in one.kept]
        )
        left = folders.evict(everything, total, room)
        if swept:
            self._allow(_ALL, total, left.nbytes)
        return left.dropped

    def sweep_one(self, namespace: str) -> int:
        """Sweep one namespace; how many chunks were dropped."""
        swept = self._one(folders.namespace_folder(self._root, namespace), room=0)
        return swept.dropped if swept else 0

    def _folders(self) -> list[str]:
        own = self._limits.namespace
        if own is None:
            return folders.namespaces(self._root)
        return [folders.namespace_folder(self._root, own)]

    def _total(self) -> int | None:
        return self._limits.max_bytes if self._limits.namespace is None else None

    def _one(self, folder: str, *, room: int) -> folders.Swept | None:
        """Sweep one namespace; None when it is being swept, or is none."""
        try:
            folders.check_folder(self._root, folder)
        except OSError:
            return None
        digest = os.path.basename(folder)
        every = self._limits.quota if isinstance(self._limits.quota, int) else None
        limit = self._quotas.get(digest, every)
        with try_file(f"{folder}/sweep.lock") as ours:
            if not ours:
                return None
            swept = folders.sweep(folder, self._limits.deadlines(), limit=limit, room=room)
        if limit is not None:
            self._allow(digest, limit, swept.nbytes)
        return swept

    def _is_used_up(self, name: str, nbytes: int) -> bool:
        with self._lock:
            self._room[name] = self._room.get(name, 0) - nbytes
            return self._room[name] < 0

    def _allow(self, name: str, limit: int, held: int) -> None:
        with self._lock:
            self._room[name] = min(limit - held, limit // _ROOM)
