"""Attention over a long cache without repeating K and V, and without what a mask hides.

transformers' sdpa path copies K and V once per query head of a group as soon as there is a mask.
Folding the query heads of one KV head into the query length needs no copy and gives the same
numbers.  Nor does that path skip what a mask hides.  Here, many queries under a mask go in blocks,
each over the columns from the first to the last that one of its rows sees: about half the work
where tokens are computed again, and less in a sliding window.

It stands in for the stock function behind "sdpa" (`support.standing`), with the same mask.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcache_rag.models.attention import few_queries

# The mask is tiled once per query head of a group, so long queries take the stock path.
MAX_PACKED_ROWS = 2048

# Queries under a mask from which on they go in blocks, and of how many (fastest of 32 to 256 on
# CPUs; larger ones skip less).
BLOCK = 64

FEWEST_BLOCKED = 2 * BLOCK


class Block(NamedTuple):
    """Rows of a mask and the columns that any of them sees, both half-open."""

    start: int
    stop: int
    first: int
    last: int


# Every layer is handed the same mask, which is looked through and made addable once.
_BLOCKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

_ADDED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot product attention with grouped heads packed into the query length.

    Args:
        module: The calling layer.
        query: `(rows, heads, queries, width)`.
        key: `(rows, kv_heads, tokens, width)`.
        value: `(rows, kv_heads, tokens, width)`.
        attention_mask: `(rows, 1, queries, tokens)`, bool or added, or None.
        dropout: Probability, 0 outside training.
        scaling: Factor of the scores, None for `width ** -0.5`.
        is_causal: Passed on to the stock function.
        kwargs: Passed on to the stock function.

    Returns:
        `(rows, queries, heads, width)` and None, as transformers expects.
    """
    queries = query.shape[2]
    if attention_mask is None and 1 < queries < key.shape[2]:
        # The model left out queries whose logits nobody wants; what is left is no square.
        attention_mask = torch.ones(
            1, 1, queries, key.shape[2], dtype=torch.bool, device=query.device
        ).tril(key.shape[2] - queries)
    repeats = query.shape[1] // key.shape[1]  # query heads per KV head
    # Causal from nothing: sdpa has a kernel for it.
    empty_cache = attention_mask is None and queries > 1
    special_mask = attention_mask is not None and attention_mask.shape[1] != 1
    is_plain = not special_mask and kwargs.get("position_bias") is None
    if attention_mask is not None and is_plain and queries >= FEWEST_BLOCKED:
        return _blocked(query, key, value, attention_mask, dropout, scaling), None
    alone = repeats == 1 and not few_queries.takes(query, key, value, dropout)
    if alone or empty_cache or not is_plain or repeats * queries > MAX_PACKED_ROWS:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return result
    if few_queries.takes(query, key, value, dropout):
        mask = None if attention_mask is None else added_mask(attention_mask, query.dtype)
        return few_queries.attend(query, key, value, mask, scaling), None
    mask = None
    if attention_mask is not None:
        mask = added_mask(attention_mask, query.dtype, repeats)[..., : key.shape[2]]
    return _packed(query, key, value, mask, dropout, scaling).transpose(1, 2).contiguous(), None


@cache
def _has_tiles() -> bool:
    """Whether this CPU multiplies bfloat16 by tiles (AMX), which torch's own function uses.

    Blocks of queries take it a third of the time that our kernel for few queries needs (230 queries
    over 1,100 keys of 14 heads: 3.8 ms, not 9.2).
    """
    known: Any = getattr(torch.cpu, "_is_amx_tile_supported", None)  # not in every torch
    return known is not None and bool(known())


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """`(rows, heads, queries, width)`, given a mask with the queries once per head of a group."""
    rows, heads, queries, width = query.shape
    groups = key.shape[1]
    # Head after head of a group, each with all its queries: the mask repeats in this order.
    packed = query.reshape(rows, groups, heads // groups * queries, width)
    output = torch.nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(rows, heads, queries, value.shape[-1])  # of (rows, groups, ..., width)


def added_mask(mask: Tensor, dtype: torch.dtype, repeats: int = 1) -> Tensor:
    """The mask as it is added to scores, its queries `repeats` times; made once for all layers.

    sdpa would make it of a bool mask in every call.
    """
    known: dict[tuple[torch.dtype, int], Tensor]
    known = _ADDED.setdefault(mask, {})  # type: ignore[no-untyped-call]  # in torch
    added = known.get((dtype, repeats))
    if added is None:
        added = mask[:1] if mask.stride(0) == 0 else mask  # one for all rows
        if added.dtype == torch.bool:
            added = added.new_zeros(added.shape, dtype=dtype).masked_fill_(~added, -torch.inf)
        if repeats > 1:
            added = added.repeat(1, 1, repeats, 1)  # (rows or 1, 1, repeats * queries, tokens)
        if added is not mask:
            known[dtype, repeats] = added
    return added


def _blocked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    rows, heads, queries, _ = query.shape
    output = query.new_empty(rows, queries, heads, value.shape[-1])  # as transformers wants it
    added = added_mask(mask, query.dtype)  # (rows or 1, 1, queries, tokens)
    for start, stop, first, last in mask_blocks(mask):
        last = min(last, key.shape[2])  # a mask may be wider than the cache is filled
        inputs = (query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last])
        hidden = added[:, :, start:stop, first:last]
        if not _has_tiles() and few_queries.takes(*inputs, dropout):
            output[:, start:stop] = few_queries.attend(*inputs, hidden, scaling)
            continue
        hidden = hidden.repeat(1, 1, heads // key.shape[1], 1)
        output[:, start:stop] = _packed(*inputs, hidden, dropout, scaling).transpose(1, 2)
    return output


def mask_blocks(mask: Tensor) -> list[Block]:
    """Blocks of `BLOCK` rows of a mask, with the columns that they see.

    A block of which no row sees anything (padding) has every column, so that it stays finite.

    Args:
        mask: `(rows, 1, queries, tokens)`, bool (True is seen) or added to the scores (the lowest
            number of its dtype, or less, is not seen).
    """
    known: list[Block] | None = _BLOCKS.get(mask)  # type: ignore[no-untyped-call]  # in torch
    if known is not None:
        return known
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    queries, tokens = mask.shape[-2:]
    flat = seen[:, 0].any(0)  # (queries, tokens): seen in any row of the batch
    parts = torch.stack(
        [part.any(0) for part in torch.split(flat, BLOCK)]
    ).byte()  # (blocks, tokens)
    first, behind = parts.argmax(1), parts.flip(1).argmax(1)  # first seen from either end
    blocks = []
    for index, (low, high, some) in enumerate(
        torch.stack([first, tokens - behind, parts.amax(1).long()], 1).tolist()
    ):
        start = index * BLOCK
        columns = (low, high) if some else (0, tokens)
        blocks.append(Block(start, min(start + BLOCK, queries), *columns))
    _BLOCKS[mask] = blocks
    return blocks
