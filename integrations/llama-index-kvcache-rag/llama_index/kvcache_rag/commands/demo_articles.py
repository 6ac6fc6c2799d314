"""`kvcache-rag demo`: a real model over forty articles about the real world.

Every question is answered by full prefill and from cached chunks, over the same retrieved nodes: a
paragraph or two each, the best one last, beside the question, where a small model reads best.
"""

from __future__ import annotations

import statistics
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.integration import chosen_adapter, table
from kvcache_rag_lab.articles import read_articles, read_questions
from llama_index.kvcache_rag.commands.report import milliseconds, plural, size, without_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag_lab.articles import Article, ArticleQuestion
    from llama_index.kvcache_rag.commands.demo_app import DemoApp, Exchange, Filling

CHUNK_SIZE: Final = 128
"""Of a node, in tokens of LlamaIndex's counter."""
TOP_K: Final = 9
MAX_NEW_TOKENS: Final = 48
WIDTH: Final = 88
LINES: Final = 3
"""Of an answer, on the terminal."""


@dataclass(frozen=True)
class AskedQuestion:
    """One question, answered both ways over the same nodes.

    Attributes:
        question: As it was asked.
        expected: The parts of a right answer, each in the spellings that count; none if no article
            tells, so that only a refusal is right.
        is_found: Whether of every article that tells a node was retrieved.
        full: The answer by full prefill.
        cached: The answer from cached chunks.
        full_is_right: Whether the first is right.
        cached_is_right: Whether the second is.
        full_ttft: Seconds to the first token by full prefill.
        cached_ttft: Seconds to the first token from cached chunks.
        ratio: How many times sooner that is.
        context_tokens: Tokens before the question.
        reused_tokens: Of these, how many came from caches.
        recomputed_tokens: Of these, how many the policy computed again.
        misses: Chunks whose cache was not stored.
    """

    question: str
    expected: tuple[tuple[str, ...], ...]
    is_found: bool
    full: str
    cached: str
    full_is_right: bool
    cached_is_right: bool
    full_ttft: float
    cached_ttft: float
    ratio: float
    context_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    misses: int


class ArticlesDemo:
    """The articles, and some or all of their questions.

    Attributes:
        documents: How many articles there are.
        texts: Their nodes, by id: the article's name, and a number.
        questions: Those that are asked.
    """

    collection, top_k, max_new_tokens = "demo-articles", TOP_K, MAX_NEW_TOKENS

    def __init__(self, questions: int | None) -> None:
        """Read both.

        Args:
            questions: How many, spread over all of them, so that each kind has its share; None for
                all.
        """
        self.documents, self.texts = _split(read_articles())
        self.questions = spread(read_questions(), questions)

    def facts(self, app: DemoApp, filling: Filling) -> dict[str, Any]:
        """What is asked about, by whom, and what ingestion did."""
        import torch

        return {
            "model": app.model,
            "backend": app.settings.backend,
            "adapter": chosen_adapter(app.settings.model, app.settings.adapter),
            "threads": torch.get_num_threads(),
            "documents": self.documents,
            "top_k": app.top_k,
            "chunks": filling.chunks,
            "prefilled": filling.prefilled,
            "prefill_seconds": filling.seconds if filling.prefilled else None,
            "bytes": filling.nbytes,
            "folder": app.settings.kv_dir,
        }

    @staticmethod
    def judged(question: ArticleQuestion, exchange: Exchange) -> AskedQuestion:
        """What became of a question."""
        return _asked(question, exchange)

    @staticmethod
    def row(number: int, asked: AskedQuestion) -> str:
        """That for people."""
        return _row(number, asked)

    @staticmethod
    def summary(asked: Sequence[AskedQuestion], last: Exchange) -> dict[str, Any]:
        """What all answers say together."""
        return {"policy": last.cached.metrics["policy"], **_summary(asked)}

    @staticmethod
    def print_start(facts: dict[str, Any]) -> None:
        """Model, articles, caches."""
        print(_model(facts))
        print(f"{plural(facts['documents'], 'article')}; {_caches(facts)}\n")

    @staticmethod
    def print_end(summary: dict[str, Any], facts: dict[str, Any]) -> None:
        """The summary for people."""
        print(_table(summary))
        print(
            f"the first token from cached chunks came {summary['ttft_ratio']:.1f} times sooner "
            f"(median of {plural(len(summary['questions']), 'question')}),\n"
            f"over a context of {summary['context_tokens']:.0f} tokens (median); "
            f"policy {summary['policy']}"
        )
        print(f"KV caches: {_caches(facts)}")
        print(
            f"articles with the answer retrieved: {summary['retrieved']} of "
            f"{summary['answerable']}; chunks without a stored cache: {summary['misses']}"
        )
        print(_model(facts))

    @staticmethod
    def failure(summary: dict[str, Any]) -> str:
        """What went wrong, in one sentence; "" if nothing did."""
        return without_cache(summary["misses"])


