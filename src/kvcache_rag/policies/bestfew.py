"""Answer from the retriever's best chunks alone, as a full prefill of them would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from kvcache_rag.policies.base import Arrangement, ReusePolicy
from kvcache_rag.policies.checks import checked_count
from kvcache_rag.policies.named import Form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.policies.base import Signals
    from kvcache_rag.policies.relevance import Retrieved
    from kvcache_rag.stitching.stitch import StitchedPrompt


MOST: Final = 3
"""Chunks that are answered from, where nobody says how many."""
NEAR: Final = 2.0 + 1e-6
"""Standard deviations of relevance: who is farther behind the best one is left out.

Two chunks of which scores alone are known are always two apart, which says nothing; so this is a
little more than they are after rounding.
"""


@dataclass(frozen=True)
class BestFew(ReusePolicy):
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
    computes_chunks: ClassVar[bool] = True
    moves_chunks: ClassVar[bool] = False
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            checked_count("count", self.count)

    def chosen(self, retrieved: Retrieved) -> tuple[int, ...]:
        """The best, best first."""
        ranked = retrieved.ranked()
        if self.count is not None:
            return ranked[: self.count]
        relevance = retrieved.relevance
        return tuple(one for one in ranked[:MOST] if relevance[ranked[0]] - relevance[one] <= NEAR)

    def arranged(self, scores: Sequence[float]) -> Arrangement:
        """The best first, where it was prefilled; the others are computed behind it."""
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
        return Arrangement(tuple(ranked), max(0, len(scores) - 1))

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """All chunks but the first: what computing them with the query has to equal."""
        from kvcache_rag.policies.selection import candidates  # loads torch

        return candidates(prompt)
