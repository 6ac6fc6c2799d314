"""The tasks of `kvcache-rag eval`: where questions come from, and how answers are scored.

| names | questions | metrics, the first is the main one |
|---|---|---|
| reader_KIND | the packaged reader's generator, held-out names | exact_match, refused |
| niah_*, niah_reader_* | `niah`, `niah_reader` | reference_coverage |
| rgb_en, rgb_zh, rgb_zh_int, each also _noiseNN | RGB | accuracy, rejected |
| hotpotqa, 2wiki (or 2wikimqa), musique | multi-document QA | f1, exact_match, f1_longbench |
| squad | SQuAD v1.1 with distractors | f1, exact_match |
| nq | Natural Questions, by lost-in-the-middle's rule | substring_match |
| dureader | DuReader, by LongBench's rule | rouge_l |
| multifieldqa_zh | LongBench: one long document, split into chunks | f1 |

The reader's answers are compared letter for letter; those of data sets as `metrics` says.  A
question has the same id for every `k`, and a larger `n` only adds questions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.evaluation import metrics
from kvcache_rag.evaluation.chunking import CHUNK_TOKENS, OVERLAP, estimated_tokens, split_text
from kvcache_rag.evaluation.niah import ANSWER_TOKENS, VARIANTS, needle_question
from kvcache_rag.evaluation.niah_reader import READER_VARIANTS, reader_needle_question
from kvcache_rag.evaluation.question import Question, TokenCounter, top_k
from kvcache_rag.evaluation.reader_task import FIRST_SEED, MAX_NEW_TOKENS, examples
from kvcache_rag.evaluation.sets import RGB, SETS, rgb_task, set_task
from kvcache_rag.evaluation.task import Task
from kvcache_rag.reader import KINDS
from kvcache_rag.reader.language import REFUSAL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Question", "Task", "TokenCounter", "task_by_name", "task_names"]

# Questions of a generator when the caller does not say how many.
GENERATED: Final = 200
# The pool of documents that `k` chooses from (more if `k` is more), and facts of each.
READER_DOCUMENTS: Final = 6
READER_FACTS: Final = 4
_ALIASES: Final = {"2wikimqa": "2wiki", "2wikimultihopqa": "2wiki"}
_READER: Final = {f"reader_{kind}": kind for kind in KINDS}


def task_names() -> tuple[str, ...]:
    """Every name that `task_by_name` takes, without its aliases."""
    return (*_READER, *READER_VARIANTS, *VARIANTS, *RGB, *SETS)


def task_by_name(
    name: str,
    *,
    data: Path | None = None,
    count: TokenCounter | None = None,
    length: int = 4096,
    chunk_tokens: int = CHUNK_TOKENS,
    overlap: int = OVERLAP,
    documents: int = READER_DOCUMENTS,
    facts: int = READER_FACTS,
) -> Task:
    """Build a task.

    Args:
        name: One of `task_names`.
        data: Folder with a data set's JSON lines (`hotpotqa.jsonl`, ...); for RGB the files of its
            repository (`zh_refine.json`, ...) do as well. None: the hub.
        count: Number of tokens of a text, without special tokens, by the model's tokenizer; an
            estimate by default.
        length: Tokens of a needle task's prompt, see `niah.needle_question`.
        chunk_tokens: Longest chunk of a needle task, and of multifieldqa_zh.
        overlap: Tokens that such chunks share.
        documents: The pool of a reader's question, from which `k` chooses.
        facts: Of each of these documents.

    Raises:
        InvalidInputError: If there is no such task, a number is below 1, or `data` does not have
            its file.
    """
    name = _ALIASES.get(name, name)
    count = count or estimated_tokens
    if documents < 1 or facts < 1:
        raise InvalidInputError(
            f"a reader's question needs documents and facts, not {documents}x{facts}"
        )
    if name in _READER:
        ask = partial(_reader_questions, _READER[name], documents, facts)
        return Task(name, ("exact_match", "refused"), "", MAX_NEW_TOKENS, ask, _reader_score)
    if name in READER_VARIANTS:
        hide = partial(_reader_needles, name, documents, facts)
        return Task(name, ("reference_coverage",), "", MAX_NEW_TOKENS, hide, _coverage)
    if name in VARIANTS:
        one = partial(
            needle_question,
            name,
            count=count,
            length=length,
            chunk_tokens=chunk_tokens,
            overlap=overlap,
        )
        return Task(
            name,
            ("reference_coverage",),
            VARIANTS[name].instruction,
            ANSWER_TOKENS,
            partial(_needles, one),
            _coverage,
        )
    if name in RGB:
        return rgb_task(name, data)
    if name in SETS:
        return set_task(
            name, data, partial(split_text, count=count, tokens=chunk_tokens, overlap=overlap)
        )
    raise InvalidInputError(f"there is no task {name!r}; choose from {', '.join(task_names())}")


def _coverage(answer: str, question: Question) -> tuple[float, ...]:
    return (metrics.reference_coverage(answer, question.answers),)


def _reader_score(answer: str, question: Question) -> tuple[float, ...]:
    said = answer.strip()
    return float(said in question.answers), float(said == REFUSAL)


def _reader_questions(
    kind: str, documents: int, facts: int, n: int | None, seed: int, k: int | None
) -> list[Question]:
    wanted, documents = n or GENERATED, max(k or 0, documents)
    found = [
        Question(
            id=f"reader_{kind}-{documents}-{seed}-{context}-{index}",
            question=one.text,
            chunks=example.documents,
            answers=(one.answer,),
            relevant=tuple(sorted(one.documents)),
        )
        for context, example in enumerate(examples(kind, wanted, seed, documents, facts))
        for index, one in enumerate(example.questions)
    ]
    return [top_k(question, k) for question in found[:wanted]]


def _reader_needles(
    name: str, documents: int, facts: int, n: int | None, seed: int, k: int | None
) -> list[Question]:
    documents = max(k or 0, documents)
    return [
        top_k(
            reader_needle_question(
                name, FIRST_SEED * (seed + 1) + index, documents=documents, facts=facts
            ),
            k,
        )
        for index in range(n or GENERATED)
    ]


def _needles(
    one: Callable[[int], Question], n: int | None, seed: int, k: int | None
) -> list[Question]:
    return [top_k(one(FIRST_SEED * (seed + 1) + index), k) for index in range(n or GENERATED)]
