"""The pure parts of the benchmark of decoding, and its sides on a tiny model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from laws import QUESTION, TEXTS, make_engine

from benchmarks import decoding
from benchmarks.shapes import CHUNK, build_model
from benchmarks.ttft_sides import FLOOR, PAGES
from kvcache_rag.models import generate as generating
from kvcache_rag.models.attention import few_queries

if TYPE_CHECKING:
    import pytest


def test_an_interval_is_median_and_range() -> None:
    assert decoding.interval([3.0, 1.0, 2.0]) == {"value": 2.0, "low": 1.0, "high": 3.0}


def test_before_is_generate_and_torch_and_the_others_are_not() -> None:
    kept = (generating.decodes, few_queries.library)
    with decoding.as_side(decoding.BEFORE):
        assert few_queries.library() is None
        assert not generating.decodes(None, 1, None, {})  # type: ignore[arg-type]  # says no to all
    with decoding.as_side("auto"):
        assert (generating.decodes, few_queries.library) == kept


def test_the_floor_is_measured_with_and_without_the_kernel() -> None:
    rows = decoding.floors(build_model("tiny", torch.bfloat16), CHUNK, 3)
    assert [row["first token"] for row in rows] == [FLOOR, PAGES]
    assert all(row["ms"] > 0 and row["ms before"] > 0 and row["rounds"] == 3 for row in rows)
    assert all(row["of before's"]["low"] <= row["of before's"]["high"] for row in rows)


def test_sides_take_turns_over_the_same_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "TOKENS", 4)
    engine = make_engine("llama")
    rows = decoding.timed({"before": engine, "auto": engine}, TEXTS, 3)
    assert [row["side"] for row in rows] == ["before", "auto"]
    assert rows[0]["times before's"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert all(row["tokens/s"] > 0 for row in rows)
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=2).token_ids
