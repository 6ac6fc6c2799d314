"""Compute the head of every chunk again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.policies.base import ReusePolicy
from kvcache_rag.policies.checks import checked_positions
from kvcache_rag.policies.policy_registry import PolicySyntax

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitching.stitch import StitchedPrompt


@dataclass(frozen=True)
class LegoLink(ReusePolicy):
    """Compute the first tokens of every chunk but the first again (EPIC, arXiv 2410.15332, 4.3).

    A chunk computed alone uses its first tokens as attention sinks; after other chunks they should
    not be sinks.  The cost does not grow with the length of the chunks.

    Attributes:
        tokens: How many of each chunk, 16 in the paper; 0 is `Reuse()`.
        positions: Where the other tokens are placed; those computed again are at their true
            positions.
    """

    name: ClassVar[str] = "legolink"
    _forms = (PolicySyntax("legolink[:TOKENS]", lambda words: LegoLink(*words.numbers(int))),)
    tokens: int = 16
    positions: PositionScheme = "reordered"

    def __post_init__(self) -> None:
        checked_positions(self.positions)
        if not isinstance(self.tokens, int) or isinstance(self.tokens, bool) or self.tokens < 0:
            raise InvalidInputError(
                f"tokens must be a number of tokens from 0 up, not {self.tokens!r}"
            )

    @property
    def head(self) -> int:  # type: ignore[override]  # its tokens
        """Where chunks of models with recurrent layers are cut."""
        return self.tokens

    @property
    def is_reuse(self) -> bool:
        """With `tokens` 0."""
        return self.tokens == 0

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """The head of each chunk but the first."""
        from kvcache_rag.policies.selection import nothing  # loads torch

        selected = nothing(prompt)
        for chunk in prompt.chunks[1:]:
            selected[chunk.start : min(chunk.start + self.tokens, chunk.stop)] = True
        return selected
