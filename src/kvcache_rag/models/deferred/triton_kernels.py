# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of attention over segments; `models.deferred.kernel` launches them.

A program takes a tile of query rows of one KV head (the query heads of its group folded into the
rows) and a share of the row's work: runs of segments, then the tail.  It carries one online softmax
through all of them.  The columns of query and keys are taken apart into the two partners that
rotate together and the rest that does not; scores are the sum of their products.  A run has one
rotation: either the query tile is rotated back once per run, or each tile of keys is rotated
(`Tile.rotated`).  Where several programs share a row, each writes what it has, normalised, with its
log-sum-exp, and `merge` adds them up (Flash-Decoding's split KV).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kvcache_rag.models.deferred.worklist import ANGLE_BITS, CHUNK_BITS, FIRST_BITS, TOKENS_BITS

NO_PAIRS, HALVES, NEIGHBOURS = 0, 1, 2  # KernelShape.style: how the partners lie

NOTHING, QUERY, KEYS = 0, 1, 2  # Tile.rotated: what is rotated

# Where the fields of a packed run begin, and what they hold at most.
_TOKENS_AT = tl.constexpr(ANGLE_BITS)

_FIRST_AT = tl.constexpr(ANGLE_BITS + TOKENS_BITS)

_CHUNK_AT = tl.constexpr(ANGLE_BITS + TOKENS_BITS + FIRST_BITS)

_ANGLE_MOST = tl.constexpr((1 << ANGLE_BITS) - 1)

_TOKENS_MOST = tl.constexpr((1 << TOKENS_BITS) - 1)

_FIRST_MOST = tl.constexpr((1 << FIRST_BITS) - 1)

_CHUNK_MOST = tl.constexpr((1 << CHUNK_BITS) - 1)

_HALVES = tl.constexpr(HALVES)


class KernelShape(NamedTuple):
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
    """How the work is cut: query rows, keys at a time, longest run, what rotates, shared rows."""

    rows: int
    keys: int
    run: int
    rotated: int
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
    """The columns that rotate: first partners and second partners."""
    if SHAPE.style == _HALVES:
        first = _block(starts, real, SHAPE.start, SHAPE.half, SHAPE.half_size)
        second = _block(starts, real, SHAPE.start + SHAPE.half, SHAPE.half, SHAPE.half_size)
    else:
        both = _block(starts, real, SHAPE.start, 2 * SHAPE.half, 2 * SHAPE.half_size)
        first, second = tl.split(tl.reshape(both, (both.shape[0], SHAPE.half_size, 2)))
    return first, second


@triton.jit
def rest(starts, real, SHAPE: tl.constexpr):
    """The columns that do not rotate."""
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
def rotated(first, second, cos, sin):
    """Partners rotated by an angle per column, in float32 with one rounding."""
    one, other = first.to(tl.float32), second.to(tl.float32)
    left = one * cos[None, :] - other * sin[None, :]
    right = other * cos[None, :] + one * sin[None, :]
    return left.to(first.dtype), right.to(first.dtype)


@triton.jit
def scores_of(query, starts, real, cos, sin, ROTATES: tl.constexpr, SHAPE: tl.constexpr):
    """Products of the query tile with a tile of keys, float32."""
    qa, qb, qr = query
    ka, kb, kr = parts_of(starts, real, SHAPE)
    if SHAPE.half > 0:
        if ROTATES:
            ka, kb = rotated(ka, kb, cos, sin)
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
    """Chunk, first token, tokens and angle of a run (`Run.pack`)."""
    angle = entry & _ANGLE_MOST
    tokens = (entry >> _TOKENS_AT) & _TOKENS_MOST
    first = (entry >> _FIRST_AT) & _FIRST_MOST
    chunk = (entry >> _CHUNK_AT) & _CHUNK_MOST
    return chunk, first, tokens.to(tl.int32), angle


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


_QUERY, _KEYS = tl.constexpr(QUERY), tl.constexpr(KEYS)

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _first_seen(ends, first, runs, lowest):
    """How many of a row's runs end at or before column `lowest`, by bisection."""
    low, high = 0, runs
    while low < high:
        middle = (low + high) // 2
        if tl.load(ends + first + middle) <= lowest:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def _attend_run(
    query,
    state,
    item,
    head,
    own,
    oldest,
    work,
    memory,
    angles,
    factor,
    dtype,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """All tiles of one run; `own` and `oldest` are columns."""
    packed, ends = work
    bases, strides, chunks = memory
    chunk, first, tokens, angle = unpacked(tl.load(packed + item))
    keys = tl.load(bases + chunk).to(tl.pointer_type(dtype))
    keys += head * tl.load(strides + chunk) + first * SHAPE.width
    values = tl.load(bases + chunks + chunk).to(tl.pointer_type(dtype))
    values += head * tl.load(strides + chunks + chunk) + first * SHAPE.value_width
    if SHAPE.aligned:
        keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
    column = tl.load(ends + item) - tokens
    qa, qb, qr = query
    cos, sin = factor, factor  # not used unless something is rotated
    if TILE.rotated != 0:
        cosines, sines = angles
        places = tl.arange(0, SHAPE.half_size)
        cos = tl.load(cosines + angle * SHAPE.half + places, mask=places < SHAPE.half, other=1.0)
        sin = tl.load(sines + angle * SHAPE.half + places, mask=places < SHAPE.half, other=0.0)
        if SHAPE.reverse:
            sin = -sin
        if TILE.rotated == _QUERY:
            qa, qb = rotated(qa, qb, cos, -sin)
    peak, total, held = state
    low = 0
    if SHAPE.window > 0:
        low = tl.maximum(oldest - column, 0) // TILE.keys * TILE.keys
    for start in range(low, tokens, TILE.keys):
        token = start + tl.arange(0, TILE.keys)
        here = token < tokens
        scores = scores_of(
            (qa, qb, qr), keys + token * SHAPE.width, here, cos, sin, TILE.rotated == _KEYS, SHAPE
        )
        seen = here[None, :]
        if SHAPE.window > 0:
            seen = seen & ((column + token)[None, :] > (own - SHAPE.window)[:, None])
        scores = tl.where(seen, scores * factor, float("-inf"))
        state = (peak, total, held)
        peak, total, held = fold(scores, state, values + token * SHAPE.value_width, here, SHAPE)
    return peak, total, held


@triton.jit
def _attend_tail(
    query,
    state,
    low,
    high,
    hidden,
    own,
    keys,
    values,
    factor,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Tokens `low ... high` of the tail; `own` is each query's own token there."""
    k_start, k_token = keys
    v_start, v_token = values
    peak, total, held = state
    for start in range(low, high, TILE.keys):
        token = start + tl.arange(0, TILE.keys)
        here = (token >= hidden) & (token < high)
        at = token.to(tl.int64)
        scores = scores_of(query, k_start + at * k_token, here, factor, factor, False, SHAPE)
        seen = here[None, :] & (token[None, :] <= own[:, None])
        if SHAPE.window > 0:
            seen = seen & (token[None, :] > (own - SHAPE.window)[:, None])
        scores = tl.where(seen, scores * factor, float("-inf"))
        state = (peak, total, held)
        peak, total, held = fold(scores, state, v_start + at * v_token, here, SHAPE)
    return peak, total, held


@triton.jit(do_not_specialize=["queries", "tail_tokens", "tail_column", "chunks"])
def attend(
    tensors,
    work,
    memory,
    angles,
    results,
    strides,
    queries,
    tail_tokens,
    tail_column,
    chunks,
    factor,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (query tiles, rows x KV heads, splits); see `kernel.deferred_attend`.

    `tensors`: query, tail keys, tail values, sinks; `work`: packed runs, their ends, bounds of the
    rows, keep; `memory`: addresses and head strides of the chunks; `angles`: cosines and sines;
    `results`: output and log-sum-exps; `strides`: row, head and token of query, keys and values.
    """
    query, tail_keys, tail_values, sinks = tensors
    packed, ends, bounds, keep = work
    q_stride, k_stride, v_stride = strides
    tile, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    row = (tl.program_id(1) // SHAPE.kv_heads).to(tl.int64)
    head = (tl.program_id(1) % SHAPE.kv_heads).to(tl.int64)
    # Heads of a group side by side, so that a tile's query tokens are neighbours.
    places = tile * TILE.rows + tl.arange(0, TILE.rows)
    index = places // SHAPE.repeats
    heads = head * SHAPE.repeats + places % SHAPE.repeats
    real = index < queries
    starts = query + row * q_stride[0] + heads * q_stride[1] + index.to(tl.int64) * q_stride[2]
    whole = parts_of(starts, real, SHAPE)
    own = tail_tokens - queries + index
    oldest = tail_tokens - queries + tile * TILE.rows // SHAPE.repeats - SHAPE.window + 1
    # Triton takes the fields of a constexpr as shapes only once they are constexprs themselves.
    m: tl.constexpr = TILE.rows
    width: tl.constexpr = SHAPE.value_size
    peak = tl.full((m,), float("-inf"), tl.float32)
    total = tl.zeros((m,), tl.float32)
    held = tl.zeros((m, width), tl.float32)
    if SHAPE.has_sinks:
        sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * _LOG2_E
        peak = tl.where(split == splits - 1, sink, peak)
        total = tl.where(split == splits - 1, 1.0, total)

    first = tl.load(bounds + row)
    runs = tl.load(bounds + row + 1) - first
    behind = 0
    if SHAPE.window > 0:
        behind = _first_seen(ends, first, runs, tail_column + oldest)
    share = tl.cdiv(runs - behind + tl.cdiv(tail_tokens, TILE.run), splits)
    begin = behind + split * share
    stop = begin + share
    for item in range(first + begin, first + tl.minimum(stop, runs)):
        peak, total, held = _attend_run(
            whole, (peak, total, held), item, head, tail_column + own, tail_column + oldest,
            (packed, ends), (memory[0], memory[1], chunks), angles, factor,
            query.dtype.element_ty, SHAPE, TILE,
        )  # fmt: skip

    hidden = tl.load(keep + row)
    low = tl.maximum(tl.maximum(begin - runs, 0) * TILE.run, hidden // TILE.keys * TILE.keys)
    if SHAPE.window > 0:
        low = tl.maximum(low, tl.maximum(oldest, 0) // TILE.keys * TILE.keys)
    newest = tl.minimum((tile * TILE.rows + TILE.rows - 1) // SHAPE.repeats, queries - 1)
    high = tl.minimum((stop - runs) * TILE.run, tail_tokens - queries + newest + 1)
    keys = (tail_keys + row * k_stride[0] + head * k_stride[1], k_stride[2])
    values = (tail_values + row * v_stride[0] + head * v_stride[1], v_stride[2])
    state = _attend_tail(
        whole, (peak, total, held), low, high, hidden, own, keys, values, factor, SHAPE, TILE
    )
    place = (row * queries + index) * (SHAPE.kv_heads * SHAPE.repeats) + heads
    if TILE.is_shared:
        rows = tl.num_programs(1) // SHAPE.kv_heads
        place += split.to(tl.int64) * rows * queries * (SHAPE.kv_heads * SHAPE.repeats)
    store_state(state, place, real, results[0], results[1], SHAPE, TILE)


@triton.jit(do_not_specialize=["splits", "count"])
def merge(
    parts, levels, output, splits, count, VALUE: tl.constexpr, V: tl.constexpr, S: tl.constexpr
):
    """Add up `(splits, count, VALUE)` parts by their log-sum-exp (base 2); one program per row."""
    place = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, V)
    peak = tl.full((S,), float("-inf"), tl.float32)
    for first in range(0, splits, S):
        number = (first + tl.arange(0, S)).to(tl.int64)
        level = tl.load(levels + number * count + place, mask=number < splits, other=float("-inf"))
        peak = tl.maximum(peak, level)
    highest = tl.max(peak, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros((S,), tl.float32)
    held = tl.zeros((V,), tl.float32)
    for first in range(0, splits, S):
        number = (first + tl.arange(0, S)).to(tl.int64)
        level = tl.load(levels + number * count + place, mask=number < splits, other=float("-inf"))
        weight = tl.exp2(level - highest)
        part = tl.load(
            parts + (number * count + place)[:, None] * VALUE + columns[None, :],
            mask=(weight > 0)[:, None] & (columns < VALUE)[None, :],
            other=0.0,
        )
        held += tl.sum(weight[:, None] * part, 0)
        total += weight
    whole = tl.sum(total, 0)
    result = held / tl.where(whole > 0, whole, 1.0)
    tl.store(
        output + place * VALUE + columns, result.to(output.dtype.element_ty), mask=columns < VALUE
    )
