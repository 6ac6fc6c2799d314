"""Every interval of the project, one function per kind, all of 95 %.

| of what | function | rule |
|---|---|---|
| a count of successes | `wilson`, `Share` | Wilson's score interval |
| a mean score | `mean_interval` | Wilson's where every score is 0 or 1, else a bootstrap |
| a difference of scores | `paired_bootstrap` | bootstrap; Wilson's beside it where few differ |
| a difference of losses | `mean_change` | normal approximation |
| a ratio of mean scores | `paired_ratio`, `kept_ratio`, `least_kept`, `most_provable` | the same |
| how many questions it takes | `trials_without_loss`, `trials_to_keep` | these, solved for n |
| a median of times | `median_interval` | bootstrap |
| a quotient of two of these | `quotient` | their errors in quadrature, on a log scale |
| draws of anything | `percentiles` | 2.5 % and 97.5 % of them |

Questions over the same documents fare alike, so they are drawn together: the bootstrap resamples
clusters (contexts), never single questions of one.  Numbers only; what was asked is not known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

Z: Final = 1.96
"""How many standard errors a two-sided 95 % interval reaches to either side."""

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


@dataclass(frozen=True)
class Share:
    """A tally of outcomes: how many of all were as they should be."""

    successes: int
    trials: int

    @classmethod
    def from_outcomes(cls, outcomes: Iterable[bool]) -> Share:
        """Count what is true."""
        flags = list(outcomes)
        return cls(sum(flags), len(flags))

    @property
    def value(self) -> float:
        """The share, 0 of nothing."""
        return self.successes / max(1, self.trials)

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.successes, self.trials)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} % ({100 * low:.1f}-{100 * high:.1f}, n={self.trials})"


def wilson(successes: float, trials: float, z: float = Z) -> tuple[float, float]:
    """Wilson's score interval of a proportion."""
    if trials == 0:
        return 0.0, 1.0
    share, square = successes / trials, z * z / trials
    centre = (share + square / 2) / (1 + square)
    spread = z * math.sqrt(share * (1 - share) / trials + square / (4 * trials)) / (1 + square)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def trials_without_loss(share: float, most: int = 100_000) -> int:
    """How many trials, none of them lost, leave at most `share` of losses open; at most `most`."""
    # Wilson's upper bound of none in n is z² / (n + z²).
    return min(most, max(1, math.ceil(Z * Z * (1 / share - 1)))) if share > 0 else most


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
    low, high = percentiles(totals / counts)
    differing, bounds = _few(differences, clusters)
    if bounds is not None:
        low, high = min(low, bounds[0]), max(high, bounds[1])
    return Comparison(float(differences.mean()), low, high, len(differences), differing)


def few_losses(
    first: Sequence[float],
    second: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
) -> tuple[float, float] | None:
    """Bounds of the mean difference where a bootstrap has seen too little to know them.

    A bootstrap of questions that went alike says that they always will.  Where fewer than
    `LEAST_DIFFERING` clusters went differently, no more than Wilson's upper bound for the share of
    clusters that may be lost, or won, is: 40 without a loss leave 8.8 % open, 73 leave 5 %.

    Returns:
        Lowest and highest difference, None where a bootstrap knows enough.
    """
    return _few(_paired(first, second, clusters), clusters)[1]


def _few(
    differences: Array, clusters: Sequence[Hashable] | None
) -> tuple[int, tuple[float, float] | None]:
    """How many clusters differ, and the bounds of `few_losses`."""

    def count(parts: Array) -> int:
        return int((_clustered(parts, clusters)[0] > 0).sum())

    differing = count(np.abs(differences))
    if differing >= LEAST_DIFFERING:
        return differing, None
    total = len(_clustered(differences, clusters)[0])
    lost, won = count(np.maximum(0, -differences)), count(np.maximum(0, differences))
    return differing, (-wilson(lost, total)[1], wilson(won, total)[1])


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
    mine, theirs = (
        _clustered(np.asarray(scores, float), clusters)[0] for scores in (first, second)
    )
    if not theirs.any():
        return Interval(float("nan"), float("nan"), float("nan"), len(first))
    above, below = _resampled(np.stack([mine, theirs]), seed, resamples)
    drawn = below > 0  # a resample without any score says nothing about a ratio
    low, high = percentiles(above[drawn] / below[drawn])
    return Interval(float(mine.sum() / theirs.sum()), low, high, len(first))


