"""Rows of a table of times, and chunks to be timed with."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout, chunk_key, spec_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFIX = 32
SPEC = spec_digest({"benchmark": "store"})


@dataclass(frozen=True)
class Row:
    """Milliseconds of one side, and its median as a part of another's."""

    side: str
    median: float
    lowest: float
    highest: float
    samples: int
    against: str = ""
    ratio: float | None = None
    target: float | None = None


def row_of(
    side: str,
    seconds: Sequence[float],
    against: str = "",
    others: Sequence[float] = (),
    target: float = 0.0,
) -> Row:
    """Statistics of one side; a target of 0 is none."""
    middle = statistics.median(seconds)
    return Row(
        side,
        middle * 1e3,
        min(seconds) * 1e3,
        max(seconds) * 1e3,
        len(seconds),
        against,
        middle / statistics.median(others) if others else None,
        target or None,
    )


def show(rows: Sequence[Row]) -> list[Row]:
    """Print rows as a table and give them back."""
    for row in rows:
        line = f"{row.side:<30}{row.median:>9.3f}"
        line += f"{f'{row.lowest:.3f}-{row.highest:.3f}':>20}{row.samples:>9}"
        if row.ratio is not None:
            target = "" if row.target is None else f", at most {row.target:.2f}"
            line += f"  {row.ratio:.2f} of {row.against}{target}"
        print(line, flush=True)
    return list(rows)


def chunk_of(layout: ChunkLayout, tokens: int, seed: int) -> tuple[ChunkKey, ChunkKV]:
    """A chunk of random numbers and its key."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32000, (tokens,), generator=generator, dtype=torch.int32)
    tensors = layout.empty(tokens)
    for group in tensors:
        for tensor in group:
            tensor.normal_(generator=generator)
    # The seed as a prefix: ids of one token would collide among many.
    key = chunk_key(ids.tolist(), prefix_ids=[seed] * PREFIX, spec=SPEC, namespace="")
    return key, ChunkKV(layout, ids, PREFIX, tensors)
