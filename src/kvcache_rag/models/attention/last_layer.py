"""What the query of a prompt attends to in the last layer, exactly as the model computes it.

Fast attention functions give no weights.  A model's own eager code does, so a view of the model is
made in which one layer runs it and everything else is shared: parameters, other layers and their
fast attention.  The model itself is not touched, so it can answer in another thread meanwhile.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcache_rag.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvcache_rag.models.language import LanguageModel


class QueryAttention:
    """A model that also says where the last tokens of a forward pass look.

    Attributes:
        model: A view of the model, for prefills and forward passes in its place.
        layer: Number of the layer whose attention is given: the last one that sees every token.
            (In a layer with a sliding window, all tokens outside it would count the same, 0.)
        first: Number of the first layer that sees every token.
        attentions: That last layer's attention in the view; hooks on it see the weights, `(rows,
            heads, tokens, columns)`, with their gradients if these are on.
    """

    def __init__(self, model: LanguageModel, *, with_first: bool = False) -> None:
        """Make the view.

        Args:
            model: Is not touched.
            with_first: Whether the attention of its first layer is wanted too (`both`).  Such a
                view is for `both` alone: without an explicit mask eager code is not causal, which
                only behind the last layer makes no difference; prefill with the model itself.

        Raises:
            UnsupportedModelError: If the model keeps no keys and values, or no layer of it is
                built like those of transformers, or it attends by place.
        """
        if model.abilities.memory == "own":
            raise UnsupportedModelError(
                f"{model.config.model_type}: llama.cpp shows nobody its attention, so it cannot be "
                'an auxiliary model; load that with backend="transformers"'
            )
        model.ensure_attends_only("so it cannot be an auxiliary model; choose another one")
        # Falcon's eager code adds the bias twice.
        model.ensure_takes_positions("it cannot be an auxiliary model; choose another one")
        kinds = model.measured.kinds
        whole = [index for index, kind in enumerate(kinds) if kind.window is None]
        whole = whole or [*range(len(kinds))]
        self.first, self.layer = whole[0], whole[-1]
        self._name = str(model.config.model_type)
        view = copy.copy(model)
        view.model = _branch(model.model)
        wanted = {self.first, self.layer} if with_first else {self.layer}
        self._seen = {layer: self._viewed(model, view, layer) for layer in sorted(wanted)}
        self.attentions = self._seen[self.layer]
        self.model = view

    def _viewed(self, model: LanguageModel, view: LanguageModel, layer: int) -> list[Any]:
        """A layer's attention in the view, which runs eager code from now on."""
        paths = [
            path
            for path, module in model.model.named_modules()
            if getattr(module, "layer_idx", None) == layer and hasattr(module, "config")
        ]
        if not paths:
            raise UnsupportedModelError(
                f"{self._name}: layer {layer} has no attention of the usual kind, so it "
                "cannot be an auxiliary model; choose another one"
            )
        return [_eager(_reached(view.model, path)) for path in paths]

    def weights(self, ids: Tensor, cache: Any, place: int) -> Tensor:
        """Run `ids` behind a filled cache and give what they attend to.

        Args:
            ids: `(n,)` int64 ids of the query.
            cache: A transformers cache of one row that holds `place` tokens.
            place: Where the first of them stands.

        Returns:
            `(n, place + n)` float32 on the CPU: attention weights after softmax, mean of the heads;
            a row adds up to 1 (to less in a model with attention sinks).

        Raises:
            UnsupportedModelError: If the layer gives no attention weights.
        """
        return self._weights(ids, cache, place)[self.layer]

    def both(self, ids: Tensor, cache: Any, place: int) -> tuple[Tensor, Tensor]:
        """`weights` of the first layer, and of the last, by one pass of a view `with_first`."""
        found = self._weights(ids, cache, place)
        return found[self.first], found[self.layer]

    def _weights(self, ids: Tensor, cache: Any, place: int) -> dict[int, Tensor]:
        places = torch.arange(place, place + len(ids))  # (n,) of the queries
        tokens = place + len(ids)  # of the keys
        # An explicit mask, because eager code and fast functions want different ones.
        mask = self.model.causal_mask(places, tokens)
        kept: dict[int, Tensor] = {}

        def keep(layer: int, _: Any, __: Any, output: Any) -> None:
            for part in output if isinstance(output, tuple) else ():
                shape = (len(ids), tokens)
                if isinstance(part, Tensor) and part.ndim == 4 and part.shape[-2:] == shape:
                    # (rows = 1, heads, n, columns) to (n, columns)
                    kept[layer] = part[0].float().mean(0).cpu()

        hooks = [
            module.register_forward_hook(partial(keep, layer))
            for layer, modules in self._seen.items()
            for module in modules
        ]
        try:
            self.model.forward(ids[None], cache, places, mask=mask, keep=1)
        finally:
            for hook in hooks:
                hook.remove()
        silent = [layer for layer in self._seen if layer not in kept]
        if silent:
            raise UnsupportedModelError(
                f"{self._name}: layer {silent[0]} gives no attention weights, so it cannot be an "
                "auxiliary model; choose another one"
            )
        return kept


def _branch(module: Any) -> Any:
    """A module with the same parameters and parts, whose parts can be exchanged."""
    branch = copy.copy(module)
    branch.__dict__["_modules"] = dict(module._modules)
    for name in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        branch.__dict__[name] = copy.copy(module.__dict__[name])
    return branch


def _reached(root: Any, path: str) -> Any:
    """The part at `path`, after everything on the way there became the view's own."""
    for name in path.split("."):
        child = _branch(root._modules[name])
        root._modules[name] = child
        root = child
    return root


def _eager(attention: Any) -> Any:
    attention.config = copy.copy(attention.config)
    # Not the property, which would also set parts of a composed config that are shared.
    attention.config._attn_implementation_internal = "eager"
    return attention
