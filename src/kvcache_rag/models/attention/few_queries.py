"""Attention of few queries over a long cache on CPUs: twice as fast as torch's, and as exact.

torch's flash kernel is made for as many queries as keys.  A question over its stitched chunks, and
every token of its answer, are few queries over many keys.  The kernel comes with kvcache-rag-cpu
(`few_queries.c`); without it, or on another CPU, `library` is None and torch's kernel runs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag.models.processors import advise, has_kernels, kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_NUMBERS: Final = (
    *("rows", "groups", "heads", "queries", "tokens", "width", "value_width"),
    *("q_row", "q_head", "q_query", "k_row", "k_head", "k_token", "v_row", "v_head", "v_token"),
    *("out_row", "out_head", "out_query", "mask_row", "mask_query"),
    *("threads", "splits", "chunks"),
)

# The kernel takes elements of heads in such groups.
_GROUP: Final = 32

# Tokens below which a head is not split among threads, and parts at most.
_FEWEST: Final = 256
_MOST_SPLITS: Final = 64


class _Shape(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int64) for name in _NUMBERS), ("scale", ctypes.c_float))


@dataclass(frozen=True, eq=False)
class ChunkSlots:
    """K and V of one chunk in some layers, as they are stored; the last dimension lies together.

    Attributes:
        key: `(layers, kv_heads, tokens, width)`, bfloat16 or, with scales, int8.
        value: `(layers, kv_heads, tokens, value_width)` of the same dtype.
        scales: As the codec `Int8` stores them: of K `(layers, kv_heads, 1, width)` bfloat16, of V
            `(layers, kv_heads, tokens, 1)`; None for numbers that stand for themselves.
        angles: Cosines and sines that take the keys to their places, `(tokens or 1, width / 2)`
            float32 each, for columns i and i + width / 2; None where they stand there.
    """

    key: Tensor
    value: Tensor
    scales: tuple[Tensor, Tensor] | None = None
    angles: tuple[Tensor, Tensor] | None = None

    def described(self) -> tuple[list[int], list[int]]:
        """The kernel's `Chunk` in the first layer, and by how much each number grows per layer."""
        slots = (self.key, self.value)
        scales, angles = self.scales or (), self.angles or ()
        numbers = [self.key.shape[2], *(slot.stride(place) for slot in slots for place in (1, 2))]
        numbers += [part.stride(1) for part in scales] or [0, 0]
        numbers.append(angles[0].stride(0) * (len(angles[0]) > 1) if angles else 0)
        memory = [*slots, *scales]
        steps = [tensor.stride(0) * tensor.itemsize for tensor in memory]
        addresses = [tensor.data_ptr() for tensor in memory]
        unscaled = [0, 0] if self.scales is None else []
        ends = [part.data_ptr() for part in angles] or [0, 0]
        return (
            [*numbers, *addresses, *unscaled, *ends],
            [*[0] * len(numbers), *steps, *unscaled, 0, 0],
        )


# Numbers of a `Chunk`, each of 8 bytes.
_CHUNK_NUMBERS: Final = 14


class ChunkContext:
    """Chunks one behind another, before the tokens of a cache.

    Attributes:
        tokens: How many they are.
        count: Of how many chunks.
    """

    def __init__(self, slots: Sequence[ChunkSlots]) -> None:
        """Describe chunks, one or more, to the kernel, once for all layers and passes."""
        self._slots = tuple(slots)  # keeps the memory
        self.tokens, self.count = sum(slot.key.shape[2] for slot in slots), len(slots)
        first, steps = zip(*(slot.described() for slot in slots), strict=True)
        layers = torch.arange(slots[0].key.shape[0])[:, None, None]
        # (layers, chunks, numbers) int64
        self._described = torch.tensor(first) + layers * torch.tensor(steps)

    def address(self, layer: int) -> int:
        """Where the kernel finds the chunks of a layer."""
        return self._described.data_ptr() + layer * self._described.stride(0) * 8


