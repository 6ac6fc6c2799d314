"""The model of hits against sums by hand, its simulation, and the project's own store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import hit_ratio
from benchmarks.caching import (
    Copy,
    che_ratio,
    draw,
    exponent_for,
    popularity,
    static_hits,
    static_ratio,
    store_hits,
)
from benchmarks.prompt_caches import WAYS
from kvcache_rag_lab.evaluation.cost.popularity import lru_hits
from kvcache_rag_lab.scoring.statistics import mean_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

copies = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=80)


def test_the_formula_is_the_sum_worked_by_hand() -> None:
    # Weights 1, 1/2, 1/3, 1/4 of 25/12: two of four copies hold 18/25 of the requests.
    assert static_ratio(4, 1.0, 2) == pytest.approx(18 / 25)
    # With two copies of each chunk the same room holds the first chunk only: 12/25.
    assert static_ratio(4, 1.0, 2, 2) == pytest.approx(12 / 25)
    # Room for three: one chunk and half of the next, (1 + 1/4) / (25/12).
    assert static_ratio(4, 1.0, 3, 2) == pytest.approx(15 / 25)
    assert static_ratio(4, 1.0, 4) == static_ratio(4, 1.0, 9) == pytest.approx(1)
    assert popularity(4, 1.0).tolist() == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25])


@pytest.mark.parametrize("chunks", [100, 1000, 50_000])
def test_the_papers_gain_follows_from_an_exponent_whatever_the_number_of_chunks(
    chunks: int,
) -> None:
    alpha = exponent_for(2.86, 20, 100)
    assert alpha == pytest.approx(0.8526, abs=1e-4)
    gain = static_ratio(chunks, alpha, 100) / static_ratio(chunks, alpha, 100, 20)
    assert gain == pytest.approx(2.86)


@pytest.mark.parametrize("ratio", [static_ratio, che_ratio])
def test_uniform_popularity_gains_as_many_times_as_there_are_positions(ratio: object) -> None:
    assert callable(ratio)
    assert ratio(1000, 0.0, 100) == pytest.approx(0.1)
    assert ratio(1000, 0.0, 100, 20) == pytest.approx(0.005)


@given(copies, st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_the_store_hits_exactly_what_a_list_of_the_last_copies_hits(
    asked: list[Copy], budget: int
) -> None:
    warm = len(asked) // 5
    assert store_hits(asked, warm, budget) == lru_hits(asked, warm, budget)


@pytest.mark.parametrize("alpha", [0.0, 0.85])
def test_on_a_stream_the_store_hits_exactly_what_the_simulation_hits(alpha: float) -> None:
    stream = draw(200, alpha, 5, 1500, seed=3)
    for by_position in (False, True):
        asked = stream.copies(by_position=by_position)
        assert store_hits(asked, stream.warm, 30) == lru_hits(asked, stream.warm, 30)


def test_the_last_copies_are_kept_by_their_use() -> None:
    a, b, c = (0, 0), (1, 0), (2, 0)
    assert lru_hits([a, b, a, c, a, b], 0, 2) == 2, "b went before a, which was used since"
    assert lru_hits([a, a, a], 2, 1) == 1, "the first two only fill the cache"
    assert static_hits([a, b, (0, 1), (1, 1)], 0, 3, 2) == 3, "(0, 0), (0, 1) and (1, 0) are kept"


def shares(alpha: float, positions: int, *, lru: bool, by_position: bool) -> Sequence[float]:
    found = []
    for seed in range(12):
        stream = draw(400, alpha, positions, 3000, seed)
        asked = stream.copies(by_position=by_position)
        hits = (
            lru_hits(asked, stream.warm, 60)
            if lru
            else static_hits(asked, stream.warm, 60, positions if by_position else 1)
        )
        found.append(hits / (3000 - stream.warm))
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.85, 1.1])
@pytest.mark.parametrize("by_position", [False, True])
def test_the_static_cache_hits_what_the_formula_says(alpha: float, by_position: bool) -> None:
    found = mean_interval(shares(alpha, 6, lru=False, by_position=by_position))
    expected = static_ratio(400, alpha, 60, 6 if by_position else 1)
    # Three times the half width of 95 %: a chance of about 1 in 10^8 for each of six.
    assert abs(found.value - expected) < 3 * max(found.high - found.value, found.value - found.low)
    assert found.high - found.low < 0.03


@pytest.mark.parametrize("by_position", [False, True])
def test_the_last_used_hit_what_ches_approximation_says(by_position: bool) -> None:
    found = mean_interval(shares(0.85, 6, lru=True, by_position=by_position))
    assert found.value == pytest.approx(che_ratio(400, 0.85, 60, 6 if by_position else 1), abs=0.01)


def test_a_run_writes_rows_with_the_null_beside_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plotted: list[int] = []
    monkeypatch.setattr("benchmarks.hit_ratio.plot", lambda rows, *_: plotted.append(len(rows)))
    file = tmp_path / "rows.json"
    monkeypatch.setattr(
        "benchmarks.hit_ratio.plot_prompts", lambda rows, _: plotted.append(len(rows))
    )
    words = ["--streams", "2", "--requests", "200", "--json", str(file)]
    assert hit_ratio.main([*words, "--plot", str(tmp_path / "plot.svg")]) == 0
    report = json.loads(file.read_text())
    rows = report["rows"]
    assert len(rows) == 7 * 2 * 5 == plotted[0]
    prompts = report["prompts_of_several_documents"]
    assert len(prompts) == 3 * 2 * 3 == plotted[1]
    assert {row["alpha"] for row in prompts} == {1.1, 1.5, 2.1}
    for row in prompts:
        assert row["position_free"]["value"] == max(row[way]["value"] for way in WAYS)
    assert report["paper"]["alpha"] == pytest.approx(0.8526, abs=1e-4)
    for row in rows:
        (null,) = [
            other["gain"]["value"]
            for other in rows
            if other["alpha"] == 0
            and (other["side"], other["positions"]) == (row["side"], row["positions"])
        ]
        assert row["null"] == pytest.approx(null, nan_ok=True)
    assert "0.853" in capsys.readouterr().out


def test_the_committed_results_are_those_of_the_formula() -> None:
    file = Path(__file__).parents[2] / "lab" / "benchmarks" / "results" / "hit_ratio.json"
    report = json.loads(file.read_text())
    for row in report["rows"]:
        if row["side"] == "formula":
            copies = row["positions"]
            expected = static_ratio(report["chunks"], row["alpha"], report["budget"], copies)
            assert row["per_position"]["value"] == pytest.approx(expected)
    stored = [row for row in report["rows"] if row["side"] == "store"]
    simulated = [row for row in report["rows"] if row["side"] == "lru"]
    for measured, expected in zip(stored, simulated, strict=True):
        assert {**measured, "side": "lru"} == expected
