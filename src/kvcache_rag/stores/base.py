"""The contract of every store, and what all stores share: checks and counters.

A store maps `ChunkKey` to `ChunkKV`.  It never fails a question: a failed read is a miss, a failed
write is counted.  It knows nothing of models; callers pass the expected shapes as a `ChunkLayout`.
"""

from __future__ import annotations

import logging
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from kvcache_rag.codecs import Codec, EncodedChunk, Native
from kvcache_rag.codecs.codec_registry import codec_of
from kvcache_rag.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    InvalidInputError,
    NamedArguments,
    UnreadableChunkError,
    UntrustedChunkError,
)
from kvcache_rag.forks import Reopened, new_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from kvcache_rag.codecs import Room
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout


T = TypeVar("T")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hit:
    """A chunk and the tier it came from ("memory", "disk", ...)."""

    chunk: ChunkKV
    tier: str


@dataclass(frozen=True)
class EncodedHit:
    """A chunk in the form of its store's codec, and the tier it came from."""

    chunk: EncodedChunk
    tier: str


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened, in this process.

    Every `get` counts once: as a hit, a miss, a corrupt or an untrusted file.

    Attributes:
        hits: Chunks returned, per tier.
        misses: Keys that were not held, or could not be read.
        corrupt: Files quarantined because they were damaged or not the chunk.
        untrusted: Files left alone because the store's signing key did not sign them.
        puts: Chunks written.
        put_failures: Chunks that could not be written (disk full, read-only, too large); they are
            served uncached.
        declined: Chunks that were used but not kept, because another process was still making room
            under a limit.
        evictions: Chunks dropped by a limit or their age.
        last_failure: Reason of the last failed or declined write, or failed remote operation; "" if
            none failed.
        failures: Remote operations that failed, timed out or were skipped after such failures.
        bytes_read: Bytes of the hits, per tier: file bytes, or tensors and token ids in memory.
        bytes_written: Bytes of the chunks written, per tier.
        seconds: Wall seconds of the hits, per tier.
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
    untrusted: int = 0
    declined: int = 0


