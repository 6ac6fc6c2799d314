"""The reader's own questions, answered through the engine by any model.

Documents and questions come from the reader's generator, with names that never occur in its
training; every policy answers the same questions.  An answer counts when it is the expected text,
letter for letter.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_rag.progress import progress_bar
from kvcache_rag.reader import KINDS, ReaderExample, ReaderQuestion, make_example
from kvcache_rag.reader.language import REFUSAL
from kvcache_rag.reader.scoring import Share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.policies import ReusePolicy

# Far from the seeds of training and of the reader's own check.
FIRST_SEED = 10_000_000
MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class KindResult:
    """Result of one kind of question under one policy.

    Attributes:
        kind: Kind of question.
        policy: Name of the policy.
        right: Answers that equal the expected text.
        refused: Answers that say the documents do not contain it; an error unless the kind is
            "unanswerable".
        reused_share: Median share of chunk tokens that came from the store.
    """

    kind: str
    policy: str
    right: Share
    refused: Share
    reused_share: float


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


def evaluate_reader(
    engine: Engine,
    policies: Sequence[ReusePolicy],
    *,
    questions: int,
    seed: int = 0,
    documents: int = 6,
    facts: int = 4,
    kinds: Sequence[str] = KINDS,
    show_progress: bool = False,
    note: Callable[[KindResult], None] | None = None,
) -> list[KindResult]:
    """Ask every policy the same questions.

    Args:
        engine: The model.
        policies: What to compare.
        questions: At least so many per kind.
        seed: Another seed gives other names, facts and questions.
        documents: Per question.
        facts: Per document.
        kinds: Kinds of questions, from `kvcache_rag.reader.KINDS`.
        show_progress: Whether to show a bar.
        note: Called with each result as it is known.
    """
    results = []
    for kind in kinds:
        asked = examples(kind, questions, seed, documents, facts)
        total = len(policies) * len(asked)
        with progress_bar(total, kind, "context", show=show_progress) as bar:
            for policy in policies:
                answers = list(_answers(engine, policy, asked, bar.update))
                result = _result(kind, policy, answers)
                results.append(result)
                if note is not None:
                    note(result)
    return results


def _answers(
    engine: Engine,
    policy: ReusePolicy,
    asked: Sequence[ReaderExample],
    advance: Callable[[int], object],
) -> Iterator[tuple[ReaderQuestion, str, float]]:
    for example in asked:
        batch = [(question.text, example.documents) for question in example.questions]
        answers = engine.generate_batch(batch, policy=policy, max_new_tokens=MAX_NEW_TOKENS)
        for question, answer in zip(example.questions, answers, strict=True):
            metrics = answer.metrics
            chunk_tokens = metrics.reused_tokens + metrics.prefilled_tokens
            yield question, answer.text.strip(), metrics.reused_tokens / max(1, chunk_tokens)
        advance(1)


def _result(
    kind: str, policy: ReusePolicy, answers: Sequence[tuple[ReaderQuestion, str, float]]
) -> KindResult:
    count = len(answers)
    return KindResult(
        kind=kind,
        policy=repr(policy),
        right=Share(sum(text == question.answer for question, text, _ in answers), count),
        refused=Share(sum(text == REFUSAL for _, text, _ in answers), count),
        reused_share=statistics.median([share for *_, share in answers] or [0.0]),
    )
