"""What training sees at each step: mixes of context forms and question kinds.

Binding facts to entities, not to relations, is the hard part, so the first mix is mostly contexts
in which every sentence states the same relation. Refusals and questions for several values come
later: while nothing else is known they are an easy way to lower the loss without reading. Facts
that need the document before (`linked`) come last.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kvcache_rag_lab.reader.generator import READING, Mix, Size, draw_example, draw_linked_example
from kvcache_rag_lab.reader.names import names, piece_names, wide_names
from training.reader.batches import encode, pack

if TYPE_CHECKING:
    from training.reader.batches import Batch, EncodedExample
    from training.reader.tokenizer import WordEncoder


STAGES: Final[tuple[Size, ...]] = ((1, 4), (2, 4), (3, 4), (4, 4), (6, 4))

OTHER_SIZES: Final[tuple[Size, ...]] = ((3, 4), (4, 4), (4, 5), (5, 4), (5, 5), (6, 5), (8, 4))

SMALL_SIZES: Final[tuple[Size, ...]] = (
    *((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (3, 2), (4, 1), (4, 2), (5, 2), (6, 1)),
    *((6, 2), (7, 2), (8, 1), (8, 2), (8, 3)),
)

LINKED_SIZES: Final[tuple[Size, ...]] = (
    *((6, 4), (6, 4), (6, 4), (3, 4), (4, 4), (5, 4), (4, 5), (6, 3), (2, 4), (3, 2), (5, 2)),
    *((8, 4), (6, 2)),
)

_OTHER_SHARE: Final = 0.25

_SMALL_SHARE: Final = 0.25  # of the batches with wide names

_POOL_WEIGHTS: Final = (0.2, 0.4, 0.4)  # syllable names only, all together, wide names only

_FACTS_PER_BATCH: Final = 384

_MOST_CONTEXTS: Final = 32

BINDING: Final = Mix(
    {"uniform": 0.74, "rivals": 0.08, "profile": 0.08, "mixed": 0.06, "several": 0.04},
    {
        "uniform": {"single": 0.96, "unanswerable": 0.04},
        "rivals": {"single": 0.96, "unanswerable": 0.04},
        "profile": {"single": 0.96, "unanswerable": 0.04},
        "mixed": {"single": 0.90, "unanswerable": 0.04, "two_hop": 0.06},
        "several": {"single": 0.50, "multi_value": 0.50},
    },
)

# Beside linked contexts: more of what is forgotten first.
KEEPING: Final = Mix(
    {**READING.forms, "chain": 0.16, "several": 0.30},
    {
        **READING.questions,
        "chain": {"single": 0.20, "two_hop": 0.58, "two_hop_direct": 0.14, "unanswerable": 0.08},
    },
)


def training_batch(
    stream: str,
    mix: Mix,
    size: Size,
    encoder: WordEncoder,
    prefix: list[int],
    *,
    questions: int,
    block: bool,
    wide: bool = False,
    linked: float = 0.0,
) -> Batch:
    """Return the training batch named by `stream`.

    Args:
        stream: Name of the batch; the same name always gives the same batch.
        mix: Which forms and kinds to draw.
        size: Documents and facts per document; the last stage also draws other sizes.
        encoder: Gives the token ids.
        prefix: Token ids all chunks are read behind.
        questions: Questions per context at most.
        block: Whether to pack for the stitched computation.
        wide: Whether to draw wide names too, and small contexts in the last stage.
        linked: Share of contexts with facts that need the document before; sizes are drawn too.
    """
    rng = random.Random(f"train/{stream}")
    if linked:
        size = rng.choice(LINKED_SIZES)
    elif size == STAGES[-1]:
        chance = rng.random()
        if chance < _OTHER_SHARE:
            size = rng.choice(OTHER_SIZES)
        elif wide and chance < _OTHER_SHARE + _SMALL_SHARE:
            size = rng.choice(SMALL_SIZES)
    documents, facts = size
    pools = _wide_pools(encoder.pieces()) if wide else (names("train"),)
    contexts = min(_MOST_CONTEXTS, max(4, _FACTS_PER_BATCH // (documents * facts)))
    examples: list[EncodedExample] = []
    while len(examples) < contexts:
        pool = rng.choices(pools, _POOL_WEIGHTS)[0] if wide else pools[0]
        if linked and rng.random() < linked:
            example = draw_linked_example(rng, size, questions, pool)
        else:
            example = draw_example(rng, mix, size, questions, pool)
        if example.questions:
            examples.append(encode(example, encoder))
    return pack(examples, prefix, block=block)


@lru_cache(maxsize=2)
def _wide_pools(pieces: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the pools of names, in the order of `_POOL_WEIGHTS`."""
    plain, wide = names("train"), wide_names(training=True) + piece_names(pieces)
    return plain, plain + wide, wide
