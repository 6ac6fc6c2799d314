"""The plain path of families with ALiBi: a bias by positions that are told, under a mask.

Their own code can be told neither, so its parts are exchanged for one forward pass: the mask that
transformers makes, and the columns of the bias, which are taken from the model's own table.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

# Longer than any sequence of the laws.
LONGEST = 2048


@contextmanager
def told_positions(model: Any, positions: Tensor, allowed: Tensor) -> Iterator[None]:
    """Let a forward pass put keys at `positions`, `(n,)`, under a mask `(n, n)`.

    The pass begins with an empty cache or none, and has a mask argument of one number per token.
    """
    dtype = model.dtype
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    module: Any = sys.modules[type(model).__module__]
    changes: dict[str, Any] = {"create_causal_mask": lambda **_: mask[None, None]}
    if hasattr(module, "build_mpt_alibi_tensor"):
        build = module.build_mpt_alibi_tensor

        def columns(heads: int, longest: int, *_: Any, **__: Any) -> Tensor:
            table: Tensor = build(heads, longest)  # (heads, 1, longest), the last one is 0
            return table[..., positions - positions.max() - 1]

        changes["build_mpt_alibi_tensor"] = columns
    else:
        own = module.build_alibi_tensor

        def told(_: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
            ones = torch.ones(1, LONGEST, dtype=torch.long)
            table: Tensor = own(ones, heads, dtype)  # (heads, 1, LONGEST)
            return table[..., positions]

        changes["build_alibi_tensor"] = told
    with patch.multiple(module, **changes):
        yield
