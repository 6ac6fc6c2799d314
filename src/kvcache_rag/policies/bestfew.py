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
ADDED: Final = 0.1
"""Share of the question, by its words, that a further chunk has to add."""


@dataclass(frozen=True)
class BestFew(ReusePolicy):
    """Answer from the best few chunks, best first, exactly; the others are left out.

    One chunk behind the prefix saw all that it would see in a full prefill, so what is stored of it
    is what a full prefill computes.  The best chunk comes from there, unmoved, and the others of
    the few are computed behind it together with the question: the answer is that of a full prefill
    of these few, for one chunk's computing less, and with one chunk for the question's alone.

    Attributes:
        count: How many; None for the best one, and as many as `MOST` where each says something of
            the question that those before it do not.
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
        few = ranked[:1]
        for index in ranked[1:MOST]:
            if retrieved.added(index, few) < ADDED:
                break
            few = (*few, index)
        return few

    def arranged(self, scores: Sequence[float]) -> Arrangement:
        """The best first, where it was prefilled; the others are computed behind it."""
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
        return Arrangement(tuple(ranked), max(0, len(scores) - 1))

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """All chunks but the first: what computing them with the query has to equal."""
        from kvcache_rag.policies.selection import candidates  # loads torch

        return candidates(prompt)
