"""RGB (arXiv 2309.01431) as its repository publishes it: pools of documents, mixed at a noise rate.

A line of its files is `{"id", "query", "answer", "positive": [...], "negative": [...]}`.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.evaluation.question import Question

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvcache_rag.evaluation.question import Language

    Row = Mapping[str, Any]


def rgb_questions(
    rows: Iterable[Row], language: Language, noise: float | None, passages: int = 5
) -> Iterator[Question]:
    """RGB's own files: `passages` documents, of which the share `noise` is noise, rounded up.

    RGB's `processdata`: the first documents of each pool, one side filled up from the other where
    it is too short; for integration (`positive` is a list of lists) one document per part of the
    answer first, then the second of each, and so on, and noise for what is left.  RGB draws order,
    and documents of a part, with a fixed random seed; here the row's id draws them.  Without
    `noise`: all documents of both pools.

    Raises:
        InvalidInputError: If `noise` is not within 0 and 1 or `passages` is below 1.
    """
    if not (noise is None or 0 <= noise <= 1) or passages < 1:
        raise InvalidInputError(
            f"{passages} passages with noise {noise} cannot be; noise is 0 to 1"
        )
    for row in rows:
        rng = random.Random(f"rgb/{row['id']}")
        positive, negative = _rgb_documents(row, noise, passages, rng)
        drawn = [(text, True) for text in positive] + [(text, False) for text in negative]
        rng.shuffle(drawn)
        groups = _rgb_groups(row["answer"])
        yield Question(
            id=str(row["id"]),
            question=row["query"],
            chunks=tuple(text for text, _ in drawn),
            answers=tuple(dict.fromkeys(one for group in groups for one in group)),
            answer_groups=groups if len(groups) > 1 else (),
            relevant=tuple(index for index, (_, relevant) in enumerate(drawn) if relevant),
            language=language,
        )


def _rgb_groups(answer: Any) -> tuple[tuple[str, ...], ...]:
    parts = answer if isinstance(answer, list) else [answer]
    return tuple(tuple(part) if isinstance(part, list) else (part,) for part in parts)


def _rgb_documents(
    row: Row, noise: float | None, passages: int, rng: random.Random
) -> tuple[list[str], list[str]]:
    positive, negative = row["positive"], row["negative"]
    parted = bool(positive) and isinstance(positive[0], list)
    if noise is None:
        return ([text for part in positive for text in part] if parted else positive), negative
    noisy = math.ceil(passages * noise)
    helpful = passages - noisy
    if parted:
        parts = [rng.sample(part, len(part)) for part in positive]
        taken = [part[0] for part in parts]
        for depth in range(1, max(map(len, parts))):
            rest = [part[depth] for part in parts if len(part) > depth]
            taken += rest[: max(0, helpful - len(taken))]
        return taken, negative[: max(0, passages - len(taken))]
    if noise == 1:
        return [], negative[:passages]
    if noisy > len(negative):
        noisy = len(negative)
        helpful = passages - noisy
    elif helpful > len(positive):
        helpful = len(positive)
        noisy = passages - helpful
    return positive[:helpful], negative[:noisy]
