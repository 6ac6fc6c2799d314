"""Linear layers of few rows on CPUs, with weights read in place from oneDNN; and norms.

`few_rows.c` is compiled with the package if there is a C compiler; without it, on another CPU or
with an oneDNN that keeps weights in another order, oneDNN multiplies.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag_cpu.compiled import compiled

if TYPE_CHECKING:
    from torch import Tensor

# Rows up to which it is sooner than oneDNN: a question is no more.  Where tiles multiply (AMX),
# oneDNN has them; guesses from the prompt are no more than 12.
MOST: Final = 12 if torch.cpu._is_amx_tile_supported() else 64

# Outputs and inputs of the kernel come in such blocks.
_BLOCK: Final = 64

# Not in every torch.
_PLACE: Final[Any] = getattr(torch.ops.mkldnn, "data_ptr", None)
_BYTES: Final[Any] = getattr(torch.ops.mkldnn, "_nbytes", None)


@cache
def library() -> Any:
    """The kernel, or None."""
    found = compiled("libfew_rows.so")
    if found is None:
        return None
    found.kvcache_rag_linear.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4
    found.kvcache_rag_linear.restype = None
    found.kvcache_rag_norm.argtypes = [
        *[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int64, ctypes.c_float, ctypes.c_int64,
    ]  # fmt: skip
    found.kvcache_rag_norm.restype = None
    return found


def address(packed: Tensor, weight: Tensor) -> int:
    """Where oneDNN keeps a weight, if in the order that `linear` reads; else 0.

    Args:
        packed: Made of it by oneDNN.
        weight: `(outputs, inputs)` bfloat16.
    """
    outputs, inputs = weight.shape
    if library() is None or _PLACE is None or outputs % _BLOCK or inputs % _BLOCK:
        return 0
    if _BYTES(packed) != weight.nbytes:
        return 0
    place = int(_PLACE(packed))
    held = torch.frombuffer(
        (ctypes.c_char * weight.nbytes).from_address(place), dtype=torch.int32
    ).view(-1, inputs // 2, _BLOCK)
    # Two inputs in 32 bits.  All are compared, since what order oneDNN takes is its own affair.
    pairs = weight.detach().contiguous().view(torch.int32).view(-1, _BLOCK, inputs // 2)
    is_read = not place % _BLOCK and torch.equal(held.transpose(1, 2), pairs)
    return place if is_read else 0


def takes(inputs: Tensor, width: int) -> bool:
    """Whether `linear` can be given these."""
    return (
        inputs.numel() <= MOST * width
        and inputs.dtype == torch.bfloat16
        and inputs.is_cpu
        and inputs.is_contiguous()
        and not inputs.requires_grad
    )


def linear(inputs: Tensor, width: int, place: int, outputs: int, bias: Tensor | None) -> Tensor:
    """`(..., outputs)` of `(..., width)`, with the weight at `place`."""
    output = inputs.new_empty(*inputs.shape[:-1], outputs)
    library().kvcache_rag_linear(
        inputs.data_ptr(),
        place,
        0 if bias is None else bias.data_ptr(),
        output.data_ptr(),
        inputs.numel() // width,
        width,
        outputs,
        torch.get_num_threads(),
    )
    return output


def norms(inputs: Tensor, weight: Tensor) -> bool:
    """Whether `normed` can be given these."""
    return (
        inputs.dtype == weight.dtype == torch.bfloat16
        and inputs.is_cpu
        and weight.is_cpu
        and inputs.is_contiguous()
        and not torch.is_grad_enabled()
    )


def normed(inputs: Tensor, weight: Tensor, least: float) -> Tensor:
    """`(..., width)`: rows by the root of their mean square, `least` added, times the weight."""
    output, width = torch.empty_like(inputs), weight.numel()
    library().kvcache_rag_norm(
        inputs.data_ptr(),
        weight.data_ptr(),
        output.data_ptr(),
        inputs.numel() // width,
        width,
        least,
        torch.get_num_threads(),
    )
    return output
