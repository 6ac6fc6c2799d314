"""Keep the tokens whose keys are short (Devoto et al. 2024, arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcache_rag.presses.base import Press

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.presses.base import LayerStates


@dataclass(frozen=True)
class Knorm(Press):
    """A key's L2 norm tells how much attention its token will get: the shorter, the more.

    Norms are taken as parts of the head's mean norm, so that no head decides for all by its scale.
    """

    name: ClassVar[str] = "knorm"

    def scores(self, layer: LayerStates) -> Tensor:
        """The norms, negative."""
        norms = layer.keys[:, layer.start :].float().norm(dim=-1)  # (kv_heads, tokens)
        scores: Tensor = -norms / norms.mean(-1, keepdim=True).clamp_min(1e-12)
        return scores
