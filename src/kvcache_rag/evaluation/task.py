"""What a task is: questions, and the rule that scores answers to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.evaluation.question import Question

# Questions by (how many, seed, k), and scores by (answer, question).
Draw = Callable[[int | None, int, int | None], list[Question]]
Measure = Callable[[str, Question], tuple[float, ...]]


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
    """

    name: str
    metrics: tuple[str, ...]
    instruction: str
    max_new_tokens: int
    draw: Draw
    measure: Measure

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

    def score(self, answer: str, question: Question) -> dict[str, float]:
        """How right `answer` is: a number from 0 to 1 for each of `metrics`."""
        return dict(zip(self.metrics, self.measure(answer, question), strict=True))
