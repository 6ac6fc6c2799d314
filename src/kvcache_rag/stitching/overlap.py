"""Put the chunks of a prompt into their places first layers first, beside the forward pass.

The plain path brings every chunk whole and rotates its keys afterwards (`stitch`).  In main memory
(`Placing`) each byte is read, hashed, rotated and placed once, one layer at a time; on a device
(`cross`) chunks that are kept in memory cross the bus band of layers by band, and each band is
rotated behind its copies.  The forward pass is at the first layers meanwhile.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.models.rotation import Move
from kvcache_rag.stitching.stitch import distances
from kvcache_rag.stores.device import deliver_layers, device_of, lane_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.kv.rotary import RotaryTable, StoredPosition
    from kvcache_rag.models.cache import Loading
    from kvcache_rag.models.rotation import ModelLayout
    from kvcache_rag.stores.base import ChunkReader
    from kvcache_rag.stores.device import LayerArrivals

    Layers = tuple[Tensor, ...]


def cross(
    layout: ModelLayout,
    chunks: Sequence[ChunkKV | None],
    places: Sequence[ChunkKV],
    scheme: PositionScheme,
    stored: StoredPosition = "local",
    *,
    adjacent: bool = False,
) -> LayerArrivals:
    """Copy chunks to their places in a buffer and rotate their keys, as copying and `stitch` do.

    Args:
        layout: How the model rotates its caches.
        chunks: Prefix and chunks in prompt order, as they are kept in memory, this machine's or a
            device's; None for one that lies in its place already, with its keys not rotated yet.
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

    def rotate(layers: Sequence[slice]) -> None:
        for move, run in runs:
            move.rotate(run, layers)

    kept, their = [], []
    for chunk, place in zip(chunks, places, strict=True):
        if chunk is not None:
            kept.append(chunk)
            their.append(place)
    return deliver_layers(kept, their, rotate, others=places)


def _runs(
    layout: ModelLayout,
    places: Sequence[ChunkKV],
    ways: Sequence[tuple[Tensor, Tensor] | None],
) -> list[tuple[Move, ChunkKV]]:
    """Neighbours that move, as one part each: a device is told little and does much."""
    runs: list[tuple[Move, ChunkKV]] = []
    run: list[int] = []
    for index in range(len(places) + 1):
        way = ways[index] if index < len(places) else None
        if way is not None:
            run.append(index)
        elif run:
            pairs = [pair for one in run if (pair := ways[one]) is not None]
            # (tokens of the run,) each
            old, new = (torch.cat(one) for one in zip(*pairs, strict=True))
            joined = _joined_places([places[one] for one in run])
            runs.append((Move.of(layout, old, new, device_of(joined)), joined))
            run = []
    return runs


def _joined_places(places: Sequence[ChunkKV]) -> ChunkKV:
    """Neighbouring views of one buffer as one."""
    first, tokens = places[0], sum(map(len, places))
    tensors = tuple(
        tuple(
            # (layers, [2,] heads, tokens of all, width): no copy, as the strides are the buffer's.
            part.as_strided((*part.shape[:-2], tokens, part.shape[-1]), part.stride())
            for part in group
        )
        for group in first.tensors
    )
    ids = torch.cat([place.tokens for place in places])  # (tokens of all,) int32, a copy
    return ChunkKV(first.layout, ids, first.start, tensors)


