"""This package's layers for transformers' caches.

`deferred/cache.py` and `sequence_cache.py` of kvcache-rag-llamacpp have the others.

A layer of ours keeps its tokens in a preallocated buffer and appends in place.  It never drops
tokens, not even for sliding windows: the models' own masks add the window by index.  Passes over
chosen tokens put them back in place, or only look at them.  What recurrent layers remember lies in
layers of their own, or beside keys and values.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.models.rotation import LayerKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.kv.buffer import KVBuffer


_NAMES: Final = ("cache", "past_key_values", "cache_params")
CACHE_NAME: Final = next(
    field.name for field in fields(BaseModelOutputWithPast) if field.name in _NAMES
)
"""What this transformers calls the cache that `generate()` is given and that a pass returns:
"cache" from 5.24 on, "past_key_values" before."""


def cache_name(forward: Any) -> str:
    """What a model's forward pass calls the cache that it is given."""
    known = inspect.signature(forward).parameters
    return next((name for name in _NAMES if name in known), CACHE_NAME)


class RecurrentCache(Cache):
    """A cache without keys and values, which counts the tokens that its layers cannot count.

    Attributes:
        held: Tokens behind which its states are.
    """

    held: int = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held."""
        return self.held


def cache_of(layers: list[Any], held: int = 0) -> Cache:
    """A cache of layers, behind so many tokens."""
    if any(isinstance(layer, DynamicLayer) for layer in layers):
        return Cache(layers=layers)
    recurrent = RecurrentCache(layers=layers)
    recurrent.held = held
    return recurrent


def own_class(model: Any) -> Any:
    """The class of the caches that a model takes: its own, where it insists on one for its states.

    Such a class keeps states beside its layers; ours keeps them in layers, as all others do.
    """
    inner = getattr(model, "base_model", model)
    for parameter in inspect.signature(inner.forward).parameters.values():
        kinds = [one for one in get_args(parameter.annotation) if hasattr(one, _OWN_STATES)]
        if kinds:
            return _with_states_in_layers(kinds[0])
    return Cache


_OWN_STATES: Final = "set_linear_cache"


@cache
def _with_states_in_layers(kind: Any) -> Any:
    class OwnCache(kind):  # type: ignore[misc]  # made of a variable
        def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
            layer = self.layers[layer_idx]
            layer.update_recurrent_state(linear_cache)
            layer.has_previous_state[0] = True

        def get_linear_cache(self, layer_idx: int) -> Tensor | None:
            layer = self.layers[layer_idx]
            return layer.recurrent_states[0] if layer.has_previous_state[0] else None

    for name in ("__len__", "batch_repeat_interleave", "batch_select_indices", "get_seq_length"):
        setattr(OwnCache, name, getattr(Cache, name))
    return OwnCache


GROWTH = 256


class _Missing:
    """Stands for a class that an older transformers does not have."""


# Not in every transformers 5: layers that share another's cache, and recurrent states.
DummyLayer: Any = getattr(cache_utils, "DummyLayer", _Missing)

LinearAttentionCacheLayerMixin: Any = getattr(
    cache_utils, "LinearAttentionCacheLayerMixin", _Missing
)
_RecurrentLayer: Any = getattr(cache_utils, "LinearAttentionLayer", _Missing)
_BOTH: Final = tuple(
    getattr(cache_utils, f"LinearAttentionAnd{name}AttentionLayer", _Missing)
    for name in ("Full", "SlidingWindow")
)


def knows_states() -> bool:
    """Whether this transformers keeps states in the way that is written here, as 5.23 does."""
    update = getattr(_RecurrentLayer, "update_conv_state", None)
    return update is not None and {"state_idx", "conv_kernel_size"} <= {
        *inspect.signature(update).parameters
    }


def layer_kinds(config: Any) -> tuple[LayerKind, ...]:
    """Kind of every layer, told from the cache that transformers itself would build.

    Raises:
        UnsupportedModelError: If a layer keeps something else than keys and values of every token.
    """
    text = config.get_text_config(decoder=True)
    name = text.model_type
    try:
        layers = DynamicCache(config=text).layers
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: transformers has no standard cache for it ({error})"
        ) from error
    types = getattr(text, "layer_types", None) or [None] * len(layers)
    kinds = []
    for index, (layer, layer_type) in enumerate(zip(layers, types, strict=False)):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            kinds.append(_recurrent_kind(name, index, layer))
        # Exactly these classes: one derived from them may keep something else.
        elif type(layer) is DynamicSlidingWindowLayer and layer_type == "chunked_attention":
            kinds.append(LayerKind(limit=int(layer.sliding_window)))
        elif type(layer) is DynamicSlidingWindowLayer:
            kinds.append(LayerKind(window=int(layer.sliding_window)))
        elif type(layer) is DynamicLayer:
            kinds.append(LayerKind())
        elif isinstance(layer, DummyLayer):
            kinds.append(LayerKind(keeps="nothing"))
        else:
            described = layer_type or type(layer).__name__
            raise UnsupportedModelError(
                f"{name}: layer {index} keeps a {described} cache instead of the keys and "
                "values of every token"
            )
    if not kinds:
        raise UnsupportedModelError(f"{name}: layer 0 keeps no keys and values")
    return tuple(kinds)


def _recurrent_kind(name: str, index: int, layer: Any) -> LayerKind:
    kind = type(layer)
    if not knows_states():
        raise UnsupportedModelError(
            f"{name}: layer {index} keeps a recurrent state ({kind.__name__}), whose chunks need a "
            "newer transformers (5.23 does)"
        )
    if getattr(layer, "number_of_states", 1) != 1:
        raise UnsupportedModelError(f"{name}: layer {index} keeps several recurrent states")
    if kind is _RecurrentLayer:
        return LayerKind(keeps="state")
    if kind in _BOTH:
        window = getattr(layer, "sliding_window", None)
        return LayerKind(window=None if window is None else int(window), keeps="both")
    raise UnsupportedModelError(
        f"{name}: layer {index} keeps a recurrent state of an unknown kind ({kind.__name__})"
    )


class HaltedError(Exception):
    """Ends a forward pass as soon as what it was run for is known; never reaches a caller."""


class BufferLayer(DynamicLayer):
    """A cache layer over a preallocated buffer.

    Attributes:
        length: Tokens held.
        keep: `(rows,)` leading columns of the first update that are already held, or None (see
            `buffer_cache`).
        halts: Whether the pass ends here, because nothing reads what lies behind.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Hold `length` tokens of `keys` and `values`, `(rows, heads, capacity, width)`."""
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in transformers
        self.key_buffer, self.value_buffer = keys, values
        self.length = length
        self.keep: Tensor | None = None
        self.halts = False
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._expose()

    def _expose(self) -> None:
        self.keys, self.values = self._held()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append in place and return everything held, as views."""
        stop = self.length + key_states.shape[-2]
        if stop > self.key_buffer.shape[2]:
            # With room to spare, so that the next tokens do not copy everything again.
            self.key_buffer = _grown(self.key_buffer, stop + GROWTH)
            self.value_buffer = _grown(self.value_buffer, stop + GROWTH)
        for buffer, states in ((self.key_buffer, key_states), (self.value_buffer, value_states)):
            target = buffer[:, :, self.length : stop]  # (rows, heads, new tokens, width), a view
            target.copy_(states if self.keep is None else _kept(target, states, self.keep))
        self.keep = None  # of the first update only
        self.length = stop
        self.keys, self.values = held = self._held()
        # Only now: what comes after the pass reads these keys and values.
        if self.halts:
            raise HaltedError
        return held

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def crop(self, max_length: int) -> None:
        """Drop the last `-max_length` tokens (as transformers asks), or keep `max_length`."""
        self.length = self.length + max_length if max_length < 0 else min(self.length, max_length)
        self._expose()

    def _held(self) -> tuple[Tensor, Tensor]:
        # (rows, heads, length, width), views
        return self.key_buffer[:, :, : self.length], self.value_buffer[:, :, : self.length]

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        self.key_buffer, self.value_buffer = keys, values
        self.length = keys.shape[2]
        self._expose()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, for beams."""
        # What the first update keeps lies behind what counts as held.
        behind = 0 if self.keep is None else int(self.keep.max())
        length, stop = self.length, self.length + behind
        keys, values = self.key_buffer[:, :, :stop], self.value_buffer[:, :, :stop]
        # (rows * repeats, heads, stop, width), copies: the buffer has one row per prompt only
        self._replace(keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0))
        self.length = length  # `_replace` counted what lies behind as well
        if self.keep is not None:
            self.keep = self.keep.repeat_interleave(repeats, 0)
        self._expose()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        keys, values = self._held()
        # Copies, (len(indices), heads, length, width)
        self._replace(keys[indices], values[indices])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the rows in the order of the beams."""
        rows = beam_idx.to(self.key_buffer.device)
        keys, values = self._held()
        self._replace(keys.index_select(0, rows), values.index_select(0, rows))


