"""The contract of every store.

A store maps `ChunkKey` to `ChunkKV`.  It never fails a question: what cannot be read is a miss,
what cannot be written is counted.  It knows nothing of models; the shapes it may expect are handed
in as a `ChunkLayout`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_rag.codecs import Codec, Native

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from kvcache_rag.chunk import ChunkKey, ChunkKV, ChunkLayout


@dataclass(frozen=True)
class Hit:
    """A chunk and the tier it came from ("memory", "disk", ...)."""

    chunk: ChunkKV
    tier: str


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened, in this process.

    Every `get` counts once: as a hit, a miss or a corrupt file.

    Attributes:
        hits: Chunks given back, per tier.
        misses: Keys that were not held, or could not be read.
        corrupt: Files put aside because they were not what they should be.
        puts: Chunks written.
        put_failures: Chunks that could not be written (disk full, read-only, too large); they are
            served uncached.
        evictions: Chunks dropped to stay under the limit, or after their last owner released them.
        last_failure: What the last failed write said, "" when none failed.
    """

    hits: dict[str, int]
    misses: int = 0
    corrupt: int = 0
    puts: int = 0
    put_failures: int = 0
    evictions: int = 0
    last_failure: str = ""


class ChunkStore(ABC):
    """Chunks by key.

    Every method may be called from any thread, and for stores on disk from any process.  Keys
    whose digest or spec is not 64 hexadecimal digits are refused with `InvalidInputError`, as are
    a chunk or an `out` whose shapes are not those of the key and the layout.
    """

    @property
    def codec(self) -> Codec:
        """The form in which chunks are kept; its name belongs in the spec of their keys."""
        return Native()

    @abstractmethod
    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        """Give back a chunk.

        Args:
            key: Its address.
            layout: The shapes and dtype its tensors must have.
            out: Where to put the tensors, `key.tokens` long, possibly strided views; its `tokens`
                are filled in too, its `start` must be the key's.  On an error their content is
                undefined.  Without it the result may be shared with other callers and must not be
                written to.

        Raises:
            ChunkNotFoundError: If the key is not held.
            CorruptChunkError: If it was held but is damaged or not this chunk; it is put aside
                first.
            InvalidInputError: If the key or `out` cannot be used.
        """

    @abstractmethod
    def put(self, key: ChunkKey, chunk: ChunkKV) -> bool:
        """Keep a chunk; True when it is kept.

        A failure to write is counted in `stats`, never raised.  An older chunk of the same key is
        replaced; readers see the old one or the new one, never a mixture.
        """

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Whether the key is held now; it may be gone a moment later."""

    def touch(self, key: ChunkKey) -> None:
        """Note that the key was used, so that others are evicted before it; best effort.

        `get` notes it by itself.  A store in front of this one calls it when it answers instead.
        """
        del key

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Drop a chunk at once, whoever owns it; True when it was held.  Claims stay."""

    @abstractmethod
    def locked(self, keys: Iterable[ChunkKey]) -> AbstractContextManager[None]:
        """Hold the locks of `keys`, so that a missing chunk is computed once.

        All stripes are taken in one order, so two callers with overlapping keys cannot block each
        other for ever.  Nesting is not allowed.  A directory in which no lock can be made
        (read-only) gives no lock and no error.
        """

    @abstractmethod
    def claim(self, key: ChunkKey, owner: str) -> None:
        """Note that `owner` (a collection id) uses the key, held or not; undoes its release."""

    @abstractmethod
    def release(self, key: ChunkKey, owner: str) -> None:
        """Note that `owner` no longer uses the key: a tombstone.

        The chunk is dropped by the first `sweep` after the grace time, unless somebody claims it,
        or claimed it before and has not released it.  A key that the owner never claimed is left
        alone.
        """

    @abstractmethod
    def sweep(self) -> int:
        """Drop what was released before the grace time and the least recently used above the limit.

        Returns:
            How many chunks were dropped; 0 when another sweep is running.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """Counters of this process."""
