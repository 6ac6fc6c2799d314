"""Exact match of a network's answers, under full attention and stitched.

A network under training is no engine: it is asked here, whole batches of contexts in one pass, and
each answer is checked behind the right tokens before it.  What is counted is a `Share`, as in every
evaluation (`kvcache_rag_lab.scoring.statistics`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvcache_rag_lab.reader.generator import make_example
from kvcache_rag_lab.reader.language import INSTRUCTION, REFUSAL
from training.reader.batches import IGNORED, encode, pack, read
from training.reader.tokenizer import BOS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag_lab.reader.generator import NamePool
    from training.reader.batches import EncodedExample
    from training.reader.network import Network
    from training.reader.tokenizer import WordEncoder


_BATCH: Final = 16

_QUESTIONS: Final = 4


@dataclass(frozen=True)
class Outcome:
    """How one question went: whole answer right, and whether the answer begins as a refusal."""

    right: bool
    refused: bool


def prefix_ids(encoder: WordEncoder) -> list[int]:
    """Return the token ids every chunk is read behind."""
    return [BOS, *encoder.encode(INSTRUCTION)]


def held_out_examples(
    kind: str,
    questions: int,
    encoder: WordEncoder,
    *,
    seed: int,
    documents: int = 6,
    facts: int = 4,
    names: NamePool = "held_out",
) -> list[EncodedExample]:
    """Return examples with at least `questions` questions of `kind`, `names` in them."""
    examples: list[EncodedExample] = []
    count = 0
    while count < questions:
        example = make_example(
            seed * 1_000_000 + len(examples),
            documents=documents,
            facts=facts,
            kind=kind,
            questions=_QUESTIONS,
            names=names,
        )
        examples.append(encode(example, encoder))
        count += len(example.questions)
    return examples


def answer_outcomes(
    network: Network, examples: Sequence[EncodedExample], encoder: WordEncoder, *, block: bool
) -> list[Outcome]:
    """Ask every question of `examples`.

    Predicts each token behind the right ones before it: an answer is right here, `<eos>` included,
    if and only if greedy decoding gives it.

    Args:
        network: The reader.
        examples: All with the same number of documents if `block`.
        encoder: The reader's tokenizer.
        block: Whether chunks are prefilled apart and stitched, or all is one causal text.
    """
    prefix, refusal = prefix_ids(encoder), encoder.encode(REFUSAL)[0]
    outcomes: list[Outcome] = []
    for start in range(0, len(examples), _BATCH):
        some = examples[start : start + _BATCH]
        batch = pack(some, prefix, block=block)
        with torch.no_grad():
            asked, _ = read(network, batch)
            guesses = network.logits(asked).argmax(-1)
        for row, example in enumerate(some):
            for index in range(len(example.questions)):
                here = (batch.segments[row] == index) & (batch.labels[row] != IGNORED)
                guess, wanted = guesses[row][here], batch.labels[row][here]
                outcomes.append(Outcome(bool((guess == wanted).all()), int(guess[0]) == refusal))
    return outcomes
