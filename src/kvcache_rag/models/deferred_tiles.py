# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Steps of the Triton kernels in `deferred_triton`: tiles of query, keys and values.

The columns of keys and query are taken apart into the two partners that turn together and the rest
that does not turn; scores are the sum of their products.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kvcache_rag.models.deferred_metadata import (
    CHUNK_BITS,
    FIRST_BITS,
    TOKENS_BITS,
    TURN_BITS,
)

NO_PAIRS, HALVES, NEIGHBOURS = 0, 1, 2  # Shape.style: how the partners lie
NOTHING, QUERY, KEYS = 0, 1, 2  # Tile.turn: what is turned

# Where the fields of a packed run begin, and what they hold at most.
_TOKENS_AT = tl.constexpr(TURN_BITS)
_FIRST_AT = tl.constexpr(TURN_BITS + TOKENS_BITS)
_CHUNK_AT = tl.constexpr(TURN_BITS + TOKENS_BITS + FIRST_BITS)
_TURN_MOST = tl.constexpr((1 << TURN_BITS) - 1)
_TOKENS_MOST = tl.constexpr((1 << TOKENS_BITS) - 1)
_FIRST_MOST = tl.constexpr((1 << FIRST_BITS) - 1)
_CHUNK_MOST = tl.constexpr((1 << CHUNK_BITS) - 1)
_HALVES = tl.constexpr(HALVES)


class Shape(NamedTuple):
    """What is fixed by a layer; `*_size` are counts of columns rounded up to powers of two."""

    kv_heads: int
    repeats: int
    width: int
    value_width: int
    style: int
    start: int
    half: int
    reverse: bool
    window: int
    aligned: bool
    has_sinks: bool
    half_size: int
    rest_size: int
    value_size: int
    precision: str


class Tile(NamedTuple):
    """How the work is cut: query rows, keys at a time, longest run, what turns, shared rows."""

    rows: int
    keys: int
    run: int
    turn: int
    is_shared: bool


@triton.jit
def _block(starts, real, first, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Columns from `first` on of some rows, zeros where there is nothing."""
    columns = tl.arange(0, SIZE)
    seen = real[:, None]
    if COUNT != SIZE:
        seen = seen & (columns < COUNT)[None, :]
    return tl.load(starts[:, None] + (first + columns)[None, :], mask=seen, other=0.0)


@triton.jit
def pairs(starts, real, SHAPE: tl.constexpr):
    """The columns that turn: first partners and second partners."""
    if SHAPE.style == _HALVES:
        first = _block(starts, real, SHAPE.start, SHAPE.half, SHAPE.half_size)
        second = _block(starts, real, SHAPE.start + SHAPE.half, SHAPE.half, SHAPE.half_size)
    else:
        both = _block(starts, real, SHAPE.start, 2 * SHAPE.half, 2 * SHAPE.half_size)
        first, second = tl.split(tl.reshape(both, (both.shape[0], SHAPE.half_size, 2)))
    return first, second


@triton.jit
def rest(starts, real, SHAPE: tl.constexpr):
    """The columns that do not turn."""
    count: tl.constexpr = SHAPE.width - 2 * SHAPE.half
    if SHAPE.start == 0:
        kept = _block(starts, real, 2 * SHAPE.half, count, SHAPE.rest_size)
    else:
        columns = tl.arange(0, SHAPE.rest_size)
        seen = real[:, None] & (columns < count)[None, :]
        columns = tl.where(columns < SHAPE.start, columns, columns + 2 * SHAPE.half)
        kept = tl.load(starts[:, None] + columns[None, :], mask=seen, other=0.0)
    return kept


@triton.jit
def parts_of(starts, real, SHAPE: tl.constexpr):
    """First partners, second partners and the rest; what a shape does not have repeats another."""
    if SHAPE.half > 0:
        first, second = pairs(starts, real, SHAPE)
        kept = first
        if SHAPE.rest_size > 0:
            kept = rest(starts, real, SHAPE)
    else:
        kept = rest(starts, real, SHAPE)
        first, second = kept, kept
    return first, second, kept


@triton.jit
def turned(first, second, cos, sin):
    """Partners turned by an angle per column, in float32 with one rounding."""
    one, other = first.to(tl.float32), second.to(tl.float32)
    left = one * cos[None, :] - other * sin[None, :]
    right = other * cos[None, :] + one * sin[None, :]
    return left.to(first.dtype), right.to(first.dtype)


@triton.jit
def scores_of(query, starts, real, cos, sin, TURNS: tl.constexpr, SHAPE: tl.constexpr):
    """Products of the query tile with a tile of keys, float32."""
    qa, qb, qr = query
    ka, kb, kr = parts_of(starts, real, SHAPE)
    if SHAPE.half > 0:
        if TURNS:
            ka, kb = turned(ka, kb, cos, sin)
        scores = tl.dot(qa, tl.trans(ka), input_precision=SHAPE.precision)
        scores = tl.dot(qb, tl.trans(kb), scores, input_precision=SHAPE.precision)
        if SHAPE.rest_size > 0:
            scores = tl.dot(qr, tl.trans(kr), scores, input_precision=SHAPE.precision)
    else:
        scores = tl.dot(qr, tl.trans(kr), input_precision=SHAPE.precision)
    return scores


@triton.jit
def fold(scores, state, starts, real, SHAPE: tl.constexpr):
    """One step of the online softmax, base 2: peak, total and weighted values so far."""
    peak, total, held = state
    highest = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet has no peak to subtract.
    level = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(peak - level)
    values = _block(starts, real, 0, SHAPE.value_width, SHAPE.value_size)
    held = held * shrink[:, None]
    held = tl.dot(weights.to(values.dtype), values, held, input_precision=SHAPE.precision)
    return highest, total * shrink + tl.sum(weights, 1), held


@triton.jit
def unpacked(entry):
    """Chunk, first token, tokens and turn of a run (`Run.pack`)."""
    turn = entry & _TURN_MOST
    tokens = (entry >> _TOKENS_AT) & _TOKENS_MOST
    first = (entry >> _FIRST_AT) & _FIRST_MOST
    chunk = (entry >> _CHUNK_AT) & _CHUNK_MOST
    return chunk, first, tokens.to(tl.int32), turn


@triton.jit
def store_state(state, place, real, output, levels, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Write the normalised values and, where others share the row, the log-sum-exp (base 2)."""
    peak, total, held = state
    divisor = tl.where(total > 0, total, 1.0)
    columns = tl.arange(0, SHAPE.value_size)
    tl.store(
        output + place[:, None] * SHAPE.value_width + columns[None, :],
        (held / divisor[:, None]).to(output.dtype.element_ty),
        mask=real[:, None] & (columns < SHAPE.value_width)[None, :],
    )
    if TILE.is_shared:
        level = tl.where(total > 0, peak + tl.log2(divisor), float("-inf"))
        tl.store(levels + place, level, mask=real)
