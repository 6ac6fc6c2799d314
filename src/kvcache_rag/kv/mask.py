"""The block mask: what each token of a stitched prompt may see, as one ordinary forward pass.

This is the specification that stitching is tested against, and the mask for fine-tuning.  Every
chunk was prefilled behind its own copy of the prefix, so the single forward that equals a stitched
prompt holds such a copy for each chunk, which only that chunk sees; the query sees the first copy,
every chunk and itself. With an empty prefix it is TurboRAG's mask (arXiv 2410.07590, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


PositionScheme = Literal["reordered", "composite"]
"""`reordered`: one chunk behind the other; `composite`: each keeps its local positions."""


@dataclass(frozen=True)
class MaskedSequence:
    """A sequence with explicit positions and visibility.

    Attributes:
        ids: `(n,)` int64 token ids: prefix, then per chunk (prefix copy,) chunk, then the query.
        positions: `(n,)` int64 rotary positions.
        indices: `(n,)` int64 places in the stitched prompt; sliding windows count these.
        allowed: `(n, n)` bool, row sees column.
        query_tokens: How many of the last tokens are the query.
    """

    ids: Tensor
    positions: Tensor
    indices: Tensor
    allowed: Tensor
    query_tokens: int


def block_mask(
    prefix: Sequence[int],
    chunks: Sequence[Sequence[int]],
    query: Sequence[int],
    scheme: PositionScheme = "reordered",
) -> MaskedSequence:
    """The one forward pass that a stitched prompt must equal.

    Args:
        prefix: Ids of the shared prefix, may be empty.
        chunks: Ids of each chunk, in prompt order.
        query: Ids of the query.
        scheme: Where the chunks stand.
    """
    ids: list[int] = list(prefix)
    positions = list(range(len(prefix)))
    indices = list(range(len(prefix)))
    block = [0] * len(prefix)
    visible = [True] * len(prefix)
    place = len(prefix)
    for number, chunk in enumerate(chunks):
        start = place if scheme == "reordered" else len(prefix)
        if number:
            ids += prefix
            positions += range(start - len(prefix), start)
            indices += range(place - len(prefix), place)
            block += [number] * len(prefix)
            visible += [False] * len(prefix)
        ids += chunk
        positions += range(start, start + len(chunk))
        indices += range(place, place + len(chunk))
        block += [number] * len(chunk)
        visible += [True] * len(chunk)
        place += len(chunk)
    ids += query
    positions += range(place, place + len(query))
    indices += range(place, place + len(query))
    in_query = torch.tensor([False] * len(block) + [True] * len(query))  # (n,) all of them
    blocks = torch.tensor(block + [-1] * len(query))  # the prefix is of the first chunk's block
    seen = torch.tensor(visible + [True] * len(query))  # by the query: one copy of each place
    order = torch.arange(len(ids))
    causal = order[:, None] >= order[None]  # (n, n), row sees column
    allowed = causal & torch.where(in_query[:, None], seen[None], blocks[:, None] == blocks[None])
    return MaskedSequence(
        torch.tensor(ids), torch.tensor(positions), torch.tensor(indices), allowed, len(query)
    )


def recompute_mask(
    prefix: Sequence[int],
    chunks: Sequence[Sequence[int]],
    query: Sequence[int],
    selected: Tensor,
    scheme: PositionScheme = "reordered",
) -> MaskedSequence:
    """The one forward pass that a stitched prompt with recomputed tokens must equal.

    Behind the chunks as in `block_mask` stands a second copy of every selected token, at its true
    position.  The originals see what they saw when they were prefilled.  A copy sees, of the tokens
    at places up to its own, the originals that were not selected and the copies of those that
    were; so does the query.

    Args:
        prefix: Ids of the shared prefix, may be empty.
        chunks: Ids of each chunk, in prompt order.
        query: Ids of the query.
        selected: `(context_tokens,)` bool, over prefix and chunks.
        scheme: Where the chunks stand.
    """
    plain = block_mask(prefix, chunks, query, scheme)
    stored = len(plain.ids) - len(query)  # tokens of the context, copies of the prefix included
    visible = plain.allowed[-1, :stored]  # what the query sees: one token per place of the context
    originals = visible.nonzero()[:, 0][selected]  # (selected,) columns
    places = selected.nonzero()[:, 0]  # (selected,) places, which are also their true positions

    def with_copies(of: Tensor, copies: Tensor) -> Tensor:
        return torch.cat([of[:stored], copies, of[stored:]])  # (stored + selected + query,)

    ids = with_copies(plain.ids, plain.ids[originals])
    positions = with_copies(plain.positions, places)
    indices = with_copies(plain.indices, places)
    seen = visible.clone()
    seen[originals] = False  # a copy stands for them
    seen = torch.cat([seen, torch.ones(len(ids) - stored, dtype=torch.bool)])
    allowed = seen[None] & (indices[None] <= indices[:, None])  # (n, n), causal by places
    allowed[:stored] = False
    allowed[:stored, :stored] = plain.allowed[:stored, :stored]  # as when they were prefilled
    return MaskedSequence(ids, positions, indices, allowed, len(query))