class StateLayer(_RecurrentLayer):  # type: ignore[misc]  # not in every transformers
    """A cache layer of what a recurrent layer remembers.

    Attributes:
        touched: Called when a module writes to it.
    """

    is_compileable = False
    touched: Callable[[], None] | None = None

    def remember(self, window: Tensor | None, state: Tensor | None) -> None:
        """Go on from copies of a window `(rows, channels, width)` and a state `(rows, ...)`.

        Copies, as transformers writes in place; with neither it begins at nothing.
        """
        is_graded = torch.is_grad_enabled()
        # Outside inference mode, so that they can be written in and out of it.
        with torch.inference_mode(mode=False), torch.set_grad_enabled(is_graded):
            window, state = (None if one is None else one.clone() for one in (window, state))
        self.has_previous_state[0] = window is not None or state is not None
        for one in (state, window):
            if one is not None:
                self.dtype, self.device = one.dtype, one.device
        if window is not None:
            self.conv_states[0], self.conv_kernel_size[0] = window, window.shape[-1]
            self.is_conv_states_initialized[0] = True
        if state is not None:
            self.recurrent_states[0] = state
            self.is_recurrent_states_initialized[0] = True

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it, and say so."""
        self._touch(self.conv_states)
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it, and say so."""
        self._touch(self.recurrent_states)
        return super().update_recurrent_state(*args, **kwargs)

    def _touch(self, states: dict[int, Tensor | None]) -> None:
        if self.touched is not None:
            self.touched()
        held = states[0]
        if held is not None and torch.is_grad_enabled():
            states[0] = held.clone()  # transformers writes in place what gradients need as it was

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, for beams."""
        self._change(lambda one: one.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self._change(lambda one: one[indices])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        for states in (self.conv_states, self.recurrent_states):
            if states[0] is not None:
                states[0] = change(states[0])


@cache
def beside_state(kind: type[DynamicLayer]) -> Any:
    """The class of layers that keep keys and values as `kind` does, and a state beside them."""

    class BothLayer(StateLayer, kind):  # type: ignore[misc,valid-type]  # made of a variable
        is_compileable = False

        def __init__(self, *args: Any) -> None:
            StateLayer.__init__(self)
            kind.__init__(self, *args)

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            # Of keys and values by place, of states by name, as transformers calls it.
            (kind if args else StateLayer).lazy_initialization(self, *args, **kwargs)

        def reorder_cache(self, beam_idx: Tensor) -> None:
            StateLayer.reorder_cache(self, beam_idx)
            kind.reorder_cache(self, beam_idx)  # type: ignore[arg-type]  # of int64, as it wants

        def crop(self, max_length: int) -> None:
            kind.crop(self, max_length)  # the state has to be put back by whoever crops

        def batch_repeat_interleave(self, repeats: int) -> None:
            StateLayer.batch_repeat_interleave(self, repeats)
            kind.batch_repeat_interleave(self, repeats)

        def batch_select_indices(self, indices: Tensor) -> None:
            StateLayer.batch_select_indices(self, indices)
            kind.batch_select_indices(self, indices)

    return BothLayer


def bare_layer(kind: LayerKind) -> Any:
    """A layer that keeps no keys and values of its own: a state, or nothing."""
    return StateLayer() if kind.has_state else DummyLayer()


def layer_of(kind: LayerKind, own: type[DynamicLayer], *args: Any) -> Any:
    """A layer that keeps keys and values as `own` does, with a state where there is one."""
    return (beside_state(own) if kind.has_state else own)(*args)


def held_state(cache: Any, layer: int) -> tuple[Tensor | None, Tensor | None]:
    """Window `(rows, channels, width)` and state `(rows, ...)` of a cache's layer, not copied."""
    own: Any = cache.layers[layer]
    return own.conv_states[0], own.recurrent_states[0]


