"""A mask for models whose mask argument also gives the tokens' positions.

Models with a bias by place (ALiBi, arXiv 2108.12409) count the places of the keys in the mask that
they are given, one number per token, and take no mask with a row per query.  So they are given
that count, and the mask where transformers makes its own of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvcache_rag.models.attention.support import take_stock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A context variable, so that engines in other threads have theirs.
_GIVEN: ContextVar[Tensor | None] = ContextVar("kvcache_rag_placed_mask", default=None)


@dataclass(frozen=True, eq=False)
class PlacedMask:
    """What each row sees of the keys in a cache, which stand at places 0, 1, 2, ...

    Attributes:
        added: `(1, 1, n, m)` added to the scores of n queries and m keys.
    """

    added: Tensor

    @contextmanager
    def given(self, model: Any, rows: int) -> Iterator[Tensor]:
        """Let a forward pass within be masked so; yields its mask argument, `(rows, m)` int64."""
        _listen(str(model.config._attn_implementation))
        token = _GIVEN.set(self.added)
        try:
            yield torch.ones(rows, self.added.shape[-1], dtype=torch.long, device=self.added.device)
        finally:
            _GIVEN.reset(token)


class _Listening:
    """A mask function of transformers that gives the mask in force, if there is one."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A model that an app compiles whole has none, and no compiler reads a context variable.
        given = None if torch.compiler.is_compiling() else _GIVEN.get()
        return self.own(*args, **kwargs) if given is None else given


def _listen(name: str) -> None:
    # For good: another thread may be between entering and leaving a pass of its own.
    take_stock()
    own: Any = ALL_MASK_ATTENTION_FUNCTIONS[name]
    if not isinstance(own, _Listening):
        AttentionMaskInterface.register(name, _Listening(own))
