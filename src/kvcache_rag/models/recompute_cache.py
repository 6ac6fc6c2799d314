"""Caches for passes over chosen tokens: put back in place, or only looked at.

Beside `models.cache`, the one module that touches transformers' cache classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import Cache, DynamicLayer

from kvcache_rag.models.cache import BufferLayer, DummyLayer

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.kvbuffer import KVBuffer
    from kvcache_rag.models.base import LayerKind


class HaltedError(Exception):
    """Ends a forward pass as soon as what it was run for is known; never reaches a caller."""


class RecomputeLayer(BufferLayer):
    """A layer whose first update puts leading tokens into places that it holds already.

    Attributes:
        places: `(n,)` int64 places of the first `n` tokens of the update; the others are appended.
        halts: Whether the pass ends here, because nothing reads what lies behind.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int, places: Tensor) -> None:
        """Hold `length` tokens of `keys` and `values`, some of which come anew."""
        super().__init__(keys, values, length)
        self.places = places
        self.halts = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write in place, append the rest and return everything held, as views."""
        count = self.places.shape[0]
        for buffer, states in ((self.key_buffer, key_states), (self.value_buffer, value_states)):
            buffer.index_copy_(2, self.places, states[:, :, :count].to(buffer.dtype))
        held = super().update(key_states[:, :, count:], value_states[:, :, count:])
        if self.halts:
            raise HaltedError
        return held


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
        if kind.shared:
            layers.append(DummyLayer())
            continue
        layer = RecomputeLayer(*slots[index], length, places)
        layer.halts = halts and index == last
        layers.append(layer)
    return Cache(layers=layers)


def tapped_cache(kinds: tuple[LayerKind, ...], layer: int) -> tuple[Cache, TappedLayer]:
    """A cache for one pass over a whole context that ends (with `HaltedError`) at `layer`."""
    tapped = TappedLayer()  # type: ignore[no-untyped-call]  # untyped in transformers
    make: Any = PassingLayer
    layers: list[Any] = [
        tapped if index == layer else DummyLayer() if kind.shared else make()
        for index, kind in enumerate(kinds)
    ]
    return Cache(layers=layers), tapped
