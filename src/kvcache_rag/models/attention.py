"""Attention over a long cache without repeating K and V.

transformers' sdpa path copies K and V once per query head of a group as soon as there is a mask.
Folding the query heads of one KV head into the query length needs no copy and gives the same
numbers.  Registered under a name of its own, with sdpa's mask function (without which transformers
would pass no mask at all).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "kvcache_rag_packed"
# The mask is tiled once per query head of a group, so long queries take the stock path.
MAX_PACKED_ROWS = 2048


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
        attention_mask: `(rows, 1, queries, tokens)` or None.
        dropout: Probability, 0 outside training.
        scaling: Factor of the scores, None for `width ** -0.5`.
        is_causal: Passed on to the stock function.
        kwargs: Passed on to the stock function.

    Returns:
        `(rows, queries, heads, width)` and None, as transformers expects.
    """
    rows, heads, queries, width = query.shape
    groups = key.shape[1]
    repeats = heads // groups
    empty_cache = (
        attention_mask is None and queries > 1
    )  # causal from nothing: sdpa has a kernel for it
    special_mask = attention_mask is not None and attention_mask.shape[1] != 1
    if (
        repeats == 1
        or empty_cache
        or special_mask
        or repeats * queries > MAX_PACKED_ROWS
        or kwargs.get("position_bias") is not None
    ):
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
    packed = query.reshape(rows, groups, repeats * queries, width)
    mask = None
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[2]].repeat(1, 1, repeats, 1)
    output = torch.nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    unpacked = output.reshape(rows, heads, queries, value.shape[-1])
    return unpacked.transpose(1, 2).contiguous(), None


def use_packed_attention(model: Any) -> bool:
    """Switch a model from "sdpa" to the packed function; False for any other attention."""
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return False
    can_change = getattr(model, "_can_set_attn_implementation", None)
    if can_change is not None and not can_change():
        return False  # Falcon and its like carry their own attention code
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, sdpa_mask)
    try:
        model.set_attn_implementation(PACKED)
    except (ValueError, AttributeError):
        return False
    return True
