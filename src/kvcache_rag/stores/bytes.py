"""Bytes by name: all that a place has to be able to do in which chunks are kept.

What chunks need beyond that stands once, above every place (`stores.stored`): their files, codecs,
checksums and signatures, limits, deletion, counters.
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
"""What a name stands for: its bytes, or an open file, which is read from where it is needed."""

GENERATION = "generation"
"""Last part of the name that outlives the deletion of a folder: it says that there was one."""


@dataclass(frozen=True)
class Entry:
    """What is known of a name without reading its bytes.

    Attributes:
        name: The whole name.
        nbytes: How many bytes it stands for.
        written: When they were put, in seconds since the epoch.
        used: When they were put or read last.
    """

    name: str
    nbytes: int
    written: float
    used: float


class ByteStore(ABC):
    """A place for bytes, which knows nothing of chunks.

    Names are paths of digits, letters, `.` and `-`, with `/` between their parts.  Every method may
    be called from any thread.  What a place cannot do raises `OSError`: above, that is a miss or is
    counted, and fails no question.

    Attributes:
        excludes_processes: Whether `lock` excludes other processes, not only other threads.
    """

    excludes_processes: bool = False

    @abstractmethod
    def get(self, name: str, most: int | None = None) -> Blob | None:
        """What a name stands for, whole as it was put; None if nothing.  It counts as used.

        Args:
            name: Which.
            most: How many of its first bytes are enough.

        Raises:
            CorruptChunkError: If something stands there that cannot have been put.
        """

    @abstractmethod
    def put(
        self,
        name: str,
        pieces: Sequence[Buffer],
        allowed: Callable[[], bool] | None = None,
    ) -> bool:
        """Let a name stand for bytes; whoever reads it has the old ones or all of the new ones.

        Args:
            name: Which.
            pieces: The bytes, in order.
            allowed: Asked when they are written and before anybody can read them; after a False
                nobody ever does.  Without it they may be lost in a power cut.

        Returns:
            Whether they can be read now.
        """

    @abstractmethod
    def delete(self, names: Iterable[str], *, damaged: Blob | None = None) -> int:
        """Let names stand for nothing; whoever reads one reads on.

        Args:
            names: Which; one that ends with `/` means all names that begin so, but for `GENERATION`
                right below it.
            damaged: What `get` gave, if that is why.  It may be kept aside, for people.

        Returns:
            How many of those that end with `.safetensors` stood for something.
        """

    @abstractmethod
    def list(self, prefix: str) -> Iterable[Entry]:
        """What there is: of one name, or of all that begin with a `prefix` that ends with `/`.

        Those of one first part come one after the other.
        """

    @abstractmethod
    def lock(self, name: str, patience: float | None = None) -> AbstractContextManager[bool]:
        """Hold a lock, whose name is none of bytes; gives whether it is held.

        Args:
            name: Which.
            patience: Seconds after which it gives False; None to wait as long as it takes.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close what is open."""

    @staticmethod
    def covers(said: str, name: str) -> bool:
        """Whether `delete` of what is said deletes a name, too."""
        below = said.endswith("/") and name.startswith(said)
        return name == said or (below and name != said + GENERATION)


class MemoryBytes(ByteStore):
    """Bytes in the memory of this process: as plain as a place can be."""

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
