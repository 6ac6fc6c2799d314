"""Attention to 8-bit chunks in place on a CPU, without copying or decoding them.

The codec `Int8` keeps keys at position 0.  The kernel takes each number to what it stands for and
each key to its place while it reads them, and rounds as a copy in a prompt's buffer is rounded, so
an answer is that over a copy (`plain_attention`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcache_rag.codecs import EncodedChunk
from kvcache_rag.forks import new_lock
from kvcache_rag.kv.rotary import angle_table, rotate_
from kvcache_rag.models.attention import few_queries
from kvcache_rag.models.attention.few_queries import ChunkContext, ChunkSlots
from kvcache_rag.models.attention.packed import added_mask
from kvcache_rag.models.deferred.attention import attend_behind, ordinary_attention
from kvcache_rag.models.deferred.segments import LayerCall, Segment, turns_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.kv.rotary import Rotation
    from kvcache_rag.models.language import LanguageModel
    from kvcache_rag.models.rotation import ModelLayout

# Positions for which angles are kept at least; more are worked out when a prompt is longer.
_POSITIONS = 4096


def int8_refusal(model: LanguageModel) -> str:
    """Why chunks in 8 bits cannot be attended to where they lie, as a sentence; "" if they can."""
    name, layout = str(model.config.model_type), model.measured
    if model.device.type != "cpu" or layout.dtype != torch.bfloat16:
        return f"{name}: chunks in 8 bits are read in place by bfloat16 models on a CPU"
    for group in layout.groups:
        rotation, width = group.key_rotation, group.layout.key_shape[1]
        if width % 32 or group.layout.value_shape[1] % 32:
            return f"{name}: its heads have {width} columns, not a multiple of 32"
        if not turns_whole(group):
            return f"{name}: its keys are rotated as {rotation}, not all in halves"
    if few_queries.library() is None:
        return "chunks in 8 bits are read in place by a kernel for CPUs with AVX-512 for bfloat16"
    return ""


class _Angles:
    """Cosines and sines of the positions from 0 on, of each rotation of a model."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._tables: dict[Rotation, tuple[Tensor, Tensor]] = {}

    def up_to(self, layout: ModelLayout, rotation: Rotation, stop: int) -> tuple[Tensor, Tensor]:
        """Both `(stop or more, dim / 2)` float32, the sine with the sign of the rotation."""
        with self._lock:
            table = self._tables.get(rotation)
            if table is None or len(table[0]) < stop:
                # By whole steps, so that a little longer prompt finds them.
                count = -(-stop // _POSITIONS) * _POSITIONS
                places = torch.arange(count)
                frequencies = layout.frequencies[rotation.frequency].at_rest.cpu()
                with torch.inference_mode(mode=False):
                    cos, sin = angle_table(frequencies, torch.zeros_like(places), places)
                    table = cos, (-sin if rotation.reverse else sin)
                self._tables[rotation] = table
            return table


_ANGLES: weakref.WeakKeyDictionary[ModelLayout, _Angles] = weakref.WeakKeyDictionary()


def _slots(layout: ModelLayout, group: int, segment: Segment) -> ChunkSlots:
    """K and V of a chunk in the layers of a group."""
    tail = f".{group}" if len(layout.groups) > 1 else ""
    stored = _codes(segment).stored
    return ChunkSlots(
        key=stored[f"kq{tail}"],
        value=stored[f"vq{tail}"],
        scales=(stored[f"ks{tail}"], stored[f"vs{tail}"]),
        angles=_turned(layout, layout.groups[group].key_rotation, segment),
    )


def _codes(segment: Segment) -> EncodedChunk:
    if not isinstance(segment.chunk, EncodedChunk):
        raise TypeError("a segment of 8 bits lies in codes")
    return segment.chunk


def _turned(
    layout: ModelLayout, rotation: Rotation, segment: Segment
) -> tuple[Tensor, Tensor] | None:
    if rotation.style == "none":
        return None
    cos, sin = _ANGLES.setdefault(layout, _Angles()).up_to(
        layout, rotation, segment.position + len(segment)
    )
    place = slice(segment.position, segment.position + len(segment))
    return cos[place], sin[place]


@dataclass(frozen=True, eq=False)
class Int8Segments:
    """What the rows of a batch hold before their own, growing buffer.

    Attributes:
        layout: The model's.
        rows: Per row its chunks, in ascending columns without holes.
        tail: Column of the first token that lies in the cache's own buffer.
        keep: Per row, so many first columns of that buffer stand for what its chunks hold, or for
            padding; nobody looks at them.
        contexts: Per group and row the chunks, as the kernel reads them.
        callers: Where the layers that attend are noted, in order; None to note nothing.
    """

    layout: ModelLayout
    rows: tuple[tuple[Segment, ...], ...]
    tail: int
    keep: tuple[int, ...]
    contexts: tuple[tuple[ChunkContext, ...], ...]
    callers: list[torch.nn.Module] | None = None

    @classmethod
    def from_rows(
        cls,
        layout: ModelLayout,
        rows: Sequence[Sequence[Segment]],
        tail: int,
        keep: Sequence[int],
    ) -> Int8Segments:
        """Describe the chunks to the kernel; every row has one or more."""
        contexts = tuple(
            tuple(ChunkContext([_slots(layout, group, segment) for segment in row]) for row in rows)
            for group in range(len(layout.groups))
        )
        return cls(layout, tuple(map(tuple, rows)), tail, tuple(keep), contexts)

    def attend(self, group: int, place: int, call: LayerCall) -> Tensor:
        """Attention of one layer.

        Returns:
            `(rows, queries, heads, value_width)`; of tokens that are kept, any finite number.
        """
        query, key, value, mask = call.query, call.key, call.value, call.mask
        if not call.is_alike_for_heads or not few_queries.takes(query, key, value, 0.0):
            return self.plain_attention(group, place, call)
        if mask is None and query.shape[2] > 1:
            mask = _causal(query.shape[2], self.tail + key.shape[2])
        hidden = None if mask is None else added_mask(mask, query.dtype)
        outputs = []
        for row, context in enumerate(self.contexts[group]):
            own, keep = slice(row, row + 1), self.keep[row]
            seen = hidden
            if hidden is not None:
                seen = hidden[own if len(hidden) > 1 else slice(0, 1), ..., self._first(row) :]
            tensors = query[own], key[own, :, keep:], value[own, :, keep:]
            alone = LayerCall(*tensors, None, call.factor, call.sinks)
            outputs.append(attend_behind(context, place, alone, seen))
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return whole.transpose(1, 2).contiguous()

    def _first(self, row: int) -> int:
        return self.rows[row][0].column

    def plain_attention(self, group: int, place: int, call: LayerCall) -> Tensor:
        """The specification: decoded and rotated copies, and ordinary attention in float32."""
        key, value = call.key, call.value
        columns, rotation = self.tail + key.shape[2], self.layout.groups[group].key_rotation
        keys = key.new_zeros(*key.shape[:2], columns, key.shape[3])
        values = value.new_zeros(*value.shape[:2], columns, value.shape[3])
        for row, segments in enumerate(self.rows):
            first = self.tail + self.keep[row]
            keys[row, :, first:] = key[row, :, self.keep[row] :]
            values[row, :, first:] = value[row, :, self.keep[row] :]
            for segment in segments:
                there = slice(segment.column, segment.stop)
                decoded = _codes(segment).decoded()
                keys[row, :, there] = decoded.keys(group)[place]
                values[row, :, there] = decoded.values(group)[place]
                if rotation.style != "none":
                    places = segment.position + torch.arange(len(decoded))
                    frequencies = self.layout.frequencies[rotation.frequency].at_rest
                    angles = angle_table(frequencies, torch.zeros_like(places), places)
                    rotate_(keys[row, :, there], rotation, *angles)
        return ordinary_attention(call, keys, values)


def _causal(queries: int, columns: int) -> Tensor:
    """What new tokens at the end of all columns may see, `(1, 1, queries, columns)` bool."""
    return torch.ones(queries, columns, dtype=torch.bool).tril(columns - queries)[None, None]
