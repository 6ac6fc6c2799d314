"""Keep what a chunk's own last tokens attend to (Li et al. 2024, SnapKV, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import avg_pool1d

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.chunk import kept_tokens
from kvcache_rag.presses.base import Press

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.presses.base import LayerStates


@dataclass(frozen=True)
class SnapKV(Press):
    """The mean attention of a window of last tokens, pooled over neighbours; the window is kept.

    There the window is the end of a prompt with its question.  A chunk knows no question, so here
    it is the chunk's own end, and never more than half of what is kept.

    Attributes:
        window: Last tokens of the chunk that observe.
        kernel: Tokens over which attention is averaged, an odd number.
    """

    window: int = 16
    kernel: int = 5

    name: ClassVar[str] = "snapkv"
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or self.kernel < 1 or not self.kernel % 2:
            raise InvalidInputError(
                f"window is a number of tokens from 1 up and kernel an odd one, not {self.window} "
                f"and {self.kernel}"
            )

    def scores(self, layer: LayerStates) -> Tensor:
        """The attention of the window, infinite for the window itself."""
        window = max(1, min(self.window, kept_tokens(layer.tokens, self.keep) // 2))
        given = layer.queries
        scores = torch.full((layer.keys.shape[0], layer.tokens), torch.inf)
        rest = layer.tokens - window
        if rest <= 0 or given is None:
            return scores
        queries = given[:, -window:].float()  # (heads, window, width)
        keys = layer.keys.float().repeat_interleave(len(queries) // len(layer.keys), 0)
        logits = queries @ keys.transpose(1, 2) * layer.factor  # (heads, window, seen)
        seen = logits.shape[-1]
        hidden = torch.ones(window, seen, dtype=torch.bool, device=logits.device).triu(
            seen - window + 1
        )
        attention = logits.masked_fill(hidden, -torch.inf).softmax(-1).mean(1)  # (heads, seen)
        observed = attention[None, :, layer.start : seen - window]  # (1, heads, rest)
        # Means over as many neighbours as the kernel has, zeros beyond the ends.
        pooled = avg_pool1d(observed, self.kernel, 1, self.kernel // 2)[0]
        scores[:, :rest] = layer.per_kv_head(pooled).cpu()
        return scores
