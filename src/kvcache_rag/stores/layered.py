"""Chunks cross to a device band of layers by band, while earlier layers already compute.

A forward pass needs layer 0 of every chunk first, so that is what crosses first.  Rotation happens
on the device, right behind each band.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.stores.lane import lane_to
from kvcache_rag.stores.transfer import device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from kvcache_rag.chunk import ChunkKV, ChunkLayout
    from kvcache_rag.stores.arena import Event
    from kvcache_rag.stores.lane import Lane

    Turn = Callable[[Sequence[slice]], object]

BANDS = 6  # so that at most a sixth of the crossing is waited for, in few and so large copies


@dataclass(frozen=True, eq=False)
class LayerArrivals:
    """Layers that are on their way (an `Arrivals` of `models.arrival`).

    Attributes:
        events: Per layer the end of the band it belongs to.
        waited: Seconds for which the caller had to wait: none, the device waits.
        error: What went wrong: nothing, what lies in memory was verified when it was put there.
    """

    events: Mapping[int, Event]
    _lane: Lane
    waited: float = 0.0
    error: BaseException | None = None

    def wait(self, layer: int) -> None:
        """Let the current stream wait for a layer; the caller goes on."""
        self._lane.follow(self.events[layer])

    def close(self) -> None:
        """Let the current stream wait for everything, so that the places may be used again."""
        for event in dict.fromkeys(self.events.values()):
            self._lane.follow(event)


def deliver_layers(
    chunks: Sequence[ChunkKV],
    parts: Sequence[ChunkKV],
    turn: Turn | None = None,
    *,
    others: Sequence[ChunkKV] = (),
    bands: int = BANDS,
) -> LayerArrivals:
    """Copy chunks that are kept in memory into their places, the first layers of all of them first.

    Args:
        chunks: Anywhere; asynchronously from pinned memory.  Never written to.
        parts: Where they go, on one device; of the same layout and lengths.
        turn: Called behind the copies of each band with the places of its layers in each group;
            turns the keys of those layers, of `parts` and `others`.
        others: Places on that device that are filled already.
        bands: Into how many runs the model's layers are cut at most.

    Returns:
        What each layer has to wait for.

    Raises:
        InvalidInputError: If there are no places, or not one per chunk.
    """
    everything = (*chunks, *parts, *others)
    if not (parts or others) or len(parts) != len(chunks):
        raise InvalidInputError(
            f"{len(chunks)} chunks cannot go to {len(parts)} places; give one place per chunk"
        )
    chunks, parts, there = tuple(chunks), tuple(parts), (*parts, *others)[0]
    lane = lane_to(device_of(there))
    touched = [tensor for one in everything for group in one.tensors for tensor in group]
    events: dict[int, Event] = {}
    for layers, slices in _bands(there.layout, bands):
        work = partial(_copy, lane, chunks, parts, slices, turn)
        event = lane.send(work, () if events else touched)  # said once, it holds for later work too
        events.update(dict.fromkeys(layers, event))
    for chunk, part in zip(chunks, parts, strict=True):
        part.tokens.copy_(chunk.tokens)
    return LayerArrivals(events, lane)


def _copy(
    lane: Lane,
    chunks: Sequence[ChunkKV],
    parts: Sequence[ChunkKV],
    slices: Sequence[slice],
    turn: Turn | None,
) -> None:
    for chunk, part in zip(chunks, parts, strict=True):
        for where, sources, targets in zip(slices, chunk.tensors, part.tensors, strict=True):
            for source, target in zip(sources, targets, strict=True):
                _into(target[where], source[where], lane)
    if turn is not None:
        turn(slices)


def _into(target: Tensor, source: Tensor, lane: Lane) -> None:
    if source.shape[0]:
        target.copy_(lane.fetch(source))


def _bands(layout: ChunkLayout, count: int) -> list[tuple[list[int], list[slice]]]:
    """Runs of the model's layers, and where each group has them."""
    layers = sorted(layer for group in layout.groups for layer in group.layers)
    size = max(1, -(-len(layers) // max(1, count)))
    found = []
    for first in range(0, len(layers), size):
        band = layers[first : first + size]
        slices = []
        for group in layout.groups:
            below = sum(layer < band[0] for layer in group.layers)
            slices.append(slice(below, below + sum(layer in band for layer in group.layers)))
        found.append((band, slices))
    return found
