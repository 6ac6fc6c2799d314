"""The training forward: the stitched computation of some samples, with gradients.

Where all layers attend, a mask says it, in one pass of the stock model (`MaskedForward`).  A
recurrent layer heeds no mask.  With some, chunks are computed as for a store, each behind the
prefix alone; keys are moved, states are composed, and the questions follow behind
(`StitchedForward`).  An adapter that acts on questions alone takes two passes: the context by the
untouched model, without gradients, and the questions over its keys and values (`DividedForward`).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.models.cache import graded_cache, growing_cache, held_state, layer_tensors
from kvcache_rag.models.rotation import KeyRotation
from kvcache_rag.models.states import State
from kvcache_rag.stitching.states import compose
from kvcache_rag.stitching.stitch import first_positions
from kvcache_rag_lab.finetune.packing import IGNORED, Batch, MaskedBatch, divide, marked, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from kvcache_rag.kv.chunk import GroupLayout
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.models.hf import TransformersModel
    from kvcache_rag.models.states import RecurrentLayers
    from kvcache_rag_lab.finetune.packing import Divided
    from kvcache_rag_lab.finetune.sources import Encoded

SHAPE_MULTIPLE = 64  # each new shape costs low precision a kernel: time, and memory for good


class Forward(Protocol):
    """How samples are computed."""

    def ensure_possible(self) -> None:
        """Raise `UnsupportedModelError` if the model cannot be computed so."""

    def batch(self, samples: Sequence[Encoded]) -> Batch:
        """Samples as one batch."""

    def logits(self, batch: Any) -> Tensor:
        """Logits `(rows, kept, vocabulary)` of a batch of its own making."""


@dataclass(frozen=True)
class MaskedForward:
    """One pass of the stock model under the block mask.

    Attributes:
        adapter: The model.
        positions: Where chunks stand.
        dtype: Of activations.
    """

    adapter: TransformersModel
    positions: PositionScheme
    dtype: torch.dtype

    def ensure_possible(self) -> None:
        """Tokens have to stand where they are told to."""
        self.adapter.ensure_takes_positions(
            "it cannot be trained under the block mask, in which copies of the prefix share places "
            "with chunks; use Reuse() without fine-tuning"
        )

    def batch(self, samples: Sequence[Encoded]) -> MaskedBatch:
        """Samples side by side, padded on the left."""
        multiple = _multiple(self.dtype)
        return pack(samples, self.positions, self.adapter.mask_argument, multiple)

    def logits(self, batch: MaskedBatch) -> Tensor:
        """Logits of the last tokens, `(rows, kept, vocabulary)`."""
        logits: Tensor = self.run(batch).logits[:, -batch.kept :]
        return logits

    def run(self, batch: MaskedBatch) -> Any:
        """The stock model's own output; its logits are of the last `kept` tokens at least."""
        adapter = self.adapter
        arguments: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(adapter.model.forward).parameters:
            arguments["logits_to_keep"] = batch.kept
        mask: Any = batch.mask
        if isinstance(mask, dict):
            mask = {name: self._rounded(tensor) for name, tensor in mask.items()}
        else:
            mask = self._rounded(mask)
        return adapter.model(
            input_ids=batch.ids.to(adapter.device),
            attention_mask=mask,
            position_ids=batch.positions.to(adapter.device),
            use_cache=False,
            **arguments,
        )

    def _rounded(self, mask: Tensor) -> Tensor:
        return mask.clamp(min=torch.finfo(self.dtype).min).to(self.dtype)


@dataclass(frozen=True)
class DividedBatch(Batch):
    """Samples whose contexts are computed apart from their questions.

    Labels and segments are of tokens that are learned, and of no others.

    Attributes:
        rows: One per sample.
    """

    rows: tuple[Divided, ...]


