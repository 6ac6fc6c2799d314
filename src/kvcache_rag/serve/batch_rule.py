"""Answer waiting requests one by one or in one batch, whichever this machine's times say is sooner.

A padded batch reads the weights once for all its rows, but it lasts as long as its longest answer,
and its first row waits for its last.  Nothing is assumed of a device: both sides are measured.
"""

from __future__ import annotations

from collections import Counter, deque
from statistics import median
from typing import TYPE_CHECKING

from cachetools import LRUCache

if TYPE_CHECKING:
    from collections.abc import Hashable

# Times of one size that are looked back at; with their median, one that was held up decides little.
SAMPLES = 9
# Answers one by one that must be known before a batch is tried.
FEWEST_SINGLES = 3
# What a batch must save; less is noise.
SAVING = 0.05
# Of so many chances that were not taken, one is: a size that was slower is measured again, and so
# are single answers where batches are sooner.
RETRY = 64
# Kinds of requests whose times are remembered.
KINDS = 128


class BatchRule:
    """Times of single answers and of batches, and what follows from them.

    Seconds are those that depend on batching: without those for loading or prefilling chunks, which
    a batch does one row after the other too.  Not thread-safe.

    Attributes:
        most: Largest batch.
    """

    def __init__(self, most: int) -> None:
        """Know nothing yet."""
        self.most = max(1, most)
        self._times: LRUCache[Hashable, dict[int, deque[float]]] = LRUCache(KINDS)
        self._passed: LRUCache[Hashable, Counter[int]] = LRUCache(KINDS)

    @property
    def sizes(self) -> list[int]:
        """Sizes that are tried: powers of two, and the largest."""
        powers = [1 << bit for bit in range(1, self.most.bit_length()) if 1 << bit < self.most]
        return [*powers, self.most] if self.most > 1 else []

    def measured(self, kind: Hashable, size: int, seconds: float) -> None:
        """Note that `size` answers of a kind took `seconds` together."""
        times = self._times.setdefault(kind, {})
        times.setdefault(size, deque(maxlen=SAMPLES)).append(seconds)

    def failed(self, kind: Hashable, size: int) -> None:
        """Note that a batch could not be answered as one: it takes for ever."""
        times = self._times.setdefault(kind, {})
        times[size] = deque([float("inf")] * SAMPLES, maxlen=SAMPLES)

    def seconds(self, kind: Hashable, size: int) -> float | None:
        """What `size` answers of a kind take together; None if that was not measured."""
        times = self._times.get(kind, {}).get(size)
        return median(times) if times else None

    def size(self, kind: Hashable, alike: int, behind: int) -> int:
        """How many requests to answer together now, 1 for no batch.

        What counts is the time that everybody waits together, those behind included.

        Args:
            kind: What the requests have in common.
            alike: How many could be answered together.
            behind: How many wait besides.
        """
        single = self.seconds(kind, 1)
        possible = [size for size in self.sizes if size <= alike]
        known = len(self._times.get(kind, {}).get(1, ()))
        if single is None or known < FEWEST_SINGLES or not possible:
            return 1
        passed = self._passed.setdefault(kind, Counter())
        trial = self._trial(kind, single, possible)
        if trial:
            return trial
        best = max(possible, key=lambda size: self._saving(kind, single, size, alike + behind))
        if self._saving(kind, single, best, alike + behind) <= 0:
            best = 1
        measured = self._times[kind]
        for size in (one for one in (1, *possible) if one != best and one in measured):
            passed[size] += 1
            if passed[size] >= RETRY:
                passed[size] = 0
                return size
        return best

    def _trial(self, kind: Hashable, single: float, possible: list[int]) -> int:
        """The smallest size without a time, if the one below was no slower than single answers."""
        for size in possible:
            seconds = self.seconds(kind, size)
            if seconds is None:
                return size
            if seconds > size * single:
                return 0
        return 0

    def _saving(self, kind: Hashable, single: float, size: int, waiting: int) -> float:
        """Seconds that all who wait save by a batch of `size`, beyond what would be noise."""
        seconds = self.seconds(kind, size)
        if seconds is None:
            return 0.0
        behind = waiting - size
        together = (size + behind) * seconds
        apart = single * size * ((size + 1) / 2 + behind)
        return apart * (1 - SAVING) - together
