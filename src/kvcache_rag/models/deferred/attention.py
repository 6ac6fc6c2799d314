"""Attention over chunks in place: the query is rotated, not the keys.

LazyAttention, arXiv 2606.04302.  Per chunk the query, its grouped heads packed, is rotated back by
as much as the chunk's keys would have to be rotated, attended with, and the partial results are
merged by their log-sum-exp, as in flash decoding.  Where a kernel turns keys while it reads them,
one call of it does all chunks of a row.  `plain_attention` is what both have to equal.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.rotary import rotate_
from kvcache_rag.models.attention import few_queries
from kvcache_rag.models.attention.scaled import scaled_attention
from kvcache_rag.models.deferred.cache import LayerChunks, LayerSegments, awaited, segments_of
from kvcache_rag.models.deferred.segments import LayerCall, PassPlan, make_plan

if TYPE_CHECKING:
    from kvcache_rag.models.attention.few_queries import ChunkContext
    from kvcache_rag.models.deferred.segments import CallShape, SegmentTable


# Arguments that change which columns count or by how much, in ways this function does not know.
_UNKNOWN = ("softcap", "position_bias", "indices", "block_indices")

_FLASH_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def deferred_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over the segments that `key` carries and, behind them, `key` itself.

    Keys of a cache without segments are attended to plainly.

    Args:
        module: The calling layer.
        query: `(rows, heads, queries, width)`, rotated to its place.
        key: `(rows, kv_heads, tail, width)`, as `TailLayer.update` gave it.
        value: `(rows, kv_heads, tail, value_width)`.
        attention_mask: `(rows or 1, 1, queries, columns or more)`, bool or additive; None where
            every new token sees everything up to itself.
        dropout: Not used: models are in evaluation mode.
        scaling: Factor of the scores, None for `width ** -0.5`.
        s_aux: `(heads,)` scores of a sink that holds no value.
        kwargs: Of other attention functions.

    Returns:
        `(rows, queries, heads, value_width)` and None, as transformers expects.

    Raises:
        UnsupportedModelError: If the keys have lost their segments, or the model passes what this
            function does not know.
    """
    name = type(module).__name__
    layer, is_ours = segments_of(key), awaited()
    if layer is None and not is_ours:
        # Of another cache: a logits processor's own pass, an auxiliary model in another thread.
        return scaled_attention(
            module, query, key, value, attention_mask, 0.0, scaling, s_aux=s_aux, **kwargs
        )
    for unknown in _UNKNOWN:
        if kwargs.get(unknown) is not None:
            raise UnsupportedModelError(f"{name} passes {unknown}, which no kernel knows")
    if layer is None:
        raise UnsupportedModelError(f"{name} changes its keys between cache and attention")
    if layer.held.callers is not None:
        layer.held.callers.append(module)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = LayerCall(query, key, value, attention_mask, factor, s_aux)
    if isinstance(layer, LayerChunks):
        return layer.held.attend(layer.group, layer.place, call), None
    if query.device.type == "cuda":
        return _on_cuda(call, layer), None
    if has_fast_path(call, layer.held.table):
        return fast_attention(call, layer), None
    return plain_attention(call, layer), None


def has_fast_path(call: LayerCall, table: SegmentTable) -> bool:
    """Whether the CPU's kernel knows such tensors."""
    query, value = call.query, call.value
    heads, width = query.shape[1], query.shape[3]
    return (
        query.device.type == "cpu"
        and query.dtype == table.layout.dtype == value.dtype
        and is_fast(query.dtype, width, value.shape[3], heads, value.shape[1], query.device)
        and call.is_alike_for_heads
    )


def is_fast(
    dtype: torch.dtype,
    width: int,
    value_width: int,
    heads: int,
    kv_heads: int,
    device: torch.device,
) -> bool:
    """Whether there is a kernel for such a model, so that keys need not be copied and rotated."""
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None
    is_known = device.type == "cpu" and dtype in _FLASH_DTYPES
    return is_known and width == value_width and heads % kv_heads == 0


def _on_cuda(call: LayerCall, layer: LayerSegments) -> Tensor:
    try:
        from kvcache_rag.models.deferred.kernel import deferred_attend
    except ImportError:  # no Triton
        return plain_attention(call, layer)
    table, group, place = layer.held.table, layer.group, layer.place
    tensors = call.query, call.key, call.value, call.mask
    try:
        output: Tensor = deferred_attend(*tensors, call.factor, table, group, place, call.sinks)
    except NotImplementedError:
        return plain_attention(call, layer)
    return output


