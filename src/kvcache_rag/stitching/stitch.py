"""Put cached chunks together into one prompt.

The chunks already lie in their places of one buffer; stitching rotates their keys from the
positions at which they were computed to those they have in the prompt (TurboRAG, arXiv 2410.07590,
section 3.2), with the shared prefix standing once at the front (CacheClip, arXiv 2510.10129,
section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvcache_rag.models.rotation import Move

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag.kv.buffer import KVBuffer
    from kvcache_rag.kv.chunk import ChunkKV
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.kv.rotary import StoredPosition
    from kvcache_rag.models.hf import TransformersModel
    from kvcache_rag.models.rotation import ModelLayout


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
    def of(cls, prefix: int, chunks: Sequence[int], query: int) -> StitchedPrompt:
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
    """

    model: TransformersModel
    buffer: KVBuffer
    ids: Tensor
    shape: StitchedPrompt


def keeps_places(scheme: PositionScheme) -> bool:
    """Whether every token's position is its place in the prompt."""
    return scheme == "reordered"


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


def distances(
    parts: Sequence[ChunkKV],
    scheme: PositionScheme,
    stored: StoredPosition = "local",
    *,
    adjacent: bool = False,
) -> list[tuple[Tensor, Tensor] | None]:
    """Per part the positions `(tokens,)` at which its keys stand and shall stand; None if it stays.

    The arguments are those of `stitch`.
    """
    ways: list[tuple[Tensor, Tensor] | None] = []
    sizes = [(part.start, len(part)) for part in parts]
    firsts = first_positions(sizes, scheme, adjacent=adjacent)
    for (start, tokens), first in zip(sizes, firsts, strict=True):
        steps = torch.arange(tokens)
        # Raw keys all stand at position 0, whatever their token's place in the chunk.
        here = torch.zeros_like(steps) if stored == "raw" else start + steps
        there = first + steps  # (tokens,) positions in the prompt
        ways.append(None if torch.equal(here, there) else (here, there))
    return ways


def _moves(
    layout: ModelLayout, found: Sequence[tuple[Tensor, Tensor] | None], device: torch.device
) -> list[Move | None]:
    """How each part gets to its place by its `distances`, None for one that stays."""
    moving = [one for one in found if one is not None]
    if not moving:
        return [None] * len(found)
    old, new = (torch.cat(one) for one in zip(*moving, strict=True))  # (moving tokens,) each
    whole = Move.of(layout, old, new, device)  # one table for all
    moves: list[Move | None] = []
    first = 0  # counts the tokens that move: those that stay are not in the table
    for one in found:
        stop = first + (0 if one is None else len(one[0]))
        moves.append(None if one is None else whole.narrow(first, stop))
        first = stop
    return moves


def stitch(
    layout: ModelLayout,
    parts: Sequence[ChunkKV],
    scheme: PositionScheme,
    stored: StoredPosition = "local",
    *,
    adjacent: bool = False,
    sources: Mapping[int, ChunkKV] | None = None,
) -> None:
    """Rotate the keys of `parts` in place from where they stand to their prompt positions.

    This is the specification; `overlap` does the same while chunks are read.

    Args:
        layout: How the model rotates its caches.
        parts: Prefix and chunks in prompt order, as views into the prompt's buffer.
        scheme: Where chunks shall stand; `composite` means at their local positions.
        stored: Where their keys stand now.
        adjacent: Whether the highest position is the one before the query, which stands behind as
            many positions as there are tokens (see `first_positions`).
        sources: By index, chunks whose content `parts` do not hold yet: it is copied and rotated in
            one pass.

    Raises:
        UnsupportedModelError: If a chunk has to move and the model's keys cannot.
    """
    if not parts:
        return
    ways = distances(parts, scheme, stored, adjacent=adjacent)
    moves = _moves(layout, ways, parts[0].tensors[0][0].device)
    for index, (part, move) in enumerate(zip(parts, moves, strict=True)):
        source = (sources or {}).get(index)
        if move is None:
            if source is not None:
                part.copy_from(source)
        elif source is None:
            move.rotate(part)
        else:
            move.bring(part, source)
