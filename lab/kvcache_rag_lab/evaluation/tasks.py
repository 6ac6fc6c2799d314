"""The tasks of `kvcache-rag eval`: where questions come from, and how answers are scored.

| names | questions | metrics, the first is the main one |
|---|---|---|
| reader_KIND | the packaged reader's texts, 18 to 72 questions | exact_match, refused |
| niah_* | `niah` | reference_coverage |
| rgb_en, rgb_en_int, rgb_zh, rgb_zh_int, also _noiseNN | RGB | accuracy, rejected, containment |
| hotpotqa, 2wiki, musique | multi-document QA | containment, f1, exact_match, … |
| squad | SQuAD v1.1 with distractors | containment, f1, exact_match, … |
| nq | Natural Questions, by lost-in-the-middle's rule too | containment, substring_match, … |
| dureader | DuReader, by LongBench's rule | rouge_l |
| longbench_* | LongBench's forms of its question sets, its prompts (`longbench`) | f1 or rouge_l |

A set has two names where LongBench has made another one of it: `hotpotqa`, `musique` and `dureader`
are the originals, `longbench_hotpotqa` and so on LongBench's.  Where no other task has the plain
name it leads to LongBench, too: narrativeqa, qasper, multifieldqa_en, multifieldqa_zh, 2wikimqa,
triviaqa.  2WikiMultihopQA itself is `2wiki` or `2wikimultihopqa`.

The reader's answers are compared letter for letter; those of data sets as `metrics` says, in
English by containment first: a model that was not tuned for it answers in sentences.  Where rows
mark their relevant documents, `wrong_document` says which wrong answers stand in another one.  A
question has the same id for every `k`, and a larger `n` only adds questions.  Instructions are our
own, shorter than the benchmarks', because one prefix serves all questions; LongBench's are its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError, close_to
from kvcache_rag.prompt.words import normalised
from kvcache_rag_lab.evaluation import longbench
from kvcache_rag_lab.evaluation.datasets import (
    CHUNK_TOKENS,
    OVERLAP,
    estimated_tokens,
    load_hub,
    of_schema,
    read_json_lines,
    read_questions,
    rgb_questions,
    split_documents,
    split_text,
)
from kvcache_rag_lab.evaluation.longbench import LONGBENCH
from kvcache_rag_lab.evaluation.niah import (
    ANSWER_TOKENS,
    VARIANTS,
    needle_question,
)
from kvcache_rag_lab.reader import KINDS, REFUSAL, examples
from kvcache_rag_lab.scoring import metrics
from kvcache_rag_lab.scoring.question import Question, Task, TokenCounter, top_k

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcache_rag_lab.evaluation.longbench import LongBenchSet
    from kvcache_rag_lab.scoring.question import Draw, Language, Measure

__all__ = ["Question", "Task", "TokenCounter", "task_by_name", "task_names"]

# A stretch of seeds for each seed of a run.
FIRST_SEED = 10_000_000

MAX_NEW_TOKENS = 32

WRONG: Final = "wrong_document"
"""A metric of which less is better: 1 where an answer was taken from a document that is wrong."""

# Questions of a generator when the caller does not say how many.
GENERATED: Final = 200

_PLAIN: Final = (
    "narrativeqa",
    "qasper",
    "multifieldqa_en",
    "multifieldqa_zh",
    "2wikimqa",
    "triviaqa",
)

_ALIASES: Final = {
    "2wikimultihopqa": "2wiki",
    **{name: f"{longbench.PREFIX}{name}" for name in _PLAIN},
}

_READER: Final = {f"reader_{kind}": kind for kind in KINDS}


def task_names() -> tuple[str, ...]:
    """Every name that `task_by_name` takes, without its aliases."""
    return (*_READER, *VARIANTS, *RGB, *SETS, *LONGBENCH)


def task_by_name(
    name: str,
    *,
    data: Path | None = None,
    count: TokenCounter | None = None,
    length: int = 4096,
    chunk_tokens: int = CHUNK_TOKENS,
    overlap: int = OVERLAP,
) -> Task:
    """Build a task.

    Args:
        name: One of `task_names`.
        data: Folder with a data set's JSON lines (`hotpotqa.jsonl`, ...); for RGB the files of its
            repository (`zh_refine.json`, ...) do as well, for LongBench those of its archive
            (`2wikimqa.jsonl`, ...). None: the hub.
        count: Number of tokens of a text, without special tokens, by the model's tokenizer; an
            estimate by default.
        length: Tokens of a needle task's prompt, see `niah.needle_question`.
        chunk_tokens: Longest chunk of a needle task, and of LongBench's single documents.
        overlap: Tokens that such chunks share.

    Raises:
        InvalidInputError: If there is no such task, a number is below 1, or `data` does not have
            its file.
    """
    name = _ALIASES.get(name, name)
    count = count or estimated_tokens
    if name in _READER:
        ask = _rows(partial(_reader_questions, _READER[name]))
        return Task(name, ("exact_match", "refused"), "", MAX_NEW_TOKENS, ask, _reader_score)
    if name in VARIANTS:
        make = partial(
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
            partial(_needles, make),
            _coverage,
        )
    if name in RGB:
        return rgb_task(name, data)
    if name in SETS:
        return set_task(name, data)
    if name in LONGBENCH:
        split = partial(split_text, count=count, tokens=chunk_tokens, overlap=overlap)
        return longbench_task(name, data, split)
    close = close_to(name, task_names())
    hint = f"did you mean {close}? There are" if close else "choose from"
    raise InvalidInputError(f"there is no task {name!r}; {hint} {', '.join(task_names())}")


def _reader_questions(kind: str) -> list[Question]:
    return [
        Question(
            id=f"reader_{kind}-{context}-{index}",
            question=asked.text,
            chunks=example.documents,
            answers=(asked.answer,),
            relevant=tuple(sorted(asked.documents)),
        )
        for context, example in enumerate(examples(kind))
        for index, asked in enumerate(example.questions)
    ]


def _needles(
    one: Callable[[int], Question], n: int | None, seed: int, k: int | None
) -> list[Question]:
    return [top_k(one(FIRST_SEED * (seed + 1) + index), k) for index in range(n or GENERATED)]


def _coverage(answer: str, question: Question) -> tuple[float, ...]:
    return (metrics.reference_coverage(answer, question.answers),)


def _reader_score(answer: str, question: Question) -> tuple[float, ...]:
    text = answer.strip()
    return float(text in question.answers), float(text == REFUSAL)


def _multi_document(answer: str, question: Question) -> tuple[float | None, ...]:
    rules = (metrics.f1, metrics.exact_match, metrics.f1_longbench)
    return (
        _contained(answer, question),
        *(metrics.best(rule, answer, question.answers) for rule in rules),
        _elsewhere(answer, question),
    )


def _contained(answer: str, question: Question) -> float:
    return metrics.containment(answer, question.groups, question.language)


def _elsewhere(answer: str, question: Question) -> float | None:
    found = metrics.wrong_document(
        answer, question.question, question.chunks, frozenset(question.relevant)
    )
    return 0.0 if found and _contained(answer, question) else found


def _squad(answer: str, question: Question) -> tuple[float | None, ...]:
    # SQuAD's own F1, which knows nothing of yes and no, is the one that LongBench took over.
    rules = (metrics.f1_longbench, metrics.exact_match)
    return (
        _contained(answer, question),
        *(metrics.best(rule, answer, question.answers) for rule in rules),
        _elsewhere(answer, question),
    )


def _nq(answer: str, question: Question) -> tuple[float | None, ...]:
    # lost-in-the-middle normalises both sides before it looks for one in the other.
    wanted = [normalised(reference) for reference in question.answers]
    found = metrics.substring_match(normalised(answer), [wanted])
    return _contained(answer, question), found, _elsewhere(answer, question)


def _dureader(answer: str, question: Question) -> tuple[float, ...]:
    return (metrics.best(metrics.rouge_l_chinese, answer, question.answers),)


def _longbench(one: LongBenchSet, answer: str, question: Question) -> tuple[float, ...]:
    if one.cut == "examples":
        # What a model goes on with behind its answer is another worked example.
        answer = answer.lstrip("\n").split("\n", 1)[0]
    return (metrics.best(_LONGBENCH_RULES[one.metric], answer, question.answers),)


def _rgb(answer: str, question: Question) -> tuple[float, ...]:
    accuracy = metrics.rgb_accuracy(
        answer, question.groups, question.language, only_noise=not question.relevant
    )
    rejected = float(metrics.is_rejection(answer, question.language))
    return accuracy, rejected, _contained(answer, question)


def own_score(answer: str, question: Question) -> dict[str, float]:
    """`exact_match` and `f1` (SQuAD's, LongBench's for Chinese) against the best right answer.

    Where there are groups of answers, both are whether every group is met (RGB's rule).  Beside
    them `containment`, and in English, where documents are called relevant, `wrong_document`.
    """
    found = {"containment": _contained(answer, question)}
    wrong = _elsewhere(answer, question) if question.language == "en" else None
    if wrong is not None:
        found[WRONG] = wrong
    if question.answer_groups:
        met = metrics.substring_match(answer, question.answer_groups, question.language)
        return {"f1": met, "exact_match": met, **found}
    overlap = metrics.f1_chinese if question.language == "zh" else metrics.f1
    return {
        "f1": metrics.best(overlap, answer, question.answers),
        "exact_match": metrics.best(metrics.exact_match, answer, question.answers),
        **found,
    }


@dataclass(frozen=True)
class DataSet:
    """A question set.

    Attributes:
        metrics: As of `Task`.
        instruction: As of `Task`.
        max_new_tokens: As of `Task`; LongBench's where it has the set.
        measure: As of `Task`.
        language: Of its texts.
        closed_instruction: As of `Task`.
    """

    metrics: tuple[str, ...]
    instruction: str
    max_new_tokens: int
    measure: Measure
    language: Language = "en"
    closed_instruction: str = ""


_SHORT: Final = "Answer the question from the documents, in as few words as possible."

# The same without documents: who has none shall not be told of them.
_CLOSED: Final = "Answer the question, in as few words as possible."

_HOPS: Final = DataSet(
    ("containment", "f1", "exact_match", "f1_longbench", WRONG),
    _SHORT,
    32,
    _multi_document,
    closed_instruction=_CLOSED,
)

SETS: Final[dict[str, DataSet]] = {
    "hotpotqa": _HOPS,
    "2wiki": _HOPS,
    "musique": _HOPS,
    "squad": DataSet(
        ("containment", "f1", "exact_match", WRONG), _SHORT, 32, _squad, closed_instruction=_CLOSED
    ),
    "nq": DataSet(
        ("containment", "substring_match", WRONG), _SHORT, 100, _nq, closed_instruction=_CLOSED
    ),
    "dureader": DataSet(
        ("rouge_l",),
        "请根据文档回答问题。",
        128,
        _dureader,
        "zh",
        closed_instruction="请回答问题。",
    ),
}

# What RGB's rule calls a rejection is asked for in the words that the rule looks for.
_RGB_INSTRUCTIONS: Final[dict[Language, str]] = {
    "en": "Answer the question from the documents. Some documents may have nothing to do with it. "
    "If none of them holds the answer, say: insufficient information.",
    "zh": "请根据文档回答问题。有些文档可能与问题无关。如果文档中没有答案，请回答：信息不足。",
}

_RGB_CLOSED: Final[dict[Language, str]] = {"en": "Answer the question.", "zh": "请回答问题。"}

_RGB_TOKENS: Final = 128

# RGB's pools: files of its repository that hold them, the corrected ones first.
_RGB_POOLS: Final = {
    "rgb_en": ("en_refine.json", "en.json"),
    "rgb_en_int": ("en_int.json",),
    "rgb_zh": ("zh_refine.json", "zh.json"),
    "rgb_zh_int": ("zh_int.json",),
}

_RGB_NOISE: Final = {
    "rgb_en": (0, 20, 40, 60, 80, 100),
    "rgb_en_int": (0, 20, 40, 60),  # more leaves no room for a document per part of the answer
    "rgb_zh": (0, 20, 40, 60, 80, 100),
    "rgb_zh_int": (0, 20, 40, 60),
}

RGB: Final = tuple(
    f"{pool}{suffix}"
    for pool, levels in _RGB_NOISE.items()
    for suffix in ("", *(f"_noise{level}" for level in levels))
)


def set_task(name: str, data: Path | None) -> Task:
    """A task of `SETS`.

    Args:
        name: Of `SETS`.
        data: Folder with its file; None: the hub.

    Raises:
        InvalidInputError: If the folder does not have the file.
    """
    data_set = SETS[name]
    path = None if data is None else data / f"{name}.jsonl"
    if path is not None:
        _check(path)

    def read() -> list[Question]:
        if path is None:
            return load_hub(name)
        other = f"{longbench.PREFIX}{name}"
        if other in LONGBENCH and _is_longbench(path):
            raise InvalidInputError(f"{path} is LongBench's file; ask for the task {other}")
        return read_questions(path, data_set.language)

    return Task(
        name,
        data_set.metrics,
        data_set.instruction,
        data_set.max_new_tokens,
        _rows(read),
        data_set.measure,
        data_set.closed_instruction,
    )


_LONGBENCH_RULES: Final = {
    "f1": metrics.f1_longbench,
    "f1_chinese": metrics.f1_chinese,
    "rouge_l_chinese": metrics.rouge_l_chinese,
}

_LONGBENCH_CLOSED: Final[dict[Language, str]] = {"en": _CLOSED, "zh": "请简短地回答问题。"}


def longbench_task(name: str, data: Path | None, split: Callable[[str], list[str]]) -> Task:
    """A task of `LONGBENCH`.

    Args:
        name: Of `LONGBENCH`.
        data: Folder with `{name}.jsonl`, in LongBench's form or the project's own, or with
            LongBench's file under its own name, in LongBench's form alone: in the project's it
            would be the original set. None: the hub.
        split: Cuts long documents into chunks.

    Raises:
        InvalidInputError: If the folder does not have the file.
    """
    one = LONGBENCH[name]
    path = None if data is None else _longbench_file(name, data)

    def read() -> list[Question]:
        if path is None:
            found = load_hub(name)
        elif path.stem == name and not _is_longbench(path):
            found = [
                replace(row, question=one.ask(row.question), closed_question=row.question)
                for row in read_questions(path, one.language)
            ]
        else:
            found = of_schema(path, partial(longbench.questions, one), read_json_lines(path))
        if one.cut != "document":
            return found
        return [split_documents(question, split) for question in found]

    return Task(
        name,
        (one.metric.removesuffix("_chinese"),),
        one.before,
        one.max_new_tokens,
        _rows(read),
        partial(_longbench, one),
        _LONGBENCH_CLOSED[one.language],
    )


def _longbench_file(name: str, data: Path) -> Path:
    path = data / f"{name}.jsonl"
    published = data / f"{LONGBENCH[name].name}.jsonl"
    if path.is_file() or not published.is_file():
        _check(path)
        return path
    return published


def _is_longbench(path: Path) -> bool:
    """Whether the first row of a file is in LongBench's form, whose documents are one text."""
    return any({"input", "context"} <= row.keys() for row in islice(read_json_lines(path), 1))


def rgb_task(name: str, data: Path | None) -> Task:
    """A task of `RGB`: a pool as it is, or five documents of which so many per cent are noise.

    Args:
        name: Of `RGB`.
        data: Folder with `{name}.jsonl`, or with the file of RGB's repository.

    Raises:
        InvalidInputError: If there is no such file.
    """
    pool, _, level = name.partition("_noise")
    language: Language = "zh" if pool.startswith("rgb_zh") else "en"
    if data is None:
        raise InvalidInputError(
            f"RGB is not on the hub; name a folder that holds {name}.jsonl, "
            f"or {_RGB_POOLS[pool][0]} of RGB's repository, with --data"
        )
    path = data / f"{name}.jsonl"
    published = next((data / file for file in _RGB_POOLS[pool] if (data / file).is_file()), None)

    def read() -> list[Question]:
        if path.is_file() or published is None:
            return read_questions(path, language)
        noise = int(level) / 100 if level else None
        convert = partial(rgb_questions, language=language, noise=noise)
        return of_schema(published, convert, read_json_lines(published))

    if published is None:
        _check(path)
    return Task(
        name,
        ("accuracy", "rejected", "containment"),
        _RGB_INSTRUCTIONS[language],
        _RGB_TOKENS,
        _rows(read),
        _rgb,
        _RGB_CLOSED[language],
    )


def _check(path: Path) -> None:
    if not path.is_file():
        raise InvalidInputError(
            f"there is no file {path}; name the folder that holds it with --data"
        )


def _rows(read: Callable[[], list[Question]]) -> Draw:
    """Draw from a data set, which is read once, when first asked for."""
    kept = cache(read)

    def draw(n: int | None, seed: int, k: int | None) -> list[Question]:
        questions = kept()
        if n is not None and n < len(questions):
            order = list(range(len(questions)))
            random.Random(f"rows/{seed}").shuffle(order)  # so that more rows hold the fewer
            questions = [questions[index] for index in sorted(order[:n])]
        return [top_k(question, k) for question in questions]

    return draw
