"""The frequencies of long prompts at every length (LongRoPE, arXiv 2402.13753, section 3).

longrope has two sets of frequencies, and transformers takes the second one for all tokens of a pass
whose highest position lies beyond the original context.  A chunk is of the set that it was computed
with, and not by its keys' rotation alone: every layer attended by these frequencies, so its values
differ, too, and keys rotated from one set to the other are no better than keys left as they are.
Whoever wants prompts of both kinds therefore has the second set for all of them, as vLLM does.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

# Models that were measured with the frequencies of short prompts.
_SHORT: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def original_length(module: nn.Module, layer_type: str | None) -> int:
    """Tokens up to which a rotary module of kind longrope takes its first frequencies."""
    config: Any = module.config
    parameters = config.rope_parameters
    parameters = parameters.get(layer_type, parameters) if layer_type else parameters
    limit = parameters.get("original_max_position_embeddings")
    return int(limit or config.original_max_position_embeddings)


def is_long(module: nn.Module, layer_type: str | None) -> bool:
    """Whether a rotary module of kind longrope has its second frequencies at every length."""
    long, original = _both(module, layer_type)
    return long is not None and torch.equal(long.to(original.device), original)


def settle_frequencies(model: Any, window: int | None) -> None:
    """Give a model the frequencies of long prompts at every length if prompts may be so long.

    The model stays so: whoever else uses it has them, too.  Other kinds of models stay as they are.

    Args:
        model: A transformers model.
        window: Longest prompt plus answer that is wanted; None for the frequencies as they are.

    Raises:
        InvalidInputError: If it was used with those of short prompts already, or changes by more
            than its frequencies (phimoe's scaling).
    """
    found = [(part, kind) for part, kind in _longrope(model) if not is_long(part, kind)]
    longer = [one for one in found if window is not None and window > original_length(*one)]
    if longer and model in _SHORT:
        raise InvalidInputError(
            f"context_window={window} needs the frequencies of long prompts at every length, and "
            "the model was used with those of short ones before; load it anew for this engine"
        )
    for module, layer_type in longer:
        if not _lengthen(module, layer_type):
            raise InvalidInputError(
                f"context_window={window} is more than the {original_length(module, layer_type)} "
                "tokens beyond which this model's longrope changes by more than its frequencies; "
                "leave it at that"
            )
    if found and not longer:
        _SHORT.add(model)


def _longrope(model: Any) -> Iterator[tuple[Any, str | None]]:
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind == "longrope":
                yield module, layer_type


def _both(module: Any, layer_type: str | None) -> tuple[Tensor | None, Tensor]:
    prefix = f"{layer_type}_" if layer_type else ""
    long = getattr(module, f"{prefix}long_inv_freq", None)
    return long, getattr(module, f"{prefix}original_inv_freq")


def _lengthen(module: Any, layer_type: str | None) -> bool:
    """Let both sets be the second one; False, and nothing is changed, if more than that changes."""
    original = _both(module, layer_type)[1]
    arguments = (layer_type,) if layer_type else ()
    nothing = torch.zeros(1, 1, 1, device=original.device)

    def angles(*positions: int) -> Tensor:
        asked = torch.tensor([positions], device=original.device)
        with torch.no_grad():
            cos, sin = module(nothing, asked, *arguments)
        return torch.stack([cos[0, 0], sin[0, 0]])  # (2, dim) of the first position

    # transformers works the second set out when it first needs it.
    expected = angles(1, original_length(module, layer_type))
    long, before = _both(module, layer_type)[0], original.clone()
    if long is not None:
        original.copy_(long.to(original.device))
    if long is not None and torch.equal(angles(1), expected):
        return True
    original.copy_(before)
    angles(1)
    return False
