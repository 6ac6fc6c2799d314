"""How long things took the last times, and when one way of doing them is worth trying again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclass(eq=False)
class Timings:
    """The last times that one thing took, by how much of it there was.

    Not thread-safe.

    Attributes:
        last: How many are looked back at.
        fewest: How many must be known before anything is said.
    """

    last: int
    fewest: int = 1
    _samples: tuple[tuple[int, float], ...] = field(default=(), init=False)

    # Sizes this much apart tell latency from bandwidth.
    APART: ClassVar[float] = 1.25

    def note(self, size: int, seconds: float) -> None:
        """Note that `size` (bytes, tokens, answers) took `seconds`."""
        self._samples = (*self._samples, (size, seconds))[-self.last :]

    def forget(self) -> None:
        """Know nothing any more."""
        self._samples = ()

    def forget_oldest(self) -> None:
        """Know one less, if there is one."""
        self._samples = self._samples[1:]

    @property
    def rates(self) -> list[float]:
        """Seconds per unit of size of each."""
        return [seconds / max(size, 1) for size, seconds in self._samples]

    @property
    def slowest(self) -> float:
        """Seconds that the slowest took; 0 without any."""
        return max([seconds for _, seconds in self._samples], default=0.0)

    def rate(self) -> float | None:
        """Seconds per unit of size: the median, in which one that was held up decides nothing."""
        return median(self.rates) if len(self._samples) >= self.fewest else None

    def line(self) -> tuple[float, float] | None:
        """Seconds for size 0 and seconds more per unit of size; None if too few are known.

        By medians (Theil and Sen), so that here, too, one that was held up decides nothing.
        """
        if len(self._samples) < self.fewest:
            return None
        slopes = [
            (later[1] - first[1]) / (later[0] - first[0])
            for first, later in combinations(self._samples, 2)
            if not 1 / self.APART < (later[0] + 1) / (first[0] + 1) < self.APART
        ]
        if not slopes:
            return 0.0, median(self.rates)
        slope = max(median(slopes), 0.0)
        return max(median([seconds - slope * size for size, seconds in self._samples]), 0.0), slope

    def seconds(self, size: int) -> float | None:
        """How long `size` will take: latency and bandwidth; None if too few are known."""
        line = self.line()
        return None if line is None else line[0] + line[1] * size


class Retry:
    """Of so many chances that were not taken, one is: what was slow may have recovered.

    Not thread-safe.
    """

    def __init__(self, after: int) -> None:
        """Count for every `what` by itself; each `after`th time is due."""
        self._after = after
        self._passed: Counter[Hashable] = Counter()

    def is_due(self, what: Hashable = None) -> bool:
        """Pass over `what` once more; whether it is to be taken this time."""
        self._passed[what] += 1
        return self._passed[what] % self._after == 0


def saving(slower: float, sooner: float, *, share: float, least: float = 0.0) -> float:
    """Seconds that the sooner of two saves beyond what would be noise.

    Args:
        slower: Seconds of the one.
        sooner: Seconds of the other.
        share: Part of `slower` that is noise.
        least: Seconds that are noise, however short both are.
    """
    return min(slower * (1 - share), slower - least) - sooner