def remember(cache: Any, states: States) -> None:
    """Let the recurrent layers of a cache go on from copies of these windows and states."""
    for layer, (window, state) in states.items():
        own: Any = cache.layers[layer]
        own.remember(window, state)


def keep_states(cache: Cache, buffer: KVBuffer) -> None:
    """Write what the recurrent layers of a cache remember to its buffer, for the next cache."""
    for layer, places in buffer.layer_states().items():
        for place, held in zip(places, held_state(cache, layer), strict=True):
            if place is not None:
                place.copy_(torch.zeros_like(place) if held is None else held)


def _grown(buffer: Tensor, capacity: int) -> Tensor:
    # All of it: columns that an update keeps lie behind the held ones.
    # (rows, heads, capacity, width); zeros, because no mask hides a NaN
    larger = buffer.new_zeros(*buffer.shape[:2], capacity, buffer.shape[3])
    larger[:, :, : buffer.shape[2]] = buffer
    return larger


def _kept(held: Tensor, fresh: Tensor, keep: Tensor) -> Tensor:
    columns = torch.arange(fresh.shape[2], device=fresh.device)  # (new tokens,)
    is_fresh = (columns[None] >= keep[:, None])[:, None, :, None]  # (rows, 1, new tokens, 1)
    return torch.where(is_fresh, fresh, held)


