"""Eight bits per value, symmetric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kvcache_rag.codecs.base import QuantisedCodec, at_least, extremes

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.kv.chunk import TensorSpec

_LEVELS = 127


@dataclass(frozen=True)
class Int8(QuantisedCodec):
    """About half of the bytes of bfloat16; one scale per channel of K and per token of V.

    A channel is a column in one head and layer; a token's scale is also per head and layer.  Keys
    are kept un-rotated, so a channel has one size over all tokens.

    Error bound, for every value x:

        |restored - x| <= s / 2 + (|x| + s) * eps / 2 + |x| * 2**-22 + tiny
        s <= (1 + eps) * m / 127 + tiny

    with m the largest magnitude of x's channel (K) or token (V) in the chunk, `eps` that of the
    stored dtype (2**-7 for bfloat16), and `tiny` its smallest scale (2**-24 for float16, 2**-126
    for the others): half a step, the rounding of the result to the dtype, float32 arithmetic.
    Zeros are exact.  A chunk with values that are infinite, NaN or above half of the dtype's range
    is refused, so it is served uncached.
    """

    name: ClassVar[str] = "int8-kc-vt"
    is_attended: ClassVar[bool] = True

    def parts(
        self, shape: tuple[int, int, int, int], axis: int, dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """`q`, int8 in the slot's shape, and `s`, its scales: 1 along the axis."""
        layers, heads, tokens, width = shape
        scales = (layers, heads, 1, width) if axis == -2 else (layers, heads, tokens, 1)
        return {"q": (torch.int8, shape), "s": (dtype, scales)}

    def quantise(self, values: Tensor, axis: int, parts: dict[str, Tensor]) -> None:
        """Round to the nearest of 255 steps."""
        # [layers, heads, tokens, width]; a copy even of float32, since it is divided in place
        wide = values.to(torch.float32, copy=True)
        # [layers, heads, 1, width] for K, [layers, heads, tokens, 1] for V, as the scales
        low, high = extremes(wide, axis, values.dtype)
        # Rounded up, so that no quotient is above 127, where int8 would wrap around.
        scales = at_least(torch.maximum(-low, high) / _LEVELS, values.dtype)
        parts["s"].copy_(scales)
        # By the scale as it is stored, with which `restore` multiplies.
        parts["q"].copy_(wide.div_(scales.float()).round_())

    def restore(self, parts: dict[str, Tensor], axis: int, out: Tensor) -> None:
        """Multiply: int8 is exact in every dtype, so the product is rounded once."""
        del axis  # the scales have length 1 along it and broadcast
        torch.mul(parts["q"].to(out.dtype), parts["s"], out=out)
