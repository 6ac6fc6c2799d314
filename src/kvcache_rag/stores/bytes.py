"""Bytes by name: all that a place for chunks has to do.

`stores.stored` adds what chunks need beyond that, for every place: files, codecs, checksums and
signatures, limits, deletion, counters.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvcache_rag.forks import new_rlock
from kvcache_rag.stores.locks import ThreadLocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from io import FileIO

Buffer: TypeAlias = "bytes | bytearray | memoryview"

Blob: TypeAlias = "bytes | bytearray | memoryview | FileIO"
"""The content of a name: its bytes, or an open file to read parts from."""

GENERATION = "generation"
"""Last part of the name that survives the deletion of its folder, to record it."""


@dataclass(frozen=True)
class Entry:
    """What is known of a name without reading its bytes.

    Attributes:
        name: The full name.
        nbytes: Size of its content in bytes.
        written: When it was put, in seconds since the epoch.
        used: When it was last put or read.
    """

    name: str
    nbytes: int
    written: float
    used: float


class ByteStore(ABC):
    """A place for bytes that knows nothing of chunks.

    Names are paths of digits, letters, `.` and `-`, with `/` between their parts.  Every method may
    be called from any thread.  A failed operation raises `OSError`; the store counts it, as a miss
    when reading, and no question fails.

    Attributes:
        excludes_processes: Whether `lock` excludes other processes too.
    """

    excludes_processes: bool = False

    @abstractmethod
    def get(self, name: str, most: int | None = None) -> Blob | None:
        """Return the content of a name as it was put, or None; counts as use.

        Args:
            name: The name.
            most: How many of its first bytes suffice.

        Raises:
            CorruptChunkError: If the content cannot have been put there.
        """

    @abstractmethod
    def put(
        self,
        name: str,
        pieces: Sequence[Buffer],
        allowed: Callable[[], bool] | None = None,
    ) -> bool:
        """Set the content of a name; readers get the old bytes or all of the new ones.

        Args:
            name: The name.
            pieces: The bytes, in order.
            allowed: Called after writing, before anybody can read the bytes; if it returns False
                nobody ever can.  Without it a power cut may lose them.

        Returns:
            Whether they can be read now.
        """

    @abstractmethod
    def delete(self, names: Iterable[str], *, damaged: Blob | None = None) -> int:
        """Delete names; reads in progress go on.

        Args:
            names: The names; one that ends with `/` means all names below it except `GENERATION`
                directly below it.
            damaged: What `get` returned, if it was damaged.  It may be kept aside, for people.

        Returns:
            How many existing names ending with `.safetensors` were deleted.
        """

    @abstractmethod
    def list(self, prefix: str) -> Iterable[Entry]:
        """Entries of one name, or of all names below a `prefix` that ends with `/`.

        Names with the same first part come one after the other.
        """

    @abstractmethod
    def lock(self, name: str, patience: float | None = None) -> AbstractContextManager[bool]:
        """Hold a lock, whose name has no content; yields whether it is held.

        Args:
            name: Name of the lock.
            patience: Seconds to wait before it yields False; None to wait without end.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close what is open."""

    @staticmethod
    def covers(said: str, name: str) -> bool:
        """Whether `delete` of `said` also deletes a name."""
        below = said.endswith("/") and name.startswith(said)
        return name == said or (below and name != said + GENERATION)


class MemoryBytes(ByteStore):
    """Bytes in the memory of this process: the simplest place."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._kept: dict[str, tuple[bytes, Entry]] = {}
        self._guard = new_rlock()  # `allowed` looks around
        self._locks = ThreadLocks()

    def get(self, name: str, most: int | None = None) -> bytes | None:
        with self._guard:
            if name not in self._kept:
                return None
            data, entry = self._kept[name]
            self._kept[name] = data, Entry(name, len(data), entry.written, time.time())
            return data[:most]

    def put(
        self,
        name: str,
        pieces: Sequence[Buffer],
        allowed: Callable[[], bool] | None = None,
    ) -> bool:
        data, now = b"".join(pieces), time.time()
        with self._guard:  # so that no deletion comes in between
            if allowed is not None and not allowed():
                return False
            self._kept[name] = data, Entry(name, len(data), now, now)
        return True

    def delete(self, names: Iterable[str], *, damaged: Blob | None = None) -> int:
        del damaged
        with self._guard:
            gone = [one for name in names for one in self._kept if self.covers(name, one)]
            return sum(
                name.endswith(".safetensors")
                for name in gone
                if self._kept.pop(name, None) is not None
            )

    def list(self, prefix: str) -> list[Entry]:
        with self._guard:
            return [self._kept[name][1] for name in sorted(self._kept) if name.startswith(prefix)]

    def lock(self, name: str, patience: float | None = None) -> AbstractContextManager[bool]:
        return self._locks.hold([name], patience)
