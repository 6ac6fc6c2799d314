"""The one module that touches transformers' cache classes.

A layer of ours keeps its tokens in a preallocated buffer and appends in place.  It never drops
tokens, not even for sliding windows: the models' own masks add the window by index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.models.base import LayerKind

if TYPE_CHECKING:
    from kvcache_rag.kvbuffer import KVBuffer
    from kvcache_rag.models.arrival import Arrivals

GROWTH = 256


class _Missing:
    """Stands for a class that an older transformers does not have."""


# Not in every transformers 5: layers that share another's cache, and recurrent states.
DummyLayer: Any = getattr(cache_utils, "DummyLayer", _Missing)
LinearAttentionCacheLayerMixin: Any = getattr(
    cache_utils, "LinearAttentionCacheLayerMixin", _Missing
)


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
            raise UnsupportedModelError(
                f"{name}: layer {index} keeps a recurrent state ({type(layer).__name__}), "
                "which cannot be cut "
                "into chunks"
            )
        if type(layer) is DynamicSlidingWindowLayer and layer_type != "chunked_attention":
            kinds.append(LayerKind(window=int(layer.sliding_window)))
        elif type(layer) is DynamicLayer:
            kinds.append(LayerKind())
        elif isinstance(layer, DummyLayer):
            kinds.append(LayerKind(shared=True))
        else:
            described = layer_type or type(layer).__name__
            raise UnsupportedModelError(
                f"{name}: layer {index} keeps a {described} cache instead of the keys and "
                "values of every token"
            )
    if not kinds:
        raise UnsupportedModelError(f"{name}: layer 0 keeps no keys and values")
    return tuple(kinds)


class BufferLayer(DynamicLayer):
    """A cache layer over a preallocated buffer.

    Attributes:
        length: Tokens held.
        keep: `(rows,)` leading columns of the first update that are already held, or None (see
            `buffer_cache`).
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        length: int,
        index: int = 0,
        arrivals: Arrivals | None = None,
    ) -> None:
        """Hold `length` tokens of `keys` and `values`, `(rows, heads, capacity, width)`.

        Args:
            keys: The buffer of K.
            values: The buffer of V.
            length: Tokens held.
            index: Which layer of the model this is.
            arrivals: Waited for before what is held is first used; None when it is all there.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in transformers
        self.key_buffer, self.value_buffer = keys, values
        self.length = length
        self.keep: Tensor | None = None
        self._index, self._arrivals = index, arrivals
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._expose()

    def _expose(self) -> None:
        self.keys, self.values = self._held()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append in place and return everything held, as views."""
        self._arrive()
        stop = self.length + key_states.shape[-2]
        if stop > self.key_buffer.shape[2]:
            self.key_buffer = _grown(self.key_buffer, stop + GROWTH)
            self.value_buffer = _grown(self.value_buffer, stop + GROWTH)
        for buffer, states in ((self.key_buffer, key_states), (self.value_buffer, value_states)):
            target = buffer[:, :, self.length : stop]
            target.copy_(states if self.keep is None else _kept(target, states, self.keep))
        self.keep = None
        self.length = stop
        self._expose()
        return self._held()

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def crop(self, max_length: int) -> None:
        """Drop the last `-max_length` tokens (as transformers asks), or keep `max_length`."""
        self.length = self.length + max_length if max_length < 0 else min(self.length, max_length)
        self._expose()

    def _arrive(self) -> None:
        if self._arrivals is not None:
            self._arrivals.wait(self._index)
            self._arrivals = None

    def _held(self) -> tuple[Tensor, Tensor]:
        return self.key_buffer[:, :, : self.length], self.value_buffer[:, :, : self.length]

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        self.key_buffer, self.value_buffer = keys, values
        self.length = keys.shape[2]
        self._expose()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, for beams."""
        self._arrive()
        # What the first update keeps lies behind what counts as held.
        behind = 0 if self.keep is None else int(self.keep.max())
        length, stop = self.length, self.length + behind
        keys, values = self.key_buffer[:, :, :stop], self.value_buffer[:, :, :stop]
        self._replace(keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0))
        self.length = length
        if self.keep is not None:
            self.keep = self.keep.repeat_interleave(repeats, 0)
        self._expose()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self._arrive()
        keys, values = self._held()
        self._replace(keys[indices], values[indices])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the rows in the order of the beams."""
        self._arrive()
        rows = beam_idx.to(self.key_buffer.device)
        keys, values = self._held()
        self._replace(keys.index_select(0, rows), values.index_select(0, rows))


def _grown(buffer: Tensor, capacity: int) -> Tensor:
    # All of it: columns that an update keeps lie behind the held ones.
    larger = buffer.new_zeros(*buffer.shape[:2], capacity, buffer.shape[3])
    larger[:, :, : buffer.shape[2]] = buffer
    return larger


def _kept(held: Tensor, fresh: Tensor, keep: Tensor) -> Tensor:
    columns = torch.arange(fresh.shape[2], device=fresh.device)
    is_fresh = (columns[None] >= keep[:, None])[:, None, :, None]
    return torch.where(is_fresh, fresh, held)


def buffer_cache(
    buffer: KVBuffer,
    kinds: tuple[LayerKind, ...],
    length: int,
    keep: Tensor | None = None,
    arrivals: Arrivals | None = None,
) -> Cache:
    """A transformers cache over `buffer`, which holds `length` tokens per row, now or soon.

    Args:
        buffer: The memory; the cache writes into it.
        kinds: Kind of each layer of the model.
        length: Tokens held.
        keep: `(rows,)` leading columns per row of the first update that the buffer already holds:
            in a left-padded batch the shorter queries' first columns still belong to their context.
        arrivals: Says when each layer's context is there; None when all of it is.
    """
    slots = buffer.slots()
    layers: list[Any] = []
    for index, kind in enumerate(kinds):
        if kind.shared:
            layers.append(DummyLayer())
            continue
        layer = BufferLayer(*slots[index], length, index, arrivals)
        layer.keep = keep
        layers.append(layer)
    return Cache(layers=layers)


def growing_cache(kinds: tuple[LayerKind, ...]) -> Cache:
    """An empty cache whose layers keep every token, whatever their window."""
    return Cache(layers=[DummyLayer() if kind.shared else DynamicLayer() for kind in kinds])


def layer_tensors(cache: Cache) -> list[tuple[Tensor, Tensor] | None]:
    """K and V of every layer, `(rows, heads, tokens, width)`; None for layers that keep none."""
    found: list[tuple[Tensor, Tensor] | None] = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DummyLayer):
            found.append(None)
            continue
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            raise UnsupportedModelError(f"layer {index} wrote no keys and values into its cache")
        found.append((keys, values))
    return found
