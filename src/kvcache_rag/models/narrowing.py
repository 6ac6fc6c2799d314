"""Let some tokens of a forward pass leave it between two layers of an unmodified model.

The model's own code loops over its layers, so nothing here knows a family: before a layer runs,
what it is given is reduced to the tokens that are left.  Which these are is asked at a few layers,
after the keys and values of that layer are computed and before its attention.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from kvcache_rag.models.cache import HaltedError, RecomputeLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers.cache_utils import Cache

    from kvcache_rag.models.hf import TransformersModel


@contextmanager
def narrowing(
    model: TransformersModel,
    cache: Cache,
    tokens: int,
    layers: Sequence[int],
    keep: Callable[[int, Tensor], Tensor],
) -> Iterator[None]:
    """Within, the pass over `cache` loses tokens at some layers; other passes do not notice.

    Args:
        model: The model of the pass.
        cache: Of `recompute_cache`.
        tokens: Of the pass, those included that it appends.
        layers: At which tokens may leave, 0-based and ascending.
        keep: Is given a layer and the deviation of the tokens computed again, `(n,)` float32 on
            the CPU; says which go on, `(n,)` bool.  Appended tokens always do.

    Raises:
        InvalidInputError: If a layer does not exist or keeps no values of its own.
        UnsupportedModelError: If the model's layers are not a list of modules.
    """
    modules = _decoder_layers(model)
    for layer in layers:
        if layer >= len(modules) or not isinstance(cache.layers[layer], RecomputeLayer):
            raise InvalidInputError(
                f"layer {layer} keeps no values of its own; the check layers of this model are "
                f"among 1 to {len(modules) - 1}"
            )
    state = _Narrowing(model, cache, tokens, frozenset(layers), keep)
    hooks = [
        module.register_forward_pre_hook(state.hook(index), with_kwargs=True)
        for index, module in enumerate(modules)
        if index >= layers[0]
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(eq=False)
class _Narrowing:
    """What is left of one forward pass.

    Attributes:
        left: `(m,)` int64, which of the pass's tokens; None for all.
    """

    model: TransformersModel
    cache: Cache
    tokens: int
    layers: frozenset[int]
    keep: Callable[[int, Tensor], Tensor]
    left: Tensor | None = None

    def hook(self, index: int) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
        """What runs before layer `index`: gives what the layer is to get instead."""

        def before(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if not any(value is self.cache for value in (*args, *kwargs.values())):
                return None  # a pass of somebody else
            hidden, args, kwargs = _split(args, kwargs)
            given = self._reduced(args), self._reduced(kwargs)
            if index in self.layers:
                staying = self._checked(index, module, hidden, *given)
                hidden = hidden.index_select(-2, staying.to(hidden.device))
                everyone = torch.arange(self.tokens) if self.left is None else self.left
                self.left = everyone[staying]
                given = self._reduced(args), self._reduced(kwargs)
            return (hidden, *given[0]), given[1]

        return before

    def _checked(
        self, index: int, module: nn.Module, hidden: Tensor, args: Any, kwargs: Any
    ) -> Tensor:
        """Which of the rows of `hidden` stay, `(rows left,)` int64 ascending."""
        layer = self.cache.layers[index]
        if not isinstance(layer, RecomputeLayer):  # `narrowing` has seen to it
            raise TypeError(f"layer {index} recomputes nothing")
        layer.compared = self.model.measured.unrotated_slot(index)
        with suppress(HaltedError):
            module.forward(hidden, *args, **kwargs)  # up to this layer's keys and values
        kept = self.keep(index, layer.deviation.cpu()).cpu()  # (n,) bool
        for later in self.cache.layers[index:]:
            if isinstance(later, RecomputeLayer):
                later.places = later.places[kept.to(later.places.device)]
        appended = torch.ones(hidden.shape[-2] - len(kept), dtype=torch.bool)
        return torch.cat([kept, appended]).nonzero()[:, 0]

    def _reduced(self, value: Any) -> Any:
        """Tensors of all tokens of the pass, wherever they are, with the tokens that are left."""
        if isinstance(value, Tensor):
            axis = _token_axis(value, self.tokens)
            if axis is None or self.left is None:
                return value
            return value.index_select(axis, self.left.to(value.device))
        if type(value) in (tuple, list):
            return type(value)(map(self._reduced, value))
        if type(value) is dict:
            return {name: self._reduced(part) for name, part in value.items()}
        return value


def _split(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Hidden states, which every layer takes first, and all else."""
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest


def _token_axis(tensor: Tensor, tokens: int) -> int | None:
    """The axis of the tokens of a pass of one row, by the shapes that transformers gives layers.

    `(tokens,)`; `(1, tokens)` or `(tokens, width)`; `(1, tokens, width)`; `(1, heads or 1, tokens,
    width or columns)`, so masks and angles alike.
    """
    axes = {1: (0,), 2: (1, 0) if tensor.shape[0] == 1 else (0,), 3: (1,), 4: (2,)}
    return next((axis for axis in axes.get(tensor.ndim, ()) if tensor.shape[axis] == tokens), None)


def _decoder_layers(model: TransformersModel) -> list[nn.Module]:
    """The modules that the model's own code runs one after the other.

    Raises:
        UnsupportedModelError: If there is no list of as many as there are layers.
    """
    wanted = len(model.measured.kinds)
    for part in model.model.modules():
        is_list = isinstance(part, nn.ModuleList) and len(part) == wanted
        if is_list and all(_has_attention(layer, index) for index, layer in enumerate(part)):
            return list(part)
    raise UnsupportedModelError(
        f"{model.config.model_type}: its layers are not in one list, so no token can leave between "
        "them; leave check_layers away"
    )


def _has_attention(layer: nn.Module, index: int) -> bool:
    return any(getattr(part, "layer_idx", None) == index for part in layer.modules())
