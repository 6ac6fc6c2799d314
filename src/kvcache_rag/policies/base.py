"""The extension point: what of a stitched prompt is reused and what is computed again.

Few hooks, one small file per paper, one class.  A caller never asks which class a policy is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.mask import PositionScheme
    from kvcache_rag.stitch import StitchedPrompt


class Scorer(Protocol):
    """Says which characters of the chunks matter for a question (an auxiliary model does)."""

    def scores(self, question: str, chunks: Sequence[str]) -> Sequence[Tensor]:
        """Score every character, so that two tokenizers need nothing in common but the text.

        Args:
            question: Text of the question, as the user wrote it.
            chunks: Texts of the chunks in prompt order.

        Returns:
            Per chunk `(characters,)` float32 on the CPU; larger matters more.
        """


class Signals(Protocol):
    """What the engine can tell a policy about a loaded and stitched prompt, computed when asked."""

    def deviation(self, layer: int) -> Tensor:
        """How far stitched values are from those of a full prefill at one layer.

        Computed on a copy by running all context tokens up to `layer` (0-based).

        Returns:
            `(context_tokens,)` float32: squared L2 distance of V over heads and width.
        """

    def deviation_tokens(self, layer: int) -> int:
        """As many tokens computed again take about the time of `deviation(layer)`; 0 once known."""

    def relevance(self) -> Tensor:
        """Scores of the context tokens by the policy's scorer, aligned by character offsets.

        Returns:
            `(context_tokens,)` float32; the prefix has the lowest score.
        """

    def affordable(self, seconds: float) -> int:
        """How many context tokens can be computed again in `seconds`, by measured rates."""


@dataclass(frozen=True)
class AttentionScaling:
    """How query and generated tokens weigh the chunks against the rest (APE, 2502.05431).

    Attributes:
        temperature: Divides the scores of chunk tokens; 1 is plain attention.
        scale: Multiplies `temperature` times the log-sum-exp of these; 1 is plain attention at
            temperature 1.
    """

    temperature: float = 1.0
    scale: float = 1.0


class ReusePolicy(ABC):
    """How cached chunks are used.

    Attributes:
        positions: Where the chunks stand.
        joint: Whether the chunks of a prompt are computed and stored together, as one.
        adjacent_query: Whether the query stands right behind the highest position of a chunk
            instead of behind as many positions as there are tokens (they differ when composite).
        needs_scorer: Whether `select` reads `signals.relevance()`.
        auxiliary: The scorer, None for the engine's own.
        scaling: How the query weighs the chunks; None is plain attention.
    """

    positions: PositionScheme = "reordered"
    joint: ClassVar[bool] = False
    adjacent_query: bool = False
    needs_scorer: bool = False
    auxiliary: Scorer | None = None
    scaling: AttentionScaling | None = None
    name: ClassVar[str]

    @property
    def is_full(self) -> bool:
        """Whether everything is computed: a plain prefill that loads nothing."""
        return False

    @property
    def is_reuse(self) -> bool:
        """Whether nothing is computed again, whatever the prompt."""
        return False

    def signal_tokens(self, signals: Signals) -> int:
        """What the signals cost that `select` will ask for, in tokens computed again.

        Only what delays the answer counts, so not a scorer that works while chunks are loaded.
        """
        return 0

    def resolved(self, prompt: StitchedPrompt, signals: Signals) -> ReusePolicy:
        """The policy that selects for this prompt: itself, unless it is a choice among others.

        It may differ in what it selects, not in where the chunks stand or how they are weighed.

        Args:
            prompt: The prompt's spans.
            signals: As for `select`.
        """
        return self

    def __or__(self, other: ReusePolicy) -> ReusePolicy:
        """Compute again what either policy chooses: `LegoLink(4) | CacheBlend(0.1)`.

        Raises:
            InvalidInputError: If they want different things that exclude each other.
        """
        from kvcache_rag.policies.union import Union  # it is itself a policy

        return Union(self, other) if isinstance(other, ReusePolicy) else NotImplemented

    @abstractmethod
    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """Which context tokens are computed again in the context of the whole prompt.

        Args:
            prompt: The prompt's spans; the query is always computed.
            signals: Measured on the loaded prompt, each only when it is asked for.

        Returns:
            `(context_tokens,)` bool.
        """
