"""`kvcache-rag demo --model tiny`: the packaged reader over made-up facts, in a minute."""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from llama_index.kvcache_rag.commands.report import milliseconds, plural, size, without_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag_lab.reader import ReaderQuestion
    from llama_index.kvcache_rag.commands.demo_app import DemoApp, Exchange, Filling

QUESTIONS: Final = 24
TOP_K: Final = 8
MAX_NEW_TOKENS: Final = 24
ENOUGH: Final = 0.8
"""Share of right answers below which the command fails."""


@dataclass(frozen=True)
class Outcome:
    """One question, answered both ways over the same chunks.

    Attributes:
        question: As it was asked.
        answer: From stored caches.
        expected: The right answer.
        is_right: Whether they agree.
        is_found: Whether the document that has the answer was retrieved.
        misses: Chunks whose cache was not stored.
        stitched: Seconds to the first token from stored caches.
        full: Seconds to the first token by full prefill.
        reused_tokens: Tokens that were not computed.
    """

    question: str
    answer: str
    expected: str
    is_right: bool
    is_found: bool
    misses: int
    stitched: float
    full: float
    reused_tokens: int


class ReaderDemo:
    """Documents of made-up facts, and questions whose answers are exact."""

    top_k, max_new_tokens = TOP_K, MAX_NEW_TOKENS

    def __init__(self, seed: int, questions: int) -> None:
        """Take the documents, and questions about them.

        Args:
            seed: Decides which questions.
            questions: How many at most.
        """
        from kvcache_rag_lab.reader import collection

        self.seed, self.collection = seed, "demo-reader"
        known = collection()
        order = random.Random(seed).sample(known.questions, len(known.questions))
        self.questions = order[:questions]
        self.texts = {f"document-{index}": text for index, text in enumerate(known.documents)}

    def facts(self, app: DemoApp, filling: Filling) -> dict[str, Any]:
        """What is asked about, and what ingestion did."""
        return {
            "seed": self.seed,
            "model": app.model,
            "documents": len(self.texts),
            "top_k": app.top_k,
            "chunks": filling.chunks,
            "prefilled": filling.prefilled,
            "bytes": filling.nbytes,
            "folder": app.settings.kv_dir,
        }

    @staticmethod
    def judged(question: ReaderQuestion, exchange: Exchange) -> Outcome:
        """What became of a question."""
        return _outcome(question, exchange)

    @staticmethod
    def row(number: int, outcome: Outcome) -> str:
        """That for people."""
        return _row(number, outcome)

    @staticmethod
    def summary(outcomes: Sequence[Outcome], last: Exchange) -> dict[str, Any]:
        """What all answers say together."""
        count = len(outcomes)
        return {
            "right": sum(outcome.is_right for outcome in outcomes) / count,
            "recall": sum(outcome.is_found for outcome in outcomes) / count,
            "misses": sum(outcome.misses for outcome in outcomes),
            "ttft_ratio": statistics.median(one.full / one.stitched for one in outcomes),
            "ttft_stitched": statistics.median(outcome.stitched for outcome in outcomes),
            "ttft_full": statistics.median(outcome.full for outcome in outcomes),
            "questions": [asdict(outcome) for outcome in outcomes],
        }

    @staticmethod
    def print_start(facts: dict[str, Any]) -> None:
        """Model, documents, caches, and the head of the table."""
        print(f"seed {facts['seed']}, model {facts['model']}")
        documents, chunks = plural(facts["documents"], "document"), plural(facts["chunks"], "chunk")
        print(f"{documents}, {chunks}; ", end="")
        if facts["prefilled"]:
            print(f"{plural(facts['prefilled'], 'chunk')} prefilled now, ", end="")
        else:
            print("no chunk prefilled: all caches were there from an earlier run, ", end="")
        print(f"{size(facts['bytes'])} in {facts['folder']}\n")
        print(
            "    answer                    expected                  right"
            "  stitched      full  ratio reused"
        )

    @staticmethod
    def print_end(summary: dict[str, Any], facts: dict[str, Any]) -> None:
        """The summary for people."""
        print(
            f"\nright {summary['right']:.0%}, "
            f"the right document among the {facts['top_k']} retrieved {summary['recall']:.0%}, "
            f"chunks without a stored cache: {summary['misses']}"
        )
        print(
            f"median time to the first token: {milliseconds(summary['ttft_stitched'])} stitched, "
            f"{milliseconds(summary['ttft_full'])} full prefill; "
            f"median ratio {summary['ttft_ratio']:.1f}x"
        )
        print("this model is tiny; larger ones and longer contexts gain far more: `make bench`")

    @staticmethod
    def failure(summary: dict[str, Any]) -> str:
        """What went wrong, in one sentence; "" if nothing did."""
        if summary["right"] >= ENOUGH or summary["misses"]:
            return without_cache(summary["misses"])
        return f"only {summary['right']:.0%} of the answers are right, {ENOUGH:.0%} are due"


def _outcome(question: ReaderQuestion, exchange: Exchange) -> Outcome:
    cached = exchange.cached
    return Outcome(
        question=question.text,
        answer=cached.text,
        expected=question.answer,
        is_right=" ".join(cached.text.split()) == question.answer,
        is_found=all(f"document-{index}" in exchange.nodes for index in question.documents),
        misses=cached.metrics["misses"],
        stitched=cached.ttft,
        full=exchange.full.ttft,
        reused_tokens=cached.metrics["reused_tokens"],
    )


def _row(number: int, outcome: Outcome) -> str:
    return (
        f"{number:3d} {outcome.question}\n    {outcome.answer:<25} {outcome.expected:<25}"
        f" {'yes' if outcome.is_right else 'NO':<5}"
        f" {milliseconds(outcome.stitched):>9} {milliseconds(outcome.full):>9}"
        f" {outcome.full / outcome.stitched:5.1f}x {outcome.reused_tokens:6d}"
    )
