"""Ways to keep documents: small traces worked by hand, and what each is where all has room."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import hit_ratio, locality
from benchmarks.caching import popularity, store_hits
from benchmarks.prompt_caches import (
    FREE,
    PER_POSITION,
    PREFIX,
    PROMPT_CACHE,
    WAYS,
    PromptStudy,
    Room,
    draw_prompts,
    position_free_hits,
    prefix_hits,
    ratios,
    read_trace,
)

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.prompt_caches import Prompts

A, B, C = 0, 1, 2
TRACE: Prompts = [(A, B), (B, A), (A, C), (B, C), (C, B)]
prompts = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), max_size=30)


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


@given(prompts, st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_the_projects_store_finds_what_one_copy_per_document_finds(
    asked: Prompts, room: int
) -> None:
    flat = [(document, 0) for prompt in asked for document in prompt]
    assert position_free_hits(asked, 0, room) == store_hits(flat, 0, room)


def test_room_is_counted_in_bytes_of_keys_and_values() -> None:
    # 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB a token, 64 MiB for 512.
    assert Room("Llama-3.1-8B", 512, 1).documents == 14
    assert Room("Llama-3.1-8B", 512, 0.0671).documents == 0
    assert Room("Llama-3.1-8B", 512, 0.06711).documents == 1
    assert Room("Qwen2-7B", 512, 1).documents == 34


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
    assert "75.00" in capsys.readouterr().out


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


def test_locality_writes_a_trace_of_what_is_retrieved(tmp_path: Path) -> None:
    corpus, queries, trace = (tmp_path / name for name in ("c.jsonl", "q.jsonl", "t.csv"))
    texts = {"x": "the red fox", "y": "a blue whale", "z": "blue and red paint"}
    rows = [json.dumps({"id": name, "text": text}) for name, text in texts.items()]
    corpus.write_text("\n".join(rows))
    asked = [("whale", "y"), ("red fox", "x")]
    lines = [json.dumps({"question": question, "gold": name}) for question, name in asked]
    queries.write_text("\n".join(lines))
    words = ["--corpus", str(corpus), "--queries", str(queries), "--trace", str(trace)]
    assert locality.main([*words, "--tops", "2"]) == 0
    assert read_trace(trace) == [(0,), (1, 2)]
    assert trace.read_text().split() == ["1", "0,2"]


def test_a_study_has_a_row_per_exponent_number_of_documents_and_budget() -> None:
    study = PromptStudy(documents=60, requests=60, streams=2, per_prompt=(2, 4))
    rows = study.rows((1.1, 2.1))
    assert [(row.alpha, row.per_prompt, row.gigabytes) for row in rows] == [
        (alpha, count, budget) for alpha in (1.1, 2.1) for count in (2, 4) for budget in (1, 4, 16)
    ]
    assert all(row.position_free.value >= row.per_position.value > 0 for row in rows)
