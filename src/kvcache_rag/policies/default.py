"""What is reused where nobody says it: the one place of that choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvcache_rag.policies.bestlast import BestLast
from kvcache_rag.policies.fixed import Reuse
from kvcache_rag.policies.legolink import LegoLink

if TYPE_CHECKING:
    from kvcache_rag.policies.base import ReusePolicy

UNTRAINED: Final[ReusePolicy] = BestLast()
"""Of a model that was not trained to read chunks that do not see each other."""

UNTRAINED_RECURRENT: Final[ReusePolicy] = LegoLink()
"""Of one with recurrent layers: it lost nothing on models that were trained on whole prompts, where
`BestLast` lost what refers to the chunk before (docs/quality.md)."""


def default_policy(*, trained: bool, recurrent: bool = False) -> ReusePolicy:
    """The policy of an engine that was given none.

    Args:
        trained: Whether the model was trained for blocks, so that plain reuse is what it was
            taught.
        recurrent: Whether it has recurrent layers.
    """
    if trained:
        return Reuse()
    return UNTRAINED_RECURRENT if recurrent else UNTRAINED


def reuse_warning(policy: ReusePolicy, *, trained: bool, recurrent: bool = False) -> str:
    """What plain reuse may cost a model that was not trained for it; "" for nothing to be said."""
    instead = default_policy(trained=False, recurrent=recurrent)
    if trained or not isinstance(policy, Reuse) or policy == instead:
        return ""
    return (
        f"{policy!r} was asked for on a model that was not trained for it, which may lose right "
        f"answers and take them from the wrong document; use {instead!r}, or fine-tune the model "
        "(kvcache-rag finetune)"
    )
