"""Products with 8-bit and 4-bit weights on CPUs.

`rounded_weights.c` is compiled with the package if there is a C compiler; without it, or on another
CPU, torch multiplies.  For few rows weights are widened in registers; for more rows a block of
outputs is widened at a time, and torch multiplies in bfloat16.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import linear

from kvcache_rag_cpu import few_rows
from kvcache_rag_cpu.compiled import compiled

if TYPE_CHECKING:
    from torch import Tensor

# Outputs and inputs of the kernel come in such blocks.
_BLOCK: Final = 64

# Weights that are widened at a time: they stay in the second cache until they have multiplied.
_WIDENED: Final = 2**20

# Of a block of outputs, the order in which unpacking bytes to words leaves them as they were.
_UNPACKED: Final = (2, 2, 4, 4)


@cache
def library() -> Any:
    """The kernel, or None."""
    found = compiled("librounded_weights.so")
    if found is None:
        return None
    found.kvcache_rag_rounded.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 5
    found.kvcache_rag_rounded.restype = None
    found.kvcache_rag_widened.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 6
    found.kvcache_rag_widened.restype = None
    return found


def fits(integers: Tensor, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for such weights, `(outputs, inputs)`, of a model in `dtype`."""
    whole = not (integers.shape[0] % _BLOCK or integers.shape[1] % _BLOCK)
    return whole and has_kernel(dtype)


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for rounded weights of a model in `dtype`."""
    return dtype == torch.bfloat16 and library() is not None


def ordered(integers: Tensor) -> Tensor:
    """Eight bits, `(outputs, inputs)`, as the kernel reads them: `(blocks, pairs, 128)`."""
    parts = integers.view(-1, *_UNPACKED, integers.shape[1] // 2, 2)
    return parts.permute(0, 5, 1, 3, 2, 4, 6).flatten(2).contiguous()


def as_rows(integers: Tensor) -> Tensor:
    """`(outputs, inputs)` of what `ordered` gave."""
    lines, lanes, four = _UNPACKED[0], _UNPACKED[2], _UNPACKED[3]
    parts = integers.view(*integers.shape[:2], lines, lanes, 2, four, 2)
    return parts.permute(0, 2, 4, 3, 5, 1, 6).reshape(len(integers) * _BLOCK, -1)


def is_read(packed: Tensor, integers: Tensor) -> bool:
    """Whether torch packed four bits, `(outputs, inputs)`, in the order that the kernel reads."""
    # All are compared, since what order torch takes is its own affair.  Of a block and an input:
    # outputs 0 to 31 in the low halves of bytes, 32 to 63 in the high ones.
    low, high = integers.view(-1, 2, _BLOCK // 2, integers.shape[1]).to(torch.uint8).unbind(1)
    expected = (low | high << 4).transpose(1, 2)  # (blocks, inputs, 32)
    return torch.equal(packed.view(expected.shape), expected)


def product(
    inputs: Tensor, weights: Tensor, levels: Tensor, bias: Tensor | None, outputs: int, bits: int
) -> Tensor:
    """`(..., outputs)` of `(..., width)`.

    Args:
        inputs: In bfloat16.
        weights: What `ordered` gave, or was found by `is_read`.
        levels: `(outputs,)` scales; in four bits `(width / 32, outputs, 2)`.
        bias: `(outputs,)`, or None.
        outputs: How many.
        bits: 8 or 4.
    """
    width = inputs.shape[-1]
    if not few_rows.takes(inputs, width):
        step = max(1, _WIDENED // width // _BLOCK) * _BLOCK
        parts = []
        for first in range(0, outputs, step):
            last = min(first + step, outputs)
            wide = widened(weights, levels, (width, outputs), range(first, last), bits)
            parts.append(linear(inputs, wide.t(), None if bias is None else bias[first:last]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    output = inputs.new_empty(*inputs.shape[:-1], outputs)
    library().kvcache_rag_rounded(
        inputs.data_ptr(),
        weights.data_ptr(),
        levels.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        output.data_ptr(),
        inputs.numel() // width,
        width,
        outputs,
        torch.get_num_threads(),
        bits,
    )
    return output


def widened(
    weights: Tensor, levels: Tensor, shape: tuple[int, int], some: range, bits: int
) -> Tensor:
    """`(width, some)` bfloat16: whole blocks of outputs, of weights of shape `(width, outputs)`."""
    wide = torch.empty(shape[0], len(some), dtype=torch.bfloat16)
    library().kvcache_rag_widened(
        weights.data_ptr(),
        levels.data_ptr(),
        wide.data_ptr(),
        *shape,
        some.start,
        some.stop,
        torch.get_num_threads(),
        bits,
    )
    return wide
