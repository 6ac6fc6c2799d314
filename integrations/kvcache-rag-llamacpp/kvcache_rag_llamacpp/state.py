"""Read and write the bytes of a llama.cpp state as keys and values.

They are what `llama_state_seq_get_data` gives for one sequence of a unified cache:

    u32 magic | i32 sequence
    per cache (one; two where some layers have a sliding window, theirs last)
        u32 streams (1) | u32 cells | cells x (i32 position, u32 1, i32 sequence)
        u32 transposed | u32 layers
        layers x (i32 type, u64 bytes of a row, cells x row)                    keys
        layers x (i32 type, u64 bytes of a row, cells x row)                    values
        layers x (i32 type, u32 bytes of an element, u32 width, width x cells)  or so, transposed

They contain no version, so the form is learned from a newly made state, and bytes that do not fit
it are refused (`read`).  States are never kept: what llama.cpp gets was written here, with our own
lengths.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.chunk import GroupLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC: Final = 0xAF143CD8
_BEGIN = struct.Struct("<Ii")
_CELLS = struct.Struct("<II")
_CELL = struct.Struct("<iIi")
_DATA = struct.Struct("<II")
_ROWS = struct.Struct("<iQ")
_COLUMNS = struct.Struct("<iII")
_HEADER = 12  # bytes before the numbers of a layer, either way


@dataclass(frozen=True)
class StateFormat:
    """How the states of one context are written.

    Attributes:
        groups: Per cache its layers, counted through, and the shapes of a token's keys and values.
        dtype: Of both.
        kind: The number that llama.cpp has for that dtype.
        transposed: Whether values lie `(width, cells)`.
    """

    groups: tuple[GroupLayout, ...]
    dtype: torch.dtype
    kind: int
    transposed: bool

    def write(self, positions: Sequence[int], sequence: int = 0) -> SequenceState:
        """A new state of cells at these positions, whose keys and values are to be filled in."""
        cells = len(positions)
        row = b"".join(_CELL.pack(position, 1, sequence) for position in positions)
        data = bytearray(_BEGIN.size + sum(self._nbytes(group, cells) for group in self.groups))
        _BEGIN.pack_into(data, 0, MAGIC, sequence)
        place, parts = _BEGIN.size, []
        for group in self.groups:
            _CELLS.pack_into(data, place, 1, cells)
            place += _CELLS.size
            data[place : place + len(row)] = row
            place += len(row)
            _DATA.pack_into(data, place, int(self.transposed), len(group.layers))
            place += _DATA.size
            keys = place
            key, value = _width(group.key_shape), _width(group.value_shape)
            for _ in group.layers:
                _ROWS.pack_into(data, place, self.kind, key * self.dtype.itemsize)
                place += _HEADER + cells * key * self.dtype.itemsize
            values = place
            for _ in group.layers:
                if self.transposed:
                    _COLUMNS.pack_into(data, place, self.kind, self.dtype.itemsize, value)
                else:
                    _ROWS.pack_into(data, place, self.kind, value * self.dtype.itemsize)
                place += _HEADER + cells * value * self.dtype.itemsize
            parts.append(_Part(tuple(positions), keys, values))
        return SequenceState(self, data, tuple(parts))

    def _nbytes(self, group: GroupLayout, cells: int) -> int:
        width = _width(group.key_shape) + _width(group.value_shape)
        numbers = cells * width * self.dtype.itemsize
        head = _CELLS.size + cells * _CELL.size + _DATA.size
        return head + len(group.layers) * (2 * _HEADER + numbers)

    def read(self, data: bytearray) -> SequenceState:
        """What llama.cpp wrote.

        Raises:
            UnsupportedModelError: If that is another form.
        """
        found = _parsed(data)
        for cache, group in zip(found, self.groups, strict=False):
            fits = (
                len(found) == len(self.groups)
                and cache.layers == len(group.layers)
                and cache.transposed == self.transposed
                and cache.kinds == {self.kind}
                and cache.key_row == _width(group.key_shape) * self.dtype.itemsize
                and cache.value_row == _width(group.value_shape) * self.dtype.itemsize
            )
            if not fits:
                raise UnsupportedModelError("a state of llama.cpp has another form than before")
        return SequenceState(
            self, data, tuple(_Part(one.positions, one.keys, one.values) for one in found)
        )


@dataclass(frozen=True)
class _Part:
    """Where the numbers of one cache are in a state, in bytes."""

    positions: tuple[int, ...]
    keys: int
    values: int


@dataclass(frozen=True, eq=False)
class SequenceState:
    """The bytes of a state, and its keys and values in them.

    Attributes:
        form: How it is written.
        data: The bytes.
        parts: Where things are.
    """

    form: StateFormat
    data: bytearray
    parts: tuple[_Part, ...]

    def positions(self, group: int) -> tuple[int, ...]:
        """Where the cells of a cache stand; layers with a window keep those alone that it shows."""
        return self.parts[group].positions

    def keys(self, group: int) -> Tensor:
        """`[layers, heads, cells, width]`, a view."""
        part, layout = self.parts[group], self.form.groups[group]
        return self._rows(part.keys, len(layout.layers), len(part.positions), layout.key_shape)

    def values(self, group: int) -> Tensor:
        """`[layers, heads, cells, width]`, a view."""
        part, layout = self.parts[group], self.form.groups[group]
        layers, cells = len(layout.layers), len(part.positions)
        if not self.form.transposed:
            return self._rows(part.values, layers, cells, layout.value_shape)
        heads, width = layout.value_shape
        stride = _HEADER // self.form.dtype.itemsize + cells * heads * width
        return self._view(
            part.values, (layers, heads, cells, width), (stride, width * cells, 1, cells)
        )

    def _rows(self, place: int, layers: int, cells: int, shape: tuple[int, int]) -> Tensor:
        heads, width = shape
        stride = _HEADER // self.form.dtype.itemsize + cells * heads * width
        return self._view(place, (layers, heads, cells, width), (stride, width, heads * width, 1))

    def _view(self, place: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        count = (len(self.data) - place - _HEADER) // self.form.dtype.itemsize
        flat = torch.frombuffer(
            self.data, dtype=self.form.dtype, offset=place + _HEADER, count=count
        )
        return flat.as_strided(shape, strides)


@dataclass(frozen=True)
class CacheSection:
    """One cache of a state, as it was read.

    Attributes:
        positions: Of its cells.
        transposed: Whether values lie `(width, cells)`.
        layers: How many.
        kinds: The types of its tensors.
        key_row: Bytes of a cell's keys, the same in all layers.
        value_row: Likewise of its values.
        keys: Where these begin, in bytes.
        values: Where these begin.
    """

    positions: tuple[int, ...]
    transposed: bool
    layers: int
    kinds: frozenset[int]
    key_row: int
    value_row: int
    keys: int
    values: int


def _parsed(data: bytearray) -> list[CacheSection]:
    """The caches of a state.

    Raises:
        UnsupportedModelError: If it cannot be read as one.
    """
    place, caches = _BEGIN.size, list[CacheSection]()
    try:
        magic, _ = _BEGIN.unpack_from(data)
        while magic == MAGIC and place < len(data):
            cache, place = _cache(data, place)
            caches.append(cache)
    except (struct.error, OverflowError):  # of a length beyond all memory
        caches = []
    if not caches or place != len(data):
        raise UnsupportedModelError("a state of llama.cpp cannot be read: its form is unknown")
    return caches


def _cache(data: bytearray, place: int) -> tuple[CacheSection, int]:
    streams, cells = _CELLS.unpack_from(data, place)
    place += _CELLS.size
    if streams != 1 or not cells or cells * _CELL.size > len(data) - place:
        raise struct.error("streams or cells")
    rows = [_CELL.unpack_from(data, place + index * _CELL.size) for index in range(cells)]
    if any(count != 1 for _, count, _ in rows):
        raise struct.error("cells of several sequences, or with more than a position")
    place += cells * _CELL.size
    transposed, layers = _DATA.unpack_from(data, place)
    if transposed > 1:
        raise struct.error("how values lie")
    place += _DATA.size
    keys, kinds, key_rows, value_rows = place, set(), set(), set()
    for _ in range(layers):
        kind, row = _ROWS.unpack_from(data, place)
        kinds.add(kind)
        key_rows.add(row)
        place += _HEADER + cells * row
    values = place
    for _ in range(layers):
        if transposed:
            kind, element, width = _COLUMNS.unpack_from(data, place)
            row = element * width
        else:
            kind, row = _ROWS.unpack_from(data, place)
        kinds.add(kind)
        value_rows.add(row)
        place += _HEADER + cells * row
    if place > len(data) or len(key_rows) != 1 or len(value_rows) != 1:
        raise struct.error("layers of several shapes")
    positions = tuple(position for position, _, _ in rows)
    cache = CacheSection(
        positions,
        bool(transposed),
        layers,
        frozenset(kinds),
        key_rows.pop(),
        value_rows.pop(),
        keys,
        values,
    )
    return cache, place


def read_state_format(
    data: bytearray, heads: Sequence[Sequence[int]], dtype: torch.dtype, kind: int
) -> StateFormat:
    """The form of a state that llama.cpp wrote.

    Args:
        data: The state.
        heads: Per cache the widths that a head may have; the first that divides is taken.
        dtype: Of keys and values.
        kind: The number that llama.cpp has for it.

    Raises:
        UnsupportedModelError: If it is none that is known here.
    """
    caches, groups, first = _parsed(data), [], 0
    if len(caches) > len(heads):
        raise UnsupportedModelError(f"llama.cpp keeps {len(caches)} caches, of which 2 are known")
    for cache, widths in zip(caches, heads, strict=False):
        if cache.kinds != {kind}:
            raise UnsupportedModelError(
                "llama.cpp keeps keys and values in another type than asked"
            )
        key, value = (row // dtype.itemsize for row in (cache.key_row, cache.value_row))
        width = next((one for one in widths if one and key % one == 0), key)
        count = key // width
        groups.append(
            GroupLayout(
                layers=tuple(range(first, first + cache.layers)),
                key_shape=(count, width),
                value_shape=(count, value // count) if value % count == 0 else (1, value),
            )
        )
        first += cache.layers
    return StateFormat(tuple(groups), dtype, kind, caches[0].transposed)


def _width(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]