@dataclass(frozen=True)
class DividedForward:
    """A pass over the context by the untouched model, and one over all questions behind it.

    Attributes:
        adapter: The model, with an adapter in it.
        positions: Where chunks stand.
        dtype: Of activations.
        untouched: Gives what the adapter is out of force in.
    """

    adapter: TransformersModel
    positions: PositionScheme
    dtype: torch.dtype
    untouched: Callable[[], AbstractContextManager[Any]]

    def ensure_possible(self) -> None:
        """Tokens have to stand where they are told to, and every layer to heed a mask."""
        so = 'it cannot be trained on questions alone; set lora_tokens to "all"'
        self.adapter.ensure_attends_only(f"so {so}")
        self.adapter.ensure_takes_positions(so)

    def batch(self, samples: Sequence[Encoded]) -> DividedBatch:
        """Samples one after the other."""
        multiple = _multiple(self.dtype)
        rows = tuple(divide(sample, self.positions, multiple) for sample in samples)
        labels = _ended_together([row.labels for row in rows], IGNORED)
        segments = _ended_together([row.segments for row in rows], -1)
        return DividedBatch(labels, segments, sum(row.tokens for row in rows), rows)

    def logits(self, batch: DividedBatch) -> Tensor:
        """Logits of what predicts a token of an answer, `(rows, kept, vocabulary)`."""
        rows = [self._row(row) for row in batch.rows]
        return torch.stack([functional.pad(row, (0, 0, batch.kept - len(row), 0)) for row in rows])

    def _row(self, row: Divided) -> Tensor:
        """Logits `(learned, vocabulary)`; of all others the output layer would take its time."""
        cache, first = growing_cache(self.adapter.measured.kinds), row.context
        if first:
            with torch.no_grad(), self.untouched():
                self._pass(row, cache, 0, first, keep=1)
        return self._pass(row, cache, first, len(row.ids), keep=row.learned)[0]

    def _pass(self, row: Divided, cache: Any, first: int, last: int, keep: int | Tensor) -> Tensor:
        here = slice(first, last)
        mask = self.adapter.mask_argument(
            row.allowed[here, :last], row.indices[here], row.indices[:last]
        )
        return self.adapter.graded(
            row.ids[None, here], cache, row.positions[here], mask=mask, keep=keep
        )


def _ended_together(rows: Sequence[Tensor], padding: int) -> Tensor:
    """`(rows, longest)`, padded on the left."""
    longest = max(map(len, rows))
    return torch.stack(
        [functional.pad(row, (longest - len(row), 0), value=padding) for row in rows]
    )


def _multiple(dtype: torch.dtype) -> int:
    return SHAPE_MULTIPLE if dtype == torch.bfloat16 else 1


@dataclass(frozen=True)
class StitchedBatch(Batch):
    """Samples as they are.

    Attributes:
        samples: One per row.
    """

    samples: tuple[Encoded, ...]


