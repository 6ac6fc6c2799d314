"""Dropping what has to go from a store on disk, one namespace at a time.

Chunks that are too old, the least recently used above a limit, what killed writers left; and a
whole namespace, so that nothing comes back.

A limit is kept by making room before a chunk is written: whoever writes adds its bytes to a count
in the folder, under the folder's lock, and walks the folder when the count is above the limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

from kvcache_rag.errors import InvalidInputError, check_name
from kvcache_rag.stores.disk import folders
from kvcache_rag.stores.locks import try_file

if TYPE_CHECKING:
    from typing import TypeAlias

    from kvcache_rag.stores.disk.folders import NamespaceFolder, Stripe


Quota: TypeAlias = "int | Mapping[str, int] | None"

PATIENCE = 0.1  # seconds that a `put` waits while another process drops chunks

_SHARE = 10  # a walk makes room for a tenth of the limit

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
class DiskLimits:
    """What may stay in a folder.

    Attributes:
        namespace: The only namespace to look at, None for all.
        max_bytes: Bytes that all of them may hold together, None for no limit.
        quota: Bytes that each may hold: one number for all, or by namespace.
        ttl: Seconds from the writing of a chunk to its end, None for no end.
        temp_age: Seconds after which unfinished files are left over.
    """

    namespace: str | None
    max_bytes: int | None
    quota: Quota
    ttl: float | None
    temp_age: float

    def of(self, namespace: str) -> int | None:
        """Bytes that one namespace may hold, None for no limit of its own."""
        quota = self.quota.get(namespace) if isinstance(self.quota, Mapping) else self.quota
        if self.namespace is None or self.max_bytes is None:
            return quota
        return self.max_bytes if quota is None else min(quota, self.max_bytes)

    @property
    def total(self) -> int | None:
        """Bytes that all namespaces may hold together, None for no limit."""
        return self.max_bytes if self.namespace is None else None

    def largest(self, namespace: str) -> int | None:
        """Bytes that a single chunk may have."""
        limits = [limit for limit in (self.of(namespace), self.max_bytes) if limit is not None]
        return min(limits, default=None)

    def deadlines(self) -> Deadlines:
        """What is too old at this moment."""
        now = time.time()
        return Deadlines(
            temporary=now - self.temp_age,
            abandoned=now - _ABANDONED,
            written=None if self.ttl is None else now - self.ttl,
            future=now + folders.USED_AGAIN,
        )


@dataclass(frozen=True)
class Deadlines:
    """What is too old for a sweep; all times in seconds since the epoch.

    Attributes:
        temporary: Unfinished files go that were last written then or before.
        abandoned: Unfinished files count that were last written then or before.
        written: Chunks go that were written then or before; None for none.
        future: A file dated later than this is of a clock that was wrong.  It counts as of now,
            and is dated so, for else it would never become old.
    """

    temporary: float
    abandoned: float
    written: float | None
    future: float

    def is_expired(self, written: float) -> bool:
        """Whether a chunk written then has to go."""
        return self.written is not None and written <= self.written

    def corrected(self, path: str, written: float) -> float:
        """The time of a file, which is set to now if it is of the future."""
        if written <= self.future:
            return written
        with suppress(OSError):
            folders.set_times(path)
            return os.lstat(path).st_mtime
        return time.time()


@dataclass(frozen=True)
class Swept:
    """What a sweep did.

    Attributes:
        dropped: How many chunks went.
        kept: Last use, bytes and path of the files that stay and may go: chunks, what was put
            aside, and what killed writers left.
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
    def joined(cls, parts: Iterable[Swept]) -> Swept:
        """What several sweeps did."""
        parts = [*parts]
        kept = [entry for part in parts for entry in part.kept]
        return cls(sum(part.dropped for part in parts), kept, sum(part.fixed for part in parts))


