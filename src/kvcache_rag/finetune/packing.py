"""Pack samples into one forward pass of the stock model: the stitched computation, exactly.

`mask.block_mask` says what each token may see and where it stands.  All questions of a context lie
behind it one after the other, each at the place where it would stand alone, and see the context
and themselves only, so a context is run once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.mask import MaskedSequence, block_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.finetune.samples import Encoded
    from kvcache_rag.mask import PositionScheme

IGNORED = -100
MaskArgument = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Samples side by side, padded on the left so that all ends meet.

    Attributes:
        ids: `(rows, tokens)` int64.
        positions: `(rows, tokens)` int64 rotary positions.
        mask: Additive float mask `(rows, 1, tokens, tokens)`, or one per layer type.
        labels: `(rows, kept)` int64: what each of the last `kept` tokens has to predict, else
            `IGNORED`.
        segments: `(rows, kept)` int64: which span a label belongs to, -1 where there is none.
        tokens: Tokens that are not padding.
    """

    ids: Tensor
    positions: Tensor
    mask: MaskArgument
    labels: Tensor
    segments: Tensor
    tokens: int

    @property
    def kept(self) -> int:
        """Of how many of the last tokens logits are needed."""
        return self.labels.shape[1]


def lay_out(sample: Encoded, scheme: PositionScheme) -> MaskedSequence:
    """One row: the block mask of the context, with the spans packed behind it.

    Args:
        sample: Ids; without chunks it is an ordinary causal text.
        scheme: Where the chunks stand.

    Raises:
        InvalidInputError: If there is nothing in front of the first target.
    """
    spans = [span.prompt + span.target for span in sample.spans]
    if any(not span.prompt for span in sample.spans):
        raise InvalidInputError("a question needs at least one token in front of its answer")
    packed = [token for span in spans for token in span]
    row = block_mask(sample.prefix, sample.chunks, packed, scheme)
    if len(spans) < 2:
        return row
    first = len(row.ids) - len(packed)
    offsets = torch.cat([torch.arange(len(span)) for span in spans])
    owner = torch.cat([torch.full((len(span),), index) for index, span in enumerate(spans)])
    positions, indices, allowed = row.positions.clone(), row.indices.clone(), row.allowed.clone()
    positions[first:] = row.positions[first] + offsets
    indices[first:] = row.indices[first] + offsets
    allowed[first:, first:] &= owner[:, None] == owner[None]
    return MaskedSequence(row.ids, positions, indices, allowed, len(packed))


def pack(
    samples: Sequence[Encoded],
    scheme: PositionScheme,
    mask_argument: Callable[[Tensor, Tensor], MaskArgument],
    multiple: int = 1,
) -> Batch:
    """Samples as one batch.

    Args:
        samples: At least one.
        scheme: Where chunks stand.
        mask_argument: `TransformersModel.mask_argument`, which knows the layers' windows.
        multiple: Rows, and what is kept of them, are padded to a multiple of so many tokens.
    """
    rows = [lay_out(sample, scheme) for sample in samples]
    longest = -(-max(len(row.ids) for row in rows) // multiple) * multiple
    kept = min(longest, -(-max(row.query_tokens for row in rows) // multiple) * multiple)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    positions = torch.zeros_like(ids)
    labels = torch.full((len(rows), kept), IGNORED)
    segments = torch.full((len(rows), kept), -1)
    masks = []
    for number, (sample, row) in enumerate(zip(samples, rows, strict=True)):
        padding = longest - len(row.ids)
        ids[number, padding:] = row.ids
        positions[number, padding:] = row.positions
        _mark(sample, labels[number], segments[number], kept - row.query_tokens)
        # Padding sees itself, because a row that sees nothing has no softmax.
        allowed = torch.eye(longest, dtype=torch.bool)
        allowed[padding:, padding:] = row.allowed
        indices = torch.zeros(longest, dtype=torch.long)
        indices[padding:] = row.indices
        masks.append(mask_argument(allowed, indices))
    tokens = sum(len(row.ids) for row in rows)
    return Batch(ids, positions, _joined(masks), labels, segments, tokens)


def _mark(sample: Encoded, labels: Tensor, segments: Tensor, start: int) -> None:
    """Write the targets of a row; a token predicts the one behind it."""
    for index, span in enumerate(sample.spans):
        first = start + len(span.prompt) - 1
        stop = first + len(span.target)
        labels[first:stop] = torch.tensor(span.target)
        segments[first:stop] = index
        start += len(span.prompt) + len(span.target)


def _joined(masks: list[MaskArgument]) -> MaskArgument:
    plain = [mask for mask in masks if isinstance(mask, Tensor)]
    if plain:
        return torch.cat(plain)
    named = [mask for mask in masks if isinstance(mask, dict)]
    return {name: torch.cat([mask[name] for mask in named]) for name in named[0]}
