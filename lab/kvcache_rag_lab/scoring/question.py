"""A question about documents with its accepted answers, and a task: many questions and a score.

Every data set and generator hands questions to whoever asks (`scoring.ask`) in this form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kvcache_rag.errors import InvalidInputError

Language = Literal["en", "zh"]

TokenCounter = Callable[[str], int]
"""Number of tokens of a text, without special tokens."""

Draw = Callable[[int | None, int, int | None], "list[Question]"]
"""Questions by (how many, seed, k)."""

Measure = Callable[[str, "Question"], "tuple[float | None, ...]"]
"""Scores by (answer, question); None where a question does not say what one needs."""


@dataclass(frozen=True)
class Question:
    """One question, what it is asked about, and what counts as an answer.

    Attributes:
        id: Name of the row, unique within its task.
        question: The question.
        chunks: The documents in the order of the prompt.
        answers: Right answers. Any one counts, unless `answer_groups` says otherwise; for a task
            that asks for several things at once (RULER) all are wanted.
        answer_groups: If not empty, every group has to be met by one of its strings (RGB).
        relevant: Indices into `chunks` of those that hold the answer; empty if none does or if the
            data set does not say.
        language: Of question and documents.
        closed_question: Instead of `question` where no documents are given; empty: the same.
        scores: Of each chunk, by who retrieved them; empty where nobody says.
    """

    id: str
    question: str
    chunks: tuple[str, ...]
    answers: tuple[str, ...]
    answer_groups: tuple[tuple[str, ...], ...] = ()
    relevant: tuple[int, ...] = ()
    language: Language = "en"
    closed_question: str = ""
    scores: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if any(not 0 <= index < len(self.chunks) for index in self.relevant):
            raise InvalidInputError(
                f"question {self.id!r} calls documents {self.relevant} relevant but has "
                f"{len(self.chunks)}; count from 0"
            )

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """`answer_groups`, or the answers as one group."""
        return self.answer_groups or (self.answers,)


def top_k(question: Question, k: int | None) -> Question:
    """Keep at most `k` documents, as a retriever that finds the relevant ones would.

    Relevant documents are taken first, then the others, each in the given order; what is kept
    stands in the given order. With more than `k` relevant documents the first `k` of them stay.
    Where no document is called relevant, the first `k` stay.

    Args:
        question: A question over a pool of documents.
        k: How many at most; None keeps all.

    Raises:
        InvalidInputError: If `k` is below 1.
    """
    if k is None or k >= len(question.chunks) > 0:
        return question
    if k < 1:
        raise InvalidInputError(f"k must be at least 1, not {k}")
    relevant = set(question.relevant)
    ranked = sorted(range(len(question.chunks)), key=lambda index: (index not in relevant, index))
    kept = sorted(ranked[:k])
    return replace(
        question,
        chunks=tuple(question.chunks[index] for index in kept),
        relevant=tuple(place for place, index in enumerate(kept) if index in relevant),
    )


@dataclass(frozen=True)
class Task:
    """Questions and the rule that scores answers to them.

    Attributes:
        name: Name of the task.
        metrics: Names of what `score` gives; the first is the main one.
        instruction: For the prompt's prefix; empty: keep the engine's own.
        max_new_tokens: Tokens that the benchmark allows an answer.
        draw: Gives the questions; use `questions`.
        measure: Gives the scores in the order of `metrics`; use `score`.
        closed_instruction: Instead of `instruction` where no documents are given; empty: the same.
    """

    name: str
    metrics: tuple[str, ...]
    instruction: str
    max_new_tokens: int
    draw: Draw
    measure: Measure
    closed_instruction: str = ""

    @property
    def metric(self) -> str:
        """The main metric."""
        return self.metrics[0]

    def questions(
        self, n: int | None = None, seed: int = 0, k: int | None = None
    ) -> list[Question]:
        """The questions, the same for the same arguments.

        Args:
            n: At most so many. None: all of a data set, 200 of a generator. Of a data set with
                more rows, `seed` draws which; they stay in the order of the data set. A larger
                `n` gives the same questions and more.
            seed: Of a generator: other questions.
            k: At most so many documents each, relevant ones first (`question.top_k`); a question
                keeps its id. The reader's questions choose from 6 documents, or from `k` if that
                is more, and are others then.

        Raises:
            InvalidInputError: If a number is below 1 (`seed`: below 0) or data cannot be read.
            MissingExtraError: If the data set comes from the hub and `datasets` is not installed.
        """
        for name, value in (("n", n), ("k", k)):
            if value is not None and value < 1:
                raise InvalidInputError(f"{name} must be at least 1, not {value}")
        if seed < 0:
            raise InvalidInputError(f"seed must be at least 0, not {seed}")
        return self.draw(n, seed, k)

    def in_order(self) -> Task:
        """The same, but `n` questions of a data set are its first ones, whatever the seed."""
        return replace(self, draw=partial(_first, self.draw))

    def score(self, answer: str, question: Question) -> dict[str, float]:
        """How right `answer` is: a number from 0 to 1 for each of `metrics` that can be told."""
        found = zip(self.metrics, self.measure(answer, question), strict=True)
        return {name: score for name, score in found if score is not None}


def _first(draw: Draw, n: int | None, seed: int, k: int | None) -> list[Question]:
    every = draw(None, seed, k)
    # A generator gives 200 unless it is asked for more.
    return every[:n] if n is None or n <= len(every) else draw(n, seed, k)
