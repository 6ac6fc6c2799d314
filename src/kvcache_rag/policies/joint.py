"""Chunks that were computed together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvcache_rag.policies.base import ReusePolicy

if TYPE_CHECKING:
    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitch import StitchedPrompt


@dataclass(frozen=True)
class Combination(ReusePolicy):
    """Reuse the cache of exactly these chunks in this order, computed together.

    Shared RAG-DCache (arXiv 2504.11765) with combinations of k > 1 chunks.  A combination
    stands directly behind the prefix, where it was computed, so nothing moves and the logits are
    those of a full prefill.  This is also the way for models whose keys cannot move.  Every order
    of every selection is computed once, so it pays where questions repeat selections.
    """

    name: ClassVar[str] = "combination"
    joint: ClassVar[bool] = True

    @property
    def is_reuse(self) -> bool:
        """Always."""
        return True

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """No token."""
        return torch.zeros(prompt.context_tokens, dtype=torch.bool)
