"""Intervals for scores, and for the difference of two ways to answer the same questions.

Questions over the same documents fare alike, so they are drawn together: everything here resamples
clusters (contexts), never single questions of one.  Numbers only; what was asked is not known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray


def wilson(successes: float, trials: float, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion (95 % by default)."""
    if trials == 0:
        return 0.0, 1.0
    share, square = successes / trials, z * z / trials
    centre = (share + square / 2) / (1 + square)
    spread = z * math.sqrt(share * (1 - share) / trials + square / (4 * trials)) / (1 + square)
    return max(0.0, centre - spread), min(1.0, centre + spread)


# Intervals for scores, and for the difference of two ways to answer the same questions.
#
# Questions over the same documents fare alike, so they are drawn together: everything here
# resamples clusters (contexts), never single questions of one. Numbers only; what was asked is not
# known here.


if TYPE_CHECKING:
    Array = NDArray[np.float64]

RESAMPLES: Final = 10_000

# With fewer clusters that differ, no sign test can reach 5 % (2 x 0.5^5 = 0.0625), and a bootstrap
# that only ever saw wins would claim a ranking all the same.
LEAST_DIFFERING: Final = 6

_BLOCK: Final = 1 << 20  # random numbers drawn at a time


@dataclass(frozen=True)
class Interval:
    """A mean or a ratio with its 95 % interval.

    Attributes:
        value: The estimate.
        low: Lower bound.
        high: Upper bound.
        n: Questions.
    """

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Comparison:
    """Mean of `first - second` over the same questions, with its 95 % interval.

    Attributes:
        difference: In the unit of the scores; above 0 the first is better.
        low: Lower bound.
        high: Upper bound.
        n: Questions.
        differing: Clusters in which the two do not score the same.
    """

    difference: float
    low: float
    high: float
    n: int
    differing: int

    @property
    def ranked(self) -> bool:
        """Whether one may be called better: the interval excludes 0, and enough clusters differ."""
        return self.differing >= LEAST_DIFFERING and (self.low > 0 or self.high < 0)


