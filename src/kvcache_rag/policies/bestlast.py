"""Compute the retriever's best chunks after the cached others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcache_rag.policies.base import PlainReuse, Plan
from kvcache_rag.policies.checks import checked_positions, checked_ratio
from kvcache_rag.policies.policy_registry import PolicySyntax
from kvcache_rag.prompt.scores import ranking

if TYPE_CHECKING:
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.relevance import Retrieved


@dataclass(frozen=True)
class BestLast(PlainReuse):
    """Put the retriever's best chunks last and compute them together with the question.

    The others come before them in their order and are reused as they are.  The best chunks are then
    computed in their context, as in a full prefill, in one pass that costs its share of one.  The
    retriever makes the choice, not the model.

    Attributes:
        share: Share of the chunks, rounded to whole ones, and at least one. 0 is the best chunk
            alone, which costs less if many are retrieved (docs/quality.md has both).
        positions: Where the other chunks are placed; the best are at their true positions.
    """

    name: ClassVar[str] = "bestlast"
    _forms = (PolicySyntax("bestlast[:SHARE]", lambda words: BestLast(*words.numbers(float))),)
    share: float = 0.2
    positions: PositionScheme = "reordered"

    def __post_init__(self) -> None:
        checked_positions(self.positions)
        checked_ratio(self.share, "share", "the best chunk alone")

    def plan(self, retrieved: Retrieved) -> Plan:
        """The best last, the very best next to the question; of equal ones the first is better.

        The first chunk in the prompt is exact from its cache, so it is never computed.
        """
        chunks = len(retrieved)
        scores = ranking(retrieved.scores, chunks)
        ranked = sorted(range(chunks), key=lambda index: -scores[index])
        count = max(1, round(self.share * chunks))
        best = ranked[:count][::-1]
        others = [index for index in range(chunks) if index not in best]
        return Plan((*others, *best), max(0, min(count, chunks - 1)))
