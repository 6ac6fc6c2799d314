"""Put the chunks of a prompt into their places on a device, first layers first.

What `placing` does in main memory: here chunks that are kept in memory cross the bus band of layers
by band, and each band is turned behind its copies, while the forward pass is at earlier layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcache_rag.chunk import ChunkKV
from kvcache_rag.stitch import Move, distances
from kvcache_rag.stores.lane import lane_to
from kvcache_rag.stores.layered import deliver_layers
from kvcache_rag.stores.transfer import device_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.mask import PositionScheme
    from kvcache_rag.models.base import ModelLayout
    from kvcache_rag.stitch import StoredPosition
    from kvcache_rag.stores.layered import LayerArrivals


def cross(
    layout: ModelLayout,
    chunks: Sequence[ChunkKV | None],
    places: Sequence[ChunkKV],
    scheme: PositionScheme,
    stored: StoredPosition = "local",
    *,
    adjacent: bool = False,
) -> LayerArrivals:
    """Copy chunks to their places in a buffer and turn their keys, as copying and `stitch` do.

    Args:
        layout: How the model rotates its caches.
        chunks: Prefix and chunks in prompt order, as they are kept in memory, this machine's or a
            device's; None for one that lies in its place already, with its keys not turned yet.
        places: Where they go: views into the prompt's buffer, side by side.
        scheme: Where chunks shall stand.
        stored: Where their keys stand now.
        adjacent: Whether the query stands right behind the highest position (see `stitch`).

    Returns:
        What each layer has to wait for.

    Raises:
        UnsupportedModelError: If a chunk has to move and the model's keys cannot.
    """
    ways = distances(places, scheme, stored, adjacent=adjacent)
    runs: list[tuple[Move, ChunkKV]] = []
    # Made where they are used: what a stream allocates is its own.  Sent first, so that they do not
    # wait for copies.
    lane_to(device_of(places[0])).send(lambda: runs.extend(_runs(layout, places, ways)), [])

    def turn(layers: Sequence[slice]) -> None:
        for move, run in runs:
            move.turn(run, layers)

    kept, their = [], []
    for chunk, place in zip(chunks, places, strict=True):
        if chunk is not None:
            kept.append(chunk)
            their.append(place)
    return deliver_layers(kept, their, turn, others=places)


def _runs(
    layout: ModelLayout,
    places: Sequence[ChunkKV],
    ways: Sequence[tuple[Tensor, Tensor] | None],
) -> list[tuple[Move, ChunkKV]]:
    """Neighbours that move, as one part each: a device is told little and does much."""
    found: list[tuple[Move, ChunkKV]] = []
    run: list[int] = []
    for index in range(len(places) + 1):
        way = ways[index] if index < len(places) else None
        if way is not None:
            run.append(index)
        elif run:
            pairs = [pair for one in run if (pair := ways[one]) is not None]
            old, new = (torch.cat(one) for one in zip(*pairs, strict=True))
            joined = _joined([places[one] for one in run])
            found.append((Move.of(layout, old, new, device_of(joined)), joined))
            run = []
    return found


def _joined(places: Sequence[ChunkKV]) -> ChunkKV:
    """Neighbouring views of one buffer as one."""
    first, tokens = places[0], sum(map(len, places))
    tensors = tuple(
        tuple(
            part.as_strided((*part.shape[:-2], tokens, part.shape[-1]), part.stride())
            for part in group
        )
        for group in first.tensors
    )
    ids = torch.cat([place.tokens for place in places])
    return ChunkKV(first.layout, ids, first.start, tensors)
