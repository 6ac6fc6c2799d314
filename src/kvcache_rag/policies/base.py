"""The extension point: what of a stitched prompt is reused and what is computed again.

One method, one small file, one class.  A caller never asks which class a policy is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.mask import PositionScheme
    from kvcache_rag.stitch import StitchedPrompt


class ReusePolicy(ABC):
    """How cached chunks are used.

    Attributes:
        positions: Where the chunks stand.
        joint: Whether the chunks of a prompt are computed and stored together, as one.
    """

    positions: PositionScheme = "reordered"
    joint: ClassVar[bool] = False
    name: ClassVar[str]

    @abstractmethod
    def select(self, prompt: StitchedPrompt) -> Tensor:
        """Which context tokens are computed again in the context of the whole prompt.

        Args:
            prompt: The prompt's spans; the query is always computed.

        Returns:
            `(context_tokens,)` bool.  All True is a plain prefill and loads nothing.
        """
