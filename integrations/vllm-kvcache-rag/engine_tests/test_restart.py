"""What outlives an engine, and what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conftest import SmallEngine, apart, random_case, reused, saved

if TYPE_CHECKING:
    from pathlib import Path

TOLERANCE = 1e-3


def test_chunks_outlive_the_engine(tmp_path: Path) -> None:
    case, model = random_case(80), saved("llama", tmp_path / "model")
    first = SmallEngine(model, tmp_path / "kv")
    before = first.ask(case)
    assert before.kv_transfer_params["kvcache_rag"]["why"].startswith("how this engine rotates")
    assert apart(before, first.full(case)) < TOLERANCE
    assert first.law() == ""
    first.keep(case)
    first.stop()
    second = SmallEngine(model, tmp_path / "kv", max_num_seqs=2)
    assert second.law() == ""
    answer = second.ask(case)
    assert reused(answer) == case.params.context
    assert apart(answer, second.stitched(case)) < TOLERANCE
    second.stop()
    # Other weights under the same name find nothing.
    third = SmallEngine(saved("llama", tmp_path / "model", seed=1), tmp_path / "kv")
    assert third.law() == ""
    answer = third.ask(case)
    assert reused(answer) == 0
    assert apart(answer, third.full(case)) < TOLERANCE
    third.stop()
