"""The data sets as tasks: which metrics are theirs, what the model is told, where rows come from.

Instructions are our own, shorter than the benchmarks', because one prefix serves all questions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.evaluation import metrics
from kvcache_rag.evaluation.datasets import read_json_lines, read_questions
from kvcache_rag.evaluation.hub import load_hub, of_schema
from kvcache_rag.evaluation.question import Question, top_k
from kvcache_rag.evaluation.rgb import rgb_questions
from kvcache_rag.evaluation.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcache_rag.evaluation.question import Language
    from kvcache_rag.evaluation.task import Draw, Measure


def _multi_document(answer: str, question: Question) -> tuple[float, ...]:
    rules = (metrics.f1, metrics.exact_match, metrics.f1_longbench)
    return tuple(metrics.best(rule, answer, question.answers) for rule in rules)


def _squad(answer: str, question: Question) -> tuple[float, ...]:
    # SQuAD's own F1, which knows nothing of yes and no, is the one that LongBench took over.
    rules = (metrics.f1_longbench, metrics.exact_match)
    return tuple(metrics.best(rule, answer, question.answers) for rule in rules)


def _nq(answer: str, question: Question) -> tuple[float, ...]:
    # lost-in-the-middle normalises both sides before it looks for one in the other.
    wanted = [metrics.normalised(one) for one in question.answers]
    return (metrics.substring_match(metrics.normalised(answer), [wanted]),)


def _dureader(answer: str, question: Question) -> tuple[float, ...]:
    return (metrics.best(metrics.rouge_l_chinese, answer, question.answers),)


def _multifield(answer: str, question: Question) -> tuple[float, ...]:
    return (metrics.best(metrics.f1_chinese, answer, question.answers),)


def _rgb(answer: str, question: Question) -> tuple[float, ...]:
    accuracy = metrics.rgb_accuracy(
        answer, question.groups, question.language, only_noise=not question.relevant
    )
    return accuracy, float(metrics.is_rejection(answer, question.language))


@dataclass(frozen=True)
class DataSet:
    """A question set.

    Attributes:
        metrics: As of `Task`.
        instruction: As of `Task`.
        max_new_tokens: As of `Task`; LongBench's where it has the set.
        measure: As of `Task`.
        language: Of its texts.
        file: Name of the local file, without `.jsonl`; empty: the name of the task.
        long: Whether a document is so long that it has to be split into chunks.
    """

    metrics: tuple[str, ...]
    instruction: str
    max_new_tokens: int
    measure: Measure
    language: Language = "en"
    file: str = ""
    long: bool = False


_SHORT: Final = "Answer the question from the documents, in as few words as possible."
_HOPS: Final = DataSet(("f1", "exact_match", "f1_longbench"), _SHORT, 32, _multi_document)

SETS: Final[dict[str, DataSet]] = {
    "hotpotqa": _HOPS,
    "2wiki": _HOPS,
    "musique": _HOPS,
    "squad": DataSet(("f1", "exact_match"), _SHORT, 32, _squad),
    "nq": DataSet(("substring_match",), _SHORT, 100, _nq),
    "dureader": DataSet(("rouge_l",), "请根据文档回答问题。", 128, _dureader, "zh"),
    "multifieldqa_zh": DataSet(
        ("f1",),
        "请根据文档简短地回答问题。",
        64,
        _multifield,
        "zh",
        file="longbench_multifieldqa_zh",
        long=True,
    ),
}

# What RGB's rule calls a rejection is asked for in the words that the rule looks for.
_RGB_INSTRUCTIONS: Final[dict[Language, str]] = {
    "en": "Answer the question from the documents. Some documents may have nothing to do with it. "
    "If none of them holds the answer, say: insufficient information.",
    "zh": "请根据文档回答问题。有些文档可能与问题无关。如果文档中没有答案，请回答：信息不足。",
}
_RGB_TOKENS: Final = 128
# RGB's pools: files of its repository that hold them, the corrected ones first.
_RGB_POOLS: Final = {
    "rgb_en": ("en_refine.json", "en.json"),
    "rgb_zh": ("zh_refine.json", "zh.json"),
    "rgb_zh_int": ("zh_int.json",),
}
_RGB_NOISE: Final = {
    "rgb_en": (0, 20, 40, 60, 80, 100),
    "rgb_zh": (0, 20, 40, 60, 80, 100),
    "rgb_zh_int": (0, 20, 40, 60),  # more leaves no room for a document per part of the answer
}
RGB: Final = tuple(
    f"{pool}{suffix}"
    for pool, levels in _RGB_NOISE.items()
    for suffix in ("", *(f"_noise{level}" for level in levels))
)


def set_task(name: str, data: Path | None, split: Callable[[str], list[str]]) -> Task:
    """A task of `SETS`.

    Args:
        name: Of `SETS`.
        data: Folder with its file; None: the hub.
        split: Cuts long documents into chunks.

    Raises:
        InvalidInputError: If the folder does not have the file.
    """
    data_set = SETS[name]
    path = None if data is None else data / f"{data_set.file or name}.jsonl"
    if path is not None:
        _check(path)

    def read() -> list[Question]:
        found = load_hub(name) if path is None else read_questions(path, data_set.language)
        return [split_documents(one, split) for one in found] if data_set.long else found

    return Task(
        name,
        data_set.metrics,
        data_set.instruction,
        data_set.max_new_tokens,
        _rows(read),
        data_set.measure,
    )


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
    published = next((data / one for one in _RGB_POOLS[pool] if (data / one).is_file()), None)

    def read() -> list[Question]:
        if path.is_file() or published is None:
            return read_questions(path, language)
        noise = int(level) / 100 if level else None
        convert = partial(rgb_questions, language=language, noise=noise)
        return of_schema(published, convert, read_json_lines(published))

    if published is None:
        _check(path)
    return Task(
        name, ("accuracy", "rejected"), _RGB_INSTRUCTIONS[language], _RGB_TOKENS, _rows(read), _rgb
    )


def split_documents(question: Question, split: Callable[[str], list[str]]) -> Question:
    """Split every document; parts of a relevant one stay relevant if they hold an answer.

    Where no part holds the letters of an answer (free-form answers), all parts of the relevant
    documents stay relevant.
    """
    parts = [(part, index) for index, text in enumerate(question.chunks) for part in split(text)]
    among = [place for place, (_, index) in enumerate(parts) if index in question.relevant]
    holding = [
        place
        for place in among
        if any(answer.lower() in parts[place][0].lower() for answer in question.answers)
    ]
    return replace(
        question, chunks=tuple(part for part, _ in parts), relevant=tuple(holding or among)
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