class ChunkStore(NamedArguments, ABC):
    """Chunks by key.

    Every method may be called from any thread, and for stores on disk from any process.  A key
    whose digest or spec is not 64 hexadecimal digits raises `InvalidInputError`, as does a chunk or
    an `out` whose shapes do not fit the key and the layout.

    Attributes:
        tier: Name under which hits are counted.
        excludes_processes: Whether `locked` excludes other processes too.
    """

    tier: str
    excludes_processes: bool = True

    @property
    def codec(self) -> Codec:
        """The form in which chunks are kept; its name belongs in the spec of their keys."""
        return Native()

    @abstractmethod
    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        """Return a chunk.

        Args:
            key: Its address.
            layout: The shapes and dtype its tensors must have.
            out: Where to put the tensors, `key.tokens` long, possibly strided views.  Its `tokens`
                are filled too; its `start` must be the key's.  On an error its content is
                undefined.  On a CUDA device, later work on the current stream sees it filled; the
                caller need not wait.  Without `out`, the result may be shared with other callers
                and must not be written to.

        Raises:
            ChunkNotFoundError: If the key is not held.
            CorruptChunkError: If it was held but is damaged or not this chunk; it is quarantined
                first.
            UntrustedChunkError: If the store's signing key did not sign what it holds, which is
                left as it is.
            InvalidInputError: If the key or `out` cannot be used.
        """

    @property
    def gives_encoded(self) -> bool:
        """Whether `encoded` works: all chunks are held in a form that attention reads."""
        return False

    def encoded(self, key: ChunkKey, layout: ChunkLayout, room: Room | None = None) -> EncodedHit:
        """Return a chunk in its stored form; counts and raises like `get`.

        Args:
            key: Its address.
            layout: The shapes and dtype of the decoded tensors.
            room: Memory for a chunk that is read for this call alone, valid until its owner reuses
                it; None for new memory.
        """
        del layout, room
        raise ChunkNotFoundError(f"chunk {key.digest} is not kept in a form to be attended to")

    @abstractmethod
    def put(self, key: ChunkKey, chunk: ChunkKV, generation: int | None = None) -> bool:
        """Store a chunk; True if it is kept.

        A failed write is counted in `stats`, never raised.  A chunk larger than a limit is not
        kept; one that finds no room in time is declined.  It replaces an older chunk of the same
        key; readers see the old or the new one, never a mixture.

        Args:
            key: Its address.
            chunk: The chunk.
            generation: The namespace's generation when the chunk was begun; None for the current
                one.  If the namespace was deleted since, the chunk is not kept.
        """

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Whether the key is held now; it may be gone a moment later."""

    def locate(self, key: ChunkKey) -> str | None:
        """Name of the tier that holds the key now, or None; reads no chunk."""
        return self.tier if self.contains(key) else None

    def touch(self, key: ChunkKey) -> None:
        """Note that the key was used, so that others are evicted first; best effort.

        `get` does so itself.  A store in front of this one calls it when it answers instead.
        """
        del key

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Drop a chunk at once; True if it was held."""

    @abstractmethod
    def delete_namespace(self, namespace: str, generation: int | None = None) -> int:
        """Drop everything in a namespace at once and begin its next generation.

        When the call returns, no byte of it is left in this process or on its media.  Other
        processes drop it from memory when they next look at `generation`.  The namespace may then
        be used again.

        Args:
            namespace: The namespace.
            generation: The next generation, if another tier has it already; None for a new one by
                the time.

        Returns:
            How many chunks were dropped.

        Raises:
            OSError: If something could not be dropped.
        """

    @abstractmethod
    def generation(self, namespace: str) -> int:
        """A number that grows whenever any process deletes the namespace; at first 0.

        It is above the last number and the time in nanoseconds, so two tiers' numbers show which
        was deleted later.  It grows before the first byte is deleted and again after the last,
        which marks copies made meanwhile as stale.  The call is cheap and never raises.
        """

    @abstractmethod
    def locked(self, keys: Iterable[ChunkKey]) -> AbstractContextManager[object]:
        """Hold the locks of `keys`, so that a missing chunk is computed once.

        Locks are taken in one order, so callers with overlapping keys cannot deadlock.  Nesting is
        not allowed.  A read-only directory gives no lock and no error.
        """

    @abstractmethod
    def sweep(self) -> int:
        """Drop chunks that are too old, and the least recently used above the limit.

        Returns:
            How many chunks were dropped; 0 if another sweep is running.
        """

    def describe(self, spec: str, namespace: str, description: Mapping[str, Any]) -> None:
        """Note which model a spec belongs to, for people who maintain the store; best effort."""
        del spec, namespace, description

    def close(self) -> None:
        """Stop background threads; the store may still be used, without them."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Counters of this store in this process."""


class Tier(Reopened, ChunkStore):
    """A store that keeps chunks itself: in which form, for how long, and what it counts.

    Attributes:
        ttl: Seconds from a chunk's `put` to its end, used or not; None for no end.
    """

    _DAMAGED: ClassVar[str]  # what is said of a digest
    _ABSENT: ClassVar[str]

    def __init__(self, tier: str, codec: Codec | str | None, ttl: float | None) -> None:
        """Keep chunks in the form of a codec.

        Raises:
            InvalidInputError: If `ttl` is not above zero, or there is no such codec.
        """
        if ttl is not None and not ttl > 0:
            raise InvalidInputError(
                f"ttl is a number of seconds above 0, not {ttl}; None for no end"
            )
        self.tier, self.ttl = tier, ttl
        self._codec = codec_of(codec)
        self._counters = Counters(tier)

    @property
    def codec(self) -> Codec:
        return self._codec

    @property
    def gives_encoded(self) -> bool:
        return self._codec.is_attended

    def stats(self) -> StoreStats:
        return self._counters.stats()

    def _counted(self, key: ChunkKey, read: Callable[[], tuple[T, int]]) -> T:
        """What `read` gives for a key, and of how many bytes; it counts, whatever comes of it.

        Raises:
            ChunkNotFoundError: As `Counters.reading` says.
        """
        started = time.perf_counter()
        damaged, absent = self._DAMAGED.format(key.digest), self._ABSENT.format(key.digest)
        with self._counters.reading(damaged, absent):
            found, nbytes = read()
        self._counters.hit(self.tier, nbytes, time.perf_counter() - started)
        return found


