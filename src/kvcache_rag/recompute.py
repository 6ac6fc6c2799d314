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

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.cache import HaltedError, recompute_cache

if TYPE_CHECKING:
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

    The pass ends once the last layer has its keys and values.

    Args:
        row: A stitched prompt.
        selected: `(context_tokens,)` bool.

    Raises:
        UnsupportedModelError: If the model takes no positions, or its attention no mask.
    """
    model, query = row.model, row.shape.spans[-1]
    context, stop = query.start, query.stop - 1
    model.ensure_recomputable()
    chosen = selected.nonzero()[:, 0]  # (chosen,) int64 places in the prompt, ascending
    places = torch.cat([chosen, torch.arange(context, stop)])  # (chosen + query - 1,)
    mask = model.causal_mask(places, stop)  # over what the buffer will hold, place by place
    kinds = model.measured.kinds
    cache = recompute_cache(row.buffer, kinds, context, chosen.to(model.device), halts=True)
    with suppress(HaltedError):
        # (1, chosen + query - 1) ids; the pass halts before any logits.
        model.forward(row.ids[None, places], cache, places, mask=mask, keep=1)