@cache
def library() -> Any:
    """The kernel, or None where it was not built or this CPU cannot run it."""
    installed = kernels()
    if installed is None:
        if has_kernels():
            advise()
        return None
    found = installed.attention()
    if found is None:
        return None
    sizes = tuple(getattr(found, f"kvcache_rag_{name}_bytes", int)() for name in ("shape", "chunk"))
    if sizes != (ctypes.sizeof(_Shape), 8 * _CHUNK_NUMBERS):
        return None  # of another version
    found.kvcache_rag_attend.argtypes = [ctypes.c_void_p] * 8
    return found


def takes(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether `attend` can be given these."""
    return (
        query.dtype == key.dtype == value.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and not dropout
        and not (key.shape[-1] % _GROUP or value.shape[-1] % _GROUP)
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and not query.requires_grad
        and library() is not None
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Scaled dot product attention.

    Args:
        query: `(rows, heads, queries, width)` bfloat16.
        key: `(rows, kv_heads, tokens, width)` bfloat16.
        value: `(rows, kv_heads, tokens, value_width)` bfloat16.
        mask: `(rows or 1, 1, queries or 1, tokens or more)`, added to the scores; or None.
        scaling: Factor of the scores, None for `width ** -0.5`.

    Returns:
        `(rows, queries, heads, value_width)` bfloat16; 0 for a query that sees nothing.
    """
    rows, heads, queries, width = query.shape
    output = query.new_empty(rows, queries, heads, value.shape[3])
    _run(query, key, value, mask, scaling or width**-0.5, output.transpose(1, 2), None)
    return output


def attend_partially(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """The same, with what is needed to merge it with attention to other tokens.

    Returns:
        `(rows, heads, queries, value_width)` bfloat16 and the log-sum-exp of the scores,
        `(rows, heads, queries)` float32.
    """
    output = query.new_empty(*query.shape[:3], value.shape[3])
    levels = query.new_empty(query.shape[:3], dtype=torch.float32)
    _run(query, key, value, mask, scaling, output, levels)
    return output, levels


def attend_behind(
    chunks: ChunkContext,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """`attend_partially` of one row to chunks and, behind them, to `key` and `value`.

    Chunks are read as they lie; what each number stands for is rounded as in a copy of them whose
    keys stand at their places, so that the result is that over a copy.

    Args:
        chunks: Come first.
        layer: Which of their layers.
        query: `(1, heads, queries, width)` bfloat16.
        key: `(1, kv_heads, tokens, width)` bfloat16.
        value: `(1, kv_heads, tokens, value_width)` bfloat16.
        mask: `(1, 1, queries or 1, columns or more)`, added to the scores; or None.
        scaling: Factor of the scores.
    """
    output = query.new_empty(*query.shape[:3], value.shape[3])
    levels = query.new_empty(query.shape[:3], dtype=torch.float32)
    _run(query, key, value, mask, scaling, output, levels, chunks, layer)
    return output, levels


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    output: Tensor,
    levels: Tensor | None,
    chunks: ChunkContext | None = None,
    layer: int = 0,
) -> None:
    rows, heads, queries, width = query.shape
    groups, tokens = key.shape[1], key.shape[2]
    masked = (0, 0)
    if mask is not None:
        # The kernel reads what lies there as bfloat16; one row may stand for all.
        mask = mask.to(query.dtype) if mask.stride(-1) == 1 else mask.to(query.dtype).contiguous()
        row, line = (mask.stride(place) * (mask.shape[place] > 1) for place in (0, 2))
        masked = (row, line)
    threads = torch.get_num_threads()
    shape = _Shape(
        *(rows, groups, heads // groups, queries, tokens, width, value.shape[3]),
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *output.stride()[:3],
        *masked,
        *(threads, _splits(rows * groups, tokens + (chunks.tokens if chunks else 0), threads)),
        chunks.count if chunks else 0,
        scaling,
    )
    failed = library().kvcache_rag_attend(
        ctypes.addressof(shape),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        output.data_ptr(),
        0 if levels is None else levels.data_ptr(),
        chunks.address(layer) if chunks else 0,
    )
    if failed:
        raise MemoryError


def _splits(heads: int, tokens: int, threads: int) -> int:
    """Parts of the tokens of each head, so that all threads have the same to do."""
    most = min(_MOST_SPLITS, tokens // _FEWEST)
    for splits in range(1, most + 1):
        parts = heads * splits
        if not parts % threads or parts >= 4 * threads:
            return splits
    return max(1, most)