# ---------------------------------------------------------------------- what callers hand in
# The rest is refused before memory or a path is touched.


def check_chunk(key: ChunkKey, chunk: ChunkKV) -> None:
    """Refuse a chunk that is not what its key and its own layout say.

    Raises:
        InvalidInputError: If length, start, shapes or dtypes differ.
    """
    extent = (key.tokens, key.start)
    length = chunk.tokens.numel()
    if (length, chunk.start) != extent:
        raise InvalidInputError(
            f"the chunk has {length} tokens from position {chunk.start}, its key says "
            f"{key.tokens} from {key.start}; compute the key from the chunk's own ids"
        )
    if chunk.tokens.dtype != torch.int32 or chunk.tokens.dim() != 1:
        raise InvalidInputError("the token ids of a chunk are one row of int32")
    layout = chunk.layout
    specs = tuple(
        tuple((tensor.dtype, tuple(tensor.shape)) for tensor in group) for group in chunk.tensors
    )
    expected = layout.specs(key.tokens)
    if specs != expected:
        raise InvalidInputError(f"the chunk's tensors are {specs}, its layout says {expected}")


def check_out(key: ChunkKey, layout: ChunkLayout, out: ChunkKV) -> None:
    """Refuse memory that the chunk of `key` does not fit.

    Raises:
        InvalidInputError: If the layout, length, start, shapes or dtypes differ.
    """
    if out.layout != layout:
        raise InvalidInputError("`out` has another layout than the chunk asked for")
    check_chunk(key, out)


def check_store(name: str, store: object) -> None:
    """Refuse an argument that is not a store or None.

    Raises:
        InvalidInputError: Saying how to make one from a folder's name.
    """
    if store is not None and not isinstance(store, ChunkStore):
        given = f"DiskStore({store!r})" if isinstance(store, str) else "a MemoryStore or DiskStore"
        raise InvalidInputError(f"{name} must be a store, not {store!r:.80}; give {given}")


def next_generation(last: int) -> int:
    """The number that follows `last` when a deletion is done; it is one less meanwhile."""
    return max(last + 1, time.time_ns()) + 1


# ---------------------------------------------------------------------- counting
def size_in_memory(chunk: ChunkKV | EncodedChunk) -> int:
    """Bytes of the keys, the values and the token ids."""
    return chunk.nbytes + chunk.tokens.nbytes


Number = TypeVar("Number", int, float)


# Of one failure that comes again and again, as on a full disk; others are told at DEBUG.
_PAUSE = 60.0  # seconds between two warnings

_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


def shortened(text: str) -> str:
    """A text with hashes as short as they can be told apart by a person."""
    return _HASH.sub(r"\1", text)


