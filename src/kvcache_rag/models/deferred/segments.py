"""Chunks that are attended to where they lie, and how far their keys have to move.

Deferred rotation (LazyAttention, arXiv 2606.04302): keys are neither copied nor rotated.  A key
that stands at p and is rotated by d, to p + d, scores against a query as the key itself does
against the query rotated back by d, so the query is rotated, once per distinct distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.kv.chunk import ChunkKV
    from kvcache_rag.models.rotation import ModelLayout


@dataclass(frozen=True, eq=False)
class Segment:
    """A chunk in a row of a batch.

    Attributes:
        chunk: Shared with the store, never written; its tensors lie on the model's device.
        column: Index of its first token among the columns of its row, left padding included.
        angle: Which row of the angle tables says how far its keys have to move; 0 is no move.
    """

    chunk: ChunkKV
    column: int
    angle: int


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
    rows: tuple[tuple[Segment, ...], ...]
    angles: tuple[tuple[Tensor, Tensor], ...]
    tail: int
    keep: tuple[int, ...]

    @classmethod
    def of(
        cls,
        layout: ModelLayout,
        rows: Sequence[Sequence[tuple[ChunkKV, int, int]]],
        tail: int,
        keep: Sequence[int] | None = None,
    ) -> SegmentTable:
        """A table of chunks, given the column and the distance of each.

        Args:
            layout: The model's.
            rows: Per row `(chunk, column, distance)`, the distance in positions from where the
                chunk's keys stand to where they shall stand.
            tail: Column of the first token in the cache's own buffer.
            keep: Per row, first columns of that buffer that its segments hold; None for none.

        Raises:
            UnsupportedModelError: If a chunk has to move and the model's keys cannot.
        """
        distances = [0]
        for row in rows:
            distances += sorted({distance for _, _, distance in row} - {*distances})
        if len(distances) > 1:
            layout.ensure_movable()
        angle = {distance: index for index, distance in enumerate(distances)}
        device = next((row[0][0].tensors[0][0].device for row in rows if row), torch.device("cpu"))
        return cls(
            layout,
            tuple(
                tuple(Segment(chunk, column, angle[far]) for chunk, column, far in row)
                for row in rows
            ),
            tuple(
                _angles(found.at_rest().cpu(), distances, device) for found in layout.frequencies
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
