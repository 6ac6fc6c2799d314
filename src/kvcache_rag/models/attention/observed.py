"""How much attention each column of the cache gets in a forward pass, over all layers.

Fast attention functions give no weights.  Where a model attends through transformers' interface,
our own function (`scaled.py`) stands in for the pass and counts them.  Elsewhere the model's own
code runs as ever, and what it hands to torch is looked at: the outputs of softmax over the columns,
and the arguments of scaled dot product attention, of which the weights are worked out once more.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.models.attention import scaled
from kvcache_rag.models.attention.scaled import AttentionMass, Weighting, switched, why_own_code
from kvcache_rag.models.cache import HaltedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_rag.models.language import LanguageModel

_SOFTMAX = (torch.nn.functional.softmax, torch.softmax, Tensor.softmax)


@contextmanager
def observed_attention(model: LanguageModel, tokens: int) -> Iterator[Tensor]:
    """Count the attention of one forward pass of one row within; afterwards all is as before.

    The pass ends in the attention of the last layer and gives no logits.  All of them are to be
    asked for: of tokens whose logits nobody wants, some models leave out the last layers.

    Args:
        model: The model; no other thread may use it meanwhile.
        tokens: Columns of its cache at the end of the pass, which has a mask of its own.

    Yields:
        `(tokens,)` float32 on the model's device, complete once the pass is over: weights after
        softmax, summed over layers, heads and queries.

    Raises:
        UnsupportedModelError: On leaving, if not every layer's attention could be seen.
    """
    layers = len(model.measured.kinds)
    mass = AttentionMass(torch.zeros(tokens, device=model.device), layers)
    is_ours = not why_own_code(model)
    counting = Weighting(1.0, 1.0, ((0, 0),), mass=mass)
    with suppress(HaltedError), switched(model.model, counting) if is_ours else _Watching(mass):
        yield mass.columns
    if mass.seen != layers:
        raise UnsupportedModelError(
            f"{model.config.model_type}: its attention shows its weights in {mass.seen} of "
            f"{layers} layers, so tokens cannot be chosen by what the question attends to; use "
            "CacheBlend() instead of ProphetKV()"
        )


class _Watching(TorchFunctionMode):
    """Counts the attention of code that calls torch itself, in this thread alone."""

    def __init__(self, mass: AttentionMass) -> None:
        super().__init__()
        self._mass = mass

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch as ever."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._dot_product(*args, **kwargs)
        elif func in _SOFTMAX and output.ndim > 2 and output.shape[-1] == len(self._mass.columns):
            self._mass.add(output)  # (..., queries, tokens), not what chooses experts
            self._mass.layer_ends()
        return output

    def _dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Count what torch's function attends to, given the same arguments, in float32.

        Args:
            query: `(1, heads, queries, width)`.
            key: `(1, heads or 1, tokens, width)`.
            value: Not needed.
            attn_mask: Broadcastable to `(1, heads, queries, tokens)`, bool or added.
            dropout_p: Not used: models are in evaluation mode.
            is_causal: Not where a pass has a mask of its own.
            scale: Factor of the scores, None for `width ** -0.5`.
            enable_gqa: Not where a model repeats its keys.
        """
        if attn_mask is None or is_causal or enable_gqa:
            return  # seen of none of the models that are known, so it counts as unseen
        heads, queries, width = query.shape[1:]
        tokens = key.shape[2]
        seen = attn_mask.expand(1, heads, queries, tokens)
        factor = width**-0.5 if scale is None else scale
        turned = key.float().transpose(-1, -2)  # (1, heads or 1, width, tokens)
        step = max(1, scaled.MAX_SCORES // (heads * tokens))
        for first in range(0, queries, step):
            piece = slice(first, first + step)
            scores = (query[:, :, piece].float() * factor) @ turned  # (1, heads, n, tokens)
            part = seen[:, :, piece]
            if part.dtype == torch.bool:
                scores.masked_fill_(~part, -torch.inf)
            else:
                scores += part
            self._mass.add(torch.softmax(scores, -1))
        self._mass.layer_ends()
