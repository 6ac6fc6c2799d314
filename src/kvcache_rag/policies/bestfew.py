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
"""Chunks that are answered from, where nobody says how many."""
NEAR: Final = 2.0 + 1e-6
"""Standard deviations of relevance: who is farther behind the best one is left out.

Two chunks of which scores alone are known are always two apart, which says nothing; so this is a
little more than they are after rounding.
"""


@dataclass(frozen=True)
class BestFew(PlainReuse):
    """Answer from the best few chunks, best first, exactly; the others are left out.

    One chunk behind the prefix saw all that it would see in a full prefill, so what is stored of it
    is what a full prefill computes.  The best chunk comes from there, unmoved, and the others of
    the few are computed behind it together with the question: the answer is that of a full prefill
    of these few, for one chunk's computing less, and with one chunk for the question's alone.

    Attributes:
        count: How many; None for the best one and those whose relevance is near to its own, three
            at most: one where a question has its document, more where several may be meant or
            needed (docs/quality.md has how that was chosen).
    """

    name: ClassVar[str] = "bestfew"
    _forms = (PolicySyntax("bestfew[:COUNT]", lambda words: BestFew(*words.numbers(int))),)
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            checked_count("count", self.count)

    def plan(self, retrieved: Retrieved) -> Plan:
        """The best first, where it was prefilled; the others of the few are computed behind it."""
        return few_of(retrieved.ranked(), retrieved.relevance, NEAR, self.count)


def few_of(
    ranked: tuple[int, ...], relevance: Sequence[float], near: float, count: int | None
) -> Plan:
    """Answer from the best few alone: the best from its cache, the others computed behind it.

    Args:
        ranked: Numbers of the chunks, best first.
        relevance: Of each chunk, by its number.
        near: How far behind the best one the last of the few may be.
        count: How many there are; None for those that are near, `MOST` at most.
    """
    few = [one for one in ranked[:MOST] if relevance[ranked[0]] - relevance[one] <= near]
    count = min(len(ranked), len(few) if count is None else count)
    return Plan(ranked[:count], max(0, count - 1), ranked[count:])
