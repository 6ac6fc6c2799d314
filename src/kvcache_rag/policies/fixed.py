"""Policies that choose by place alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvcache_rag.policies.base import ReusePolicy
from kvcache_rag.policies.selection import checked_positions

if TYPE_CHECKING:
    from kvcache_rag.mask import PositionScheme
    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitch import StitchedPrompt


@dataclass(frozen=True)
class Reuse(ReusePolicy):
    """Reuse every chunk as it is; only the query is computed (TurboRAG, arXiv 2410.07590).

    Attributes:
        positions: "reordered" gives chunks their positions in the prompt, "composite" leaves all of
            them right behind the prefix.
    """

    name: ClassVar[str] = "reuse"
    positions: PositionScheme = "reordered"

    def __post_init__(self) -> None:
        checked_positions(self.positions)

    @property
    def is_reuse(self) -> bool:
        """Always."""
        return True

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """No token."""
        return torch.zeros(prompt.context_tokens, dtype=torch.bool)


@dataclass(frozen=True)
class FullRecompute(ReusePolicy):
    """Compute everything: an ordinary prefill of the same token ids, the baseline."""

    name: ClassVar[str] = "full"

    @property
    def is_full(self) -> bool:
        """Always."""
        return True

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """Every token."""
        return torch.ones(prompt.context_tokens, dtype=torch.bool)
