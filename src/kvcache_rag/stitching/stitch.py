"""Put cached chunks together into one prompt: a list of segments, and a copy of them side by side.

Keys are rotated from the positions at which they were computed to those they have in the prompt
(TurboRAG, arXiv 2410.07590, section 3.2), with the shared prefix standing once at the front
(CacheClip, arXiv 2510.10129, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.models.deferred.segments import Segment
from kvcache_rag.models.rotation import KeyRotation
from kvcache_rag.stitching.states import compose
from kvcache_rag.stores.device import deliver, device_of, in_main_memory, lies_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.codecs import EncodedChunk
    from kvcache_rag.kv.buffer import KVBuffer
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.kv.rotary import StoredPosition
    from kvcache_rag.models.language import LanguageModel
    from kvcache_rag.models.rotation import ModelLayout


Chunk: TypeAlias = "ChunkKV | EncodedChunk"
"""Where a chunk lies: keys and values, or the codes of a codec."""

SpanKind = Literal["prefix", "chunk", "query"]


@dataclass(frozen=True)
class Span:
    """A run of tokens of a prompt, half-open.

    Attributes:
        kind: What the tokens are.
        start: First token.
        stop: One behind the last token.
    """

    kind: SpanKind
    start: int
    stop: int

    def __len__(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class StitchedPrompt:
    """The shape of a prompt made of prefix, chunks and query.

    Attributes:
        spans: Prefix (may be empty), chunks in prompt order, query.
    """

    spans: tuple[Span, ...]

    @classmethod
    def from_sizes(cls, prefix: int, chunks: Sequence[int], query: int) -> StitchedPrompt:
        """The prompt with these numbers of tokens."""
        spans = [Span("prefix", 0, prefix)]
        for tokens in chunks:
            spans.append(Span("chunk", spans[-1].stop, spans[-1].stop + tokens))
        spans.append(Span("query", spans[-1].stop, spans[-1].stop + query))
        return cls(tuple(spans))

    @property
    def chunks(self) -> tuple[Span, ...]:
        """Spans of the chunks."""
        return self.spans[1:-1]

    @property
    def context_tokens(self) -> int:
        """Tokens of prefix and chunks."""
        return self.spans[-1].start

    @property
    def tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.spans[-1].stop


@dataclass(frozen=True, eq=False)
class StitchedRow:
    """One prompt whose context lies in a buffer, loaded and stitched, and whose query does not.

    Attributes:
        model: The model.
        buffer: Of one row, in which the prompt begins at place 0.
        ids: `(tokens,)` int64 of the whole prompt, on the CPU.
        shape: The prompt's spans.
        segments: Prefix, if any, and chunks, in models with recurrent layers.
    """

    model: LanguageModel
    buffer: KVBuffer
    ids: Tensor
    shape: StitchedPrompt
    segments: tuple[Segment, ...] = ()


def first_positions(
    parts: Sequence[tuple[int, int]],
    scheme: PositionScheme,
    *,
    adjacent: bool = False,
) -> list[int]:
    """At which position each part of a context begins: the prefix, if any, and the chunks.

    `block_mask` says the same in its own words, on purpose: it is what a prompt put together by
    these numbers is tested against.

    Args:
        parts: Per part the position at which its first key was computed, and its tokens.
        scheme: Where the chunks stand.
        adjacent: Whether the highest position is the one before the query, which stands behind as
            many positions as there are tokens.  Composite chunks overlap, so a gap would be left;
            prefix and chunks all move up by it.  The rotation knows only distances, so this is the
            query standing right behind them.
    """
    places = []
    place = highest = 0
    for start, tokens in parts:
        places.append(place)
        place += tokens
        highest = max(highest, start + tokens)
    if scheme == "reordered":
        return places
    gap = place - highest if adjacent else 0
    return [start + gap for start, _ in parts]


def placed(
    chunks: Sequence[Chunk], scheme: PositionScheme, *, adjacent: bool = False
) -> list[Segment]:
    """Prefix, if any, and chunks in prompt order, each where it lies and at its place.

    Args:
        chunks: The prefix has `start` 0, chunks the prefix's length.
        scheme: Where chunks shall stand; `composite` means at their local positions.
        adjacent: Whether the query stands right behind the highest position (`first_positions`).
    """
    extents = [(chunk.start, len(chunk)) for chunk in chunks]
    firsts = first_positions(extents, scheme, adjacent=adjacent)
    segments, column = [], 0
    for chunk, first in zip(chunks, firsts, strict=True):
        segments.append(Segment(chunk, column, first))
        column += len(chunk)
    return segments


def materialise(
    layout: ModelLayout,
    segments: Sequence[Segment],
    buffer: KVBuffer,
    stored: StoredPosition = "local",
) -> None:
    """Copy segments to their places in a prompt's buffer, and rotate their keys to their positions.

    One pass over the memory of what lies elsewhere; what was read into its place is rotated there.
    On a device that has streams all of it happens beside what the device was told before.

    Args:
        layout: How the model rotates its caches.
        segments: In prompt order without holes; chunks of keys and values.
        buffer: Of one row.
        stored: Where their keys stand.

    Raises:
        UnsupportedModelError: If a chunk has to move and the model's keys cannot.
    """
    _place(layout, segments, buffer, stored)
    if segments:
        compose(layout.states, [one.chunk for one in segments], buffer.states)


def _place(
    layout: ModelLayout, segments: Sequence[Segment], buffer: KVBuffer, stored: StoredPosition
) -> None:
    chunks = [one.chunk for one in segments if isinstance(one.chunk, ChunkKV)]
    places = [
        buffer.view(0, one.column, one.stop, local_start=chunk.start, tokens=chunk.tokens)
        for one, chunk in zip(segments, chunks, strict=True)
    ]
    if not places:
        return
    ways = [_way(one, stored) for one in segments]
    if in_main_memory(places[0]):
        moves = _moves(layout, ways, device_of(places[0]))
        for chunk, place, move in zip(chunks, places, moves, strict=True):
            _bring(chunk, place, move)
        return
    deliver(chunks, places, lambda: _rotate_runs(layout, places, ways))


def _bring(chunk: ChunkKV, place: ChunkKV, move: KeyRotation | None) -> None:
    is_there = lies_in(chunk, place)
    if move is None:
        if not is_there:
            place.copy_from(chunk)
    elif is_there:
        move.rotate(place)
    else:
        move.copy_rotated(place, chunk)


def key_rotations(
    layout: ModelLayout, segments: Sequence[Segment], stored: StoredPosition, device: torch.device
) -> list[KeyRotation | None]:
    """How the keys of each segment get to their positions, None for one that stays.

    Raises:
        UnsupportedModelError: If a chunk has to move and the model's keys cannot.
    """
    return _moves(layout, [_way(one, stored) for one in segments], device)


def _way(segment: Segment, stored: StoredPosition) -> tuple[Tensor, Tensor] | None:
    """The positions `(tokens,)` at which its keys stand and shall stand; None if they stay."""
    steps = torch.arange(len(segment))
    # Raw keys all stand at position 0, whatever their token's place in the chunk.
    here = torch.zeros_like(steps) if stored == "raw" else segment.chunk.start + steps
    there = segment.position + steps  # positions in the prompt
    return None if torch.equal(here, there) else (here, there)


def _moves(
    layout: ModelLayout, ways: Sequence[tuple[Tensor, Tensor] | None], device: torch.device
) -> list[KeyRotation | None]:
    """How each segment gets to its place, None for one that stays."""
    moving = [one for one in ways if one is not None]
    if not moving:
        return [None] * len(ways)
    old, new = (torch.cat(one) for one in zip(*moving, strict=True))  # (moving tokens,) each
    whole = KeyRotation.from_positions(layout, old, new, device)  # one table for all
    moves: list[KeyRotation | None] = []
    first = 0  # counts the tokens that move: those that stay are not in the table
    for one in ways:
        stop = first + (0 if one is None else len(one[0]))
        moves.append(None if one is None else whole.narrow(first, stop))
        first = stop
    return moves


def _rotate_runs(
    layout: ModelLayout,
    places: Sequence[ChunkKV],
    ways: Sequence[tuple[Tensor, Tensor] | None],
) -> None:
    """Rotate neighbours that move as one: a device is told little and does much."""
    for moves, run in groupby(zip(places, ways, strict=True), key=lambda pair: pair[1] is not None):
        if not moves:
            continue
        members = [(place, way) for place, way in run if way is not None]
        # (tokens of the run,) each
        old, new = (torch.cat(one) for one in zip(*(way for _, way in members), strict=True))
        joined = _joined([place for place, _ in members])
        KeyRotation.from_positions(layout, old, new, device_of(joined)).rotate(joined)


def _joined(places: Sequence[ChunkKV]) -> ChunkKV:
    """Neighbouring views of one buffer as one."""
    first, tokens = places[0], sum(map(len, places))
    tensors = tuple(
        tuple(
            # (layers, [2,] heads, tokens of all, width): no copy, as the strides are the buffer's.
            part.as_strided((*part.shape[:-2], tokens, part.shape[-1]), part.stride())
            for part in group
        )
        for group in first.tensors[: len(first.layout.groups)]
    )
    tensors += first.tensors[len(first.layout.groups) :]  # states do not rotate
    ids = torch.cat([place.tokens for place in places])  # (tokens of all,) int32, a copy
    return ChunkKV(first.layout, ids, first.start, tensors)
