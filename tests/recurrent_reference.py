"""The other side of the laws of recurrent layers: tokens one by one, nothing composed.

No transition is formed, no kernel for several tokens is called, no block mask is made, and no
module is told from another.  Each token goes through the whole model's own way of decoding, in
three rows of a batch whose hidden states are made equal before every decoder layer:

- row 0 is the chunk behind its copy of the prefix alone: what it computes is what the chunk is;
- row 1 takes the prompt's state through the same inputs, with the window that the chunk itself has;
- row 2 takes the prompt's window through the same inputs.

Behind a chunk the prompt goes on with the state of row 1 and the window of row 2, and the
question's tokens follow one by one behind the keys and values of all chunks.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

ROWS = 3
States = dict[int, tuple["Tensor | None", "Tensor | None"]]
"""Window and state by layer, one row."""


def reference_logits(
    model: Any,
    prefix: Sequence[int],
    chunks: Sequence[Sequence[int]],
    query: Sequence[int],
    *,
    head: int = 0,
    composite: bool = False,
    more: int = 0,
) -> Tensor:
    """Logits `(query + more, vocabulary)` of a question behind chunks that do not see each other.

    With `composite` each stands right behind the prefix, at the positions of the others; `more` are
    the likeliest tokens behind the question.

    The first `head` tokens of every chunk but the first see all that stands before them; the rest
    of a chunk is what it is behind its own head alone.
    """
    kept: list[dict[int, tuple[Tensor, Tensor]]] = []
    start: States = {}
    with torch.no_grad():
        if prefix:
            cache = _cache(model)
            kept += [_step(model, token, place, cache) for place, token in enumerate(prefix)]
            start = _states(cache, 0)
        prompt, begin = start, len(prefix)
        place = begin
        for number, chunk in enumerate(chunks):
            anew = min(head, len(chunk)) if number else 0
            place = len(prefix) if composite else begin
            cache = _cache(model)
            for before, token in enumerate(prefix):  # its copy stands right before the chunk
                _step(model, token, place - len(prefix) + before, cache)
            if anew:
                _begin(cache, start, start)
                for n, token in enumerate(chunk[:anew]):
                    _step(model, token, place + n, cache)
                in_prompt = _filled(model, kept, prompt)
                for n, token in enumerate(chunk[:anew]):
                    _forward(model, torch.tensor([[token]]), place + n, in_prompt)
                    kept.append(_newest(in_prompt))
                prompt = _states(in_prompt, 0)
            _begin(cache, _states(cache, 0) if anew else start, prompt)
            for n, token in enumerate(chunk[anew:], anew):
                kept.append(_step(model, token, place + n, cache))
            if anew < len(chunk):
                windows, states = _states(cache, 2), _states(cache, 1)
                prompt = {
                    layer: (windows[layer][0], states[layer][1]) for layer in _recurrent(cache)
                }
            begin += len(chunk)
        cache = _filled(model, kept, prompt)
        logits: list[Tensor] = []
        for number in range(len(query) + more):
            token = query[number] if number < len(query) else int(logits[-1].argmax())
            ids = torch.tensor([[token]])
            logits.append(_forward(model, ids, begin + number, cache)[0, -1])
    return torch.stack(logits)


def reference_answer(
    model: Any,
    prefix: Sequence[int],
    chunks: Sequence[Sequence[int]],
    query: Sequence[int],
    tokens: int,
) -> list[int]:
    """The greedy continuation."""
    logits = reference_logits(model, prefix, chunks, query, more=tokens - 1)
    said: list[int] = logits[len(query) - 1 :].argmax(-1).tolist()
    return said


def _step(model: Any, token: int, place: int, cache: Any) -> dict[int, tuple[Tensor, Tensor]]:
    """One token in all rows; its keys and values by layer, `(1, heads, 1, width)`."""

    def alike(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(_first_row, args)), {key: _first_row(one) for key, one in kwargs.items()}

    with ExitStack() as hooks:
        for layer in _decoder_layers(model):
            hooks.callback(layer.register_forward_pre_hook(alike, with_kwargs=True).remove)
        _forward(model, torch.full((ROWS, 1), token), place, cache)
    return _newest(cache)


def _newest(cache: Any) -> dict[int, tuple[Tensor, Tensor]]:
    return {
        index: (layer.keys[:1, :, -1:].clone(), layer.values[:1, :, -1:].clone())
        for index, layer in enumerate(cache.layers)
        if getattr(layer, "keys", None) is not None
    }


def _first_row(value: Any) -> Any:
    is_hidden = (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.ndim == 3
        and value.shape[0] == ROWS
    )
    return value[:1].expand_as(value).contiguous() if is_hidden else value


def _decoder_layers(model: Any) -> Any:
    # The one list of modules of the model that has as many as it has layers.
    lists = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    count = model.config.num_hidden_layers
    return next(one for one in lists if len(one) == count)


def _forward(model: Any, ids: Tensor, place: int, cache: Any) -> Tensor:
    known = inspect.signature(model.forward).parameters
    name = next(one for one in ("cache_params", "cache", "past_key_values") if one in known)
    arguments: dict[str, Any] = {name: cache, "use_cache": True}
    if "position_ids" in known:
        arguments["position_ids"] = torch.full((ids.shape[0], 1), place)
    logits: Tensor = model(input_ids=ids, **arguments).logits
    return logits.float()


class _Lightning(MiniMaxCache):
    """MiniMax's own cache, which counts the tokens of layer 0 alone, though it may keep none."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max((layer.get_seq_length() for layer in self.layers), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


