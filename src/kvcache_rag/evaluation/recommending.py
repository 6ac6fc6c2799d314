"""What follows from measured scores: how much is sure, which policy to use, what to mind."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final

from kvcache_rag.evaluation.statistics import LEAST_DIFFERING
from kvcache_rag.reader.scoring import wilson
from kvcache_rag.verdict import WEAK_BELOW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.verdict import PolicyScore

AGREEMENT: Final = "agreement_f1"
"""The measure where questions have no answers: word F1 of the answer and full prefill's."""
# Full prefill itself has to read the documents, or a share of its score says little.
LEAST_FULL_SCORE: Final = 0.6
# Costs that differ by less are the same, and the better score decides.
EQUAL_COST: Final = 1.2


def recommended(full: PolicyScore, rows: Sequence[PolicyScore], threshold: float) -> str:
    """The cheapest policy that surely keeps `threshold` of full prefill's score.

    Cost is the time to the first token against full prefill's; among policies that cost the same
    but for a fifth, the one with the best score.  Full prefill, if no policy passes or none that
    passes is sooner.
    """
    passing = [row for row in rows if row.kept_low >= threshold and row.ttft_ratio < 1]
    if not passing:
        return full.policy
    least = min(row.ttft_ratio for row in passing)
    equal = [row for row in passing if row.ttft_ratio <= EQUAL_COST * least]
    return max(equal, key=lambda row: (row.score, -row.answer_divergence)).policy


def least_kept(mine: Sequence[float], full: Sequence[float]) -> float:
    """Share of full prefill's score that few losses can prove; 1 where there were enough of them.

    A bootstrap of questions that went alike says that they always will.  Where fewer than
    `LEAST_DIFFERING` went differently, the share of questions that may be lost is bounded by
    Wilson's interval instead: 40 questions without a loss leave 8.8 % open, 73 leave 5 %.

    Args:
        mine: Score of each question under the policy, between 0 and 1.
        full: Scores of full prefill.

    Returns:
        NaN where full prefill has no score.
    """
    pairs = list(zip(mine, full, strict=True))
    mean = statistics.fmean(full)
    if mean <= 0:
        return math.nan
    if sum(one != other for one, other in pairs) >= LEAST_DIFFERING:
        return 1.0
    lost = sum(one < other for one, other in pairs)
    return 1 - wilson(lost, len(pairs))[1] / mean


def notes(full: PolicyScore, asked: int, given: int, measure: str) -> tuple[str, ...]:
    """What to bear in mind about a verdict, a sentence each.

    Args:
        full: Full prefill itself.
        asked: How many questions were asked.
        given: How many there were.
        measure: What decides.
    """
    found = []
    if asked < WEAK_BELOW:
        found.append(
            f"This verdict is weak: {asked} questions cannot tell policies apart; give at least "
            f"{WEAK_BELOW}, better 200."
        )
    if asked < given:
        found.append(
            f"{given - asked} questions were left out, because they do not fit the context window."
        )
    if full.score < LEAST_FULL_SCORE:
        found.append(
            f"Full prefill itself scores {100 * full.score:.1f} %, so shares of its score say "
            "little about reading."
        )
    if measure == AGREEMENT:
        found.append(
            "Questions have no answers, some or all, so policies are measured against full "
            "prefill's answers, right or wrong."
        )
    return tuple(found)
