"""Attention over segments in one Triton kernel: nothing is copied, rotation happens inside.

What LazyAttention (arXiv 2606.04302, section 4) does in its kernel, on the chunks that the store
keeps.  Rotating a tile of M query rows once per run of L tokens costs `3 / (4 L)` of the
attention's own arithmetic, rotating the keys in every tile `3 / (4 M)` (the paper's figures for
decoding and for prefill); the smaller of the two is taken.

This module imports triton, which wheels of torch for CUDA bring along.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kvcache_rag.models.deferred.triton_kernels import (
    HALVES,
    KEYS,
    NEIGHBOURS,
    NO_PAIRS,
    NOTHING,
    QUERY,
    KernelShape,
    Tile,
    attend,
    merge,
)
from kvcache_rag.models.deferred.worklist import KernelTable, WorkList, is_implied, kernel_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag.kv.rotary import Rotation
    from kvcache_rag.models.deferred.segments import SegmentTable


Rotated = Literal["query", "keys"]

SMALLEST = 16  # rows or columns of a tile that tensor cores take

# Query rows and keys of a tile, by the bytes of a key up to which they are used.
_TILES = ((256, 128, 64), (512, 64, 32), (math.inf, 32, 16))

DECODE_ROWS = 32  # query rows up to which every run has a program of its own

DECODE_RUN, PREFILL_RUN = 256, 512  # tokens

MERGED = 64  # parts that `merge` holds at a time

_STYLES = {"none": NO_PAIRS, "half": HALVES, "interleaved": NEIGHBOURS}

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_TABLES: WeakKeyDictionary[SegmentTable, KernelTable] = WeakKeyDictionary()


class Launch(NamedTuple):
    """How a call is cut up for the device."""

    tile: Tile
    tiles: int
    splits: int
    warps: int
    stages: int


def deferred_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    table: SegmentTable,
    group: int,
    place: int,
    sinks: Tensor | None = None,
    *,
    rotated: Rotated | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention of one layer over the segments of its rows and the tail behind them.

    Args:
        query: `(rows, heads, queries, width)`, standing at the last columns; bfloat16, float16 or
            float32; products are added up in float32.
        keys: Of the tail, `(rows, kv_heads, tail_tokens, width)`, the query's own included.
        values: `(rows, kv_heads, tail_tokens, value_width)`.
        mask: None, or what transformers says, bool or additive, `(rows or 1, 1, queries, columns)`
            with columns to spare.  The kernel knows padding, causality and the window by itself;
            a table's first mask is compared with that (one wait for the device).
        scaling: Factor of the scores.
        table: The segments.
        group: Index of the layer's group in `table.layout.groups`.
        place: Index of the layer in its group.
        sinks: `(heads,)` scores of a sink that holds no value, or None.
        rotated: What is rotated; None for what costs less.
        splits: Programs that share a row and tile; None to fill the device.

    Returns:
        `(rows, queries, heads, value_width)` in the query's dtype; queries at columns that the
        table keeps get finite numbers that mean nothing.

    Raises:
        NotImplementedError: Before anything runs, for what the kernel does not do.
    """
    layer_group = table.layout.groups[group]
    rows, heads, queries, width = query.shape
    _ensure_supported(query, keys, values, table, group)
    known = _known(table)
    tokens, window = (queries, keys.shape[2]), layer_group.window or 0
    if mask is not None and not _is_trusted(mask, known, table, tokens, window):
        raise NotImplementedError("the mask hides something else than padding and the future")
    addresses = known.groups[group]
    rotation = layer_group.key_rotation
    shape = _shape(
        keys.shape[1], heads, width, values.shape[3], rotation, window,
        addresses.aligned, sinks is not None, query.dtype,
    )  # fmt: skip
    launch, work = _launch(known, table, shape, query, keys.shape[2], rotated, splits)
    output = query.new_empty(rows, queries, heads, shape.value_width)
    parts, levels = _scratch(output, launch)
    angles = table.angles[rotation.frequency] if shape.half else (query, query)
    on_device = torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext()
    with on_device, _fitting():
        attend[(launch.tiles, rows * shape.kv_heads, launch.splits)](
            (query, keys, values, query if sinks is None else sinks),
            (work.packed, work.ends, work.bounds, known.keep),
            (addresses.bases[place], addresses.strides),
            angles,
            (parts, levels),
            (query.stride()[:3], keys.stride()[:3], values.stride()[:3]),
            *tokens,
            table.tail,
            addresses.strides.shape[1],
            scaling * math.log2(math.e),
            SHAPE=shape, TILE=launch.tile, num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
        if launch.tile.is_shared:
            count = rows * queries * heads
            merge[(count,)](
                parts, levels, output, launch.splits, count,
                VALUE=shape.value_width, V=shape.value_size, S=min(MERGED, _size(launch.splits, 1)),
            )  # fmt: skip
    return output


def _scratch(output: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
    """Where programs that share a row leave their parts and the log-sum-exps of these."""
    if not launch.tile.is_shared:
        return output, output
    parts = output.new_empty(launch.splits, *output.shape, dtype=torch.float32)
    return parts, output.new_empty(parts.shape[:-1], dtype=torch.float32)


@contextlib.contextmanager
def _fitting() -> Iterator[None]:
    try:
        yield
    except OutOfResources as error:  # found when a kernel is loaded, before it runs
        raise NotImplementedError(f"the device is too small for these tiles ({error})") from error


def _ensure_supported(
    query: Tensor, keys: Tensor, values: Tensor, table: SegmentTable, group: int
) -> None:
    layer_group = table.layout.groups[group]
    rows, heads, queries, width = query.shape
    if query.dtype not in _DTYPES or not query.dtype == keys.dtype == table.layout.dtype:
        raise NotImplementedError(f"{query.dtype} over {table.layout.dtype}")
    if layer_group.value_rotation.style != "none":
        raise NotImplementedError("values that rotate (MLA)")
    if rows != len(table.rows) or heads % keys.shape[1]:
        raise NotImplementedError("rows or heads that are not those of the segments")
    if (keys.shape[1], width) != layer_group.layout.key_shape or (
        values.shape[1],
        values.shape[3],
    ) != layer_group.layout.value_shape:
        raise NotImplementedError("a tail of another shape than the segments")
    if any(tensor.stride(-1) != 1 for tensor in (query, keys, values)) or queries > keys.shape[2]:
        raise NotImplementedError("strided columns, or queries that are not in the tail")


def _known(table: SegmentTable) -> KernelTable:
    known = _TABLES.get(table)
    if known is None:
        known = _TABLES[table] = kernel_table(table)
    return known


def _is_trusted(
    mask: Tensor, known: KernelTable, table: SegmentTable, tokens: tuple[int, int], window: int
) -> bool:
    if window not in known.trusted:
        known.trusted[window] = is_implied(mask, table, *tokens, window or None)
    return known.trusted[window]


def _size(count: int, smallest: int = SMALLEST) -> int:
    """The next power of two that a tile can have."""
    return max(smallest, 1 << (count - 1).bit_length())


@functools.lru_cache(maxsize=256)
def _shape(
    kv_heads: int,
    heads: int,
    width: int,
    value: int,
    rotation: Rotation,
    window: int,
    aligned: bool,
    has_sinks: bool,
    dtype: torch.dtype,
) -> KernelShape:
    half = rotation.dim // 2 if rotation.style != "none" else 0
    rest = width - 2 * half
    start = rotation.start if half else 0
    return KernelShape(
        kv_heads=kv_heads,
        repeats=heads // kv_heads,
        width=width,
        value_width=value,
        style=_STYLES[rotation.style],
        start=start,
        half=half,
        reverse=rotation.reverse,
        window=window,
        aligned=aligned,
        has_sinks=has_sinks,
        half_size=_size(half) if half else 0,
        rest_size=_size(rest) if rest else 0,
        value_size=_size(value),
        precision="ieee" if dtype == torch.float32 else "tf32",
    )


def _launch(
    known: KernelTable,
    table: SegmentTable,
    shape: KernelShape,
    query: Tensor,
    tail_tokens: int,
    rotated: Rotated | None,
    splits: int | None,
) -> tuple[Launch, WorkList]:
    """Tiles, and how many programs share a row."""
    rows = shape.repeats * query.shape[2]
    # Tiles of query, keys and values have to fit the memory that a program shares.
    row_bytes = max(shape.width, shape.value_width) * query.element_size()
    most, n = next(tile for limit, *tile in _TILES if row_bytes <= limit)
    m = min(_size(rows), most)
    decodes = rows <= DECODE_ROWS
    run = DECODE_RUN if decodes else PREFILL_RUN
    work = known.work(table, run)
    if not shape.half:
        what = NOTHING
    elif rotated is None:
        what = QUERY if work.tokens >= m else KEYS
    else:
        what = QUERY if rotated == "query" else KEYS
    tiles = -(-rows // m)
    pieces = work.longest + -(-tail_tokens // run)
    if splits is None:
        programs = tiles * shape.kv_heads * query.shape[0]
        splits = pieces if decodes else max(1, min(pieces, _processors(query.device) // programs))
    warps = 4 if m < most or row_bytes <= 64 else 8
    stages = 3 if m <= DECODE_ROWS and row_bytes <= 256 else 2
    tile = Tile(m, n, run, what, splits > 1)
    return Launch(tile, tiles, splits, warps, stages), work


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