def sweep(namespace: NamespaceFolder, when: Deadlines) -> Swept:
    """Drop what has to go in one namespace; readers that have a file open keep what they read.

    Args:
        namespace: Its folder.
        when: What is too old.
    """
    parts = [
        _sweep_stripe(stripe, when)
        for spec in namespace.specs()
        for stripe in spec.stripes(dated=when.written is not None)
    ]
    fixed = sum(_size(f"{spec.path}/{folders.MANIFEST}") for spec in namespace.specs())
    for path in namespace.deletions():
        folders.remove(path, [])
    for path, written in namespace.quarantine_times():
        if when.is_expired(written):
            folders.remove(path, [])
    aside = [(file.written, file.nbytes, file.path) for file in namespace.quarantined()]
    return Swept.joined([*parts, Swept(0, aside, fixed)])


def _sweep_stripe(stripe: Stripe, when: Deadlines) -> Swept:
    dropped = fixed = 0
    kept: list[tuple[float, int, str]] = []
    for leftover in stripe.unfinished:
        written = when.corrected(leftover.path, leftover.written)
        if written <= when.temporary and folders.unlink(leftover.path):
            continue
        if written <= when.abandoned:
            kept.append((written, leftover.nbytes, leftover.path))
        else:
            fixed += leftover.nbytes
    for file in stripe.files:
        written = when.corrected(file.path, file.written)
        if when.is_expired(written) and folders.unlink(file.path):
            dropped += 1
            continue
        used = min(when.future, file.used if written == file.written else written)
        kept.append((used, file.nbytes, file.path))
    return Swept(dropped, kept, fixed)


def _size(path: str) -> int:
    with suppress(OSError):
        return os.lstat(path).st_size
    return 0


def evict(swept: Swept, limit: int | None) -> Swept:
    """Drop the least recently used of `swept.kept` when there are more than `limit` bytes.

    Args:
        swept: What is there.
        limit: Bytes that may stay, None for no limit.
    """
    nbytes = swept.nbytes
    if limit is None or nbytes <= limit:
        return swept
    dropped = swept.dropped
    stay = []
    for entry in sorted(swept.kept):
        _, size, path = entry
        if nbytes <= limit:
            stay.append(entry)
        elif folders.unlink(path):
            dropped += path.endswith(folders.SUFFIX)
            nbytes -= size
        elif os.path.lexists(path):
            stay.append(entry)
        else:  # another process was faster
            nbytes -= size
    return Swept(dropped, stay, swept.fixed)


