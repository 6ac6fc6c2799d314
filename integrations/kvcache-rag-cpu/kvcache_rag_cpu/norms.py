"""Norms in one step instead of six, if a model's norms do exactly what most models' do.

A generated token passes two norms a layer, and six operations of torch on one row take longer than
the row.  The numbers are the same, bit by bit (`few_rows.c`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from kvcache_rag_cpu import few_rows

# Widths are whole blocks of the kernel; torch adds up wider rows in another order.
_BLOCK: Final = 64
_WIDEST: Final = 8192

_CODE: Final = attrgetter("co_code", "co_names", "co_consts")


# Word by word as transformers has it in most models: a norm that does just this is exchanged.
def _as_written(self: Any, hidden_states: Tensor) -> Tensor:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)  # type: ignore[no-any-return]  # any weight


class FusedNorm(nn.Module):
    """A norm that few rows pass in one step."""

    weight: nn.Parameter
    variance_epsilon: float

    def __init__(self, norm: nn.Module) -> None:
        """Take the place of `norm`, with everything it has."""
        super().__init__()
        self.__dict__.update(vars(norm))
        self._kind = type(norm)

    def plain(self) -> nn.Module:
        """The norm that it was made of, as it is now."""
        norm = self._kind.__new__(self._kind)
        norm.__dict__.update(vars(self))
        del norm.__dict__["_kind"]
        return norm

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`(..., width)` of `(..., width)`."""
        weight = cast("Tensor", self._parameters["weight"])
        if few_rows.norms(hidden_states, weight):
            return few_rows.normed(hidden_states, weight, self.variance_epsilon)
        return _as_written(self, hidden_states)

    def extra_repr(self) -> str:
        """Its width and what is added, as transformers prints them."""
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def fused_norm(module: nn.Module) -> FusedNorm | None:
    """`module` in this form; None for another norm, for what is no norm, or without the kernel."""
    if not _is_as_written(module) or few_rows.library() is None:
        return None
    weight = cast("Tensor", module.weight)
    whole = weight.numel() % _BLOCK == 0 and weight.numel() <= _WIDEST
    if weight.dtype != torch.bfloat16 or not weight.is_cpu or not whole:
        return None
    fused = FusedNorm(module)
    with torch.inference_mode():
        sizes = torch.tensor([1e-3, 1.0, 1.0, 1e3])[:, None]
        rows = (torch.linspace(-1, 3, 4 * weight.numel()).cos_().view(4, -1) * sizes).bfloat16()
        # Of another torch, whose sums may have another order.
        return fused if torch.equal(fused(rows), _as_written(module, rows)) else None


def _is_as_written(module: nn.Module) -> bool:
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and _CODE(code) == _CODE(_as_written.__code__)
