"""Policies that choose no single tokens: reuse everything, compute everything, or all as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcache_rag.policies.base import PlainReuse, ReusePolicy
from kvcache_rag.policies.checks import checked_positions
from kvcache_rag.policies.policy_registry import PolicySyntax

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitching.stitch import StitchedPrompt


@dataclass(frozen=True)
class Reuse(PlainReuse):
    """Reuse every chunk as it is; only the query is computed (TurboRAG, arXiv 2410.07590).

    Attributes:
        positions: "reordered" gives chunks their positions in the prompt, "composite" leaves all of
            them right after the prefix.
    """

    name: ClassVar[str] = "reuse"
    _forms = (
        PolicySyntax("reuse", lambda words: Reuse(*words.numbers())),
        PolicySyntax("composite", lambda words: Reuse("composite", *words.numbers())),
    )
    positions: PositionScheme = "reordered"

    def __post_init__(self) -> None:
        checked_positions(self.positions)


@dataclass(frozen=True)
class FullRecompute(ReusePolicy):
    """Compute everything: an ordinary prefill of the same token ids, the baseline."""

    name: ClassVar[str] = "full"
    _forms = (PolicySyntax("full", lambda words: FullRecompute(*words.numbers())),)

    @property
    def is_full(self) -> bool:
        """Always."""
        return True

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """Every token."""
        from kvcache_rag.policies.selection import nothing  # loads torch

        return ~nothing(prompt)


@dataclass(frozen=True)
class Combination(PlainReuse):
    """Reuse the cache of exactly these chunks in this order, computed together.

    Shared RAG-DCache (arXiv 2504.11765) with combinations of k > 1 chunks.  A combination stays
    directly after the prefix, where it was computed, so nothing moves and the logits are those of a
    full prefill.  It also works for models whose keys cannot move.  Every order of every selection
    is computed once, so it pays if questions repeat selections.
    """

    name: ClassVar[str] = "combination"
    _forms = (PolicySyntax("combination", lambda words: Combination(*words.numbers())),)
    joint: ClassVar[bool] = True
