"""A trained hybrid that is small enough to come along: what it reads, and what it must answer.

193,000 parameters, three gated delta layers of four; trained on whole prompts alone, as public
weights are (`lab/benchmarks/hybrid_answers.py` of commit 00c4d022).  A fact is `entity value .`,
between other words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from zoo import HYBRIDS

FOLDER: Final = Path(__file__).parent / "hybrid_reader_model"
IS_READ: Final = "qwen3_5" in HYBRIDS
"""Whether this transformers knows such models."""

DOCUMENTS: Final = (
    "o3 o17 o5 o9 e4 v21 . o2 o11 o20 o8 e30 v7 . o1 o14 o6",
    "o12 o4 o19 e11 v2 . o7 o7 o15 o3 o22 e25 v30 . o10",
    "o21 o13 o0 o16 o9 o2 e17 v12 . o5 o18 o23 e2 v5 . o4 o8 o1",
    "o6 o6 o11 e9 v28 . o14 o20 o3 o12 o17 e21 v16 . o2 o19 o0",
)
FACTS: Final = (
    {"e4": "v21", "e30": "v7"},
    {"e11": "v2", "e25": "v30"},
    {"e17": "v12", "e2": "v5"},
    {"e9": "v28", "e21": "v16"},
)
ORDERS: Final = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0), (1, 3, 2))
"""Of documents, for questions about what stands in them."""


def asked() -> list[tuple[list[str], str, str]]:
    """Documents in an order, an entity in one of them, and its value."""
    return [
        ([DOCUMENTS[number] for number in order], entity, value)
        for order in ORDERS
        for number in order
        for entity, value in FACTS[number].items()
    ]
