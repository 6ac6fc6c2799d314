"""Compute the tokens again whose values differ most from those of a full prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.policies.base import RatioPolicy
from kvcache_rag.policies.checks import checked_positions, checked_ratio
from kvcache_rag.policies.policy_registry import PolicySyntax

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.base import Signal, Signals


@dataclass(frozen=True)
class CacheBlend(RatioPolicy):
    """Compute the tokens with the largest deviation again (CacheBlend, arXiv 2405.16444, 4.3).

    The deviation of a token is the squared distance, in float32, of its value at one early layer
    from the value it has in a full prefill.  To measure it, all context tokens run through the
    layers below.  Unlike in the published code, the query never counts as context, and chosen
    tokens see no later token.

    Attributes:
        ratio: Share of the chunk tokens computed again: 0 is `Reuse()`, 1 a full prefill.
        check_layer: Layer whose values are compared, 0-based.  At layer 0 there is no deviation;
            each further layer costs a layer of a full prefill.
        positions: Where the other tokens are placed; those computed again are at their true
            positions.
    """

    name: ClassVar[str] = "cacheblend"
    signal: ClassVar[Signal] = "deviation"
    _forms = (PolicySyntax("cacheblend[:RATIO]", lambda words: CacheBlend(*words.numbers(float))),)
    ratio: float = 0.15
    check_layer: int = 1
    positions: PositionScheme = "reordered"

    def __post_init__(self) -> None:
        checked_positions(self.positions)
        checked_ratio(self.ratio)
        layer = self.check_layer
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 1:
            raise InvalidInputError(
                f"check_layer must be the number of a layer from 1 up, not {layer!r}; values at "
                "layer 0 do not depend on the context"
            )

    def scores(self, signals: Signals) -> Tensor:
        """The deviation at `check_layer`."""
        return signals.deviation(self.check_layer)
