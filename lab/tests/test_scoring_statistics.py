"""Intervals hold what they promise: on hand-worked cases, and as often as they say."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from kvcache_rag import InvalidInputError
from kvcache_rag_lab.scoring.statistics import (
    LEAST_DIFFERING,
    Interval,
    Share,
    Z,
    few_losses,
    kept_ratio,
    least_kept,
    mean_change,
    mean_interval,
    median_interval,
    most_provable,
    paired_bootstrap,
    paired_ratio,
    percentiles,
    quotient,
    trials_to_keep,
    trials_without_loss,
    wilson,
)


def test_equals_the_enumeration_of_all_resamples() -> None:
    sums, sizes = np.array([3.0, -1.0, 0.5, 2.0, 1.0, 1.5]), np.array([3, 1, 2, 4, 1, 2])
    draws = np.array(list(itertools.product(range(6), repeat=6)))
    exact = np.quantile(sums[draws].sum(1) / sizes[draws].sum(1), (0.025, 0.975))
    clusters = np.repeat(np.arange(6), sizes)
    first = np.repeat(sums / sizes, sizes)
    found = paired_bootstrap(first.tolist(), [0.0] * len(first), clusters.tolist())
    assert found.difference == pytest.approx(7 / 13)
    assert (found.low, found.high) == pytest.approx(tuple(exact), abs=0.02)


def test_no_difference_among_few_is_not_none_among_all() -> None:
    scores = [0.0, 1.0, 0.5, 1.0] * 25
    found = paired_bootstrap(scores, scores)
    assert (found.difference, found.differing, found.ranked) == (0, 0, False)
    # Wilson's upper end for none of 100: 1.96² / (100 + 1.96²).
    assert (found.low, found.high) == pytest.approx((-0.0370, 0.0370), abs=1e-4)
    shared = paired_bootstrap(scores, scores, [index // 4 for index in range(100)])
    assert shared.high == pytest.approx(1.96**2 / (25 + 1.96**2))


@pytest.mark.parametrize("shared", [1, 4])
def test_the_interval_covers_the_truth_as_often_as_it_says(shared: int) -> None:
    """95 % of the intervals of simulated studies hold the true difference of 0.1.

    Four questions of a context fare alike; resampling single questions would cover 70 %.
    """
    generator = np.random.default_rng(1)
    clusters = np.repeat(np.arange(60), shared).tolist()
    covered, studies = 0, 400
    for study in range(studies):
        common = np.repeat(generator.normal(0.1, 0.4, 60), shared)
        noise = generator.normal(0, 0.1, 60 * shared)
        second = generator.random(60 * shared)
        first = second + common + noise
        found = paired_bootstrap(
            first.tolist(), second.tolist(), clusters, seed=study % 3, resamples=1000
        )
        covered += found.low <= 0.1 <= found.high
    assert 0.92 <= covered / studies <= 0.975


@pytest.mark.parametrize(("wins", "ranked"), [(LEAST_DIFFERING - 1, False), (8, True)])
def test_a_few_wins_are_no_ranking(wins: int, ranked: bool) -> None:
    first = [1.0] * wins + [0.0] * (200 - wins)
    found = paired_bootstrap(first, [0.0] * 200)
    assert (found.low > 0) is ranked
    assert found.ranked is ranked


def test_the_seed_decides_and_nothing_else() -> None:
    scores = np.random.default_rng(3).random((2, 40)).tolist()
    assert paired_bootstrap(*scores, seed=5) == paired_bootstrap(*scores, seed=5)
    assert paired_bootstrap(*scores, seed=5) != paired_bootstrap(*scores, seed=6)


def test_questions_that_fare_alike_count_once() -> None:
    scores = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    many = [one for one in scores for _ in range(4)]
    single, repeated = mean_interval(scores), mean_interval(many)
    together = mean_interval(many, [index // 4 for index in range(24)])
    assert together.high - together.low > single.high - single.low - 1e-9
    assert repeated.high - repeated.low < single.high - single.low


def test_scores_between_0_and_1_are_bootstrapped() -> None:
    scores = np.random.default_rng(4).random(400)
    found = mean_interval(scores.tolist())
    error = 1.96 * scores.std() / math.sqrt(400)
    assert (found.low, found.high) == pytest.approx(
        (scores.mean() - error, scores.mean() + error), abs=0.004
    )


def test_ratios_and_medians() -> None:
    first, second = [1.0, 0.0, 1.0, 1.0] * 50, [1.0] * 200
    found = paired_ratio(first, second)
    assert found.value == 0.75
    assert 0.67 < found.low < 0.72 < 0.78 < found.high < 0.83
    assert math.isnan(paired_ratio([1.0], [0.0]).value)
    middle = median_interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert middle.value == 3
    assert (middle.low, middle.high) == (1, 100)


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (3, 10), (10, 10), (81, 263)])
def test_wilsons_bounds_are_the_shares_that_a_score_test_just_does_not_reject(
    successes: int, trials: int
) -> None:
    assert statistics.NormalDist().cdf(Z) == pytest.approx(0.975, abs=1e-4)
    found = successes / trials
    for bound in wilson(successes, trials):
        error = math.sqrt(bound * (1 - bound) / trials)
        assert abs(found - bound) == pytest.approx(Z * error, abs=1e-9)


def test_a_share_has_wilsons_interval() -> None:
    scores = (1.0, 0.0, 1.0, 1.0)
    tally, mean = Share.from_outcomes(score > 0.5 for score in scores), mean_interval(scores)
    assert (tally.successes, tally.trials, tally.value, mean.value) == (3, 4, 0.75, 0.75)
    assert tally.interval == pytest.approx((mean.low, mean.high)) == wilson(3, 4)
    assert str(tally) == "75.0 % (30.1-95.4, n=4)"
    assert (Share.from_outcomes([]).value, Share.from_outcomes([]).interval) == (0, (0, 1))


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3, 0.999])
def test_trials_without_a_loss_are_the_fewest_that_prove_a_share(share: float) -> None:
    found = trials_without_loss(share)
    assert wilson(0, found)[1] <= share
    assert found == 1 or wilson(0, found - 1)[1] > share
    # Wilson's upper bound of none in n is z² / (n + z²).
    assert found == max(1, math.ceil(Z**2 * (1 - share) / share))
    assert trials_without_loss(0.0, most=50) == 50


def test_a_change_by_hand() -> None:
    found = mean_change([1.0, 2.0, 3.0], [1.5, 2.0, 2.5])  # changes 0.5, 0, -0.5
    assert found.value == 0
    assert (found.low, found.high) == pytest.approx((-Z * 0.5 / 3**0.5, Z * 0.5 / 3**0.5))
    alone = mean_change([1.0], [2.0])
    assert (alone.value, alone.low, alone.high) == (1, -math.inf, math.inf)
    assert mean_change([], []).n == 0


def test_a_quotient_adds_errors_in_quadrature() -> None:
    exact = Interval(4.0, 4.0, 4.0, 9)
    found = quotient(Interval(2.0, 1.0, 3.0, 7), exact)  # the other one adds nothing
    assert (found.value, found.low, found.high, found.n) == pytest.approx((0.5, 0.25, 0.75, 7))
    one = Interval(1.0, math.exp(-3), math.exp(3), 7)
    both = quotient(one, Interval(1.0, math.exp(-4), 2.0, 9))
    assert math.log(both.high) == pytest.approx(5)  # 3 and 4


def test_the_median_covers_the_truth_nearly_as_often_as_it_says() -> None:
    """A percentile bootstrap of a median is a little too narrow: 93 to 94 % at 25 values."""
    generator = np.random.default_rng(7)
    studies = [generator.lognormal(0, 1, 25).tolist() for _ in range(1500)]
    found = [median_interval(one, resamples=500) for one in studies]
    covered = Share.from_outcomes(one.low <= 1 <= one.high for one in found)
    assert 0.91 <= covered.value <= 0.96


def test_few_losses_bound_what_a_bootstrap_has_not_seen() -> None:
    alike = [1.0] * 40
    assert few_losses(alike, alike) == pytest.approx((-0.0876, 0.0876), abs=1e-4)
    assert few_losses([0.0, *alike], [1.0, *alike]) == (-wilson(1, 41)[1], wilson(0, 41)[1])
    assert few_losses(alike, alike, [0] * 20 + [1] * 20) == (-wilson(0, 2)[1], wilson(0, 2)[1])
    assert few_losses([0.0] * 6 + [1.0] * 34, alike) is None
    found = paired_bootstrap([0.0, *alike], [1.0, *alike])
    assert (found.low, found.high) == (-wilson(1, 41)[1], wilson(0, 41)[1])


def test_a_kept_share_is_no_surer_than_the_difference() -> None:
    alike = [0.5] * 40
    found = kept_ratio(alike, alike)
    assert (found.value, found.high) == (1, pytest.approx(1 + 0.0876 / 0.5, abs=1e-3))
    assert found.low == pytest.approx(least_kept(alike, alike)) == 1 - wilson(0, 40)[1] / 0.5
    lost = [0.0] * 10 + [0.5] * 30
    assert kept_ratio(lost, alike) == paired_ratio(lost, alike)  # a bootstrap has seen enough
    assert least_kept(lost, alike) == 1
    assert math.isnan(kept_ratio([0.0], [0.0]).value)
    assert math.isnan(least_kept([0.0], [0.0]))


@pytest.mark.parametrize("score", [1.0, 0.5, 0.18])
@pytest.mark.parametrize("share", [0.9, 0.95])
def test_the_fewest_questions_are_a_formula_of_score_and_share(score: float, share: float) -> None:
    """n >= z² (1 / ((1 - share) score) - 1), and that is where the proof itself turns over."""
    formula = Z**2 * (1 / ((1 - share) * score) - 1)
    fewest = trials_without_loss((1 - share) * score)
    assert fewest == math.ceil(formula)
    assert most_provable(score, fewest) >= share > most_provable(score, fewest - 1)
    known = least_kept([score] * fewest, [score] * fewest)
    assert known == pytest.approx(most_provable(score, fewest))


def scores(right: int, lost: int, won: int, total: int) -> tuple[list[float], list[float]]:
    """Of a policy and of full prefill."""
    full = [1.0] * right + [0.0] * (total - right)
    mine = [0.0] * lost + [1.0] * (right - lost + won) + [0.0] * (total - right - won)
    return mine, full


@pytest.mark.parametrize(
    ("right", "lost", "won", "share"),
    [
        (100, 0, 0, 0.99),
        (30, 0, 0, 0.9),
        (100, 2, 0, 0.95),
        (100, 0, 2, 0.98),
        (100, 8, 8, 0.95),
        (40, 12, 14, 0.9),
    ],
)
def test_as_many_questions_as_are_said_prove_what_is_kept(
    right: int, lost: int, won: int, share: float
) -> None:
    """The same questions over and over: from the estimate on they prove it, well below not."""
    mine, full = scores(right, lost, won, 120)
    needed = trials_to_keep(mine, full, share)

    def proved(times: int) -> float:
        many = mine * times, full * times
        return min(paired_ratio(*many).low, least_kept(*many))

    assert proved(math.ceil(1.1 * needed / 120)) >= share
    below = math.floor(0.8 * needed / 120)
    assert below >= 1
    assert proved(below) < share


def test_what_is_not_kept_is_proved_by_no_number() -> None:
    assert math.isnan(trials_to_keep(*scores(100, 10, 0, 120), share=0.95))
    assert math.isnan(trials_to_keep(*scores(100, 0, 0, 120), share=1.0))
    assert math.isnan(trials_to_keep([0.0], [0.0], 0.5))
    assert math.isnan(trials_to_keep(*scores(100, 5, 0, 120), share=0.95)), "just as much"


def test_percentiles_leave_a_fortieth_on_either_side() -> None:
    assert percentiles(np.arange(41.0)) == (1, 39)


@pytest.mark.parametrize(
    ("first", "second", "clusters"),
    [([], [], None), ([1.0], [1.0, 0.0], None), ([1.0, 0.0], [1.0, 0.0], [1])],
)
def test_what_cannot_be_compared_is_refused(
    first: list[float], second: list[float], clusters: list[int] | None
) -> None:
    with pytest.raises(InvalidInputError):
        paired_bootstrap(first, second, clusters)
