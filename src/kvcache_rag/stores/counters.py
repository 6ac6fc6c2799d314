"""Counting what a store did, from any thread."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError
from kvcache_rag.stores.base import StoreStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Number = TypeVar("Number", int, float)


class Counters:
    """The numbers behind `StoreStats`."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
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

    @contextmanager
    def reading(self, damaged: str, absent: str) -> Iterator[None]:
        """Count what fails within, and say it as every store does.

        Args:
            damaged: What to say of a chunk that is not what it should be.
            absent: What to say of one that cannot be read.

        Raises:
            CorruptChunkError: For a `CorruptChunkError`.
            ChunkNotFoundError: For an `OSError`.
        """
        try:
            yield
        except CorruptChunkError as error:
            self.add("corrupt")
            raise CorruptChunkError(f"{damaged}, prefill it: {error}") from None
        except OSError as error:
            self.add("misses")
            raise ChunkNotFoundError(f"{absent}, prefill it: {error}") from None

    def failed(self, reason: str) -> None:
        """Count a chunk that could not be written."""
        with self._lock:
            self._counts["put_failures"] += 1
            self._last_failure = reason

    def note(self, reason: str) -> None:
        """Remember why writing will fail, before anything was written."""
        with self._lock:
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
    return StoreStats(
        hits=added(tier.hits for tier in tiers),
        misses=own.misses,
        corrupt=sum(tier.corrupt for tier in tiers),
        puts=own.puts,
        put_failures=put_failures,
        evictions=sum(tier.evictions for tier in tiers),
        last_failure=next((t.last_failure for t in reversed(tiers) if t.last_failure), ""),
        failures=sum(tier.failures for tier in tiers),
        bytes_read=added(tier.bytes_read for tier in tiers),
        bytes_written=added(tier.bytes_written for tier in tiers),
        seconds=added(tier.seconds for tier in tiers),
    )
