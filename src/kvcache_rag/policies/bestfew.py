"""Answer from the retriever's best chunks alone, as a full prefill of them would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from kvcache_rag.policies.base import PlainReuse, Plan
from kvcache_rag.policies.checks import checked_count
from kvcache_rag.policies.policy_registry import PolicySyntax

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.policies.relevance import Retrieved


MOST: Final = 3
"""How many chunks are answered from at most, by default."""
NEAR: Final = 2.0 + 1e-6
"""Standard deviations of relevance; a chunk farther below the best one is left out.

Two chunks known only by scores are always two apart, which says nothing; so this is slightly more,
to allow for rounding.
"""


@dataclass(frozen=True)
class BestFew(PlainReuse):
    """Answer exactly from the best few chunks, best first; the others are left out.

    The first chunk after the prefix saw all that it would see in a full prefill, so its cache is
    what a full prefill computes.  The best chunk is loaded from there, unmoved, and the others of
    the few are computed after it together with the question.  The answer is that of a full prefill
    of these few, but the best chunk is not computed; with one chunk, only the question is.

    Attributes:
        count: How many; None for the best one and those of similar relevance, three at most: one if
            a single document fits the question, more if several may be meant or needed
            (docs/quality.md says how that was chosen).
    """

    name: ClassVar[str] = "bestfew"
    _forms = (PolicySyntax("bestfew[:COUNT]", lambda words: BestFew(*words.numbers(int))),)
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            checked_count("count", self.count)

    def plan(self, retrieved: Retrieved) -> Plan:
        """The best first, where it was prefilled; the others of the few are computed after it."""
        return few_of(retrieved.ranked(), retrieved.relevance, NEAR, self.count)


def few_of(
    ranked: tuple[int, ...], relevance: Sequence[float], near: float, count: int | None
) -> Plan:
    """Answer from the best few alone: the best from its cache, the others computed after it.

    Args:
        ranked: Numbers of the chunks, best first.
        relevance: Relevance of each chunk, by its number.
        near: How far below the best one the last of the few may be.
        count: How many; None for those that are near, `MOST` at most.
    """
    few = [one for one in ranked[:MOST] if relevance[ranked[0]] - relevance[one] <= near]
    count = min(len(ranked), len(few) if count is None else count)
    return Plan(ranked[:count], max(0, count - 1), ranked[count:])