@dataclass(frozen=True)
class StitchedForward:
    """Passes over chunks, and one over the questions of a sample behind what chunks left.

    Attributes:
        adapter: The model.
        recurrent: Its recurrent layers.
        positions: Where chunks stand.
    """

    adapter: TransformersModel
    recurrent: RecurrentLayers
    positions: PositionScheme

    def ensure_possible(self) -> None:
        """Chunks that overlap have to stand where they are told to."""
        if self.positions == "composite":
            self.adapter.ensure_takes_positions(
                'chunks cannot overlap in position; use positions="reordered"'
            )

    def batch(self, samples: Sequence[Encoded]) -> StitchedBatch:
        """Samples one after the other: a state goes on through padding.

        Raises:
            InvalidInputError: If a chunk is a single token, for which models have kernels apart,
                and these write over what gradients need.
        """
        if any(len(chunk) < 2 for sample in samples for chunk in sample.chunks):
            raise InvalidInputError(
                f"{self.adapter.config.model_type}: a document of a single token cannot be learned "
                "by recurrent layers; leave it out, or give the template a chunk_start"
            )
        spans = [sum(len(one.prompt) + len(one.target) for one in each.spans) for each in samples]
        labels, segments = marked(samples, max(spans))
        tokens = sum(each.context_tokens for each in samples) + sum(spans)
        return StitchedBatch(labels, segments, tokens, tuple(samples))

    def logits(self, batch: StitchedBatch) -> Tensor:
        """Logits of all questions and answers, `(rows, kept, vocabulary)`."""
        rows = [self._sample(sample) for sample in batch.samples]
        return torch.stack([functional.pad(row, (0, 0, batch.kept - len(row), 0)) for row in rows])

    def _sample(self, sample: Encoded) -> Tensor:
        """Logits of the spans of a sample, one behind the other, `(tokens, vocabulary)`."""
        context = self._context(sample)
        spans = [torch.tensor(span.prompt + span.target) for span in sample.spans]
        ids = pad_sequence(spans, batch_first=True)  # (spans, longest)
        cache = graded_cache(context.repeated(len(spans)), self.adapter.measured.kinds)
        places = torch.arange(context.capacity, context.capacity + ids.shape[1])
        logits = self.adapter.graded(ids, cache, places)
        # What stands behind the end of a span is seen by nobody.
        return torch.cat([row[: len(span)] for row, span in zip(logits, spans, strict=True)])

    def _context(self, sample: Encoded) -> KVBuffer:
        """Prefix and chunks, stitched."""
        parts = self._chunks([sample.prefix], self._joined([], [])) if sample.prefix else []
        parts += self._chunks(sample.chunks, self._joined(parts, [0] * len(parts)))
        firsts = first_positions([(one.start, len(one)) for one in parts], self.positions)
        return self._joined(parts, firsts)

    def _chunks(self, chunks: Sequence[Sequence[int]], front: KVBuffer) -> list[ChunkKV]:
        """Chunks behind what stands in front of them, those of one length in one pass."""
        found: dict[int, ChunkKV] = {}
        for length in sorted({len(chunk) for chunk in chunks}):
            rows = [row for row, chunk in enumerate(chunks) if len(chunk) == length]
            ids = torch.tensor([chunks[row] for row in rows])  # (rows, length)
            found |= zip(rows, self._alike(ids, front), strict=True)
        return [found[row] for row in range(len(chunks))]

    def _alike(self, ids: Tensor, front: KVBuffer) -> list[ChunkKV]:
        """Chunks of one length, `(rows, tokens)`."""
        measured, start = self.adapter.measured, front.capacity
        front = front.repeated(len(ids))
        cache = graded_cache(front, measured.kinds)
        before = {layer: State(*held) for layer, held in front.layer_states().items()}
        with self.recurrent.watched(before) as transitions:
            self.adapter.graded(ids, cache, torch.arange(start, start + ids.shape[1]), keep=1)
        kept, tensors = layer_tensors(cache), list[tuple[Tensor, ...]]()
        for group in measured.chunk_layout.groups:
            pairs = [pair for layer in group.layers if (pair := kept[layer]) is not None]
            # [rows, layers, heads, tokens, width] each
            keys, values = (torch.stack(one, 1)[..., start:, :] for one in zip(*pairs, strict=True))
            tensors.append(_slots(group, keys, values))
        for state in measured.states:
            held = [held_state(cache, layer) for layer in state.layers]
            parts: dict[str, list[Any]] = {
                "window": [window for window, _ in held],
                "state": [behind for _, behind in held],
                "transition": [transitions.get(layer) for layer in state.layers],
            }
            tensors.append(tuple(torch.stack(parts[name], 1) for name in state.parts))
        return [
            ChunkKV(
                measured.chunk_layout,
                tokens.int(),
                start,
                tuple(tuple(part[row] for part in group) for group in tensors),
            )
            for row, tokens in enumerate(ids)
        ]

    def _joined(self, parts: Sequence[ChunkKV], firsts: Sequence[int]) -> KVBuffer:
        """Parts of a context side by side, each moved to its first position."""
        measured = self.adapter.measured
        layout = measured.chunk_layout
        empty = KVBuffer.allocate(layout, 1, 0, self.adapter.device)
        if not parts:
            return empty
        compose(layout.states, parts, empty.states)
        moved = [self._moved(part, first) for part, first in zip(parts, firsts, strict=True)]
        tensors = []
        for index, group in enumerate(layout.groups):
            pairs = [part[index] for part in moved]
            # [1, layers, heads, tokens, width] each
            keys, values = (torch.cat(one, -2)[None] for one in zip(*pairs, strict=True))
            tensors.append(tuple(one.movedim(0, -4) for one in _slots(group, keys, values)))
        return KVBuffer(layout, tuple(tensors), 1, sum(map(len, parts)), empty.states)

    def _moved(self, part: ChunkKV, first: int) -> list[tuple[Tensor, Tensor]]:
        """Per group K and V, `[layers, heads, tokens, width]`."""
        pairs = [(part.keys(index), part.values(index)) for index in range(len(part.layout.groups))]
        if first == part.start:
            return pairs
        steps = torch.arange(len(part))
        move = KeyRotation.from_positions(
            self.adapter.measured, part.start + steps, first + steps, self.adapter.device
        )
        return [
            (
                keys if of_keys is None else of_keys.rotated(keys),
                values if of_values is None else of_values.rotated(values),
            )
            for (keys, values), (of_keys, of_values) in zip(pairs, move.slots, strict=True)
        ]


def _slots(group: GroupLayout, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Rows of K and V, `[rows, layers, heads, tokens, width]`, as a group keeps them in a chunk."""
    return (torch.stack([keys, values], 2),) if group.is_fused else (keys, values)
