"""First tokens, computed tokens and right answers on a few questions, in some minutes.

The questions are those about the packaged articles, or of the packaged reader, which can read
nothing else.  Every one has the chunks of the articles that answer it among those of others, in an
order of its own, so that nothing but single chunks recurs.  All sides answer it one after the
other, in turns; the first question is asked once before, uncounted.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, KVCacheRagError, UnsupportedModelError
from kvcache_rag.models.model_names import TINY, resolve
from kvcache_rag.models.pretrained import gguf_of
from kvcache_rag.policies import FullRecompute, Reuse
from kvcache_rag.progress import progress_bar
from kvcache_rag_lab.articles import names_all, read_articles, read_questions
from kvcache_rag_lab.evaluation.cost.speed import (
    collected_before_answers,
    interval_report,
    times_report,
)
from kvcache_rag_lab.evaluation.datasets import split_text
from kvcache_rag_lab.reader import collection
from kvcache_rag_lab.scoring.ask import Workplaces, rotated
from kvcache_rag_lab.scoring.question import Question
from kvcache_rag_lab.scoring.statistics import median_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.metrics import Answer
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.settings import EngineSettings
    from kvcache_rag_lab.scoring.question import TokenCounter

FULL: Final = "full prefill"

LLAMA: Final = "llama.cpp, full prefill"

_BACKEND: Final = "llama.cpp"

_SEED: Final = 0  # of distractors and orders

_CHUNK: Final = 128  # tokens of a piece of an article


@dataclass(frozen=True)
class QuickPlan:
    """What is asked.

    Attributes:
        questions: How many.
        context: Tokens of a question's chunks at most, unless its own documents have more.
        tokens: Longest answer.
    """

    questions: int
    context: int
    tokens: int


PLAN: Final = QuickPlan(questions=20, context=1000, tokens=32)


@dataclass(frozen=True)
class QuickCorpus:
    """Documents in chunks, and questions about them.

    Attributes:
        documents: The chunks of each.
        asked: Each question, the groups of its right answers, and the documents that hold these.
    """

    documents: Sequence[Sequence[str]]
    asked: Sequence[tuple[str, tuple[tuple[str, ...], ...], tuple[int, ...]]]

    @classmethod
    def from_articles(cls, questions: int, count: TokenCounter) -> QuickCorpus:
        """Questions about articles, at even distances among all, and the articles they are about.

        Args:
            questions: How many.
            count: Tokens of a text.
        """
        every = [one for one in read_questions() if one.is_answerable]
        drawn = [every[place * len(every) // questions] for place in range(questions)]
        names = list(dict.fromkeys(name for one in drawn for name in one.articles))
        texts = {one.name: one.text for one in read_articles()}
        pieces = [split_text(texts[name], count, tokens=_CHUNK, overlap=0) for name in names]
        asked = [(one.text, one.answers, tuple(map(names.index, one.articles))) for one in drawn]
        return cls(pieces, asked)

    @classmethod
    def from_reader(cls, questions: int) -> QuickCorpus:
        """Questions that the packaged reader can answer, and the documents of its collection."""
        known = collection()
        drawn = random.Random(_SEED).sample(known.questions, questions)
        asked = [(one.text, ((one.answer,),), one.documents) for one in drawn]
        return cls([(text,) for text in known.documents], asked)

    def questions(self, context: int, count: TokenCounter) -> list[Question]:
        """Each over its own documents and drawn chunks of others, in an order of its own.

        Args:
            context: Tokens that drawn chunks fill up, but not exceed.
            count: Tokens of a chunk.
        """
        generator = random.Random(_SEED)
        lengths = {chunk: count(chunk) for chunks in self.documents for chunk in chunks}
        found = []
        for text, groups, own in self.asked:
            chunks = [chunk for place in own for chunk in self.documents[place]]
            others = [chunk for chunk in lengths if chunk not in chunks]
            room = context - sum(map(lengths.__getitem__, chunks))
            for chunk in generator.sample(others, len(others)):
                if lengths[chunk] <= room:
                    chunks.append(chunk)
                    room -= lengths[chunk]
            generator.shuffle(chunks)
            answers = tuple(one for group in groups for one in group)
            found.append(Question(text, text, tuple(chunks), answers, answer_groups=groups))
        return found


def packaged_questions(engine: Engine, plan: QuickPlan, model: str) -> list[Question]:
    """What a model is asked: the packaged reader what it can read, all others the articles.

    Args:
        engine: Of the model.
        plan: How much.
        model: Its name.
    """

    def count(text: str) -> int:
        return len(engine.brought_ids(text))

    if model == TINY:
        corpus = QuickCorpus.from_reader(plan.questions)
    else:
        corpus = QuickCorpus.from_articles(plan.questions, count)
    return corpus.questions(plan.context, count)


@dataclass(frozen=True)
class QuickSide:
    """One way to answer.

    Attributes:
        name: What it is called.
        engine: Of the model; it goes on from no earlier prompt.
        policy: What is reused.
    """

    name: str
    engine: Engine
    policy: ReusePolicy

    def ask(self, question: Question, tokens: int) -> Answer:
        """Answer with so many tokens at most."""
        return self.engine.generate(
            question.question, question.chunks, policy=self.policy, max_new_tokens=tokens
        )


def quick_sides(engine: Engine, policy: ReusePolicy | None = None) -> tuple[QuickSide, ...]:
    """Full prefill, a policy, and `Reuse()` if that is another one.

    Args:
        engine: Of the model; its own store is not used.
        policy: None for the engine's default.

    Raises:
        UnsupportedModelError: If chunks of this model cannot be stitched.
    """
    if engine.refusal:
        raise UnsupportedModelError(
            f"{engine.refusal}, so there is no stitching of its chunks to measure"
        )
    engine = _in_memory(engine)
    named = f"{engine.policy!r}, the default" if policy is None else repr(policy)
    ways = {FULL: FullRecompute(), named: policy or engine.policy}
    if repr(Reuse()) not in map(repr, ways.values()):
        ways[repr(Reuse())] = Reuse()
    return tuple(QuickSide(name, engine, way) for name, way in ways.items())


def llama_side(settings: EngineSettings) -> QuickSide | str:
    """llama.cpp's own full prefill of the same weights, or why there is none."""
    if gguf_of(resolve(settings.model), settings.model_kwargs) is None:
        return f"it runs GGUF files, and {settings.model} is none"
    try:
        engine = settings.model_copy(update={"backend": _BACKEND}).open_engine()
    except KVCacheRagError as error:
        return str(error)
    return QuickSide(LLAMA, _in_memory(engine), FullRecompute())


