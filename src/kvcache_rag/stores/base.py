"""The contract of every store.

A store maps `ChunkKey` to `ChunkKV`.  It never fails a question: what cannot be read is a miss,
what cannot be written is counted.  It knows nothing of models; the shapes it may expect are handed
in as a `ChunkLayout`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache_rag.codecs import Codec, Native

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager

    from kvcache_rag.chunk import ChunkKey, ChunkKV, ChunkLayout
    from kvcache_rag.stores.reader import ChunkReader


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
        last_failure: What the last failed write said, or the last failed operation of a remote;
            "" when none failed.
        failures: Operations of a remote that failed, ran out of time or were skipped after such.
        bytes_read: Bytes of the hits, per tier: file bytes, or tensors and token ids in memory.
        bytes_written: Bytes of the chunks written, per tier.
        seconds: Wall seconds that the hits took, per tier.
    """

    hits: dict[str, int]
    misses: int = 0
    corrupt: int = 0
    puts: int = 0
    put_failures: int = 0
    evictions: int = 0
    last_failure: str = ""
    failures: int = 0
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class ChunkStore(ABC):
    """Chunks by key.

    Every method may be called from any thread, and for stores on disk from any process.  Keys
    whose digest or spec is not 64 hexadecimal digits are refused with `InvalidInputError`, as are
    a chunk or an `out` whose shapes are not those of the key and the layout.

    Attributes:
        tier: Name under which hits are counted.
        excludes_processes: Whether `locked` excludes other processes, not only other threads.
    """

    tier: str
    excludes_processes: bool = True

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
                undefined.  On a CUDA device it is filled for whatever the current stream is told
                afterwards; the caller need not wait.  Without it the result may be shared with
                other callers and must not be written to.

        Raises:
            ChunkNotFoundError: If the key is not held.
            CorruptChunkError: If it was held but is damaged or not this chunk; it is put aside
                first.
            InvalidInputError: If the key or `out` cannot be used.
        """

    def reader(self, key: ChunkKey, layout: ChunkLayout) -> ChunkReader | None:
        """Open a chunk to be read layer by layer; None where only `get` can read it.

        It counts as `get` does, once it is finished.

        Raises:
            ChunkNotFoundError: If the key is not held; `CorruptChunkError` if it is damaged.
            InvalidInputError: If the key cannot be used.
        """
        del key, layout
        return None

    @abstractmethod
    def put(self, key: ChunkKey, chunk: ChunkKV) -> bool:
        """Keep a chunk; True when it is kept.

        A failure to write is counted in `stats`, never raised.  An older chunk of the same key is
        replaced; readers see the old one or the new one, never a mixture.
        """

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Whether the key is held now; it may be gone a moment later."""

    def locate(self, key: ChunkKey) -> str | None:
        """Name of the tier that holds the key now, None when none does; opens no chunk."""
        return self.tier if self.contains(key) else None

    def touch(self, key: ChunkKey) -> None:
        """Note that the key was used, so that others are evicted before it; best effort.

        `get` notes it by itself.  A store in front of this one calls it when it answers instead.
        """
        del key

    def promote(self, key: ChunkKey, chunk: ChunkKV, tier: str) -> None:
        """Copy a chunk that `tier` holds into the tiers before it; best effort.

        For who declined to load it from there and computed it instead.  A store of one tier has
        none before it.
        """
        del key, chunk, tier

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Drop a chunk at once, whoever owns it; True when it was held.  Claims stay."""

    @abstractmethod
    def delete_namespace(self, namespace: str) -> int:
        """Drop everything of a namespace at once: chunks, claims, and what lies around them.

        No byte of it is left in this process and on its media when the call returns; the memory of
        other processes forgets it when they look at `epoch` again.  The namespace may be used again
        afterwards.

        Returns:
            How many chunks were dropped.

        Raises:
            OSError: If something of it could not be dropped.
        """

    def epoch(self, namespace: str) -> int:
        """A number that grows whenever any process deletes the namespace; 0 where none can know.

        It is the larger of the number before plus one and the time in nanoseconds, so that numbers
        of two tiers say which was deleted later.  It grows before the first byte goes and again
        after the last one went: what was copied meanwhile is told to be stale.  Cheap, and never an
        error.
        """
        del namespace
        return 0

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

    def describe(self, spec: str, namespace: str, description: Mapping[str, Any]) -> None:
        """Note which model a spec belongs to, for people who look after the store; best effort."""
        del spec, namespace, description

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was put is where it goes; False when `timeout` seconds did not do."""
        del timeout
        return True

    def close(self) -> None:  # noqa: B027 - most stores have nothing to stop
        """Flush and stop background threads; the store may still be used, without them."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Counters of this process."""
