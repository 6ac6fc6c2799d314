# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of attention over segments; `deferred_kernel` launches them.

A program takes a tile of query rows of one KV head (the query heads of its group folded into the
rows) and a share of the row's work: runs of segments, then the tail.  It carries one online softmax
through all of them.  A run has one rotation: either the query tile is turned back once per run, or
each tile of keys is turned (`Tile.turn`).  Where several programs share a row, each writes what it
has, normalised, with its log-sum-exp, and `merge` adds them up (Flash-Decoding's split KV).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcache_rag.models.deferred_tiles import (
    KEYS,
    QUERY,
    fold,
    parts_of,
    scores_of,
    store_state,
    turned,
    unpacked,
)

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
    chunk, first, tokens, turn = unpacked(tl.load(packed + item))
    keys = tl.load(bases + chunk).to(tl.pointer_type(dtype))
    keys += head * tl.load(strides + chunk) + first * SHAPE.width
    values = tl.load(bases + chunks + chunk).to(tl.pointer_type(dtype))
    values += head * tl.load(strides + chunks + chunk) + first * SHAPE.value_width
    if SHAPE.aligned:
        keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
    column = tl.load(ends + item) - tokens
    qa, qb, qr = query
    cos, sin = factor, factor  # not used unless something turns
    if TILE.turn != 0:
        cosines, sines = angles
        places = tl.arange(0, SHAPE.half_size)
        cos = tl.load(cosines + turn * SHAPE.half + places, mask=places < SHAPE.half, other=1.0)
        sin = tl.load(sines + turn * SHAPE.half + places, mask=places < SHAPE.half, other=0.0)
        if SHAPE.reverse:
            sin = -sin
        if TILE.turn == _QUERY:
            qa, qb = turned(qa, qb, cos, -sin)
    peak, total, held = state
    low = 0
    if SHAPE.window > 0:
        low = tl.maximum(oldest - column, 0) // TILE.keys * TILE.keys
    for start in range(low, tokens, TILE.keys):
        token = start + tl.arange(0, TILE.keys)
        here = token < tokens
        scores = scores_of(
            (qa, qb, qr), keys + token * SHAPE.width, here, cos, sin, TILE.turn == _KEYS, SHAPE
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
    """Grid (query tiles, rows x KV heads, splits); see `deferred_kernel.deferred_attend`.

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
