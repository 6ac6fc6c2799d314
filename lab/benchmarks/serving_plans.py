"""How much `benchmarks.serving` measures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from benchmarks.serving_model import MAIN, TINY, Shape
from benchmarks.serving_run import Point


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        shape: Of the model.
        points: Streams and rates, the one of the claims first.
        documents: How many are made up, without a corpus.
        top_k: Documents of each request.
        answer_tokens: Of each answer.
        capacity_requests: By which the baseline's capacity is measured.
        share_rounds: Requests by which prefill and decoding are told apart.
        cached: Part of all documents that fits the caches.
    """

    shape: Shape
    points: tuple[Point, ...]
    documents: int = 400
    top_k: int = 4
    answer_tokens: int = 16
    capacity_requests: int = 80
    share_rounds: int = 6
    cached: float = 0.5


FULL_PLAN: Final = Plan(
    MAIN,
    (
        Point("zipf", 1.2, 1000),
        Point("zipf", 4.8, 300),
        Point("uniform", 1.2, 300),
        Point("zipf", 2.4, 300),
        Point("zipf", 0.6, 60),
    ),
)
SPARE_PLAN: Final = replace(
    FULL_PLAN,
    points=(Point("zipf", 2.4, 300), Point("zipf", 1.2, 300), Point("uniform", 1.2, 300)),
)
QUICK_PLAN: Final = Plan(
    TINY, (Point("zipf", 1.2, 24),), documents=24, top_k=2, capacity_requests=8, share_rounds=2
)
