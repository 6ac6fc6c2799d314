"""Which documents questions retrieve: by BM25, by our hashing embedding, by gold label."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvcache_rag_lab.evaluation.cost.popularity import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_WORD: Final = re.compile(r"\w+")
_SATURATION: Final = 1.5  # k1 of BM25: how soon a word's repetitions stop counting
_LENGTH: Final = 0.75  # b of BM25: how far long documents are held back


@dataclass(frozen=True)
class Data:
    """Documents and questions about them, read where they lie.

    Attributes:
        documents: Texts.
        questions: Texts.
        gold: `(questions,)` indices of the documents that the questions were written about.
    """

    documents: Sequence[str]
    questions: Sequence[str]
    gold: NDArray[np.int64]


def read(corpus: Path, queries: Path) -> Data:
    """Read two files of JSON lines: `{"id", "text"}`, and `{"question", "gold": id}`.

    Raises:
        ValueError: If a file is missing, is not of that form, or names an unknown document.
    """
    rows = read_rows(corpus, ("id", "text"))
    asked = read_rows(queries, ("question", "gold"))
    number = {row["id"]: index for index, row in enumerate(rows)}
    unknown = next((row["gold"] for row in asked if row["gold"] not in number), None)
    if unknown is not None:
        raise ValueError(f"{queries} asks about {unknown}, which {corpus} does not hold")
    gold = np.array([number[row["gold"]] for row in asked], dtype=np.int64)
    return Data([row["text"] for row in rows], [row["question"] for row in asked], gold)


def read_rows(file: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; each has to have the fields `names`.

    Raises:
        ValueError: If the file is missing or a line is not of that form.
    """
    if not file.is_file():
        raise ValueError(f"there is no file {file}; the data are not part of the project")
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict) or not set(names) <= row.keys():
            raise ValueError(f"{file}, line {number} lacks one of {', '.join(names)}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{file} holds no line")
    return rows


Found = list["NDArray[np.int64]"]
"""Per question the documents retrieved, best first; fewer than asked for where nothing matches."""


def bm25(data: Data, top: int) -> Found:
    """Okapi BM25 over lower-cased words; of equal scores the earlier document comes first."""
    counts = [Counter(_WORD.findall(text.lower())) for text in data.documents]
    lengths = np.array([sum(one.values()) for one in counts], dtype=np.float64)
    relative = 1 - _LENGTH + _LENGTH * lengths / lengths.mean()
    places: dict[str, list[tuple[int, int]]] = {}
    for index, one in enumerate(counts):
        for word, count in one.items():
            places.setdefault(word, []).append((index, count))
    weights = {word: _weights(found, len(counts), relative) for word, found in places.items()}
    retrieved = []
    for question in data.questions:
        scores = np.zeros(len(counts))
        for word in _WORD.findall(question.lower()):
            if word in weights:
                where, added = weights[word]
                scores[where] += added
        retrieved.append(_best(scores, top, least=0.0))
    return retrieved


def _weights(
    found: Sequence[tuple[int, int]], documents: int, relative: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Of one word: the documents that hold it, and what it adds to their scores."""
    where = np.array([index for index, _ in found], dtype=np.int64)
    count = np.array([times for _, times in found], dtype=np.float64)
    rarity = math.log(1 + (documents - len(found) + 0.5) / (len(found) + 0.5))
    return where, rarity * count * (_SATURATION + 1) / (count + _SATURATION * relative[where])


def hashing(data: Data, top: int) -> Found:
    """Cosine of the project's hashing embedding."""
    return nearest(data.documents, data.questions, top)


def gold(data: Data, top: int) -> Found:
    """The document that each question was written about, whatever `top` is."""
    return [np.array([index]) for index in data.gold.tolist()]


def _best(scores: NDArray[np.float64], top: int, least: float) -> NDArray[np.int64]:
    order = np.argsort(-scores, kind="stable")[:top]
    return order[scores[order] > least]


RETRIEVERS: Final[dict[str, Callable[[Data, int], Found]]] = {
    "BM25": bm25,
    "hashing embedding": hashing,
    "gold label": gold,
}