class Sweeper:
    """Sweeps and makes room in the folders of one store, each under the lock of its namespace."""

    def __init__(self, root: str, limits: DiskLimits) -> None:
        """Look at nothing yet."""
        self._root = root
        self._limits = limits
        own = limits.namespace
        known = limits.quota if isinstance(limits.quota, Mapping) else ()
        names = [*known] if own is None else [own]
        # A walk over all folders sees digests, not namespaces.
        self._quotas = {folders.namespace_digest(name): limits.of(name) for name in names}

    def sweep(self) -> int:
        """Sweep everything that this store may look at.

        Returns:
            How many chunks were dropped.
        """
        own = self._limits.namespace
        if own is None:
            digests = [namespace.name for namespace in folders.namespaces(self._root)]
        else:
            digests = [folders.namespace_digest(own)]
        parts = Swept.joined(swept for digest in digests if (swept := self._swept(digest)))
        return evict(parts, self._limits.total).dropped

    def sweep_one(self, namespace: str) -> int:
        """Sweep one namespace; how many chunks were dropped."""
        swept = self._swept(folders.namespace_digest(namespace))
        return swept.dropped if swept else 0

    def _swept(self, digest: str) -> Swept | None:
        """Sweep one namespace; None when it is being swept, or is none."""
        folder = f"{self._root}/{digest}"
        try:
            folders.check_folder(self._root, folder)
        except OSError:
            return None
        every = self._limits.quota if isinstance(self._limits.quota, int) else None
        limit = self._quotas.get(digest, every)
        with try_file(folders.sweep_lock(folder)) as is_ours:
            if not is_ours:
                return None
            return evict(self._look(folder), limit)

    def _look(self, folder: str) -> Swept:
        """Drop what is too old, and find out how much there is."""
        when = self._limits.deadlines()
        if folder == self._root:
            return Swept.joined(sweep(place, when) for place in folders.namespaces(self._root))
        return sweep(folders.NamespaceFolder(os.path.basename(folder), folder), when)

    def room(self, namespace: str, nbytes: int) -> tuple[bool, int]:
        """Count a chunk that will be written; whether there is room, and how many were dropped.

        Raises:
            OSError: If there is no such folder, and it cannot be made.
        """
        folder, dropped = folders.namespace_folder(self._root, namespace), 0
        for place, limit in (
            (folder, self._limits.of(namespace)),
            (self._root, self._limits.total),
        ):
            if limit is not None:
                is_room, gone = self._counted(place, limit, nbytes)
                dropped += gone
                if not is_room:
                    return False, dropped
        return True, dropped

    def _counted(self, folder: str, limit: int, nbytes: int) -> tuple[bool, int]:
        folders.make_folder(self._root, folder)
        with try_file(folders.sweep_lock(folder), PATIENCE) as is_ours:
            if not is_ours:
                return False, 0
            used, dropped = folders.read_used(folder), 0
            if used is None or used + nbytes > limit:
                swept = evict(self._look(folder), limit - max(limit // _SHARE, nbytes))
                used, dropped = swept.nbytes, swept.dropped
            is_room = used + nbytes <= limit
            folders.write_used(folder, used + nbytes * is_room)
            return is_room, dropped


# ---------------------------------------------------------------------- deleting a namespace
# A deletion begins the next generation first, then renames every folder away, then removes what it
# renamed, then begins another generation for those who read a chunk in between.  A writer knows the
# generation in which its chunk was begun, makes a temporary file, and looks at the generation once
# more before it renames that file into its place.  If its temporary file was there before, the
# deletion takes it away with its folder, published or not; if it came later, the look sees the new
# generation.  Either way the writer fails, and no lock is needed: a writer that is killed or
# stopped at any point can neither block a deletion nor undo it.

_PASSES = 100


def delete_namespace(folder: str, last: int, *, durable: bool) -> int:
    """Remove everything in the folder of a namespace but the number of its generation.

    Args:
        folder: An existing folder.
        last: The number when all is gone; meanwhile it is one less.
        durable: Whether to have it on the medium when this returns.

    Returns:
        How many chunks were removed.

    Raises:
        OSError: If something of it could not be removed.
    """
    dropped = 0
    try:
        folders.set_generation(folder, last - 1, durable=durable)
    except OSError:
        # The disk may be full: make room and try again.
        dropped = _purge(folder)
        folders.set_generation(folder, last - 1, durable=durable)
    dropped += _purge(folder)
    folders.set_generation(folder, last, durable=durable)
    if durable:
        folders.sync_folder(folder)
    return dropped


def _purge(folder: str) -> int:
    # What a reader quarantines meanwhile comes out of the other folders: they go first.
    names = sorted(os.listdir(folder), key=lambda name: name == folders.QUARANTINE)
    for name in dict.fromkeys([*names, folders.QUARANTINE]):
        if name != folders.GENERATION and not name.startswith(folders.DELETED):
            with suppress(FileNotFoundError):
                os.rename(f"{folder}/{name}", folders.deleted_path(folder))
    # All of it, also what another deletion took away a moment before and has not removed yet, and
    # again, because a system call that began before the renaming may still add a file.
    dropped = 0
    failures: list[OSError] = []
    for _ in range(_PASSES):
        leftovers = [name for name in os.listdir(folder) if name.startswith(folders.DELETED)]
        if not leftovers:
            return dropped
        failures = []
        dropped += sum(folders.remove(f"{folder}/{name}", failures) for name in leftovers)
    raise next(iter(failures), OSError(f"{folder} is filled faster than it can be emptied"))