def _in_memory(engine: Engine) -> Engine:
    return Workplaces(engine, Path()).get("", "").reader


class QuickBench:
    """Some sides, the questions, and what became of them.

    Attributes:
        sides: The first one is what the others are compared with.
        questions: What is asked, each with its documents.
        tokens: Longest answer.
    """

    def __init__(
        self, sides: Sequence[QuickSide], questions: Sequence[Question], tokens: int
    ) -> None:
        """Look whether all fits.

        Args:
            sides: Ways to answer; those over cached chunks share the first one's engine.
            questions: What to ask.
            tokens: Longest answer.

        Raises:
            InvalidInputError: If a prompt does not fit a model's window.
        """
        self.sides, self.questions, self.tokens = tuple(sides), tuple(questions), tokens
        self._engine = self.sides[0].engine
        self._prefilled: tuple[int, int, float] | None = None
        self._answers: list[dict[str, Answer]] = []
        self._check_window()

    def _check_window(self) -> None:
        asked = (self._engine.tokenize(one.question, one.chunks) for one in self.questions)
        longest = max(len(ids.all) for ids in asked) + self.tokens
        window = min(side.engine.context_window for side in self.sides)
        if longest > window:
            raise InvalidInputError(
                f"a question with its documents and answer has {longest:,} tokens, which does not "
                f"fit the model's window of {window:,}; name a MODEL with a larger one, or leave "
                "out --quick"
            )

    def prefill(self, *, show_progress: bool = False) -> None:
        """Prefill the chunks of all questions into memory, timed."""
        texts = list(dict.fromkeys(text for one in self.questions for text in one.chunks))
        started = time.perf_counter()
        keys = self._engine.add(texts, show_progress=show_progress)
        seconds = time.perf_counter() - started
        self._prefilled = len(keys), sum(key.tokens for key in keys), seconds

    def measure(self, *, show_progress: bool = False) -> None:
        """Ask every question of all sides in turns."""
        tokens, total = self.tokens, len(self.sides) * (len(self.questions) + 1)
        with (
            collected_before_answers(),
            progress_bar(total, "ask", " answers", show=show_progress) as bar,
        ):
            for side in self.sides:  # what is loaded and compiled on a first call
                side.ask(self.questions[0], tokens)
                bar.update()
            for turn, question in enumerate(self.questions):
                found = {}
                for side in rotated(self.sides, turn):
                    gc.collect()
                    found[side.name] = side.ask(question, tokens)
                    bar.update()
                self._answers.append(found)

    def report(self) -> dict[str, Any]:
        """What was asked, prefilled and found, in seconds and tokens."""
        chunks, tokens, seconds = self._prefilled or (0, 0, 0.0)
        asked = [*map(self._asked, self.questions, self._answers)]
        return {
            "questions": len(asked),
            "chunks": statistics.median(len(row["documents"]) for row in asked),
            "context": statistics.median(row["context"] for row in asked),
            "max_new_tokens": self.tokens,
            "prefilled": {"chunks": chunks, "tokens": tokens, "seconds": seconds},
            "sides": [self._side(number, asked) for number in range(len(self.sides))],
            "asked": asked,
        }

    def _asked(self, question: Question, found: dict[str, Answer]) -> dict[str, Any]:
        ids = self._engine.tokenize(question.question, question.chunks)
        return {
            "question": question.question,
            "expected": [list(group) for group in question.groups],
            "documents": list(question.chunks),
            "context": sum(map(len, ids.chunks)),
            "answers": [_row(question, found[side.name]) for side in self.sides],
        }

    def _side(self, number: int, asked: Sequence[dict[str, Any]]) -> dict[str, Any]:
        side, rows = self.sides[number], [row["answers"][number] for row in asked]
        seconds = [row["seconds"] for row in rows]
        first = [row["answers"][0]["seconds"] for row in asked]
        ratios = [full / own for full, own in zip(first, seconds, strict=True)]
        return {
            "side": side.name,
            "policy": repr(side.policy),
            "first_token": times_report(seconds),
            "sooner": interval_report(median_interval(ratios)) if number else None,
            "computed_tokens": statistics.median(row["computed_tokens"] for row in rows),
            "right": sum(row["right"] for row in rows),
        }


def _row(question: Question, answer: Answer) -> dict[str, Any]:
    text = answer.text.strip()
    return {
        "answer": text,
        "right": int(names_all(text, question.groups)),
        "seconds": answer.metrics.ttft,
        "computed_tokens": answer.metrics.computed_tokens,
    }
