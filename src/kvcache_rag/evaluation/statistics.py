"""Shares with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

# 97.5 % quantile of the standard normal distribution.
_Z = 1.959963984540054


@dataclass(frozen=True)
class Share:
    """A share of questions with its 95 % Wilson score interval.

    Attributes:
        hits: How many.
        total: Of how many.
    """

    hits: int
    total: int

    @property
    def value(self) -> float:
        """The share, 0 when there is nothing."""
        return self.hits / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end (Wilson 1927); (0, 1) when there is nothing."""
        if not self.total:
            return (0.0, 1.0)
        spread = _Z * _Z / self.total
        centre = (self.value + spread / 2) / (1 + spread)
        inner = self.value * (1 - self.value) / self.total + spread / (4 * self.total)
        half = _Z * math.sqrt(inner) / (1 + spread)
        return (max(0.0, centre - half), min(1.0, centre + half))

    def __str__(self) -> str:
        """Such as `93.2 % (91.5-94.6)`."""
        low, high = self.interval
        return f"{100 * self.value:.1f} % ({100 * low:.1f}-{100 * high:.1f})"
