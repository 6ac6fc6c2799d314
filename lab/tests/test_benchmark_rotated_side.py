"""Sides of the rotation benchmark: they are what they are called, and equal plain attention."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import rotated_side
from benchmarks.rotated_side import FARTHEST, HEADS, KEYS, QUERY, STANDING, Setting
from kvcache_rag.models.attention import few_queries

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(few_queries.library() is None, reason="no compiled kernel")


@pytest.mark.parametrize("question", [1, 16])
@pytest.mark.parametrize("shape", HEADS)
def test_every_side_is_plain_attention_within_rounding(shape: str, question: int) -> None:
    setting = Setting(shape, 1024, question)
    for side in (KEYS, QUERY, STANDING):
        assert setting.off(side, place=3) < FARTHEST
    moved, still = setting.attend(KEYS, 0), setting.attend(STANDING, 0)
    assert float((moved - still).abs().max()) > 0.1, "a rotation changes what is attended to"


def test_only_the_keys_side_asks_the_kernel_to_turn_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("SmolLM2-135M", 1024, 16)
    calls: list[int] = []
    whole, part = few_queries.attend_behind, few_queries.attend_partially
    monkeypatch.setattr(few_queries, "attend_behind", lambda *a: (calls.append(0), whole(*a))[1])
    monkeypatch.setattr(few_queries, "attend_partially", lambda *a: (calls.append(1), part(*a))[1])
    setting.attend(KEYS, 0)
    assert calls == [0], "one call for all chunks"
    calls.clear()
    setting.attend(QUERY, 0)
    assert calls == [1] * 3, "a call for each of two chunks and one for the question itself"


def test_a_run_writes_a_row_per_side(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["--questions", "2", "--context", "512", "--shapes", "SmolLM2-135M", "--rounds", "3"]
    assert rotated_side.main([*words, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["side"] for row in rows] == [KEYS, QUERY, STANDING]
    assert rows[0]["of_keys"] == 1


def test_without_the_kernel_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(few_queries, "library", lambda: None)
    assert rotated_side.main([]) == 2
    assert "kernel" in capsys.readouterr().err
