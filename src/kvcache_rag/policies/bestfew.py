"""Answer from the retriever's best chunks alone, as a full prefill of them would."""

from __future__ import annotations

import math
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


WIDE: Final = 1536
"""Hidden size from which a model reads several documents without losing what one alone would tell.

Of two models of one family that were asked, that of 896 is righter from three at most than from
five, and that of 1,536 from five than from three (docs/quality.md).
"""
NEAR: Final = 2.0 + 1e-6
"""Standard deviations of relevance: who is farther behind the best one, a narrow model leaves out.

Two chunks of which scores alone are known are always two apart, which says nothing; so this is a
little more than they are after rounding.
"""
MOST: Final = 3
"""Chunks that a narrow model answers from."""
CLEAR: Final = 2.5 + 1e-6
"""Standard deviations by which the best one is ahead of all others where a wide model takes it
alone; a little more than the best of five is, if nothing but its score tells it from four equals.
"""
SEVERAL: Final = (3, 5)
"""Of how many a wide model answers where none is so far ahead: half of them, but in these bounds.
"""


@dataclass(frozen=True)
class BestFew(ReusePolicy):
    """Answer from the best few chunks, best first, exactly; the others are left out.

    One chunk behind the prefix saw all that it would see in a full prefill, so what is stored of it
    is what a full prefill computes.  The best chunk comes from there, unmoved, and the others of
    the few are computed behind it together with the question: the answer is that of a full prefill
    of these few, for one chunk's computing less, and with one chunk for the question's alone.

    Attributes:
        count: How many; None for what the relevance of the chunks says: one where a question has
            its document, more where several may be meant or needed, up to three for a narrow model
            and up to five for a wide one (docs/quality.md has how that was chosen).
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
        relevance = [retrieved.relevance[one] for one in ranked]
        behind = [relevance[0] - one for one in relevance[1:]]
        if retrieved.width < WIDE:
            return ranked[: 1 + sum(distance <= NEAR for distance in behind[: MOST - 1])]
        if behind and behind[0] > CLEAR:
            return ranked[:1]
        least, most = SEVERAL
        return ranked[: min(most, max(least, math.ceil(len(ranked) / 2)))]

    def arranged(self, scores: Sequence[float]) -> Arrangement:
        """The best first, where it was prefilled; the others are computed behind it."""
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
        return Arrangement(tuple(ranked), max(0, len(scores) - 1))

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """All chunks but the first: what computing them with the query has to equal."""
        from kvcache_rag.policies.selection import candidates  # loads torch

        return candidates(prompt)