def kept_ratio(
    first: Sequence[float],
    second: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
) -> Interval:
    """`paired_ratio`, at least as wide as the difference of both where few clusters differ."""
    difference = paired_bootstrap(first, second, clusters, seed=seed)
    ratio = paired_ratio(first, second, clusters, seed=seed)
    mean = math.fsum(second) / len(second)
    if difference.differing >= LEAST_DIFFERING or mean <= 0:
        return ratio
    low, high = 1 + difference.low / mean, min(1 + difference.high / mean, 1 / mean)
    return replace(ratio, low=min(ratio.low, max(0.0, low)), high=max(ratio.high, high))


def least_kept(first: Sequence[float], second: Sequence[float]) -> float:
    """Least share of the second's mean score that few losses prove, question by question.

    Returns:
        1 where a bootstrap knows enough, nan where the second has no score at all.
    """
    mean, bounds = math.fsum(second) / len(second), few_losses(first, second)
    if mean <= 0:
        return math.nan
    return 1.0 if bounds is None else 1 + bounds[0] / mean


def most_provable(score: float, questions: int) -> float:
    """Share of a mean score that is proved if none of the questions is lost.

    It is 1 - z² / ((n + z²) score), so `share` takes n >= z² (1 / ((1 - share) score) - 1).

    Returns:
        nan where there is no score.
    """
    return 1 - wilson(0, questions)[1] / score if score > 0 else math.nan


def trials_to_keep(
    first: Sequence[float],
    second: Sequence[float],
    share: float,
    clusters: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
) -> float:
    """How many questions like these would prove that the first keeps `share`: an estimate.

    What `paired_ratio` leaves open shrinks with the root of their number.  What `least_kept` does
    is Wilson's bound of the part that is lost, p, which is at most u from n = z² u (1 - u) /
    (u - p)² on; with `LEAST_DIFFERING` that differ it says no more.

    Returns:
        nan if none would: the first does not keep as much, or all of it is asked.
    """
    ratio = paired_ratio(first, second, clusters, seed=seed)
    questions, most_lost = len(first), (1 - share) * math.fsum(second) / len(second)
    if not ratio.value > share or most_lost <= 0:
        return math.nan
    drawn = questions * ((ratio.value - ratio.low) / (ratio.value - share)) ** 2
    lost, won = (
        sum(a < b for a, b in pairs)
        for pairs in (zip(first, second, strict=True), zip(second, first, strict=True))
    )
    part = lost / questions
    few = math.inf
    if part < most_lost:
        few = Z**2 * most_lost * (1 - most_lost) / (most_lost - part) ** 2
    if lost + won:
        few = min(few, LEAST_DIFFERING * questions / (lost + won))
    return float(math.ceil(max(drawn, few, 1)))


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
        low, high = percentiles(totals / counts)
    return Interval(mean, low, high, n)


def median_interval(
    values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Median with its bootstrap interval, for times.

    Of few values it is too narrow: of 7 it covers the true median in 89 %, of 25 in 93 %.

    Raises:
        InvalidInputError: If there is no value.
    """
    array = _paired(values, [0.0] * len(values), None)
    drawn = np.random.default_rng(seed).integers(0, len(array), (resamples, len(array)))
    low, high = percentiles(np.median(array[drawn], axis=1))
    return Interval(float(np.median(array)), low, high, len(array))


def mean_change(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Mean of `after - before`, value by value, by the normal approximation: for losses.

    Unlike a bootstrap it draws nothing, and single values are not from 0 to 1.  A single pair
    proves nothing: its interval is infinite.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    count = len(differences)
    mean = sum(differences) / max(1, count)
    if count < 2:
        return Interval(mean, -math.inf, math.inf, count)
    variance = sum((difference - mean) ** 2 for difference in differences) / (count - 1)
    half = Z * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half, count)


def quotient(above: Interval, below: Interval) -> Interval:
    """One positive estimate over another that was made independently of it.

    How far each may be off on its own, as a factor, is a root of squares of logarithms together.
    """
    value = above.value / below.value

    def apart(sign: int, *factors: float) -> float:
        return math.exp(sign * math.hypot(*(math.log(factor) for factor in factors)))

    return Interval(
        value,
        value * apart(-1, above.low / above.value, below.high / below.value),
        value * apart(1, above.high / above.value, below.low / below.value),
        above.n,
    )


def percentiles(drawn: Array) -> tuple[float, float]:
    """The bounds within which 95 % of the draws lie."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


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
    place = np.asarray([number.setdefault(cluster, len(number)) for cluster in clusters])
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
    sums: Array = np.concatenate(blocks, axis=1)
    return sums


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
        counts = np.bincount(drawn.ravel(), minlength=count * clusters)
        weights[start : start + count] = counts.reshape(count, clusters)
    return weights
