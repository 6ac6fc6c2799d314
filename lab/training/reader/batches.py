"""Pack contexts and their questions into tensors, and stitch prefilled chunks into contexts.

All questions of a context lie in one row behind it and do not see each other, so a context is run
once. A *full* batch runs prefix and chunks as one causal text. A *block* batch is the stitched
computation: each chunk runs behind a copy of the prefix of its own, the prefix is kept once, and
the chunks are moved to consecutive positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from training.reader.tokenizer import ANSWER, DOC, EOS, PAD, QUESTION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag_lab.reader.generator import ReaderExample
    from training.reader.network import LayerKV, Network
    from training.reader.tokenizer import WordEncoder


IGNORED = -100


@dataclass(frozen=True)
class EncodedQuestion:
    """Token ids of a question (with its marks) and of its answer (with `<eos>`)."""

    prompt: list[int]
    answer: list[int]
    kind: str


@dataclass(frozen=True)
class EncodedExample:
    """Token ids of the chunks (each with `<doc>`) and the questions about them."""

    chunks: list[list[int]]
    questions: list[EncodedQuestion]


@dataclass(frozen=True)
class Blocks:
    """How a block batch is laid out: one row per chunk behind the prefix."""

    contexts: int
    chunks: int
    longest: int
    prefix: int


@dataclass(frozen=True)
class Batch:
    """One packed batch; `blocks` is None for full attention.

    Attributes:
        ids: Context ids, `(rows, tokens)`: one row per context, or per chunk in a block batch.
        positions: Their positions, of the same shape.
        kept_positions: Positions of the stitched context, `(contexts, kept)`.
        question_ids: Packed questions and answers, `(contexts, packed)`.
        question_positions: Their positions.
        mask: True where a packed token may look, `(contexts, 1, packed, kept + packed)`.
        labels: Next token where an answer token is predicted, else `IGNORED`.
        segments: Index of the question each packed token belongs to, -1 for padding.
        blocks: Layout of a block batch.
        tokens: Number of tokens that are not padding.
    """

    ids: Tensor
    positions: Tensor
    kept_positions: Tensor
    question_ids: Tensor
    question_positions: Tensor
    mask: Tensor
    labels: Tensor
    segments: Tensor
    blocks: Blocks | None
    tokens: int


def encode(example: ReaderExample, encoder: WordEncoder) -> EncodedExample:
    """Return the token ids of `example`."""
    return EncodedExample(
        [[DOC, *encoder.encode(text)] for text in example.documents],
        [
            EncodedQuestion(
                [QUESTION, *encoder.encode(question.text), ANSWER],
                [*encoder.encode(question.answer), EOS],
                question.kind,
            )
            for question in example.questions
        ],
    )


def pack(examples: Sequence[EncodedExample], prefix: list[int], *, block: bool) -> Batch:
    """Pack `examples`; for a block batch all must have the same number of chunks."""
    layout = _pack_blocks(examples, prefix) if block else _pack_full(examples, prefix)
    ids, positions, kept_positions, kept, blocks = layout
    lengths = kept.sum(1)
    packed = max(
        sum(len(question.prompt) + len(question.answer) for question in example.questions)
        for example in examples
    )
    shape = (len(examples), packed)
    question_ids = torch.full(shape, PAD)
    labels = torch.full(shape, IGNORED)
    segments = torch.full(shape, -1)
    offsets = torch.zeros(shape, dtype=torch.long)
    for row, example in enumerate(examples):
        start = 0
        for index, question in enumerate(example.questions):
            tokens = question.prompt + question.answer
            stop, first = start + len(tokens), start + len(question.prompt) - 1
            question_ids[row, start:stop] = torch.tensor(tokens)
            segments[row, start:stop] = index
            offsets[row, start:stop] = torch.arange(len(tokens))
            labels[row, first : stop - 1] = torch.tensor(question.answer)
            start = stop
    same = segments[:, :, None] == segments[:, None, :]
    causal = same & torch.ones(packed, packed, dtype=torch.bool).tril()
    seen = kept[:, None, :].expand(-1, packed, -1)
    return Batch(
        ids,
        positions,
        kept_positions,
        question_ids,
        lengths[:, None] + offsets,
        torch.cat((seen, causal), 2)[:, None],
        labels,
        segments,
        blocks,
        int(lengths.sum()) + int((segments >= 0).sum()),
    )


def stitch(batch: Batch, caches: list[LayerKV]) -> list[LayerKV]:
    """Turn the caches of the rows of `batch` into one context cache per example."""
    blocks = batch.blocks
    if blocks is None:
        return caches
    return [(_stitch(keys, blocks), _stitch(values, blocks)) for keys, values in caches]


def read(network: Network, batch: Batch, *, hidden: bool = False) -> tuple[Tensor, Tensor]:
    """Return the last hidden states of the packed questions and of the contexts' rows."""
    context, caches = network.prefill(batch.ids, batch.positions, hidden=hidden)
    asked = network.ask(
        batch.question_ids,
        batch.question_positions,
        stitch(batch, caches),
        batch.kept_positions,
        batch.mask,
    )
    return asked, context


_Layout = tuple["Tensor", "Tensor", "Tensor", "Tensor", Blocks | None]


def _pack_full(examples: Sequence[EncodedExample], prefix: list[int]) -> _Layout:
    rows = [sum(example.chunks, list(prefix)) for example in examples]
    ids, kept = _pad(rows)
    positions = torch.arange(ids.shape[1])[None].expand(ids.shape)
    return ids, positions, positions, kept, None


def _pack_blocks(examples: Sequence[EncodedExample], prefix: list[int]) -> _Layout:
    chunks = len(examples[0].chunks)
    ids, _ = _pad([prefix + chunk for example in examples for chunk in example.chunks])
    longest = ids.shape[1] - len(prefix)
    size = len(prefix) + chunks * longest
    kept = torch.zeros(len(examples), size, dtype=torch.bool)
    kept_positions = torch.zeros(len(examples), size, dtype=torch.long)
    kept[:, : len(prefix)] = True
    kept_positions[:, : len(prefix)] = torch.arange(len(prefix))
    for row, example in enumerate(examples):
        position = len(prefix)
        for index, chunk in enumerate(example.chunks):
            start = len(prefix) + index * longest
            stop = start + len(chunk)
            kept[row, start:stop] = True
            kept_positions[row, start:stop] = torch.arange(position, position + len(chunk))
            position += len(chunk)
    positions = torch.arange(ids.shape[1])[None].expand(ids.shape)
    blocks = Blocks(len(examples), chunks, longest, len(prefix))
    return ids, positions, kept_positions, kept, blocks


def _stitch(rows: Tensor, blocks: Blocks) -> Tensor:
    """Reorder `(contexts * chunks, heads, tokens, dim)` to `(contexts, heads, kept, dim)`."""
    heads, dim = rows.shape[1], rows.shape[3]
    shape = (blocks.contexts, blocks.chunks, heads, -1, dim)
    first = rows.view(shape)[:, 0, :, : blocks.prefix]
    bodies = rows[:, :, blocks.prefix :].reshape(shape).transpose(1, 2)
    joined = bodies.reshape(blocks.contexts, heads, blocks.chunks * blocks.longest, dim)
    return torch.cat((first, joined), 2)


def _pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), PAD)
    kept = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        kept[index, : len(row)] = True
    return ids, kept