def paired_bootstrap(
    first: Sequence[float],
    second: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare two ways to answer by a percentile bootstrap over clusters.

    A bootstrap of questions that went alike says that they always will.  Where fewer than
    `LEAST_DIFFERING` clusters went differently, the interval reaches at least as far as Wilson's
    for the share of clusters that may be lost, or won: 100 without a difference leave 3.7 %.

    Args:
        first: Score of each question, from 0 to 1.
        second: Scores of the same questions in the same order.
        clusters: Per question, what it shares with others (its documents); None: nothing.
        seed: Of the resampling.
        resamples: How many.

    Raises:
        InvalidInputError: If the lengths differ or there is no question.
    """
    differences = _paired(first, second, clusters)
    sums, sizes = _clustered(differences, clusters)
    totals, counts = _resampled(np.stack([sums, sizes]), seed, resamples)
    low, high = _percentiles(totals / counts)
    differing = int((_clustered(np.abs(differences), clusters)[0] > 0).sum())
    if differing < LEAST_DIFFERING:
        lost, won = (
            int((_clustered(np.maximum(0, sign * differences), clusters)[0] > 0).sum())
            for sign in (-1, 1)
        )
        low = min(low, -wilson(lost, len(sums))[1])
        high = max(high, wilson(won, len(sums))[1])
    return Comparison(float(differences.mean()), low, high, len(differences), differing)


def paired_ratio(
    first: Sequence[float],
    second: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """How much of the second's mean score the first keeps; arguments as for `paired_bootstrap`.

    Returns:
        1 means all of it; nan where the second has no score at all.
    """
    _paired(first, second, clusters)
    mine, theirs = (_clustered(np.asarray(one, float), clusters)[0] for one in (first, second))
    if not theirs.any():
        return Interval(float("nan"), float("nan"), float("nan"), len(first))
    above, below = _resampled(np.stack([mine, theirs]), seed, resamples)
    drawn = below > 0  # a resample without any score says nothing about a ratio
    low, high = _percentiles(above[drawn] / below[drawn])
    return Interval(float(mine.sum() / theirs.sum()), low, high, len(first))


def mean_interval(
    scores: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Mean score with its interval: Wilson's where every score is 0 or 1, else a bootstrap's.

    Wilson's counts questions that fare alike as fewer (Kish's design effect, never below 1).

    Raises:
        InvalidInputError: If there is no score.
    """
    values = _paired(scores, [0.0] * len(scores), clusters)
    sums, sizes = _clustered(values, clusters)
    n, mean = len(values), float(values.mean())
    if np.isin(values, (0.0, 1.0)).all():
        effective = n / _design_effect(sums, sizes, mean)
        low, high = wilson(mean * effective, effective)
    else:
        totals, counts = _resampled(np.stack([sums, sizes]), seed, resamples)
        low, high = _percentiles(totals / counts)
    return Interval(mean, low, high, n)


def median_interval(
    values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Median with its bootstrap interval, for times.

    Raises:
        InvalidInputError: If there is no value.
    """
    held = _paired(values, [0.0] * len(values), None)
    drawn = np.random.default_rng(seed).integers(0, len(held), (resamples, len(held)))
    low, high = _percentiles(np.median(held[drawn], axis=1))
    return Interval(float(np.median(held)), low, high, len(held))


def _paired(
    first: Sequence[float], second: Sequence[float], clusters: Sequence[Hashable] | None
) -> Array:
    if not len(first):
        raise InvalidInputError("there is no score to compare; ask at least one question")
    if len(first) != len(second) or (clusters is not None and len(clusters) != len(first)):
        raise InvalidInputError(
            f"{len(first)} and {len(second)} scores cannot be compared; give both of each question"
        )
    difference: Array = np.asarray(first, float) - np.asarray(second, float)
    return difference


def _clustered(values: Array, clusters: Sequence[Hashable] | None) -> tuple[Array, Array]:
    """Sum and number of the values of each cluster, in order of appearance."""
    if clusters is None:
        return values, np.ones(len(values))
    number: dict[Hashable, int] = {}
    place = np.asarray([number.setdefault(one, len(number)) for one in clusters])
    sums, sizes = np.bincount(place, values), np.bincount(place)
    return sums.astype(np.float64), sizes.astype(np.float64)


def _design_effect(sums: Array, sizes: Array, mean: float) -> float:
    """How many times larger the variance of the mean is than that of independent questions."""
    independent = mean * (1 - mean) / max(1.0, sizes.sum() - 1)
    if independent == 0 or len(sums) < 2:
        return 1.0
    spread = ((sums - mean * sizes) ** 2).sum() / sizes.sum() ** 2
    corrected = spread * len(sums) / (len(sums) - 1)
    return float(max(1.0, corrected / independent))


def _resampled(columns: Array, seed: int, resamples: int) -> Array:
    """Sums of `(columns, clusters)` over clusters drawn with replacement.

    Returns:
        `(columns, resamples)`.
    """
    weights = _weights(columns.shape[1], seed, resamples)
    rows = max(1, _BLOCK // columns.shape[1])
    blocks = [
        columns @ weights[start : start + rows].T.astype(np.float64)
        for start in range(0, resamples, rows)
    ]
    found: Array = np.concatenate(blocks, axis=1)
    return found


@lru_cache(maxsize=4)  # a study compares many pairs over the same questions
def _weights(clusters: int, seed: int, resamples: int) -> NDArray[np.uint8]:
    """How often each cluster is in each resample, `(resamples, clusters)`."""
    generator = np.random.default_rng(seed)
    weights = np.empty((resamples, clusters), np.uint8)
    rows = max(1, _BLOCK // clusters)
    for start in range(0, resamples, rows):
        count = min(rows, resamples - start)
        drawn = generator.integers(0, clusters, (count, clusters))
        drawn += np.arange(count)[:, None] * clusters
        found = np.bincount(drawn.ravel(), minlength=count * clusters)
        weights[start : start + count] = found.reshape(count, clusters)
    return weights


def _percentiles(drawn: Array) -> tuple[float, float]:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)
