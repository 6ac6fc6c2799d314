"""Compute the retriever's best chunks behind the cached others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcache_rag.policies.base import Arrangement, ReusePolicy
from kvcache_rag.policies.checks import checked_positions, checked_ratio
from kvcache_rag.policies.named import Form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitching.stitch import StitchedPrompt


@dataclass(frozen=True)
class BestLast(ReusePolicy):
    """Put the retriever's best chunks last and compute them together with the question.

    The others stand before them in their order and are reused as they are.  What answers the
    question is then computed in their context, as in a full prefill, in one pass that costs its
    share of one.  Nothing is chosen inside the model; the choice is the retriever's.

    Attributes:
        share: Part of the chunks, rounded to whole ones, and at least one: 0 is the best chunk
            alone, which costs less where many are retrieved (docs/quality.md has both).
        positions: Where the other chunks stand; these stand at their true places.
    """

    name: ClassVar[str] = "bestlast"
    _forms = (Form("bestlast[:SHARE]", lambda words: BestLast(*words.numbers(float))),)
    computes_chunks: ClassVar[bool] = True
    share: float = 0.2
    positions: PositionScheme = "reordered"

    def __post_init__(self) -> None:
        checked_positions(self.positions)
        checked_ratio(self.share, "share", "the best chunk alone")

    def arranged(self, scores: Sequence[float]) -> Arrangement:
        """The best last, the very best next to the question; of equal ones, the first is better.

        What stands first is as in a full prefill wherever it comes from, so it is never computed.
        """
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
        count = self._count(len(scores))
        best = ranked[:count][::-1]
        others = [index for index in range(len(scores)) if index not in best]
        return Arrangement((*others, *best), max(0, min(count, len(scores) - 1)))

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """The last chunks, whole: what computing them with the query has to equal."""
        from kvcache_rag.policies.selection import candidates, nothing  # loads torch

        selected = nothing(prompt)
        for chunk in prompt.chunks[-self._count(len(prompt.chunks)) :]:
            selected[chunk.start : chunk.stop] = True
        return selected & candidates(prompt)

    def _count(self, chunks: int) -> int:
        return max(1, round(self.share * chunks))