# Numbers rotated in one go: few calls, and the float32 copies (2 x 1 MiB) fit into a cache.
_RUN = 1 << 18


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a prompt on its way.

    Attributes:
        reader: Where its layers come from.
        place: Where they go: views into the prompt's buffer.
    """

    reader: ChunkReader
    place: ChunkKV


@dataclass(frozen=True, eq=False)
class _Run:
    """Neighbours that are rotated together, or that all stay where they are."""

    parts: tuple[int, ...]
    move: Move | None


@dataclass(eq=False)
class Placing:
    """One prompt's parts on their way into its buffer, in main memory.

    Attributes:
        layout: How the model rotates its caches.
        parts: Prefix and chunks in prompt order, without gaps between them.
        scheme: Where chunks shall stand, as in `stitch`.
        stored: Where their keys stand now.
        adjacent: Whether the query stands right behind the highest position.
        reading: Seconds spent reading, per part.
        rotating: Seconds spent rotating, and copying what is in memory.
    """

    layout: ModelLayout
    parts: Sequence[Part]
    scheme: PositionScheme
    stored: StoredPosition = "local"
    adjacent: bool = False
    reading: list[float] = field(init=False)
    rotating: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        """Say where everything goes; nothing is read yet."""
        self.reading = [0.0] * len(self.parts)
        for part in self.parts:
            part.reader.aim(part.place)

    @cached_property
    def _runs(self) -> list[_Run]:
        places = [part.place for part in self.parts]
        all_ways = distances(places, self.scheme, self.stored, adjacent=self.adjacent)
        groups = [group.layout for group in self.layout.groups]
        shapes = [shape for group in groups for shape in (group.key_shape, group.value_shape)]
        # Numbers per token of a layer's larger slot.
        most = max((heads * width for heads, width in shapes), default=1)
        runs = []
        for indices in _neighbours([len(place) for place in places], all_ways, _RUN // most):
            ways = [way for index in indices if (way := all_ways[index]) is not None]
            move = None
            if ways:
                # (tokens of the run,) each
                old, new = (torch.cat(positions) for positions in zip(*ways, strict=True))
                move = Move.of(self.layout, old, new, torch.device("cpu"))
            runs.append(_Run(tuple(indices), move))
        return runs

    @cached_property
    def _slots(self) -> list[list[tuple[Layers, Layers]]]:
        """Per group and part the layers of K and of V, as views."""
        return [
            [
                # (heads, tokens, width) per layer
                (part.place.keys(group).unbind(0), part.place.values(group).unbind(0))
                for part in self.parts
            ]
            for group in range(len(self.layout.groups))
        ]

    @property
    def order(self) -> list[tuple[int, int, int]]:
        """Layer, group and place in the group, of every layer that keeps anything."""
        return sorted(
            (layer, index, place)
            for index, group in enumerate(self.layout.groups)
            for place, layer in enumerate(group.layout.layers)
        )

    def place(self, group: int, place: int) -> None:
        """Bring one layer of all parts to where it belongs.

        Raises:
            ChunkNotFoundError: If one cannot be read; a `CorruptChunkError` if it is damaged.
            UnsupportedModelError: If a chunk has to move and the model's keys cannot.
        """
        slots = self._slots[group]
        for run in self._runs:
            keys: list[tuple[Tensor, Tensor]] = []
            values: list[tuple[Tensor, Tensor]] = []
            for index in run.parts:
                k, v = slots[index][0][place], slots[index][1][place]  # (heads, tokens, width)
                started = time.perf_counter()
                # A reader that gives nothing has read to where it goes.
                stored = self.parts[index].reader.layer(group, place) or (k, v)
                self.reading[index] += time.perf_counter() - started
                keys.append((k, stored[0]))
                values.append((v, stored[1]))
            started = time.perf_counter()
            tables = (None, None) if run.move is None else run.move.slots[group]
            for slot, table in zip((keys, values), tables, strict=True):
                _settle(slot, table)
            self.rotating += time.perf_counter() - started

    def finish(self) -> None:
        for part in self.parts:
            part.reader.finish()

    def close(self) -> None:
        """Close what is open."""
        for part in self.parts:
            part.reader.close()


class PlacingAhead:
    """A placing in a thread of its own, while the model is already at its first layers.

    Attributes:
        placing: What is placed.
        waited: Seconds for which the forward pass had to wait.
        error: What went wrong, or None.
    """

    def __init__(self, placing: Placing, placed: Callable[[], object]) -> None:
        """Prepare; `placed` is called by `close` if everything was placed."""
        self.placing, self._placed = placing, placed
        self.waited = 0.0
        self.error: BaseException | None = None
        self._order = placing.order
        self._turns = {layer: number for number, (layer, _, _) in enumerate(self._order)}
        self._done = 0
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvcache-rag-load", daemon=True)

    @classmethod
    def start(cls, placing: Placing, placed: Callable[[], object]) -> PlacingAhead | None:
        """Begin; whoever made this closes it, whatever happens.  None without a thread to be had.

        Args:
            placing: What to place.
            placed: Called by `close` if everything was placed and verified.
        """
        ahead = cls(placing, placed)
        try:
            ahead._thread.start()
        except RuntimeError:
            return None
        return ahead

    def wait(self, layer: int) -> None:
        """Wait for a layer; for the last one until everything is verified (see `Arrivals`)."""
        needed = self._turns[layer] + 1
        if self._done < needed:
            started = time.perf_counter()
            with self._changed:
                self._changed.wait_for(lambda: self._done >= needed or self.error is not None)
            self.waited += time.perf_counter() - started
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Stop and wait until the thread has ended; nothing is written to the buffer any more."""
        self._stopped = True
        self._thread.join()
        if self._done == len(self._order):
            self._placed()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                for number, (_, group, place) in enumerate(self._order, 1):
                    if self._stopped:
                        return
                    self.placing.place(group, place)
                    if number == len(self._order):
                        self.placing.finish()
                    self._note(number)
        except BaseException as error:
            self.error = error
            self._note(self._done)
        finally:
            self.placing.close()

    def _note(self, done: int) -> None:
        with self._changed:
            self._done = done
            self._changed.notify()


class AheadError(Exception):
    """Loading beside the forward pass failed; nothing that came of it may be used."""


@contextmanager
def used(ahead: Loading) -> Iterator[None]:
    """What a forward pass over a context runs in, that may still be on its way; it is closed.

    Raises:
        AheadError: If the pass ended because loading failed.
    """
    try:
        yield
    except Exception as error:
        if ahead.error is not None:
            raise AheadError(str(ahead.error)) from error
        raise
    finally:
        ahead.close()


def _settle(slot: Sequence[tuple[Tensor, Tensor]], table: RotaryTable | None) -> None:
    """Write what was stored to where it goes, rotated if it has to be."""
    if table is None:
        for out, stored in slot:
            if stored is not out:
                out.copy_(stored)
        return
    out = _joined([out for out, _ in slot])  # (heads, tokens of the run, width)
    # Only where every part was read into its place is the run rotated in place.
    is_there = all(stored is place for place, stored in slot)
    table.rotate_into(out, [out] if is_there else [stored for _, stored in slot])


def _joined(views: Sequence[Tensor]) -> Tensor:
    """Neighbouring views `(heads, tokens, width)` of one buffer as one view."""
    first = views[0]
    tokens = sum(view.shape[1] for view in views)
    # A view of all: they lie side by side, and their strides are the buffer's.
    return first.as_strided((first.shape[0], tokens, first.shape[2]), first.stride())


def _neighbours(
    lengths: Sequence[int], found: Sequence[object | None], most: int
) -> Iterator[list[int]]:
    """Indices of parts in runs of up to `most` tokens, moving and staying ones apart."""
    run: list[int] = []
    for index, length in enumerate(lengths):
        is_other = run and (found[run[-1]] is None) != (found[index] is None)
        if run and (is_other or sum(lengths[member] for member in run) + length > most):
            yield run
            run = []
        run.append(index)
    if run:
        yield run
