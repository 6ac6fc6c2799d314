"""What a place must drop: old chunks, the least recently used above a limit, leftovers.

A limit is kept by making room before a chunk is put: whoever puts one adds its bytes to a count
(`used`), under a lock, and looks at everything when the count is above the limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import groupby
from numbers import Integral
from typing import TYPE_CHECKING

from kvcache_rag.errors import CorruptChunkError, InvalidInputError, check_name
from kvcache_rag.stores import object_names
from kvcache_rag.stores.folder import DELETED, QUARANTINE

if TYPE_CHECKING:
    from typing import TypeAlias

    from kvcache_rag.stores.bytes import ByteStore, Entry


Quota: TypeAlias = "int | Mapping[str, int] | None"

PATIENCE = 0.1  # seconds that a `put` waits while another process drops chunks

_SHARE = 10  # a look around makes room for a tenth of the limit

_NUMBERS = 1 << 63  # the nanoseconds of 292 years: after any of these there is a greater one

_ABANDONED = 60.0  # seconds: a writer that has not written for so long is no more


def check_quota(quota: object) -> None:
    """Refuse what is neither a number of bytes nor such numbers by namespace.

    Raises:
        InvalidInputError: If it is something else.
    """
    for name, limit in quota.items() if isinstance(quota, Mapping) else [("", quota)]:
        check_name("namespace of a quota", name)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, Integral)):
            raise InvalidInputError(
                "quota must be a whole number of bytes, or such numbers by namespace, "
                f"not {limit!r:.80}"
            )


@dataclass(frozen=True)
class Limits:
    """What may stay.

    Attributes:
        namespace: The only namespace to look at, None for all.
        max_bytes: Bytes that all of them may hold together, None for no limit.
        quota: Bytes that each may hold: one number for all, or by namespace.
        ttl: Seconds from the writing of a chunk to its end, None for no end.
        temp_age: Seconds after which unfinished files are left over.
    """

    namespace: str | None = None
    max_bytes: int | None = None
    quota: Quota = None
    ttl: float | None = None
    temp_age: float = 3600.0

    def quota_for(self, namespace: str) -> int | None:
        """Bytes that one namespace may hold, None for no limit of its own."""
        quota = self.quota.get(namespace) if isinstance(self.quota, Mapping) else self.quota
        if self.namespace is None or self.max_bytes is None:
            return quota
        return self.max_bytes if quota is None else min(quota, self.max_bytes)

    @property
    def total(self) -> int | None:
        """Bytes that all namespaces may hold together, None for no limit."""
        return self.max_bytes if self.namespace is None else None

    def too_large(self, namespace: str, nbytes: int) -> str:
        """Which limit a single chunk exceeds, "" for none."""
        for name, limit in (("max_bytes", self.max_bytes), ("quota", self.quota_for(namespace))):
            if limit is not None and nbytes > limit:
                return f"a file of {nbytes} bytes exceeds {name}={limit}"
        return ""

    def is_expired(self, written: float) -> bool:
        """Whether a chunk that was written then has to go."""
        return self.ttl is not None and written <= time.time() - self.ttl


@dataclass(frozen=True)
class SweepResult:
    """What was found and done.

    Attributes:
        dropped: How many chunks went.
        kept: Last use, bytes and name of what stays and may go: chunks, what was put aside, and
            what killed writers left.
        fixed: Bytes of what stays in any case.
    """

    dropped: int
    kept: list[tuple[float, int, str]]
    fixed: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all that stays."""
        return self.fixed + sum(size for _, size, _ in self.kept)

    @classmethod
    def joined(cls, parts: Iterable[SweepResult]) -> SweepResult:
        """Several as one."""
        parts = [*parts]
        kept = [entry for part in parts for entry in part.kept]
        return cls(sum(part.dropped for part in parts), kept, sum(part.fixed for part in parts))


