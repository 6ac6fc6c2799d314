"""The default policy; this is the one place that chooses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvcache_rag.policies.bestfew import BestFew
from kvcache_rag.policies.bestlast import BestLast
from kvcache_rag.policies.fixed import Reuse

if TYPE_CHECKING:
    from kvcache_rag.policies.base import ReusePolicy

UNTRAINED: Final[ReusePolicy] = BestFew()
"""Of a model that was not trained to read chunks that do not see each other."""
UNTRAINED_WIDE: Final[ReusePolicy] = BestLast(0.5)
"""Of such a model whose hidden size is `WIDE` and more.

Of two models of one family the one of 896 is misled by documents that it does not need, and that of
1,536 uses them: it loses right answers where it reads a few alone, or the best fifth of them
together, and keeps them where it reads the better half together (docs/quality.md).
"""
WIDE: Final = 1536


def default_policy(*, trained: bool, width: int = 0) -> ReusePolicy:
    """The policy of an engine that was given none.

    Args:
        trained: Whether the model was trained for blocks, so that plain reuse is what it was
            taught.
        width: Its hidden size; 0 if that is not known, or its chunks cannot be moved.
    """
    if trained:
        return Reuse()
    return UNTRAINED_WIDE if width >= WIDE else UNTRAINED


def reuse_warning(policy: ReusePolicy, *, trained: bool) -> str:
    """What plain reuse may cost a model that was not trained for it; "" for nothing to be said."""
    if trained or not isinstance(policy, Reuse) or policy == UNTRAINED:
        return ""
    return (
        f"{policy!r} was asked for on a model that was not trained for it, which may lose right "
        f"answers and take them from the wrong document; use {UNTRAINED!r}, or fine-tune the model "
        "(kvcache-rag finetune)"
    )
