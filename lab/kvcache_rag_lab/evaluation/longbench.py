"""LongBench's question sets (arXiv 2308.14508): rows, prompts and answer lengths.

A line is `{"input", "context", "answers", "length", "dataset", "language", "all_classes", "_id"}`:
the documents of a question are one text, which `questions` cuts as the set is made.

| sets | cut |
|---|---|
| hotpotqa, 2wikimqa, musique, dureader | at each passage's heading ("Passage 1:"), left out |
| narrativeqa, qasper, multifieldqa_en, multifieldqa_zh | nowhere: one document, to be split |
| triviaqa | before each worked example ("Passage:"); the question holds its own passage |

Prompts and lengths are those of its repository (THUDM/LongBench, MIT licence:
`config/dataset2prompt.json`, `config/dataset2maxlen.json`).  What stands before the documents there
is the task's instruction here, and what stands behind them is part of the question.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kvcache_rag_lab.scoring.question import Question

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvcache_rag_lab.scoring.question import Language

Cut = Literal["passages", "document", "examples"]

Metric = Literal["f1", "f1_chinese", "rouge_l_chinese"]

PREFIX: Final = "longbench_"

_HEADING: Final = re.compile(r"^(?:Passage \d+:|文章\s*\d+)[ \t]*\n?", re.MULTILINE)

_EXAMPLE: Final = re.compile(r"^(?=Passage:)", re.MULTILINE)


@dataclass(frozen=True)
class LongBenchSet:
    """One of its sets.

    Attributes:
        name: LongBench's name of it.
        cut: What its contexts are.
        before: Its prompt up to the documents.
        behind: Its prompt behind them; `{input}` is the question.
        max_new_tokens: Tokens that it allows an answer.
        language: Of its texts.
        metric: Its rule; the best right answer counts.
    """

    name: str
    cut: Cut
    before: str
    behind: str
    max_new_tokens: int
    language: Language = "en"
    metric: Metric = "f1"

    def ask(self, question: str) -> str:
        """The question in the words of LongBench's prompt."""
        return self.behind.replace("{input}", question)

    def pieces(self, context: str) -> tuple[str, ...]:
        """The documents that a context is made of, without white space around them."""
        if self.cut == "document":
            parts = [context]
        else:
            parts = (_HEADING if self.cut == "passages" else _EXAMPLE).split(context)
        return tuple(piece for part in parts if (piece := part.strip()))


_PHRASE: Final = (
    "as concisely as you can, using a single phrase if possible. Do not provide any explanation."
)

_ARTICLE: Final = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question "
    'cannot be answered based on the information in the article, write "unanswerable". If the '
    'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any '
    "explanation."
)

_PASSAGES: Final = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words."
)

_SETS: Final = (
    LongBenchSet(
        "narrativeqa",
        "document",
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"Answer the question {_PHRASE}\n\nStory:",
        f"Now, answer the question based on the story {_PHRASE}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
    ),
    LongBenchSet(
        "qasper",
        "document",
        f"You are given a scientific article and a question. Answer the question {_ARTICLE}\n\n"
        "Article:",
        f"Answer the question based on the above article {_ARTICLE}\n\nQuestion: {{input}}\n\n"
        "Answer:",
        128,
    ),
    LongBenchSet(
        "multifieldqa_en",
        "document",
        "Read the following text and answer briefly.",
        "Now, answer the following question based on the above text, only give me the answer and "
        "do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
    ),
    LongBenchSet(
        "multifieldqa_zh",
        "document",
        "阅读以下文字并用中文简短回答：",
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n"
        "问题：{input}\n回答：",
        64,
        "zh",
        "f1_chinese",
    ),
    *(
        LongBenchSet(
            name,
            "passages",
            f"{_PASSAGES}\n\nThe following are given passages.",
            f"{_PASSAGES}\n\nQuestion: {{input}}\nAnswer:",
            32,
        )
        for name in ("hotpotqa", "2wikimqa", "musique")
    ),
    LongBenchSet(
        "dureader",
        "passages",
        "请基于给定的文章回答下述问题。\n\n文章：",
        "请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        "zh",
        "rouge_l_chinese",
    ),
    LongBenchSet(
        "triviaqa",
        "examples",
        "Answer the question based on the given passage. Only give me the answer and do not output "
        "any other words. The following are some examples.",
        "{input}",
        32,
    ),
)

LONGBENCH: Final = {f"{PREFIX}{one.name}": one for one in _SETS}


def questions(one: LongBenchSet, rows: Iterable[Mapping[str, Any]]) -> Iterator[Question]:
    """The rows of a set.

    LongBench does not say which passages hold the answer, so `relevant` is empty but for a single
    document.

    Args:
        one: Which set.
        rows: Its rows, or LongBench-E's (whose `dataset` ends with "_e").

    Raises:
        ValueError: If a row is of another set.
    """
    for row in rows:
        if row["dataset"].removesuffix("_e") != one.name:
            raise ValueError(f"rows of {row['dataset']}, not of {one.name}")
        chunks = one.pieces(row["context"])
        yield Question(
            id=row["_id"],
            question=one.ask(row["input"]),
            chunks=chunks,
            answers=tuple(row["answers"]),
            relevant=(0,) if one.cut == "document" and chunks else (),
            language=one.language,
            closed_question=row["input"],
        )
