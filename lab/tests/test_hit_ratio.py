"""Hits of caches against sums by hand and simulations, and small traces worked by hand."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import hit_ratio
from benchmarks.common import read, result_file
from benchmarks.hit_ratio import (
    FREE,
    PER_POSITION,
    PREFIX,
    PROMPT_CACHE,
    WAYS,
    PromptStudy,
    Room,
    che_ratio,
    draw_prompts,
    exponent_for,
    popularity,
    prefix_hits,
    ratios,
    read_trace,
    simulated,
    static_ratio,
)
from kvcache_rag_lab.evaluation.cost.popularity import lru_hits
from kvcache_rag_lab.scoring.statistics import mean_interval

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.hit_ratio import Prompts

A, B, C = 0, 1, 2
TRACE: Prompts = [(A, B), (B, A), (A, C), (B, C), (C, B)]
prompts = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), max_size=30)


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


def test_the_last_copies_are_kept_by_their_use() -> None:
    a, b, c = (0, 0), (1, 0), (2, 0)
    assert lru_hits([a, b, a, c, a, b], 0, 2) == 2, "b went before a, which was used since"
    assert lru_hits([a, a, a], 2, 1) == 1, "the first two only fill the cache"


def test_the_last_used_hit_what_ches_approximation_says() -> None:
    shared, own = (mean_interval(found) for found in simulated(0.85, 6, 4000, 12))
    assert shared.value == pytest.approx(che_ratio(1000, 0.85, 100), abs=0.01)
    assert own.value == pytest.approx(che_ratio(1000, 0.85, 100, 6), abs=0.01)


def test_a_run_writes_rows_with_the_null_beside_them(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["--streams", "2", "--requests", "200", "--json", str(file)]
    assert hit_ratio.main(words) == 0
    report = read(file)
    rows = report["rows"]
    assert len(rows) == 7 * 2 * 3
    prompts = report["prompts_of_several_documents"]
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
        assert row["null"] == pytest.approx(null)


def test_the_committed_results_are_those_of_the_formula() -> None:
    report = read(result_file("hit_ratio"))
    for row in report["rows"]:
        if row["side"] == "formula":
            expected = static_ratio(1000, row["alpha"], 100, row["positions"])
            assert row["per_position"]["value"] == pytest.approx(expected)


def test_equal_prefixes_are_found_and_the_end_of_a_prompt_is_dropped_first() -> None:
    # Room for two. (A, B) fills it. Of (A, C) the A is found, and AB is dropped, not A, which was
    # used after it. Of (A, B) again the A. (B, A) finds nothing: A is held, but not behind B.
    assert prefix_hits([(A, B), (A, C), (A, B), (B, A)], 0, 2) == 2
    # Room for three keeps AB: (A, B) is found whole the second time.
    assert prefix_hits([(A, B), (A, C), (A, B)], 0, 3) == 1 + 2
    assert prefix_hits([(A, B), (A, C), (A, B)], 2, 3) == 2, "the first two only fill the cache"
    assert prefix_hits([(A, B)] * 3, 0, 0) == 0


@pytest.mark.parametrize(
    ("way", "hits"),
    [
        # A, AB | B, BA | A, AC | B, BC | C, CB: each prompt pushes out the one before.
        (PREFIX, 0),
        # A at 0 and B at 1 are bound. (B, A) wants both elsewhere. (A, C) finds A; C at 1 pushes
        # out B. (B, C) binds B at 0, for which A goes, and finds C. (C, B) wants both elsewhere.
        (PROMPT_CACHE, 2),
        # A0 B1 | B0 A1 | A0 C1 | B0 C1 | C0 B1: two are held, so only C1 is asked for in time.
        (PER_POSITION, 1),
        # A B | both | A, and C pushes out B | B pushes out A, C | both.
        (FREE, 6),
    ],
)
def test_each_way_on_a_trace_worked_by_hand(way: str, hits: int) -> None:
    assert WAYS[way](TRACE, 0, 2) == hits


@given(prompts)
@settings(max_examples=60, deadline=None)
def test_with_room_for_all_each_way_finds_what_was_there_before(asked: Prompts) -> None:
    expected = dict.fromkeys(WAYS, 0)
    before: list[tuple[int, ...]] = []
    bound: dict[int, int] = {}
    copies: set[tuple[int, int]] = set()
    seen: set[int] = set()
    for prompt in asked:
        common = (
            sum(
                1
                for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, old, strict=False))
            )
            for old in before
        )
        expected[PREFIX] += max(common, default=0)
        before.append(prompt)
        for place, document in enumerate(prompt):
            expected[PROMPT_CACHE] += bound.setdefault(document, -1) == place
            bound[document] = place if bound[document] < 0 else bound[document]
            expected[PER_POSITION] += (document, place) in copies
            expected[FREE] += document in seen
            copies.add((document, place))
            seen.add(document)
    assert {name: hits(asked, 0, 1000) for name, hits in WAYS.items()} == expected


def test_room_is_counted_in_bytes_of_keys_and_values() -> None:
    # 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB a token, 64 MiB for 512.
    assert Room("Llama-3.1-8B", 512, 1).documents == 14
    assert Room("Llama-3.1-8B", 512, 0.0671).documents == 0
    assert Room("Llama-3.1-8B", 512, 0.06711).documents == 1
    assert Room("Qwen2.5-7B", 512, 1).documents == 34


def test_drawn_prompts_hold_different_documents_in_proportion_to_their_popularity() -> None:
    drawn = draw_prompts(50, 1.1, 5, 300, seed=1)
    assert all(len(set(prompt)) == 5 for prompt in drawn)
    assert drawn == draw_prompts(50, 1.1, 5, 300, seed=1) != draw_prompts(50, 1.1, 5, 300, seed=2)
    single = [prompt[0] for prompt in draw_prompts(50, 1.1, 1, 4000, seed=1)]
    share = single.count(0) / len(single)
    assert share == pytest.approx(popularity(50, 1.1)[0], abs=0.03)  # 4 standard deviations


def test_a_trace_is_read_and_its_rows_are_kept_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, file = tmp_path / "asked.csv", tmp_path / "rows.json"
    trace.write_text("a,b\nb, a\n\na,c\nb,c\nc,b\n")
    assert read_trace(trace) == TRACE
    file.write_text(json.dumps({"rows": [], "traces": [{"trace": "other.csv"}]}))
    words = ["--trace", str(trace), "--json", str(file), "--gigabytes", "0.135", "1"]
    for _ in range(2):
        assert hit_ratio.main(words) == 0
    report = json.loads(file.read_text())
    assert [row["trace"] for row in report["traces"]] == ["other.csv", "asked.csv", "asked.csv"]
    first = report["traces"][1]
    assert (first["room"], first["per_prompt"], report["rows"]) == (2, 2.0, [])
    # The first of five requests only fills the caches.
    assert first["position_free"]["value"] == pytest.approx(6 / 8)
    assert first["prompt_cache"]["value"] == pytest.approx(2 / 8)
    assert ratios(TRACE, 2)[PER_POSITION] == first["per_position"]["value"] == pytest.approx(1 / 8)
    assert first["gain"]["value"] == pytest.approx(6)
    assert "| asked.csv | 2 | 0.135 | 2 |" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, "", "\n , \n"])
def test_a_trace_without_requests_is_refused_in_one_sentence(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "asked.csv"
    if text is not None:
        trace.write_text(text)
    assert hit_ratio.main(["--trace", str(trace), "--json", str(tmp_path / "rows.json")]) == 2
    assert str(trace) in capsys.readouterr().err
    assert not (tmp_path / "rows.json").exists()


def test_a_study_has_a_row_per_exponent_number_of_documents_and_budget() -> None:
    study = PromptStudy(documents=60, requests=60, streams=2, per_prompt=(2, 4))
    rows = study.rows((1.1, 2.1))
    assert [(row["alpha"], row["per_prompt"], row["gigabytes"]) for row in rows] == [
        (alpha, count, budget) for alpha in (1.1, 2.1) for count in (2, 4) for budget in (1, 4, 16)
    ]
    assert all(row["position_free"]["value"] >= row["per_position"]["value"] > 0 for row in rows)
