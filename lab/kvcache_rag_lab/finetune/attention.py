"""Attention with gradients that leaves out what a packed batch's mask hides.

A packed row (`packing.pack`) holds a context and all its questions: of 2,700 tokens squared, about
a third is seen.  sdpa works through all of it, and on a CPU takes nine tenths of a training step.
Here queries go in tiles, each over the runs of columns that one of its rows sees, with matrix
products that low precision makes fast.  The mask stays the specification: what it hides inside a
tile is hidden by adding it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

TILED = "kvcache_rag_tiled"

TILE = 128  # rows; fastest of 64 to 512 on two cores


class MaskTile(NamedTuple):
    """Rows of a mask, the half-open runs of columns that any of them sees, and the mask there.

    Attributes:
        rows: Half-open.
        runs: Half-open each, in ascending order.
        added: `(batch or 1, 1, rows, columns of the runs)`, or None if it hides nothing.
    """

    rows: tuple[int, int]
    runs: tuple[tuple[int, int], ...]
    added: Tensor | None


# Every layer is handed the same mask.
_TILES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def tiled_attention(
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
    """Scaled dot product attention, tile by tile.

    Args:
        module: The calling layer.
        query: `(rows, heads, queries, width)`.
        key: `(rows, kv_heads, tokens, width)`.
        value: `(rows, kv_heads, tokens, width)`.
        attention_mask: `(rows, 1, queries, tokens)` float, added; anything else is sdpa's.
        dropout: Probability; above 0 it is sdpa's.
        scaling: Factor of the scores, None for `width ** -0.5`.
        is_causal: Passed on to sdpa.
        kwargs: Passed on to sdpa.

    Returns:
        `(rows, queries, heads, width)` and None, as transformers expects.
    """
    mask = attention_mask
    added = mask is not None and mask.shape[1] == 1 and mask.is_floating_point()
    if mask is None or not added or dropout or kwargs.get("position_bias") is not None:
        stock: tuple[Tensor, None] = sdpa_attention_forward(
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
        return stock
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scaled = query * scale
    parts = [_attend(tile, scaled, key, value) for tile in tiles(mask)]
    return torch.cat(parts, 1), None


def _attend(tile: MaskTile, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One tile: `(rows, queries of the tile, heads, width)`."""
    start, stop = tile.rows
    rows, heads, _, width = query.shape
    groups, count = key.shape[1], stop - start
    # The query heads of a KV head one after the other, so that K and V need no copies.
    packed = query[:, :, start:stop].reshape(rows * groups, -1, width)
    keys = _runs(key, tile.runs).flatten(0, 1)  # (rows * groups, columns, width)
    scores = torch.bmm(packed, keys.mT)  # (rows * groups, heads of a group * queries, columns)
    if tile.added is not None:
        whole = scores.view(rows, heads, count, -1)
        scores = (whole + tile.added).view_as(scores)
    # Summed in float32 in every precision.
    output = torch.bmm(torch.softmax(scores, -1), _runs(value, tile.runs).flatten(0, 1))
    return output.view(rows, heads, count, -1).transpose(1, 2)


def _runs(tensor: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    parts = [tensor[:, :, first:last] for first, last in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def tiles(mask: Tensor) -> list[MaskTile]:
    """What each tile of a mask sees.

    Args:
        mask: `(batch, 1, queries, tokens)`, added to the scores; the lowest number of its dtype,
            or less, is not seen.
    """
    known: list[MaskTile] | None = _TILES.get(mask)  # type: ignore[no-untyped-call]  # in torch
    if known is not None:
        return known
    seen = (mask > torch.finfo(mask.dtype).min / 2)[:, 0].any(0)  # (queries, tokens)
    found = []
    for start in range(0, len(seen), TILE):
        stop = min(start + TILE, len(seen))
        runs = _stretches(seen[start:stop].any(0)) or ((0, seen.shape[1]),)
        added = torch.cat([mask[:, :, start:stop, first:last] for first, last in runs], -1)
        found.append(MaskTile((start, stop), runs, added if bool(added.any()) else None))
    _TILES[mask] = found
    return found


def _stretches(seen: Tensor) -> tuple[tuple[int, int], ...]:
    """Half-open runs of True."""
    edge = torch.zeros(1, dtype=torch.int8, device=seen.device)
    steps = torch.diff(torch.cat([edge, seen.to(torch.int8), edge]))
    first, last = (steps == 1).nonzero().flatten(), (steps == -1).nonzero().flatten()
    return tuple(zip(first.tolist(), last.tolist(), strict=True))


def use_tiled_attention(model: Any) -> bool:
    """Switch a model on a CPU from "sdpa" to this; False where it stays as it is."""
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        return False
    can_change = getattr(model, "_can_set_attn_implementation", None)
    if can_change is not None and not can_change():
        return False  # Falcon and its like carry their own attention code
    AttentionInterface.register(TILED, tiled_attention)
    AttentionMaskInterface.register(TILED, sdpa_mask)
    try:
        model.set_attn_implementation(TILED)
    except (ValueError, AttributeError):
        return False
    return True
