"""The reader's own questions: documents and questions come from its generator.

Their names never occur in the reader's training.
"""

from __future__ import annotations

from kvcache_rag.reader import ReaderExample, make_example

# Far from the seeds of training and of the reader's own check.
FIRST_SEED = 10_000_000
MAX_NEW_TOKENS = 32


def examples(
    kind: str, questions: int, seed: int, documents: int, facts: int
) -> list[ReaderExample]:
    """Examples of one kind until they hold at least `questions` questions."""
    found: list[ReaderExample] = []
    count = 0
    while count < questions:
        example = make_example(
            FIRST_SEED * (seed + 1) + len(found), documents=documents, facts=facts, kind=kind
        )
        found.append(example)
        count += len(example.questions)
    return found