def plain_attention(call: LayerCall, layer: LayerSegments) -> Tensor:
    """The specification: rotated copies of all keys, and ordinary attention in float32.

    Returns:
        `(rows, queries, heads, value_width)`; of tokens that the table keeps, any finite number.
    """
    key, value = call.key, call.value
    table = layer.held.table
    columns = table.tail + key.shape[2]
    # (rows, kv_heads, columns, width); zeros where there is padding
    keys = key.new_zeros(*key.shape[:2], columns, key.shape[3])
    values = value.new_zeros(*value.shape[:2], columns, value.shape[3])
    rotation = table.layout.groups[layer.group].key_rotation
    for row, segments in enumerate(table.rows):
        first = table.tail + table.keep[row]  # the first column that is the tail's alone
        keys[row, :, first:] = key[row, :, table.keep[row] :]
        values[row, :, first:] = value[row, :, table.keep[row] :]
        for segment in segments:
            place = slice(segment.column, segment.stop)
            keys[row, :, place] = segment.chunk.keys(layer.group)[layer.place]
            values[row, :, place] = segment.chunk.values(layer.group)[layer.place]
            if segment.angle and rotation.style != "none":
                # (1, dim / 2): one angle for all tokens of the segment
                cos, sin = (part[segment.angle, None] for part in table.angles[rotation.frequency])
                rotate_(keys[row, :, place], rotation, cos, sin)
    return ordinary_attention(call, keys, values)


def ordinary_attention(call: LayerCall, keys: Tensor, values: Tensor) -> Tensor:
    """Attention in float32 to keys that stand at their places, in the stead of the call's own.

    Args:
        call: What is asked.
        keys: `(rows, kv_heads, columns, width)`.
        values: `(rows, kv_heads, columns, value_width)`.

    Returns:
        `(rows, queries, heads, value_width)`.
    """
    query = call.query
    rows, heads, queries, _ = query.shape
    repeats, columns = heads // keys.shape[1], keys.shape[2]
    # (rows, heads, columns, width)
    wide_keys, wide_values = (part.float().repeat_interleave(repeats, 1) for part in (keys, values))
    scores = query.float() @ wide_keys.transpose(-1, -2) * call.factor
    scores = scores + _added(call.mask, queries, columns, query.device)
    if call.sinks is not None:
        sink = call.sinks.float().reshape(1, -1, 1, 1).expand(rows, -1, queries, 1)
        scores = torch.cat([scores, sink], -1)
    # A row of nothing but the lowest number (padding) stays finite.
    weights = torch.softmax(scores.clamp_min(torch.finfo(scores.dtype).min), -1)
    output = weights[..., :columns] @ wide_values
    return output.to(query.dtype).transpose(1, 2).contiguous()


def _added(mask: Tensor | None, queries: int, columns: int, device: torch.device) -> Tensor:
    if mask is None:
        last = torch.arange(columns - queries, columns, device=device)
        mask = (torch.arange(columns, device=device) <= last[:, None])[None, None]
    mask = mask[..., :columns]
    if mask.dtype != torch.bool:
        return mask.float()
    hidden = torch.zeros(mask.shape, device=device)
    return hidden.masked_fill(~mask, torch.finfo(torch.float32).min)


def fast_attention(call: LayerCall, layer: LayerSegments) -> Tensor:
    """`plain_attention` on a CPU, without a copy of K or V; needs `has_fast_path`."""
    plan = _plan(layer, call)
    if plan.is_single and few_queries.takes(call.query, call.key, call.value, 0.0):
        context = layer.held.context(layer.group)
        if context is not None:
            output = attend_behind(context, layer.place, call, plan.single_mask)
            return output.transpose(1, 2).contiguous()
    return _by_chunks(call, layer, plan)


def attend_behind(
    context: ChunkContext, place: int, call: LayerCall, hidden: Tensor | None
) -> Tensor:
    """Attention of one row to chunks and what follows them, in one call of the CPU's kernel.

    Args:
        context: The chunks of the row.
        place: Number of the layer in its group.
        call: What is asked; its own mask is not looked at.
        hidden: Added to the scores, `(1, 1, queries or 1, columns or more)`, or None.

    Returns:
        `(1, heads, queries, value_width)`.
    """
    tensors = call.query, call.key, call.value
    output, levels = few_queries.attend_behind(context, place, *tensors, hidden, call.factor)
    if call.sinks is not None:  # they take a share and give nothing
        shares = torch.sigmoid(levels - call.sinks.float()[:, None])  # (1, heads, queries)
        output = (output * shares[..., None]).to(output.dtype)
    return output


