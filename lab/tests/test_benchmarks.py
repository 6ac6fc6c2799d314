"""What benchmarks share, the main one's parts, and what every committed report looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import check, render
from benchmarks.common import RESULTS, in_turns, over, read
from benchmarks.shapes import CHUNK, SHAPES, build_model, config_of
from benchmarks.sides import (
    COLD,
    DEFERRED,
    FLOOR,
    NAIVE,
    PAGES,
    PREFIXED,
    RAM,
    STOCK,
    TURBORAG,
    Bench,
    Case,
)
from benchmarks.stock import Sample
from benchmarks.ttft import Peak, main, measure, measure_decode, ratios
from kvcache_rag_lab.evaluation.cost.flops import DecoderShape

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CASE = Case(2 * CHUNK, 20)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    model = build_model("tiny", torch.float32)
    return Bench(model, tmp_path_factory.mktemp("bench"))


# ------------------------------------------------------------------------------------ reports
REPORTS = sorted(path for path in RESULTS.glob("*.json") if not path.stem.startswith("smollm2_"))


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_report_says_what_it_is_and_has_tables(path: Path) -> None:
    report = read(path)
    assert report["about"]["benchmark"]
    assert "| --- |" in render.rendered(report)


def test_sides_take_turns_and_few_rounds_are_the_first_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.common.gc.collect", lambda: 0)
    calls: list[str] = []

    def side(name: str) -> Callable[[], int]:
        def run() -> int:
            calls.append(name)
            return calls.count(name)

        return run

    found = in_turns({"slow": side("slow"), "a": side("a")}, 3, few=("slow",), few_rounds=1)
    assert calls == ["slow", "a", "slow", "a", "a", "a"]
    assert found == {"slow": [2], "a": [2, 3, 4]}
    assert over([2.0, 4.0, 9.0], [1.0, 1.0, 3.0]) == {"value": 3.0, "low": 2.0, "high": 4.0}


def test_the_main_benchmark_runs_and_its_report_is_no_worse_than_itself(tmp_path: Path) -> None:
    file, threads = tmp_path / "bench.json", torch.get_num_threads()
    words = ["--shape", "tiny", "--contexts", "512", "--rounds", "1", "--naive-rounds", "1"]
    assert main([*words, "--no-memory", "--dtype", "float32", "--json", str(file)]) == 0
    assert torch.get_num_threads() == threads == 1
    report = read(file)
    asked = {(row["side"], row["measure"]) for row in report["rows"]}
    assert {(NAIVE, "ttft"), (PAGES, "ttft"), (STOCK, "decode"), (RAM, "decode")} <= asked
    assert ratios(report)
    assert check.main([str(file), "--committed", str(file)]) == 0
    assert check.main([str(tmp_path / "none.json"), "--committed", str(file)]) == 1


# ------------------------------------------------------------------------------------- shapes
@pytest.mark.parametrize(
    ("shape", "billions"),
    [("qwen2.5-0.5b", 0.494), ("qwen2-7b", 7.616), ("llama-3.1-8b", 8.03), ("qwen2.5-72b", 72.706)],
)
def test_shapes_are_those_of_the_published_models(shape: str, billions: float) -> None:
    model = build_model(shape, torch.bfloat16, "meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(billions, abs=6e-4)


# ---------------------------------------------------------------------------------- operations
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_papers_reduction_is_the_share_of_the_context(shape: str) -> None:
    found = DecoderShape.from_config(config_of(shape)).prompt(8192, 128)
    assert round(100 * found.reduction, 2) == 98.46  # TurboRAG's figure
    assert round(100 * found.reduction_with_rotation, 2) == 98.46  # the rotation adds nothing


def test_a_cached_instruction_adds_no_operation_but_attention_to_it() -> None:
    shape = DecoderShape.from_config(config_of("qwen2-7b"))
    without, behind = shape.prompt(8192, 128), shape.prompt(8192, 128, prefix=32)
    assert behind.cached - without.cached == shape.forward(128, 8352) - shape.forward(128, 8320)
    assert (behind.cached - without.cached) / without.full < 2e-5


# --------------------------------------------------------------------------------------- sides
def test_every_side_answers_the_same_question_alike(bench: Bench) -> None:
    sides = bench.sides(CASE)
    assert set(sides) == {NAIVE, PREFIXED, STOCK, TURBORAG, COLD, PAGES, RAM, DEFERRED, FLOOR}
    tokens = {name: sides[name](3).token for name in (TURBORAG, COLD, PAGES, RAM, DEFERRED, FLOOR)}
    assert len(set(tokens.values())) == 1, tokens
    full = {name: sides[name](3).token for name in (NAIVE, PREFIXED, STOCK)}
    assert len(set(full.values())) == 1, full


def test_turborags_way_has_our_logits(bench: Bench) -> None:
    apart = bench.agreement(CASE)
    assert set(apart) == {TURBORAG, DEFERRED}
    # float32, after keys from before RoPE were rotated at once, and ours moved once more.
    assert all(0 < value < 2e-4 for value in apart.values()), apart


def test_rows_of_a_batch_have_chunks_of_their_own(bench: Bench) -> None:
    case = Case(CHUNK, 20, batch=2)
    assert len({text for texts in case.texts for text in texts}) == 2
    assert len(set(case.questions)) == 2
    sides = bench.sides(case)
    names = (TURBORAG, PAGES, RAM, DEFERRED, FLOOR)
    assert len({sides[name](1).token for name in names}) == 1
    single = bench.side(PAGES, Case(CHUNK, 20))(1)
    assert single.token == sides[PAGES](1).token


def test_sides_take_turns_and_the_first_round_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.ttft.gc.collect", lambda: 0)  # slow with all of the tests
    calls: list[str] = []

    def side(name: str) -> Callable[[int], Sample]:
        def run(new_tokens: int) -> Sample:
            calls.append(name)
            return Sample(9.0 if calls.count(name) == 1 else 1.0, 0.5, 3)

        return run

    timed = {name: side(name) for name in (NAIVE, STOCK, RAM, FLOOR)}
    rows = measure(timed, CASE, rounds=3, slow_rounds=2)
    assert calls == [RAM, FLOOR, NAIVE, RAM, FLOOR, NAIVE, RAM, FLOOR, RAM, FLOOR]
    assert {row.side: row.rounds for row in rows} == {NAIVE: 2, RAM: 3, FLOOR: 3}
    assert {row.side: row.highest for row in rows} == {NAIVE: 9.0, RAM: 1.0, FLOOR: 1.0}
    decoded = measure_decode(timed, Case(1024, 20, batch=4), rounds=2)
    assert {row.side: row.median for row in decoded} == {STOCK: 8.0, RAM: 8.0}


# ------------------------------------------------------------------------------------ the check
PLACE = "4096 + 20 tokens, batch 1"


def made_report() -> dict[str, Any]:
    """A report of one case, of nine rounds but for the full prefill."""
    seconds = {NAIVE: 18.0, TURBORAG: 0.34, PAGES: 0.23, RAM: 0.22, DEFERRED: 0.214, FLOOR: 0.21}
    rows = [_row(side, "ttft", value) for side, value in seconds.items()]
    rows += [_row(side, "decode", value) for side, value in {STOCK: 5.0, RAM: 11.0}.items()]
    peak = Peak(PAGES, 4096, peak=1_100, weights=950, stitched=50, chunks=49)
    about = {"machine": "a machine", "device": "cpu", "shape": "qwen2.5-0.5b", "dtype": "bfloat16"}
    about |= {"benchmark": "ttft", "chunk": 512, "prefix": 32}
    agreement = {TURBORAG: 0.006}
    return {"about": about, "agreement": agreement, "memory": [vars(peak)], "rows": rows}


def _row(side: str, measure: str, median: float) -> dict[str, Any]:
    numbers = {"context": 4096, "query": 20, "batch": 1, "lowest": 0.1, "highest": 99.0}
    drift = [1.0] * 3 if side == NAIVE else [0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 1.2, 1.3, 1.4]
    samples = [median * one for one in drift]
    named = {"side": side, "measure": measure, "median": median, "parts": {}}
    return {**numbers, **named, "rounds": len(samples), "samples": samples}


def in_rounds(report: dict[str, Any], side: str, measure: str, factors: list[float]) -> None:
    """Let the side's rounds be so many times its median, and those of the others their own."""
    for row in report["rows"]:
        if row["measure"] == measure and row["side"] != NAIVE:
            times = factors if row["side"] == side else [1.0] * len(factors)
            row["samples"] = [row["median"] * one for one in times]


