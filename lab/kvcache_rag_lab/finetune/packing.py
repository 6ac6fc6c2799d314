"""From samples to forward passes of the stock model.

`Feed` deals out portions: which samples make up each forward pass, by settings and data alone.
`pack` makes one pass of a portion that is the stitched computation, exactly: `mask.block_mask` says
what each token may see and where it stands.  All questions of a context lie behind it one after the
other, each at the place where it would stand alone, and see the context and themselves only, so a
context is run once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.mask import MaskedSequence, block_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag_lab.finetune.config import FinetuneConfig
    from kvcache_rag_lab.finetune.sources import Data, Encoded, Encoder


IGNORED = -100

MaskArgument = Tensor | dict[str, Tensor]

Kind = Literal["block", "full", "plain"]

# Samples in a row that do not fit before this is called a mistake.
MAX_SKIPS = 1000


@dataclass(frozen=True)
class Portion:
    """Samples of one forward pass.

    Attributes:
        kind: "block" and "full" are document questions under one mask or the other.
        samples: As ids; of "full" already joined.
    """

    kind: Kind
    samples: tuple[Encoded, ...]


class Feed:
    """Deals out portions in an order that depends on settings and data alone.

    Kinds are spread evenly by their shares.  A portion takes samples until another one would make
    it larger than the limit; a sample that is too long by itself is skipped and counted.

    Attributes:
        state: Numbers of portions dealt and samples drawn; put back to go on from there.
    """

    def __init__(
        self, config: FinetuneConfig, data: Data, encoders: Sequence[Encoder], window: int
    ) -> None:
        """Start at the beginning.

        Args:
            config: Shares and limits.
            data: Sources.
            encoders: Give ids, one context after the other; the first one those of texts.
            window: Longest prompt of the model, in tokens.
        """
        self._config, self._data, self._encoders = config, data, encoders
        self._window = window
        self.state = {"portions": 0, "asked": 0, "qa": 0, "qa_before": 0, "plain": 0, "skipped": 0}

    def next(self) -> Portion:
        state, config = self.state, self._config
        number = state["portions"]
        state["portions"] += 1
        if _is_turn(number, config.plain_batches):
            return Portion("plain", self._fill("plain", self._plain))
        asked = state["asked"]
        state["asked"] += 1
        blocked = _is_turn(asked, config.block_share)
        if config.both_masks:
            blocked = asked % 2 == 0
            if not blocked:  # the samples of the portion before
                state["qa"] = state["qa_before"]
        state["qa_before"] = state["qa"]
        samples = self._fill("qa", self._qa)
        if blocked:
            return Portion("block", samples)
        return Portion("full", tuple(sample.joined for sample in samples))

    def fits(self, sample: Encoded) -> bool:
        """Whether a sample can be run at all."""
        return (
            sample.row_tokens <= self._config.batch_tokens and sample.prompt_tokens <= self._window
        )

    def _fill(
        self, source: Literal["qa", "plain"], draw: Callable[[int], Encoded | None]
    ) -> tuple[Encoded, ...]:
        state, longest, skips = self.state, 0, 0
        samples: list[Encoded] = []
        while True:
            sample = draw(state[source])
            if sample is None or not self.fits(sample):
                state[source] += 1
                state["skipped"] += 1
                skips += 1
                if skips == MAX_SKIPS:
                    raise InvalidInputError(
                        f"{MAX_SKIPS} {source} samples in a row do not fit into "
                        f"{min(self._config.batch_tokens, self._window)} tokens; raise batch_tokens"
                    )
                continue
            # Sized under the block mask either way, so that both masks see the same samples.
            longest = max(longest, sample.row_tokens)
            if samples and longest * (len(samples) + 1) > self._config.batch_tokens:
                return tuple(samples)
            state[source] += 1
            samples.append(sample)

    def _qa(self, number: int) -> Encoded:
        encoder = self._encoders[number % len(self._encoders)]
        return encoder.qa(self._data.qa.draw(number))

    def _plain(self, number: int) -> Encoded | None:
        limit = min(self._config.batch_tokens, self._window)
        return self._encoders[0].plain(self._data.plain.draw(number), limit)


def _is_turn(number: int, share: float) -> bool:
    """True for `share` of all numbers, evenly spread."""
    return int((number + 1) * share + 1e-9) != int(number * share + 1e-9)


@dataclass(frozen=True)
class Batch:
    """What some samples teach; where it stands differs.

    Attributes:
        labels: `(rows, kept)` int64: what each of the last `kept` tokens has to predict, else
            `IGNORED`.
        segments: `(rows, kept)` int64: which span a label belongs to, -1 where there is none.
        tokens: Tokens that are not padding.
    """

    labels: Tensor
    segments: Tensor
    tokens: int

    @property
    def kept(self) -> int:
        """Of how many of the last tokens logits are needed."""
        return self.labels.shape[1]


@dataclass(frozen=True)
class MaskedBatch(Batch):
    """Samples side by side, padded on the left so that all ends meet.

    Attributes:
        ids: `(rows, tokens)` int64.
        positions: `(rows, tokens)` int64 rotary positions.
        mask: Additive float mask `(rows, 1, tokens, tokens)`, or one per layer type.
    """

    ids: Tensor
    positions: Tensor
    mask: MaskArgument


def lay_out(sample: Encoded, scheme: PositionScheme) -> MaskedSequence:
    """One row: the block mask of the context, with the spans packed behind it.

    Args:
        sample: Ids; without chunks it is an ordinary causal text.
        scheme: Where the chunks stand.
    """
    spans = [span.prompt + span.target for span in sample.spans]
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
) -> MaskedBatch:
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
    masks = []
    for number, row in enumerate(rows):
        padding = longest - len(row.ids)
        ids[number, padding:] = row.ids
        positions[number, padding:] = row.positions
        # Padding sees itself, because a row that sees nothing has no softmax.
        allowed = torch.eye(longest, dtype=torch.bool)
        allowed[padding:, padding:] = row.allowed
        indices = torch.zeros(longest, dtype=torch.long)
        indices[padding:] = row.indices
        masks.append(mask_argument(allowed, indices))
    tokens = sum(len(row.ids) for row in rows)
    return MaskedBatch(*marked(samples, kept), tokens, ids, positions, _joined(masks))


@dataclass(frozen=True)
class Divided:
    """One row of which context and questions are computed apart, either padded on its left.

    Attributes:
        ids: `(context + asked,)` int64.
        positions: The same of rotary positions.
        indices: The same of places in the prompt, which windows count.
        allowed: `(context + asked, context + asked)` bool: what each token may see.
        asked: Tokens of the questions, padding included.
        learned: `(learned,)` int64 places, among those asked, of tokens that predict an answer.
        labels: `(learned,)` int64: what they predict.
        segments: `(learned,)` int64: of which question.
        tokens: Tokens that are not padding.
    """

    ids: Tensor
    positions: Tensor
    indices: Tensor
    allowed: Tensor
    asked: int
    learned: Tensor
    labels: Tensor
    segments: Tensor
    tokens: int

    @property
    def context(self) -> int:
        """Tokens of the context, padding included."""
        return len(self.ids) - self.asked


def divide(sample: Encoded, scheme: PositionScheme, multiple: int = 1) -> Divided:
    """A sample's row (`lay_out`), with padding where context and questions are parted.

    Args:
        sample: As ids.
        scheme: Where chunks stand.
        multiple: Either part is padded to a multiple of so many tokens.
    """
    row = lay_out(sample, scheme)
    sizes = (len(row.ids) - row.query_tokens, row.query_tokens)
    padded = [-(-size // multiple) * multiple for size in sizes]
    # Places of the row's tokens among those padded.
    places = torch.cat(
        [
            torch.arange(size) + (end - size)
            for size, end in zip(sizes, (padded[0], sum(padded)), strict=True)
        ]
    )
    ids = torch.zeros(sum(padded), dtype=torch.long)
    positions, indices = ids.clone(), ids.clone()
    ids[places], positions[places], indices[places] = row.ids, row.positions, row.indices
    # Padding sees itself, because a row that sees nothing has no softmax.
    allowed = torch.eye(len(ids), dtype=torch.bool)
    allowed[places[:, None], places[None]] = row.allowed
    labels, segments = marked([sample], padded[1])
    learned = (labels[0] != IGNORED).nonzero().flatten()
    told = (learned, labels[0, learned], segments[0, learned])
    return Divided(ids, positions, indices, allowed, padded[1], *told, len(row.ids))


def marked(samples: Sequence[Encoded], kept: int) -> tuple[Tensor, Tensor]:
    """Labels and segments of a batch whose rows end together; a token predicts the one behind it.

    Raises:
        InvalidInputError: If there is nothing in front of a target.
    """
    labels = torch.full((len(samples), kept), IGNORED)
    segments = torch.full_like(labels, -1)
    for row, sample in enumerate(samples):
        start = kept - sum(len(span.prompt) + len(span.target) for span in sample.spans)
        for index, span in enumerate(sample.spans):
            if not span.prompt:
                raise InvalidInputError(
                    "a question needs at least one token in front of its answer"
                )
            first = start + len(span.prompt) - 1
            stop = first + len(span.target)
            labels[row, first:stop] = torch.tensor(span.target)
            segments[row, first:stop] = index
            start = stop + 1
    return labels, segments


def _joined(masks: list[MaskArgument]) -> MaskArgument:
    plain = [mask for mask in masks if isinstance(mask, Tensor)]
    if plain:
        return torch.cat(plain)
    named = [mask for mask in masks if isinstance(mask, dict)]
    return {name: torch.cat([mask[name] for mask in named]) for name in named[0]}