def _cache(model: Any) -> Any:
    if model.config.model_type == "minimax":
        return _Lightning()
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _recurrent(cache: Any) -> list[int]:
    if isinstance(cache, _Lightning):
        return [layer for layer, one in enumerate(cache.linear_cache) if torch.is_tensor(one)]
    return [index for index, layer in enumerate(cache.layers) if hasattr(layer, "conv_states")]


def _states(cache: Any, row: int) -> States:
    def own(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[row : row + 1].clone()

    if isinstance(cache, _Lightning):
        return {layer: (None, own(cache.linear_cache[layer])) for layer in _recurrent(cache)}
    layers = {index: cache.layers[index] for index in _recurrent(cache)}
    return {
        index: (own(layer.conv_states[0]), own(layer.recurrent_states[0]))
        for index, layer in layers.items()
    }


def _begin(cache: Any, start: States, prompt: States) -> None:
    """Window and state of each row before a chunk: see the top."""
    for layer, (window, state) in prompt.items():
        # Zeros stand for nothing, behind an empty prefix.
        first_window, first_state = start.get(layer) or (_zeros(window), _zeros(state))
        windows = _rows(first_window, first_window, window)
        states = _rows(first_state, state, state)
        _put(cache, layer, windows, states)


def _filled(model: Any, kept: Sequence[dict[int, tuple[Tensor, Tensor]]], prompt: States) -> Any:
    """A cache of one row that holds all of it."""
    cache = _cache(model)
    for index in kept[0] if kept else ():
        keys, values = (torch.cat([one[index][slot] for one in kept], 2) for slot in (0, 1))
        cache.update(keys, values, index)
    for layer, (window, state) in prompt.items():
        _put(cache, layer, window, state)
    return cache


def _put(cache: Any, index: int, window: Tensor | None, state: Tensor | None) -> None:
    if isinstance(cache, _Lightning):
        cache.set_linear_cache(index, state)
        return
    layer = cache.layers[index]
    layer.has_previous_state[0] = True
    if window is not None:
        layer.conv_states[0], layer.conv_kernel_size[0] = window, window.shape[-1]
        layer.is_conv_states_initialized[0] = True
    if state is not None:
        layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = state, True


def _rows(*rows: Tensor | None) -> Tensor | None:
    return None if rows[0] is None else torch.cat([row for row in rows if row is not None])


def _zeros(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor)