def buffer_cache(
    buffer: KVBuffer,
    kinds: tuple[LayerKind, ...],
    length: int,
    keep: Tensor | None = None,
    *,
    halts: bool = False,
) -> Cache:
    """A transformers cache over `buffer`, which holds `length` tokens per row.

    Args:
        buffer: The memory; the cache writes into it.
        kinds: Kind of each layer of the model.
        length: Tokens held.
        keep: `(rows,)` leading columns per row of the first update that the buffer already holds:
            in a left-padded batch the shorter queries' first columns still belong to their context.
        halts: Whether a pass ends by `HaltedError` as soon as all keys and values are there.
    """
    slots = buffer.slots()
    layers: list[Any] = []
    for index, kind in enumerate(kinds):
        if not kind.has_kv:
            layers.append(bare_layer(kind))
            continue
        # Its K and V are views: what the layer appends is in the buffer, until it outgrows that.
        layer = layer_of(kind, BufferLayer, *slots[index], length)
        layer.keep = keep
        layers.append(layer)
    cache = cache_of(layers, length)
    if length:
        remember(cache, buffer.layer_states())
    last = max((index for index, kind in enumerate(kinds) if kind.keeps != "nothing"))
    if halts and kinds[last].keeps == "kv":
        # Behind it there are at most layers that share another's keys and values; a state that is
        # kept there, or beside these keys, would be missed.
        layers[last].halts = True
    return cache


def stock_cache(config: Any) -> Cache:
    """An empty cache as transformers itself would build it for a model."""
    return DynamicCache(config=config)


def takes_back(cache: Cache) -> bool:
    """Whether tokens can be dropped from the end: not where a layer lets go of earlier ones.

    A recurrent layer of ours goes back to what it remembered before (`rewind`).
    """
    return all(
        isinstance(layer, StateLayer)
        or (
            isinstance(layer, DynamicLayer)
            and not isinstance(layer, (DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin))
        )
        for layer in cache.layers
    )


States: TypeAlias = "dict[int, tuple[Tensor | None, Tensor | None]]"
"""Window and state of each recurrent layer, by its index."""


def remembered(cache: Cache) -> States:
    """Copies of what the recurrent layers remember, to `rewind` to; nothing without any."""
    held = {
        index: held_state(cache, index)
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, StateLayer)
    }
    return {
        index: (
            None if window is None else window.clone(),
            None if state is None else state.clone(),
        )
        for index, (window, state) in held.items()
    }


def rewind(cache: Cache, states: States, tokens: int) -> None:
    """Drop the last tokens, so many that the states before them are these."""
    remember(cache, states)
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            layer.crop(-tokens)
    if isinstance(cache, RecurrentCache):
        cache.held -= tokens