def _by_chunks(call: LayerCall, layer: LayerSegments, plan: PassPlan) -> Tensor:
    """One call of a kernel per chunk, with the query rotated back by as much as it stands apart."""
    query, factor = call.query, call.factor
    rows, heads, queries, width = query.shape
    groups = call.key.shape[1]
    packed = query.reshape(rows, groups, -1, width)  # the heads of a group fold into the queries
    length = packed.shape[2]  # repeats * queries
    out, level = _partial(packed, call.key, call.value, plan.tail_mask, factor)
    if rows > 1:  # as the partial results of chunks are: (1, kv_heads, rows * length, width)
        out = out.transpose(0, 1).reshape(1, groups, -1, width)
        level = level.transpose(0, 1).reshape(1, groups, -1)  # log-sum-exps
    outs, levels = [], []
    views = layer.held.views[layer.group]
    for part, rotated in zip(plan.calls, _rotated(packed, plan), strict=True):
        keys, values = (slot[layer.place] for slot in views[part.chunk])  # (1, kv_heads, n, width)
        if part.mask is not None:
            keys, values = keys[:, :, part.start : part.stop], values[:, :, part.start : part.stop]
        partial = _partial(rotated, keys, values, part.mask, factor)
        outs.append(partial[0])
        levels.append(partial[1])
    # Pairs of a row and a chunk in the order of the calls, then the tails, row by row.
    partials = torch.cat([*outs, out], 2).view(groups, -1, length, width)
    marks = torch.cat([*levels, level], 2).view(groups, -1, length)
    merged = _merged(partials, marks, plan, rows, call.sinks)
    # (kv_heads, rows, repeats, queries, width) to (rows, queries, kv_heads, repeats, width)
    by_head = merged.view(groups, rows, -1, queries, width).permute(1, 3, 0, 2, 4)
    return by_head.reshape(rows, queries, heads, width).to(query.dtype)


def _partial(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, factor: float
) -> tuple[Tensor, Tensor]:
    """Attention to some of the tokens, and the log-sum-exp of its scores."""
    if few_queries.takes(query, key, value, 0.0):
        return few_queries.attend_partially(query, key, value, mask, factor)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, level = attend(query, key, value, 0.0, False, attn_mask=mask, scale=factor)
    return output, level


def _rotated(packed: Tensor, plan: PassPlan) -> tuple[Tensor, ...]:
    """Queries of each call, `(1, kv_heads, pairs * heads * queries, width)`, rotated back."""
    if not plan.calls:
        return ()
    wide = packed.transpose(0, 1).float()  # (kv_heads, rows, repeats * queries, width)
    partner = wide.index_select(-1, plan.partners)  # each column's partner in its place
    if plan.rows is not None:  # (kv_heads, pairs, repeats * queries, width)
        wide, partner = wide.index_select(1, plan.rows), partner.index_select(1, plan.rows)
    rotated = (wide * plan.cos).addcmul_(partner, plan.sin).to(packed.dtype)
    groups, _, _, width = rotated.shape
    return torch.split(rotated.reshape(1, groups, -1, width), plan.sizes, 2)


def _merged(
    partials: Tensor, levels: Tensor, plan: PassPlan, rows: int, sinks: Tensor | None
) -> Tensor:
    """Partial results of each row as one, `(kv_heads, rows, n, width)`.

    Args:
        partials: `(kv_heads, parts, n, width)` of segments and, last, of the tails.
        levels: Log-sum-exp of the scores of each, `(kv_heads, parts, n)`.
        plan: Which belong together.
        rows: Of the batch.
        sinks: `(heads,)` scores that take a share and give nothing, or None.
    """
    groups, count, length = levels.shape
    wide = partials.to(levels.dtype)
    sink = None
    if sinks is not None:
        by_head = sinks.to(levels.dtype).view(groups, 1, -1, 1)
        sink = by_head.expand(-1, -1, -1, length // by_head.shape[2]).reshape(groups, 1, length)
    if rows == 1:
        # All parts are of the one row, so their shares are one softmax; that of the sink is lost.
        marks = levels if sink is None else torch.cat([levels, sink], 1)
        return wide.mul_(torch.softmax(marks, 1)[:, :count, :, None]).sum(1, keepdim=True)
    # One part more, of nothing: rows that have fewer parts than others point at it.
    padded = torch.nn.functional.pad(levels, (0, 0, 0, 1), value=-torch.inf)
    total = padded[:, plan.parts].logsumexp(2)  # (kv_heads, rows, n) of (kv_heads, rows, most, n)
    total = total if sink is None else torch.logaddexp(total, sink)
    shares = (levels - total.index_select(1, plan.owners)).exp_()  # (kv_heads, parts, n)
    merged = wide.new_zeros(groups, rows, *wide.shape[2:])
    return merged.index_add_(1, plan.owners, wide.mul_(shares[..., None]))


def _plan(layer: LayerSegments, call: LayerCall) -> PassPlan:
    segments, mask, shape = layer.held, call.mask, call.shape
    known: dict[tuple[int, int], tuple[CallShape, PassPlan]] = segments.unmasked_plans
    if mask is not None:
        known = segments.plans.setdefault(mask, {})  # type: ignore[no-untyped-call]  # in torch
    elif shape.queries == 1 and not any(segments.table.keep):
        shape = replace(shape, tail=1)  # it sees all of the tail, however long that is
    # The last one only: a tail that grows needs another with every token.
    entry = known.get((layer.group, shape.repeats))
    if entry is None or entry[0] != shape:
        entry = shape, make_plan(segments.table, layer.group, mask, shape, call.query.dtype)
        known[layer.group, shape.repeats] = entry
    return entry[1]
