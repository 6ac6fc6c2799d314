"""Chunks that attention reads in place, and how far their keys must move.

Deferred rotation (LazyAttention, arXiv 2606.04302): keys are neither copied nor rotated.  A key
that stands at p and is rotated by d, to p + d, scores against a query as the key itself does
against the query rotated back by d, so the query is rotated, once per distinct distance.

What one pass has to look at (`PassPlan`) is worked out once and used by every layer: a chunk
that stands in several rows of a batch is read once for all of them; a chunk that a sliding window
hides is left out, and of one that it cuts only the part is read that somebody sees.  One row that
sees all of its chunks is left to a kernel that turns keys while it reads them, where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcache_rag.kv.chunk import ChunkKV

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.codecs import EncodedChunk
    from kvcache_rag.kv.rotary import Rotation
    from kvcache_rag.models.rotation import LayerGroup, ModelLayout


@dataclass(frozen=True, eq=False)
class Segment:
    """A chunk of a prompt where it lies, and where it stands there.

    Attributes:
        chunk: Keys and values, or the codes of a codec.  Shared with a store and never written to,
            unless it lies in the prompt's own buffer.
        column: Place of its first token in the prompt; in a batch, behind the left padding.
        position: Of its first token.
    """

    chunk: ChunkKV | EncodedChunk
    column: int
    position: int

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.chunk)

    @property
    def stop(self) -> int:
        """One behind the place of its last token."""
        return self.column + len(self.chunk)

    @property
    def distance(self) -> int:
        """Positions by which its keys have to move from where they were computed."""
        return self.position - self.chunk.start


@dataclass(frozen=True, eq=False)
class HeldSegment(Segment):
    """One whose keys and values are attended to as they are, on the model's device.

    Attributes:
        angle: Which row of the angle tables says how far its keys have to move; 0 is no move.
    """

    chunk: ChunkKV
    angle: int = 0


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """What the rows of a batch hold besides their own, growing buffer.

    A column is a place in a row, left padding included.  A row's tokens begin at the column of its
    first segment; before it is padding.

    Attributes:
        layout: The model's.
        rows: Per row of the batch its segments, in ascending columns without holes.
        angles: Per frequency set of the model, cosines and sines, float32 `(angles, dim / 2)`: row
            `angle` takes a key from where it stands to its place.
        tail: Column of the first token that lies in the cache's own buffer.
        keep: Per row, so many first columns of that buffer belong to what its segments hold (or
            to its padding); nobody ever looks at them.
    """

    layout: ModelLayout
    rows: tuple[tuple[HeldSegment, ...], ...]
    angles: tuple[tuple[Tensor, Tensor], ...]
    tail: int
    keep: tuple[int, ...]

    @classmethod
    def from_rows(
        cls,
        layout: ModelLayout,
        rows: Sequence[Sequence[Segment]],
        tail: int,
        keep: Sequence[int] | None = None,
    ) -> SegmentTable:
        """A table of segments whose chunks are keys and values, not codes.

        Args:
            layout: The model's.
            rows: Per row its segments.
            tail: Column of the first token in the cache's own buffer.
            keep: Per row, first columns of that buffer that its segments hold; None for none.

        Raises:
            UnsupportedModelError: If a chunk has to move and the model's keys cannot.
        """
        distances = [0]
        for row in rows:
            distances += sorted({segment.distance for segment in row} - {*distances})
        if len(distances) > 1:
            layout.ensure_movable()
        angle = {distance: index for index, distance in enumerate(distances)}
        chunks = [segment.chunk for row in rows for segment in row]
        held = [chunk for chunk in chunks if isinstance(chunk, ChunkKV)]
        device = held[0].tensors[0][0].device if held else torch.device("cpu")
        return cls(
            layout,
            tuple(
                tuple(
                    HeldSegment(one.chunk, one.column, one.position, angle[one.distance])
                    for one in row
                    if isinstance(one.chunk, ChunkKV)
                )
                for row in rows
            ),
            tuple(
                _angles(frequency.at_rest.cpu(), distances, device)
                for frequency in layout.frequencies
            ),
            tail,
            tuple(keep or [0] * len(rows)),
        )


def _angles(
    inv_freq: Tensor, distances: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    # Exact for the distance.  The model rounds `position * inv_freq` of every position, so one
    # angle per chunk is off by up to 2e-5 of a key at position 4000 in float32.
    # (distances, dim / 2)
    angles = torch.tensor(distances, dtype=torch.float64)[:, None] * inv_freq.double()
    return angles.cos().float().to(device), angles.sin().float().to(device)


@dataclass(frozen=True, eq=False)
class ChunkCall:
    """One chunk, attended to by the rotated queries of every row that sees it.

    Attributes:
        chunk: Identity of the chunk.
        start: First of its tokens that anybody sees.
        stop: One behind the last.
        mask: Added to the scores, `(1, 1, pairs * heads * queries, stop - start)`; None where all
            is seen.
    """

    chunk: int
    start: int
    stop: int
    mask: Tensor | None


@dataclass(frozen=True, eq=False)
class PassPlan:
    """Calls of one forward pass.  A pair is a row and a segment of it that it sees.

    Attributes:
        calls: In the order of their pairs.
        sizes: Rotated queries of each call.
        rows: `(pairs,)` row of each pair, or None in a batch of one.
        cos: `(pairs, 1, width)` float32, what a query is multiplied by to rotate it back.
        sin: The same for its partner columns.
        partners: `(width,)` the column that each column is rotated with.
        tail_mask: Added to the scores of the tail, `(rows, 1, heads * queries, tail)`, or None.
        owners: `(pairs + rows,)` row of each partial result, those of the tail last.
        parts: `(rows, most)` partial results of each row; `pairs + rows` stands for none.
        is_single: Whether this is one row that sees all of its segments.
        single_mask: Added to its scores, `(1, 1, queries, columns of segments and tail)`, or None.
    """

    calls: tuple[ChunkCall, ...]
    sizes: list[int]
    rows: Tensor | None
    cos: Tensor
    sin: Tensor
    partners: Tensor
    tail_mask: Tensor | None
    owners: Tensor
    parts: Tensor
    is_single: bool
    single_mask: Tensor | None


@dataclass(frozen=True, eq=False)
class LayerCall:
    """What one layer asks.

    Attributes:
        query: `(rows, heads, queries, width)`, rotated to its place.
        key: `(rows, kv_heads, tail, width)`, what the cache's own buffer holds.
        value: `(rows, kv_heads, tail, value_width)`.
        mask: `(rows or 1, 1 or heads, queries, columns or more)`, bool (True is seen) or added to
            the scores; None where every new token sees everything up to itself.
        factor: Of the scores.
        sinks: `(heads,)` scores of a sink that holds no value, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    factor: float
    sinks: Tensor | None = None

    @property
    def is_alike_for_heads(self) -> bool:
        """Whether all heads see the same, as kernels want it."""
        return self.mask is None or (self.mask.ndim == 4 and self.mask.shape[1] == 1)

    @property
    def shape(self) -> CallShape:
        """Sizes of the pass."""
        _, heads, queries, width = self.query.shape
        return CallShape(queries, heads // self.key.shape[1], self.key.shape[2], width)


@dataclass(frozen=True)
class CallShape:
    """Sizes of one forward pass.

    Attributes:
        queries: New tokens per row.
        repeats: Query heads per KV head.
        tail: Tokens in the cache's own buffer, the new ones included.
        width: Columns of a key.
    """

    queries: int
    repeats: int
    tail: int
    width: int


def turns_whole(group: LayerGroup) -> bool:
    """Whether the keys of a group can be turned by the CPU's kernel while it reads them."""
    rotation = group.key_rotation
    whole = (0, group.layout.key_shape[1])
    return rotation.style == "none" or (
        rotation.style == "half" and (rotation.start, rotation.dim) == whole
    )


def make_plan(
    table: SegmentTable, group: int, mask: Tensor | None, shape: CallShape, dtype: torch.dtype
) -> PassPlan:
    """What the layers of a group attend to.

    Args:
        table: The segments.
        group: The layer group.
        mask: `(rows or 1, 1, queries, columns or more)`, bool (True is seen) or added to the
            scores; None where every new token sees everything up to itself.
        shape: Sizes of the pass.
        dtype: Of queries and masks.
    """
    seen = _Seen.from_mask(table, mask, shape, dtype)
    groups: dict[int, list[tuple[int, HeldSegment]]] = {}
    for row, segments in enumerate(table.rows):
        for segment in segments:
            if seen.any(row, segment):
                groups.setdefault(id(segment.chunk), []).append((row, segment))
    calls, sizes, pairs = [], [], []
    for name, members in groups.items():
        calls.append(seen.call(name, members, shape.repeats))
        sizes.append(len(members) * shape.repeats * shape.queries)
        pairs += [(row, segment.angle) for row, segment in members]
    device = table.angles[0][0].device
    angles = torch.tensor([angle for _, angle in pairs], dtype=torch.long, device=device)
    rotation = table.layout.groups[group].key_rotation
    cos, sin, partners = _back(table, rotation, angles, shape.width)
    count = len(table.rows)
    owners = [row for row, _ in pairs] + [*range(count)]
    parts: list[list[int]] = [[] for _ in range(count)]
    for part, row in enumerate(owners):
        parts[row].append(part)
    most = max(map(len, parts))
    padded = [row_parts + [len(owners)] * (most - len(row_parts)) for row_parts in parts]
    return PassPlan(
        calls=tuple(calls),
        sizes=sizes,
        rows=torch.tensor(owners[: len(pairs)], device=device) if count > 1 else None,
        cos=cos,
        sin=sin,
        partners=partners,
        tail_mask=seen.tail(shape.repeats),
        owners=torch.tensor(owners, device=device),
        parts=torch.tensor(padded, device=device),
        is_single=count == 1 and seen.added is None,
        single_mask=seen.single(),
    )


def _back(
    table: SegmentTable, rotation: Rotation, angles: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Factors `(pairs, 1, width)` of a query and of its partner columns, and those columns."""
    partners = torch.arange(width, device=angles.device)
    cos = torch.ones(len(angles), width, device=angles.device)  # (pairs, width): columns beside
    sin = torch.zeros_like(cos)  # the rotary ones stay what they are
    if rotation.style != "none":
        first, last = rotation.start, rotation.start + rotation.dim
        # (pairs, dim / 2)
        angle_cos, angle_sin = (part[angles] for part in table.angles[rotation.frequency])
        # A key is rotated by the angle; the query by as much the other way.
        signed = angle_sin if rotation.reverse else -angle_sin
        columns = partners[first:last]
        if rotation.style == "half":
            partners = torch.cat(
                [partners[:first], columns.roll(rotation.dim // 2), partners[last:]]
            )
            cos[:, first:last] = torch.cat([angle_cos, angle_cos], -1)
            sin[:, first:last] = torch.cat([-signed, signed], -1)
        else:
            swapped = columns.view(-1, 2).flip(-1).flatten()
            partners = torch.cat([partners[:first], swapped, partners[last:]])
            cos[:, first:last] = angle_cos.repeat_interleave(2, -1)
            sin[:, first:last] = torch.stack([-signed, signed], -1).flatten(-2)
    return cos[:, None], sin[:, None], partners


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a mask lets the new tokens of each row see.

    Attributes:
        table: The segments.
        added: `(rows, queries, columns)`, added to the scores; None where all segments are seen.
        some: Per row and number of columns from its segments' first, how many any token sees.
        free: The same, for those that every token sees, with nothing added.
        behind: `(rows, queries, tail)` added to the scores of the tail, or None for nothing.
    """

    table: SegmentTable
    added: Tensor | None
    some: list[dict[int, int]]
    free: list[dict[int, int]]
    behind: Tensor | None

    @classmethod
    def from_mask(
        cls, table: SegmentTable, mask: Tensor | None, shape: CallShape, dtype: torch.dtype
    ) -> _Seen:
        device = table.angles[0][0].device
        rows, columns = len(table.rows), table.tail + shape.tail
        keep = torch.tensor(table.keep, device=device)
        # Tail columns at which the new tokens stand; those that are kept ask for nothing.
        places = torch.arange(shape.tail - shape.queries, shape.tail, device=device)
        asks = places[None] >= keep[:, None]  # (rows, queries)
        lowest = torch.finfo(dtype).min
        steps = torch.arange(shape.tail, device=device)
        if mask is None:
            hides = (steps > places[:, None]).expand(rows, -1, -1)  # (rows, queries, tail)
            behind = torch.zeros(hides.shape, dtype=dtype, device=device)
            behind = behind.masked_fill_(hides, lowest)
        else:
            # Not -inf: of a row that sees nothing the kernel says the log-sum-exp 0, and a
            # row of nothing but this (what nobody looks at) stays finite.
            mask = mask[:, 0, :, :columns].expand(rows, -1, -1)  # (rows, queries, columns)
            if mask.dtype == torch.bool:
                behind = torch.zeros(rows, shape.queries, shape.tail, dtype=dtype, device=device)
                behind.masked_fill_(~mask[..., table.tail :], lowest)
            else:
                behind = mask[..., table.tail :].to(dtype, copy=True).clamp_min_(lowest)
        if any(table.keep):
            behind.masked_fill_((steps < keep[:, None])[:, None], lowest)
        kept_tail = behind if bool(behind.any()) else None
        if mask is None or _all_free(mask[..., : table.tail], table):
            return cls(table, None, [], [], kept_tail)
        added = mask
        if mask.dtype == torch.bool:
            added = torch.zeros(mask.shape, dtype=dtype, device=device)
            added.masked_fill_(~mask, lowest)
        else:
            added = mask.to(dtype).clamp_min(lowest)
        shown = ((added > lowest / 2) & asks[:, :, None]).any(1)  # (rows, columns): by some query
        free = ((added == 0) | ~asks[:, :, None]).all(1)  # (rows, columns): by every one, plainly
        return cls(table, added, _counts(table, shown), _counts(table, free), kept_tail)

    def any(self, row: int, segment: HeldSegment) -> bool:
        """Whether a row sees anything of a segment."""
        if self.added is None:
            return True
        some, stop = self.some[row], segment.stop
        return some[stop] > some[segment.column]

    def _is_free(self, row: int, segment: HeldSegment) -> bool:
        free, stop = self.free[row], segment.stop
        return free[stop] - free[segment.column] == len(segment)

    def call(self, name: int, members: list[tuple[int, HeldSegment]], repeats: int) -> ChunkCall:
        """One chunk, for all rows that see any of it."""
        tokens = len(members[0][1].chunk)
        if self.added is None or all(self._is_free(*member) for member in members):
            return ChunkCall(name, 0, tokens, None)
        parts = [
            self.added[row, :, segment.column : segment.column + tokens] for row, segment in members
        ]
        # (pairs, queries, tokens); what no row sees at either end is not read
        shown = torch.stack(parts) > torch.finfo(self.added.dtype).min / 2
        seen = shown.flatten(0, 1).any(0).nonzero()[:, 0].tolist()
        start, stop = seen[0], seen[-1] + 1
        mask = torch.cat([part[:, start:stop].repeat(repeats, 1) for part in parts])
        return ChunkCall(name, start, stop, mask[None, None])

    def single(self) -> Tensor | None:
        """The mask of a row that sees all of its segments."""
        if self.behind is None or self.added is not None or len(self.table.rows) > 1:
            return None
        before = sum(len(segment) for segment in self.table.rows[0])
        return torch.nn.functional.pad(self.behind, (before, 0))[:, None]

    def tail(self, repeats: int) -> Tensor | None:
        """The mask of the tail for packed queries."""
        return None if self.behind is None else self.behind[:, None].repeat(1, 1, repeats, 1)


def _all_free(mask: Tensor, table: SegmentTable) -> bool:
    """Whether every segment is seen, without looking at them one by one."""
    if any(table.keep):
        return False
    return bool(mask.all() if mask.dtype == torch.bool else not mask.any())


def _counts(table: SegmentTable, flags: Tensor) -> list[dict[int, int]]:
    """Per row, at each border of a segment, how many flags of `(rows, columns)` came before."""
    counts = torch.nn.functional.pad(flags.cumsum(1), (1, 0)).cpu()  # (rows, columns + 1)
    row_counts = []
    for row, segments in enumerate(table.rows):
        borders = {border for segment in segments for border in (segment.column, segment.stop)}
        ordered = sorted(borders)
        row_counts.append(dict(zip(ordered, counts[row, ordered].tolist(), strict=True)))
    return row_counts