def growing_cache(kinds: tuple[LayerKind, ...]) -> Cache:
    """An empty cache whose layers keep every token, whatever their window."""
    return cache_of(
        [layer_of(kind, DynamicLayer) if kind.has_kv else bare_layer(kind) for kind in kinds]
    )


def graded_cache(buffer: KVBuffer, kinds: tuple[LayerKind, ...]) -> Cache:
    """A cache behind all that a buffer holds, without writing to it; gradients get through."""
    cache = growing_cache(kinds)
    layers: list[Any] = cache.layers
    if buffer.capacity:
        if isinstance(cache, RecurrentCache):
            cache.held = buffer.capacity
        for layer, pair in buffer.slots().items():
            layers[layer].update(*pair)
        remember(cache, buffer.layer_states())
    return cache


def layer_tensors(cache: Cache) -> list[tuple[Tensor, Tensor] | None]:
    """K and V of every layer, `(rows, heads, tokens, width)`; None for layers that keep none."""
    tensors: list[tuple[Tensor, Tensor] | None] = []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer):
            tensors.append(None)
            continue
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            raise UnsupportedModelError(
                f"layer {index} wrote no keys and values into its cache; a recurrent state "
                "that it may keep elsewhere cannot be stored"
            )
        tensors.append((keys, values))
    return tensors


class RecomputeLayer(BufferLayer):
    """A layer whose first update puts leading tokens into places that it holds already.

    Attributes:
        places: `(n,)` int64 places of the first `n` tokens of the update; the others are appended.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int, places: Tensor) -> None:
        """Hold `length` tokens of `keys` and `values`, some of which come anew."""
        super().__init__(keys, values, length)
        self.places = places

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write in place, append the rest and return everything held, as views."""
        count = self.places.shape[0]
        for buffer, states in ((self.key_buffer, key_states), (self.value_buffer, value_states)):
            # (rows, heads, n, width) into places that may lie anywhere among those held
            buffer.index_copy_(2, self.places, states[:, :, :count].to(buffer.dtype))
        # The rest, perhaps no token at all, goes behind those held.
        return super().update(key_states[:, :, count:], value_states[:, :, count:])


class PassingLayer(DynamicLayer):
    """A layer that keeps nothing: each pass sees its own tokens alone."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """What came, as it came."""
        return key_states, value_states


class TappedLayer(PassingLayer):
    """A layer that ends the pass with the keys and values that reached it.

    Attributes:
        found: K and V, `(rows, heads, tokens, width)`; None before the pass.
    """

    found: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep what came and end the pass, before any attention of this layer."""
        self.found = (key_states, value_states)
        raise HaltedError


def recompute_cache(
    buffer: KVBuffer, kinds: tuple[LayerKind, ...], length: int, places: Tensor, *, halts: bool
) -> Cache:
    """A cache for one pass that computes tokens at `places` again and appends the rest.

    Args:
        buffer: Of one row, which holds `length` tokens; the cache writes into it.
        kinds: Kind of each layer of the model.
        length: Tokens held.
        places: `(n,)` int64, places of the first `n` tokens of the pass, each below `length`.
        halts: Whether the pass ends (with `HaltedError`) once every layer has its keys and values:
            of what the last layer does with them, only a next token would have any use.
    """
    slots = buffer.slots()
    last = max(slots)
    layers: list[Any] = []
    for index, kind in enumerate(kinds):
        if not kind.has_kv:
            layers.append(bare_layer(kind))
            continue
        layer = RecomputeLayer(*slots[index], length, places)
        layer.halts = halts and index == last  # the last one that keeps any
        layers.append(layer)
    return Cache(layers=layers)


def tapped_cache(kinds: tuple[LayerKind, ...], layer: int) -> tuple[Cache, TappedLayer]:
    """A cache for one pass over a whole context that ends (with `HaltedError`) at `layer`."""
    layers: list[Any] = [
        layer_of(kind, TappedLayer if index == layer else PassingLayer)
        if kind.has_kv
        else bare_layer(kind)
        for index, kind in enumerate(kinds)
    ]
    return Cache(layers=layers), layers[layer]
