"""Policies that choose by place alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.policies.base import ReusePolicy

if TYPE_CHECKING:
    from kvcache_rag.mask import PositionScheme
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
        if self.positions not in ("reordered", "composite"):
            raise InvalidInputError(
                f'positions must be "reordered" or "composite", not {self.positions!r}'
            )

    def select(self, prompt: StitchedPrompt) -> Tensor:
        """No token."""
        return torch.zeros(prompt.context_tokens, dtype=torch.bool)


@dataclass(frozen=True)
class FullRecompute(ReusePolicy):
    """Compute everything: an ordinary prefill of the same token ids, the baseline."""

    name: ClassVar[str] = "full"

    def select(self, prompt: StitchedPrompt) -> Tensor:
        """Every token."""
        return torch.ones(prompt.context_tokens, dtype=torch.bool)
