"""Put cached chunks together into one prompt.

The chunks already lie in their places of one buffer; stitching turns their keys from the positions
at which they were computed to those they have in the prompt (TurboRAG, arXiv 2410.07590, section
3.2), with the shared prefix standing once at the front (CacheClip, arXiv 2510.10129, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvcache_rag.chunk import ChunkKV
from kvcache_rag.rotary import angle_table, rotate_

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.kvbuffer import KVBuffer
    from kvcache_rag.mask import PositionScheme
    from kvcache_rag.models.base import LayerGroup, ModelLayout
    from kvcache_rag.models.hf import TransformersModel

SpanKind = Literal["prefix", "chunk", "query"]
StoredPosition = Literal["local", "raw"]
"""`local`: keys stand where they were computed; `raw`: every key stands at position 0."""


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


def stitch(
    layout: ModelLayout,
    parts: Sequence[ChunkKV],
    scheme: PositionScheme,
    stored: StoredPosition = "local",
    *,
    adjacent: bool = False,
) -> None:
    """Turn the keys of `parts` in place from where they stand to their prompt positions.

    Args:
        layout: How the model rotates its caches.
        parts: Prefix and chunks in prompt order, as views into the prompt's buffer.
        scheme: Where chunks shall stand; `composite` means at their local positions.
        stored: Where their keys stand now.
        adjacent: Whether the highest position is the one before the query, which stands behind as
            many positions as there are tokens.  Prefix and chunks all move up by the same; the
            rotation knows only distances, so this is the query standing right behind them.

    Raises:
        UnsupportedModelError: If a chunk has to move and the model's keys cannot.
    """
    moving, old, new = [], [], []
    total = sum(map(len, parts))
    gap = 0
    if adjacent and scheme == "composite":
        gap = total - max((part.start + len(part) for part in parts), default=0)
    place = 0
    for part in parts:
        steps = torch.arange(len(part))
        here = torch.zeros_like(steps) if stored == "raw" else part.start + steps
        there = (part.start if scheme == "composite" else place) + gap + steps
        if not torch.equal(here, there):
            moving.append(part)
            old.append(here)
            new.append(there)
        place += len(part)
    _move(layout, moving, old, new)


def unrotated(layout: ModelLayout, chunk: ChunkKV) -> ChunkKV:
    """A copy of a chunk whose keys stand at their local positions, with every key at position 0.

    Args:
        layout: How the model rotates its caches.
        chunk: In any float dtype; the arithmetic is float32 with one rounding at the end.

    Raises:
        UnsupportedModelError: If the model's keys cannot be moved.
    """
    tensors = tuple(tuple(tensor.clone() for tensor in group) for group in chunk.tensors)
    copy = ChunkKV(chunk.layout, chunk.tokens, chunk.start, tensors)
    steps = torch.arange(len(copy))
    _move(layout, [copy], [copy.start + steps], [torch.zeros_like(steps)])
    return copy


def _move(
    layout: ModelLayout, parts: Sequence[ChunkKV], old: list[Tensor], new: list[Tensor]
) -> None:
    """Turn the keys of each part from its positions `old` to its positions `new`, in place."""
    if not parts:
        return
    layout.ensure_movable()
    device = parts[0].tensors[0][0].device
    here, there = torch.cat(old), torch.cat(new)
    tables = {
        index: tuple(table.to(device) for table in angle_table(found.at_rest().cpu(), here, there))
        for index, found in enumerate(layout.frequencies)
    }
    first = 0
    for part in parts:
        stop = first + len(part)
        for index, group in enumerate(layout.groups):
            _turn(part, index, group, tables, first, stop)
        first = stop


def _turn(
    part: ChunkKV,
    index: int,
    group: LayerGroup,
    tables: dict[int, tuple[Tensor, ...]],
    first: int,
    stop: int,
) -> None:
    for slot, rotation in (
        (part.keys(index), group.key_rotation),
        (part.values(index), group.value_rotation),
    ):
        if rotation.style != "none":
            cos, sin = tables[rotation.frequency]
            rotate_(slot, rotation, cos[first:stop], sin[first:stop])