def test_ratios_are_smaller_the_better_and_have_the_interval_of_their_paired_rounds() -> None:
    report = made_report()
    found = ratios(report)
    assert found[f"decoding, stock over ram, {PLACE}"].value == pytest.approx(5 / 11)
    alike = found[f"ram over floor, {PLACE}"]  # a machine that drifts does so for both
    assert alike.low == pytest.approx(0.22 / 0.21) == pytest.approx(alike.high)
    assert (alike.rounds, alike.has_interval) == (9, True)
    naive = found[f"page cache over naive, {PLACE}"]  # its rounds are others
    assert naive.low == naive.high == naive.value == pytest.approx(0.23 / 18)
    assert not naive.has_interval
    peak = found["peak memory, page cache, 4096 tokens"]
    assert (peak.value, peak.has_interval) == (pytest.approx(1.1), True), "bytes are counted"

    factors = [0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.1, 1.2, 1.3]
    in_rounds(report, RAM, "ttft", factors)
    wide = ratios(report)[f"ram over floor, {PLACE}"]
    assert wide.value == pytest.approx(0.22 / 0.21)
    assert 0.7 * wide.value <= wide.low < wide.value < wide.high <= 1.3 * wide.value
    in_rounds(report, RAM, "ttft", factors[:5])
    assert not ratios(report)[f"ram over floor, {PLACE}"].has_interval


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ([1.0, 1.0, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.4], "fine"),  # one round was interrupted
        ([1.2, 1.2, 1.25, 1.25, 1.3, 1.3, 1.35, 1.35, 1.4], "worse"),
        ([1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 1.3, 1.3, 1.4], "not sure"),
        ([1.2, 1.3, 1.3, 1.4], "not sure"),  # four rounds are no evidence
        ([0.7, 0.7, 0.7, 0.8, 0.8, 0.8, 0.9, 0.9, 0.9], "fine"),
    ],
)
def test_the_whole_interval_has_to_be_worse(factors: list[float], verdict: str) -> None:
    fresh = made_report()
    in_rounds(fresh, RAM, "ttft", factors)
    in_rounds(fresh, STOCK, "decode", factors)
    found = check.compare(made_report(), fresh)
    ours, decoding = f"ram over floor, {PLACE}", f"decoding, stock over ram, {PLACE}"
    assert found.common[ours].verdict == found.common[decoding].verdict == verdict
    assert len(found.regressions) == 2 * (verdict == "worse")
    assert len(found.unsure) == 2 * (verdict == "not sure")
    # Decoding is judged on its own processor only.
    fresh["about"]["machine"] = "another machine"
    assert len(check.compare(made_report(), fresh).regressions) == (verdict == "worse")


@pytest.mark.parametrize("name", ["shape", "device", "dtype"])
def test_reports_of_other_models_are_not_compared(name: str) -> None:
    other = made_report()
    other["about"][name] = "another"
    with pytest.raises(ValueError, match=f"differ in {name}"):
        check.compare(made_report(), other)


def test_a_peak_is_held_against_what_its_side_keeps() -> None:
    held = {
        side: Peak(side, 512, peak=0, weights=100, stitched=10, chunks=9).held
        for side in (PAGES, RAM, DEFERRED)
    }
    assert held == {PAGES: 110, RAM: 119, DEFERRED: 109}