class Sweeper:
    """Sweeps and makes room in a place; one at a time does for a namespace."""

    def __init__(self, place: ByteStore, limits: Limits) -> None:
        """Look at nothing yet."""
        self._place, self._limits = place, limits
        own = limits.namespace
        known = limits.quota if isinstance(limits.quota, Mapping) else ()
        self._own = None if own is None else object_names.namespace_digest(own)
        # A list of everything says digests, not namespaces.
        self._quotas = {
            object_names.namespace_digest(name): limits.quota_for(name)
            for name in ([*known] if own is None else [own])
        }

    def sweep(self, namespace: str | None = None) -> int:
        """Sweep one namespace, or everything that may be looked at.

        Returns:
            How many chunks were dropped.

        Raises:
            OSError: If the place cannot say what it holds.
        """
        own = self._own if namespace is None else object_names.namespace_digest(namespace)
        listed = self._place.list("" if own is None else f"{own}/")
        parts = [self._swept(digest, entries) for digest, entries in by_namespace(listed)]
        total = self._limits.total if namespace is None else None
        return self._evicted(SweepResult.joined(parts), total).dropped

    def _swept(self, digest: str, entries: Iterable[Entry]) -> SweepResult:
        """Sweep one namespace, unless somebody is sweeping it."""
        every = None if isinstance(self._limits.quota, Mapping) else self._limits.quota
        with suppress(OSError), self._place.lock(f"{digest}/sweep", 0.0) as is_ours:
            if is_ours:
                return self._evicted(self._looked(entries), self._quotas.get(digest, every))
        return SweepResult(0, [])

    def _looked(self, entries: Iterable[Entry]) -> SweepResult:
        """Drop what is too old in one namespace, and find out how much there is."""
        dropped = fixed = 0
        kept: list[tuple[float, int, str]] = []
        now = time.time()
        for entry in entries:
            kind, written = kind_of(entry.name), entry.written
            if kind == "deleted":
                self._dropped(entry.name)
            elif kind in ("chunk", "aside") and self._limits.is_expired(written):
                dropped += self._dropped(entry.name) and kind == "chunk"
            elif kind in ("chunk", "aside"):
                kept.append((entry.used, entry.nbytes, entry.name))
            elif kind == "unfinished" and written <= now - self._limits.temp_age:
                self._dropped(entry.name)
            elif kind == "unfinished" and written <= now - _ABANDONED:
                kept.append((written, entry.nbytes, entry.name))
            elif kind:
                fixed += entry.nbytes
        return SweepResult(dropped, kept, fixed)

    def _evicted(self, swept: SweepResult, limit: int | None) -> SweepResult:
        """Drop the least recently used when there are more than `limit` bytes."""
        nbytes = swept.nbytes
        if limit is None or nbytes <= limit:
            return swept
        dropped, stay = swept.dropped, []
        for used, size, name in sorted(swept.kept):
            if nbytes > limit and self._dropped(name):
                nbytes -= size
                dropped += name.endswith(object_names.SUFFIX)
            else:
                stay.append((used, size, name))
        return SweepResult(dropped, stay, swept.fixed)

    def _dropped(self, name: str) -> bool:
        """Drop a name; whether it is gone now."""
        with suppress(OSError):
            self._place.delete([name])
            return True
        return False

    def room(self, namespace: str, nbytes: int) -> tuple[bool, int]:
        """Count a chunk that will be put; whether there is room, and how many were dropped.

        Raises:
            OSError: If the place cannot be written to.
        """
        dropped = 0
        for prefix, limit in (
            (f"{object_names.namespace_digest(namespace)}/", self._limits.quota_for(namespace)),
            ("", self._limits.total),
        ):
            if limit is not None:
                is_room, gone = self._counted(prefix, limit, nbytes)
                dropped += gone
                if not is_room:
                    return False, dropped
        return True, dropped

    def _counted(self, prefix: str, limit: int, nbytes: int) -> tuple[bool, int]:
        with self._place.lock(f"{prefix}sweep", PATIENCE) as is_ours:
            if not is_ours:
                return False, 0
            name, dropped = prefix + object_names.USED, 0
            used = self._used(name)
            if used is None or used + nbytes > limit:
                groups = by_namespace(self._place.list(prefix))
                swept = SweepResult.joined(self._looked(entries) for _, entries in groups)
                swept = self._evicted(swept, limit - max(limit // _SHARE, nbytes))
                used, dropped = swept.nbytes, swept.dropped
            is_room = used + nbytes <= limit
            with suppress(OSError):  # without a count all is looked at the next time
                self._place.put(name, [b"%020d" % (used + nbytes * is_room)])
            return is_room, dropped

    def _used(self, name: str) -> int | None:
        with suppress(OSError):
            return number(self._place, name)
        return None


def by_namespace(entries: Iterable[Entry]) -> Iterable[tuple[str, Iterable[Entry]]]:
    """Entries by the first part of their names, which come one after the other."""
    return groupby(entries, key=lambda entry: entry.name.partition("/")[0])


def kind_of(name: str) -> str:
    """What a name is of: "chunk", "unfinished", "aside", "deleted", "manifest", "" for others."""
    rest = name.partition("/")[2]
    if object_names.CHUNK.fullmatch(rest):
        return "chunk"
    if object_names.UNFINISHED.fullmatch(rest):
        return "unfinished"
    first, _, last = rest.partition("/")
    if first.startswith(DELETED):
        return "deleted"
    if first == QUARANTINE and last:
        return "aside"
    return "manifest" if last == object_names.MANIFEST else ""


def number(place: ByteStore, name: str) -> int | None:
    """A number below 2**63 that is kept under a name; None if there is none, or something else.

    Raises:
        OSError: If the place cannot say.
    """
    try:
        blob = place.get(name, 20)
    except CorruptChunkError:
        return None
    if isinstance(blob, FileIO):
        with blob:
            blob = blob.read(20)
    digits = bytes(blob or b"").strip()
    found = int(digits) if digits.isdigit() else _NUMBERS
    return found if found < _NUMBERS else None