class Counters:
    """The numbers behind `StoreStats`, and the log of what happens to chunks.

    A record names a chunk by the beginning of its hash; nothing of its text is known here.
    """

    def __init__(self, tier: str) -> None:
        """Count for a tier, by whose name it is told."""
        self._tier = tier
        self._due: dict[str, float] = {}  # when a failure is a warning again
        self._lock = new_lock()
        self._hits: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._last_failure = ""

    def hit(self, tier: str, nbytes: int = 0, seconds: float = 0.0) -> None:
        """Count a chunk of `nbytes` given back by `tier` after `seconds`."""
        with self._lock:
            self._hits[tier] += 1
            self._read[tier] += nbytes
            self._seconds[tier] = self._seconds.get(tier, 0.0) + seconds

    def kept(self, tier: str, nbytes: int) -> None:
        """Count a chunk of `nbytes` written to `tier`."""
        with self._lock:
            self._counts["puts"] += 1
            self._written[tier] += nbytes

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` more of an attribute of `StoreStats`."""
        with self._lock:
            self._counts[name] += count

    def evicted(self, count: int) -> None:
        """Count chunks that were dropped by a limit or their age."""
        if count:
            self.add("evictions", count)
            _LOG.debug("%s: %d chunks were evicted", self._tier, count)

    def deleted(self, count: int) -> None:
        """Tell that a namespace was deleted, with so many chunks; they count as no evictions."""
        _LOG.info("%s: a namespace was deleted, with %d chunks", self._tier, count)

    @contextmanager
    def reading(self, damaged: str, absent: str) -> Iterator[None]:
        """Count what fails within, and say it as every store does.

        Args:
            damaged: What to say of a chunk that is not what it should be.
            absent: What to say of one that cannot be read.

        Raises:
            CorruptChunkError: For a `CorruptChunkError`.
            UntrustedChunkError: For an `UntrustedChunkError`.
            ChunkNotFoundError: For a `FileNotFoundError`.
            UnreadableChunkError: For another `OSError`.
        """
        try:
            yield
        except CorruptChunkError as error:
            self.add("corrupt")
            _LOG.warning("%s: %s", self._tier, shortened(f"{damaged}: {error}"))
            raise CorruptChunkError(f"{damaged}, prefill it: {error}") from None
        except UntrustedChunkError as error:
            self.add("untrusted")
            self._warn("a chunk is not used", str(error))
            raise UntrustedChunkError(f"{absent}, prefill it: {error}") from None
        except OSError as error:
            self.add("misses")
            if isinstance(error, PermissionError):
                self._warn("a chunk may not be read, and is prefilled every time", str(error))
            is_absent = isinstance(error, FileNotFoundError)
            kind = ChunkNotFoundError if is_absent else UnreadableChunkError
            raise kind(f"{absent}, prefill it: {error}") from None

    def failed(self, reason: str, *, is_news: bool = True) -> None:
        """Count a chunk that could not be written.

        Args:
            reason: Why.
            is_news: Whether it is logged: it was not so far, and nobody wants it so.
        """
        self._note("put_failures", reason)
        if is_news:
            self._warn("a chunk could not be written", reason)

    def unreachable(self, reason: str) -> None:
        """Count an operation of a remote that failed."""
        self._note("failures", reason)
        self._warn("the remote failed", reason)

    def _warn(self, what: str, why: str) -> None:
        """Log what failed, as a warning once in a while."""
        now, level = time.monotonic(), logging.DEBUG
        with self._lock:
            if now >= self._due.get(what, 0.0):
                self._due[what], level = now + _PAUSE, logging.WARNING
        _LOG.log(level, "%s: %s: %s", self._tier, what, shortened(why))

    def declined(self, reason: str) -> None:
        """Count a chunk for which there was no room in time."""
        self._note("declined", reason)

    def unwritable(self, reason: str) -> None:
        """Remember why writing will fail, before anything was written."""
        self._note("put_failures", reason, 0)

    def _note(self, name: str, reason: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count
            self._last_failure = reason

    def stats(self) -> StoreStats:
        """The counts at this moment."""
        with self._lock:
            return StoreStats(
                hits=dict(self._hits),
                last_failure=self._last_failure,
                bytes_read=dict(self._read),
                bytes_written=dict(self._written),
                seconds=dict(self._seconds),
                **self._counts,
            )


def added(parts: Iterable[Mapping[str, Number]]) -> dict[str, Number]:
    """The sums of numbers by name."""
    total: dict[str, Number] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


def joined(own: StoreStats, tiers: Sequence[StoreStats], put_failures: int) -> StoreStats:
    """Counters of a store over `tiers`: what it answered itself, and the sums of what they did."""
    totals: dict[str, Any] = {}
    for one in fields(StoreStats):
        values = [getattr(tier, one.name) for tier in tiers]
        if isinstance(values[0], str):
            totals[one.name] = next(filter(None, reversed(values)), "")
        else:
            totals[one.name] = added(values) if isinstance(values[0], dict) else sum(values)
    totals |= {"misses": own.misses, "puts": own.puts, "put_failures": put_failures}
    return StoreStats(**totals)
