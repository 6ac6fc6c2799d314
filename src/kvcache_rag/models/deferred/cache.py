"""A cache whose context stays in segments; only new tokens are written, after them.

Its layers count the segments among their tokens, so that transformers makes positions and masks of
the full width, and hand them to `deferred.attention` as an attribute of the keys.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch.utils.weak import WeakTensorKeyDictionary

from kvcache_rag.models.attention.few_queries import ChunkContext, ChunkSlots
from kvcache_rag.models.cache import BufferLayer, bare_layer, cache_of, layer_of
from kvcache_rag.models.deferred.segments import turns_whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers.cache_utils import Cache

    from kvcache_rag.kv.buffer import KVBuffer
    from kvcache_rag.models.deferred.segments import HeldSegment, LayerCall, SegmentTable
    from kvcache_rag.models.rotation import LayerKind, ModelLayout


_ATTRIBUTE = "kvcache_rag_segments"

SlotViews = tuple[tuple["Tensor", ...], tuple["Tensor", ...]]
"""K and V of each layer of a group, `(1, kv_heads, tokens, width)`."""


class AttendedChunks(Protocol):
    """Chunks that know themselves how to be attended to (see `int8.Int8Segments`).

    Attributes:
        layout: The model's.
        tail: Column of the first token that lies in the cache's own buffer.
        callers: Where the layers that attend are noted, in order; None to note nothing.
    """

    @property
    def layout(self) -> ModelLayout: ...
    @property
    def tail(self) -> int: ...
    @property
    def callers(self) -> list[torch.nn.Module] | None: ...
    def attend(self, group: int, place: int, call: LayerCall) -> Tensor:
        """Attention of the layer at `place` of a group, `(rows, queries, heads, value_width)`."""


@dataclass(frozen=True, eq=False)
class HeldSegments:
    """The segments of one cache, shared by its layers.

    Attributes:
        table: The segments.
        views: Per group and chunk (by identity) its tensors, layer by layer: views.
        plans: What attention worked out, per mask.
        unmasked_plans: The same for forward passes without a mask.
        contexts: Per group the chunks of a batch of one, as the CPU's kernel reads them.
        callers: Where the layers that attend are noted, in order; None to note nothing.
    """

    table: SegmentTable
    views: tuple[dict[int, SlotViews], ...]
    plans: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    unmasked_plans: dict[Any, Any] = field(default_factory=dict)
    contexts: dict[int, ChunkContext] = field(default_factory=dict)
    callers: list[torch.nn.Module] | None = None

    @classmethod
    def from_table(
        cls, table: SegmentTable, callers: list[torch.nn.Module] | None = None
    ) -> HeldSegments:
        """Hold the segments of a table."""
        chunks = {id(segment.chunk): segment.chunk for row in table.rows for segment in row}
        views = tuple(
            {
                name: (
                    chunk.keys(group)[:, None].unbind(0),
                    chunk.values(group)[:, None].unbind(0),
                )
                for name, chunk in chunks.items()
            }
            for group in range(len(table.layout.groups))
        )
        return cls(table, views, callers=callers)

    @property
    def layout(self) -> ModelLayout:
        """The model's."""
        return self.table.layout

    @property
    def tail(self) -> int:
        """Column of the first token that lies in the cache's own buffer."""
        return self.table.tail

    def context(self, group: int) -> ChunkContext | None:
        """The chunks of the only row for the CPU's kernel; None where it cannot turn their keys."""
        (row,) = self.table.rows
        if not row or not turns_whole(self.layout.groups[group]):
            return None
        if group not in self.contexts:
            self.contexts[group] = ChunkContext([self._slots(group, one) for one in row])
        return self.contexts[group]

    def _slots(self, group: int, segment: HeldSegment) -> ChunkSlots:
        rotation = self.layout.groups[group].key_rotation
        angles = None
        if segment.angle and rotation.style != "none":
            cos, sin = (
                table[segment.angle, None] for table in self.table.angles[rotation.frequency]
            )
            angles = cos, (-sin if rotation.reverse else sin)
        return ChunkSlots(segment.chunk.keys(group), segment.chunk.values(group), angles=angles)


@dataclass(frozen=True, eq=False)
class LayerSegments:
    """What one layer attends to besides the keys that carry this.

    Attributes:
        held: The segments.
        group: Its layer group.
        place: Its number in the group.
    """

    held: HeldSegments
    group: int
    place: int


@dataclass(frozen=True, eq=False)
class LayerChunks:
    """The same of chunks that know themselves how to be attended to."""

    held: AttendedChunks
    group: int
    place: int


FrontOfLayer: TypeAlias = LayerSegments | LayerChunks


class _Passes(threading.local):
    """Whether the next attention of this thread is that of a cache with segments."""

    awaits_segments = False


_PASSES = _Passes()


def segments_of(key: Tensor) -> FrontOfLayer | None:
    """The segments that belong in front of these keys; None if they carry none."""
    segments: FrontOfLayer | None = getattr(key, _ATTRIBUTE, None)
    return segments


def awaited() -> bool:
    """Whether keys with segments were given out in this thread since this was last asked."""
    was = _PASSES.awaits_segments
    _PASSES.awaits_segments = False
    return was


class TailLayer(BufferLayer):
    """A cache layer that holds the tokens behind its segments.

    Attributes:
        segments: What stands in front.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int, segments: FrontOfLayer) -> None:
        """Hold `length` tokens of `keys` and `values`, `(rows, heads, capacity, width)`."""
        self.segments = segments
        super().__init__(keys, values, length)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append in place; the keys given back carry the segments."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        setattr(keys, _ATTRIBUTE, self.segments)
        _PASSES.awaits_segments = True
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens in segments and buffer: the columns of a row."""
        return self.segments.held.tail + self.length


def deferred_cache(
    held: HeldSegments | AttendedChunks,
    kinds: tuple[LayerKind, ...],
    buffer: KVBuffer,
    known: int = 0,
) -> Cache:
    """A transformers cache of segments and, behind them, a buffer.

    Args:
        held: The segments.
        kinds: Kind of each layer of the model.
        buffer: Memory for the tokens behind them; the cache writes into it.
        known: Tokens that it holds.
    """
    slots = buffer.slots()
    places = {
        layer: (group, place)
        for group, layers in enumerate(held.layout.groups)
        for place, layer in enumerate(layers.layout.layers)
    }
    layers: list[Any] = []
    for index, kind in enumerate(kinds):
        if not kind.has_kv:
            layers.append(bare_layer(kind))
        else:
            where = places[index]
            front: FrontOfLayer
            if isinstance(held, HeldSegments):
                front = LayerSegments(held, *where)
            else:
                front = LayerChunks(held, *where)
            layers.append(layer_of(kind, TailLayer, *slots[index], known, front))
    return cache_of(layers, held.tail + known)
