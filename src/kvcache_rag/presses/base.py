"""What every press is, and what it looks at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.chunk import kept_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.kv.rotary import Rotation


@dataclass(frozen=True, eq=False)
class LayerStates:
    """What one layer made of a chunk, which stands behind a prefix.

    Attributes:
        keys: `(kv_heads, seen, width)`, rotated; those of the chunk are the last ones.
        values: `(kv_heads, seen, value_width)`.
        tokens: Of the chunk.
        queries: `(heads, tokens, width)` of the chunk's tokens, rotated; None for a press that
            needs none.
        factor: Of the scores `queries @ keys`.
        rotation: How keys and queries are rotated; None if that is not known.
        inv_freq: `(dim / 2,)` float32, radians per position; None without a rotation.
    """

    keys: Tensor
    values: Tensor
    tokens: int
    queries: Tensor | None = None
    factor: float = 1.0
    rotation: Rotation | None = None
    inv_freq: Tensor | None = None

    @property
    def start(self) -> int:
        """Position of the chunk's first token."""
        return self.keys.shape[1] - self.tokens

    def per_kv_head(self, scores: Tensor) -> Tensor:
        """Scores `(heads, ...)` of query heads, averaged over those that share keys and values."""
        return scores.reshape(self.keys.shape[0], -1, *scores.shape[1:]).mean(1)


@dataclass(frozen=True)
class Press(ABC):
    """Chooses the tokens of a chunk whose keys and values are stored; the others are pruned.

    Every layer and head scores the tokens, the mean decides.  One set for all of them keeps a
    chunk a tensor without gaps, which every codec, store and kernel reads as it reads others.

    Attributes:
        keep: Share of a chunk's tokens that is kept, above 0 and at most 1; at 1 nothing is pruned.

    Raises:
        InvalidInputError: If it is not such a number.
    """

    keep: float

    name: ClassVar[str]
    """Its name on command lines."""
    needs_queries: ClassVar[bool] = False
    """Whether it looks at queries, which a cache does not hold."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.keep, (int, float)) and not isinstance(self.keep, bool)
        if not is_number or not 0 < self.keep <= 1:
            raise InvalidInputError(
                f"keep is the share of a chunk's tokens that is kept, above 0 and at most 1, not "
                f"{self.keep!r}"
            )

    @abstractmethod
    def scores(self, layer: LayerStates) -> Tensor:
        """Of every token of the chunk `(kv_heads, tokens)` float32, higher is kept; may be inf."""

    def kept(self, scores: Tensor) -> Tensor:
        """Places of the tokens that are kept, ascending, by the scores of all layers' heads.

        Args:
            scores: `(tokens,)`; of equal ones the first is kept.
        """
        count = kept_tokens(len(scores), self.keep)
        order = torch.sort(scores, descending=True, stable=True).indices
        return order[:count].sort().values
