"""Answer from the retriever's best chunks alone, as a full prefill of them would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from kvcache_rag.policies.base import PlainReuse, Plan
from kvcache_rag.policies.checks import checked_count
from kvcache_rag.policies.named import Form

if TYPE_CHECKING:
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
    _forms = (Form("bestfew[:COUNT]", lambda words: BestFew(*words.numbers(int))),)
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            checked_count("count", self.count)

    def plan(self, retrieved: Retrieved) -> Plan:
        """The best first, where it was prefilled; the others of the few are computed behind it."""
        ranked, relevance = retrieved.ranked(), retrieved.relevance
        few = [one for one in ranked[:MOST] if relevance[ranked[0]] - relevance[one] <= NEAR]
        count = min(len(ranked), len(few) if self.count is None else self.count)
        return Plan(ranked[:count], max(0, count - 1), ranked[count:])