def _split(articles: Sequence[Article]) -> tuple[int, dict[str, str]]:
    """How many articles, and their nodes by id, as an app of LlamaIndex makes them."""
    from llama_index.core.node_parser import SentenceSplitter

    splitter = SentenceSplitter(chunk_size=CHUNK_SIZE, chunk_overlap=0)
    nodes = {
        f"{article.name} {number}": text
        for article in articles
        for number, text in enumerate(splitter.split_text(article.text), start=1)
    }
    return len(articles), nodes


def spread(questions: Sequence[ArticleQuestion], count: int | None) -> list[ArticleQuestion]:
    """Some of the questions, at even distances, in their order; None for all.

    Raises:
        InvalidInputError: If there are not as many.
    """
    from kvcache_rag import InvalidInputError

    if count is None:
        return list(questions)
    if not 1 <= count <= len(questions):
        raise InvalidInputError(f"--questions must be 1 to {len(questions)}, not {count}")
    return [questions[index * len(questions) // count] for index in range(count)]


def _summary(asked: Sequence[AskedQuestion]) -> dict[str, Any]:
    answerable = [one for one in asked if one.expected]
    others = [one for one in asked if not one.expected]
    return {
        "answerable": len(answerable),
        "right_full": sum(one.full_is_right for one in answerable),
        "right_cached": sum(one.cached_is_right for one in answerable),
        "unanswerable": len(others),
        "refused_full": sum(one.full_is_right for one in others),
        "refused_cached": sum(one.cached_is_right for one in others),
        "retrieved": sum(one.is_found for one in answerable),
        "misses": sum(one.misses for one in asked),
        "context_tokens": statistics.median(one.context_tokens for one in asked),
        "ttft_ratio": statistics.median(one.ratio for one in asked),
        "ttft_full": statistics.median(one.full_ttft for one in asked),
        "ttft_cached": statistics.median(one.cached_ttft for one in asked),
        "questions": [asdict(one) for one in asked],
    }


def _asked(question: ArticleQuestion, exchange: Exchange) -> AskedQuestion:
    full, cached = exchange.full, exchange.cached
    return AskedQuestion(
        question=question.text,
        expected=question.answers,
        is_found=set(question.articles) <= {node.rpartition(" ")[0] for node in exchange.nodes},
        full=full.text,
        cached=cached.text,
        full_is_right=question.is_met_by(full.text),
        cached_is_right=question.is_met_by(cached.text),
        full_ttft=full.ttft,
        cached_ttft=cached.ttft,
        ratio=exchange.ratio,
        context_tokens=exchange.context_tokens,
        reused_tokens=cached.metrics["reused_tokens"],
        recomputed_tokens=cached.metrics["recomputed_tokens"],
        misses=cached.metrics["misses"],
    )


def _model(facts: dict[str, Any]) -> str:
    """Who is asked."""
    adapter, threads = facts["adapter"] or "none", plural(facts["threads"], "thread")
    by = "" if facts["backend"] == "transformers" else f" in {facts['backend']}"
    return f"model {facts['model']}{by}, adapter {adapter}, {threads}"


def _caches(facts: dict[str, Any]) -> str:
    """What is kept, and whether it was computed now."""
    kept = f"{plural(facts['chunks'], 'chunk')}, {size(facts['bytes'])} in {facts['folder']}; "
    if not facts["prefilled"]:
        return kept + "no chunk prefilled: all were there"
    seconds = milliseconds(facts["prefill_seconds"])
    return kept + f"{plural(facts['prefilled'], 'chunk')} prefilled in {seconds}"


def _row(number: int, asked: AskedQuestion) -> str:
    """A question, and below it both answers beside their times."""
    question = textwrap.fill(
        asked.question, WIDTH, initial_indent=f"{number:2d}  ", subsequent_indent="    "
    )
    wrong, right = ("WRONG", "right") if asked.expected else ("MADE UP", "refused")
    lines = [question]
    for name, text, is_right, ttft in (
        ("full prefill", asked.full, asked.full_is_right, asked.full_ttft),
        ("cached chunks", asked.cached, asked.cached_is_right, asked.cached_ttft),
    ):
        verdict = right if is_right else wrong
        start = f"    {name:<14}{milliseconds(ttft):>9}  {verdict:<9}"
        lines.append(
            textwrap.fill(
                " ".join(text.split()) or "(nothing)",
                WIDTH,
                initial_indent=start,
                subsequent_indent=" " * len(start),
                max_lines=LINES,
                placeholder=" ...",
            )
        )
    return "\n".join(lines)


def _table(summary: dict[str, Any]) -> str:
    rows: list[tuple[str, str, str]] = [("", "full prefill", "cached chunks")]
    for label, total, name in (
        ("right", "answerable", "right"),
        ("no article tells: refused", "unanswerable", "refused"),
    ):
        count = summary[total]
        full, cached = (f"{summary[f'{name}_{side}']} of {count}" for side in ("full", "cached"))
        if count:
            rows.append((label, full, cached))
    rows.append(
        (
            "first token after (median)",
            milliseconds(summary["ttft_full"]),
            milliseconds(summary["ttft_cached"]),
        )
    )
    return "\n" + "\n".join(table(rows, right=frozenset({1, 2})))
