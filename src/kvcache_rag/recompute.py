"""Compute chosen context tokens again, in the context of the whole prompt, in place.

One forward pass of the unmodified model over [chosen tokens, query]: every layer writes the new
keys and values into their places in the buffer and attends over everything there.  Each token
attends by its true place in the prompt (keys at places up to its own, windows counted in places),
whatever else was chosen; published implementations let a chosen token see keys behind it
(YaoJiayi/CacheBlend issue 21).  It also stands at its true position.  With composite positions the
chosen tokens therefore leave their chunk's local positions for those of the prompt, at which the
query stands too, and the others keep theirs.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcache_rag.errors import InvalidInputError, refuse
from kvcache_rag.models.cache import HaltedError, buffer_cache, keep_states, recompute_cache
from kvcache_rag.stitching.states import StateWalk

if TYPE_CHECKING:
    from kvcache_rag.models.rotation import ModelLayout
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitching.stitch import StitchedPrompt, StitchedRow


def chosen_tokens(policy: ReusePolicy, shape: StitchedPrompt, signals: Signals) -> Tensor:
    """What a policy selects, checked.

    Returns:
        `(context_tokens,)` bool on the CPU.

    Raises:
        InvalidInputError: If it is no such tensor, or the policy moves the query next to the chunks
            and selects tokens all the same.
    """
    selected = _checked(policy, policy.select(shape, signals), shape)
    if policy.adjacent_query and bool(selected.any()):
        raise InvalidInputError(
            f"{policy} wants the query next to the chunks and tokens computed again, which stand "
            "at their places in the prompt; choose one of the two"
        )
    return selected


def _checked(policy: ReusePolicy, selected: Any, shape: StitchedPrompt) -> Tensor:
    """What `select` gave, on the CPU, if it is what it must be."""
    wanted = (shape.context_tokens,)
    if not isinstance(selected, Tensor) or selected.dtype != torch.bool:
        kind = selected.dtype if isinstance(selected, Tensor) else type(selected).__name__
        raise InvalidInputError(
            f"{policy} selects tokens by {kind}; select must return a bool tensor of shape {wanted}"
        )
    if tuple(selected.shape) != wanted:
        raise InvalidInputError(
            f"{policy} selects from shape {tuple(selected.shape)}; select must return a bool "
            f"tensor of shape {wanted}, one per context token"
        )
    return selected.cpu()


def recompute(row: StitchedRow, selected: Tensor) -> None:
    """Compute chosen tokens again, and the query but its last token, writing both into the buffer.

    The query is left to whoever goes on where there are recurrent layers, which hold what is behind
    the last token alone (`ContextRow.missing`).

    The pass ends once the last layer has its keys and values.

    Args:
        row: A stitched prompt.
        selected: `(context_tokens,)` bool.

    Raises:
        UnsupportedModelError: If the model takes no positions, or its attention no mask.
    """
    model, query = row.model, row.shape.spans[-1]
    context, stop = query.start, query.stop - 1
    if model.abilities.recompute == "heads":
        _recompute_in_order(row, selected)
        return
    refuse(model.abilities.cannot_choose)
    chosen = selected.nonzero()[:, 0]  # (chosen,) int64 places in the prompt, ascending
    places = torch.cat([chosen, torch.arange(context, stop)])  # (chosen + query - 1,)
    mask = model.causal_mask(places, stop)  # over what the buffer will hold, place by place
    kinds = model.measured.kinds
    cache = recompute_cache(row.buffer, kinds, context, chosen.to(model.device), halts=True)
    with suppress(HaltedError):
        # (1, chosen + query - 1) ids; the pass halts before any logits.
        model.forward(row.ids[None, places], cache, places, mask=mask, keep=1)


def _recompute_in_order(row: StitchedRow, selected: Tensor) -> None:
    """The same in a model with recurrent layers, chunk by chunk, and without the query.

    A token inside a recurrent layer has no place of its own: what follows it depends on it.  So
    whole chunks are computed again, or heads at which they are cut; states go through the rest.
    """
    model, buffer = row.model, row.buffer
    layout = model.measured
    prefix = row.segments[0].chunk if row.segments[0].column == 0 else None
    has_prefix = len(row.segments) > len(row.shape.chunks)
    walk = StateWalk(layout.states, prefix, buffer.states)
    if has_prefix:
        walk.through(row.segments[0].chunk)
    for segment, span in zip(row.segments[has_prefix:], row.shape.chunks, strict=True):
        chosen = selected[span.start : span.stop]
        count = int(chosen.sum())
        if count:
            if not _is_head(layout, chosen, count):
                refuse(model.abilities.cannot_choose)
            compute(row, span.start, span.start + count)
            walk.at()
        if count < len(span):
            walk.through(segment.chunk, head=count)


def _is_head(layout: ModelLayout, chosen: Tensor, count: int) -> bool:
    """Whether what is chosen of a chunk is all of it, or what it is cut behind."""
    cuts = {group.head for group in layout.states if group.form != "none"}
    return bool(chosen[:count].all()) and (count == len(chosen) or not cuts - {count})


def compute(row: StitchedRow, start: int, stop: int) -> None:
    """Compute the tokens `start..stop` of a prompt behind what its buffer holds up to there.

    Keys, values and the states behind them are in the buffer afterwards.
    """
    cache = buffer_cache(row.buffer, row.model.measured.kinds, start)
    if start < stop:
        row.model.forward(row.ids[None, start:stop], cache, torch.arange(start, stop), keep=1)
    keep_states(cache, row.buffer)
