"""Compute the tokens again that the question attends to most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcache_rag.policies.base import RatioPolicy
from kvcache_rag.policies.checks import checked_positions, checked_ratio
from kvcache_rag.policies.policy_registry import PolicySyntax

if TYPE_CHECKING:
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.base import Signal


@dataclass(frozen=True)
class ProphetKV(RatioPolicy):
    """Compute the tokens again that the question attends to most (ProphetKV, arXiv 2602.02579).

    The question runs once over the stitched chunks, as with `Reuse()`.  Its attention to each token
    is added up over all layers, heads and tokens of the question.  The most attended tokens are
    computed again together with the question, in one further pass.  So the question chooses,
    without a second model.

    Attributes:
        ratio: Share of the chunk tokens computed again: 0 is `Reuse()`, 1 a full prefill.
        positions: Where the other tokens are placed; those computed again are at their true
            positions.
    """

    name: ClassVar[str] = "prophetkv"
    signal: ClassVar[Signal] = "attention"
    _forms = (PolicySyntax("prophetkv[:RATIO]", lambda words: ProphetKV(*words.numbers(float))),)
    ratio: float = 0.2
    positions: PositionScheme = "reordered"

    def __post_init__(self) -> None:
        checked_positions(self.positions)
        checked_ratio(self.ratio)
