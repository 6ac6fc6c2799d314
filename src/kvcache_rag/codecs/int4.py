"""Four bits per value, asymmetric, in groups (KIVI, arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kvcache_rag.codecs.base import QuantisedCodec, at_least, extremes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from kvcache_rag.kv.chunk import TensorSpec

GROUP = 64
_LEVELS = 15


@dataclass(frozen=True)
class Int4(QuantisedCodec):
    """About 2/7 of the bytes of bfloat16; experimental: answers may change.

    A group of 64 values shares a smallest value and a step: in K 64 tokens of a channel (a column
    in one head and layer), in V 64 columns of a token in one head.  The last group of an axis may
    be shorter.  Keys are kept un-rotated, so a channel's values are closer together (KVQuant, arXiv
    2401.18079, section 3.2).

    Error bound, for every value x:

        |restored - x| <= s / 2 + (|x| + s) * eps / 2 + m * 2**-21 + tiny
        s <= (1 + eps) * (high - low) / 15 + tiny

    with `low` and `high` the extremes of x's group, m the larger of their magnitudes, `eps` that of
    the stored dtype (2**-7 for bfloat16), and `tiny` its smallest scale (2**-24 for float16,
    2**-126 for the others): half a step, the rounding of the result to the dtype, float32
    arithmetic.  Groups of one repeated value (zeros, too) are exact.  A chunk with values that are
    infinite, NaN or above half of the dtype's range is refused, so it is served uncached.
    """

    name: ClassVar[str] = "int4-g64"

    def parts(
        self, shape: tuple[int, int, int, int], axis: int, dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """`q`, two columns per byte, `s`, the steps, and `z`, the smallest values, per group."""
        layers, heads, tokens, width = shape
        groups = (
            (layers, heads, _ceil(tokens, GROUP), width)
            if axis == -2
            else (layers, heads, tokens, _ceil(width, GROUP))
        )
        packed = (layers, heads, tokens, _ceil(width, 2))  # along the columns for K as well
        return {"q": (torch.uint8, packed), "s": (dtype, groups), "z": (dtype, groups)}

    def quantise(self, values: Tensor, axis: int, parts: dict[str, Tensor]) -> None:
        """Round to the nearest of 16 steps."""
        # [layers, heads, tokens, width]; a copy even of float32, since it is worked on in place
        levels = values.to(torch.float32, copy=True)
        for run in _runs(values.shape[axis]):
            # [layers, heads, count, size, width] for K, [layers, heads, tokens, count, size] for V:
            # counted from the end, `axis` is that of `size` now.
            inside = run.view(levels, axis)
            low, high = extremes(inside, axis, values.dtype)  # 1 in place of `size`
            # Rounded up, so that 15 steps reach `high`.
            scales = at_least((high - low) / _LEVELS, values.dtype)
            run.scales(parts["s"], axis).copy_(scales)
            run.scales(parts["z"], axis).copy_(low)  # exact: it is one of the values
            # In place, so in `levels`; by the steps as stored, which `restore` multiplies with.
            inside.sub_(low).div_(scales.float()).round_().clamp_(0, _LEVELS)
        levels = levels.to(torch.uint8)
        # [layers, heads, tokens, half]: byte i has column i in its low bits and column half + i in
        # its high ones, which stay 0 in the last byte of an odd width.
        half = parts["q"].shape[-1]
        parts["q"].copy_(levels[..., :half])
        parts["q"][..., : levels.shape[-1] - half] |= levels[..., half:] << 4

    def restore(self, parts: dict[str, Tensor], axis: int, out: Tensor) -> None:
        """Smallest value plus steps, in float32; the copy into `out` rounds once."""
        packed = parts["q"]  # [layers, heads, tokens, half]
        half = packed.shape[-1]
        # [layers, heads, tokens, width] float32, first with the levels, then with the values
        wide = torch.empty(out.shape, device=out.device)
        wide[..., :half].copy_(packed & 15)
        wide[..., half:].copy_((packed >> 4)[..., : out.shape[-1] - half])
        for run in _runs(out.shape[axis]):
            scales, lowest = run.scales(parts["s"], axis), run.scales(parts["z"], axis)
            # Through a view, so in `wide`; scales and lowest broadcast along `size`.
            run.view(wide, axis).mul_(scales.float()).add_(lowest.float())
        out.copy_(wide)


@dataclass(frozen=True)
class _Run:
    """Groups of one size that follow each other on an axis."""

    first: int
    count: int
    size: int

    def view(self, values: Tensor, axis: int) -> Tensor:
        """Their values, with the axis split into `count` and `size`; a view."""
        run = values.narrow(axis, self.first * GROUP, self.count * self.size)
        return torch.unflatten(run, axis, (self.count, self.size))

    def scales(self, scales: Tensor, axis: int) -> Tensor:
        """Their scales, with 1 in place of `size`; a view."""
        run = scales.narrow(axis, self.first, self.count)
        return torch.unflatten(run, axis, (self.count, 1))


def _runs(length: int) -> Iterator[_Run]:
    """The full groups of an axis, and the shorter rest."""
    full, rest = divmod(length, GROUP)
    if full:
        yield _Run(0, full, GROUP)
    if rest:
        yield _Run(full, 1, rest)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
