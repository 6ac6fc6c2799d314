"""What is asked, and when: the same requests at the same moments for every arm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.caching import popularity

if TYPE_CHECKING:
    from collections.abc import Sequence

ZIPF: Final = 1.0
STREAMS: Final = {"zipf": ZIPF, "uniform": 0.0}
"""Exponents of the popularity of documents, by the name of a stream; both are synthetic."""


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        at: Seconds from the start of the stream to its arrival.
        documents: Which documents, best first, all different.
        question: A text of its own.
    """

    at: float
    documents: tuple[int, ...]
    question: str


def draw_requests(
    stream: str, count: int, rate: float, documents: int, top_k: int, seed: int = 0
) -> list[Asked]:
    """Open-loop arrivals (Poisson) of questions over documents of given popularity.

    The documents asked for do not depend on the rate, nor do the arrivals but for its scale; fewer
    requests are the first ones of more.

    Args:
        stream: A name of `STREAMS`.
        count: How many.
        rate: Per second.
        documents: How many there are; which of them are popular is drawn.
        top_k: Of each request.
        seed: Of everything.

    Raises:
        ValueError: If there are fewer documents than a request needs.
    """
    if documents < top_k:
        raise ValueError(f"{documents} documents are too few for {top_k} per request")
    order, picks, gaps = (np.random.default_rng([seed, which]) for which in range(3))
    ranked = order.permutation(documents)
    weights = popularity(documents, STREAMS[stream])
    asked: list[Asked] = []
    at = 0.0
    for number in range(count):
        at += float(gaps.exponential()) / rate
        ranks = picks.choice(documents, top_k, replace=False, p=weights)
        found = tuple(ranked[ranks].tolist())
        asked.append(Asked(at, found, question_of(number)))
    return asked


def question_of(number: int) -> str:
    """A question of some twenty tokens, different for every request."""
    return f"Request {number:05d}: what do these documents say, and which of them says it first?"


def texts_of(asked: Asked, documents: Sequence[str]) -> list[str]:
    """The texts of the request's documents."""
    return [documents[index] for index in asked.documents]
