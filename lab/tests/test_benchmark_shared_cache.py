"""The benchmark of one engine: scores by hand, what passes find, what a run keeps, its page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from small import make_model, make_tokenizer

from benchmarks import serving_report
from benchmarks.shared_cache import (
    CACHE,
    NO_CACHE,
    TOGETHER,
    A,
    B,
    Cell,
    Questions,
    Report,
    cells,
    folder_bytes,
    passes_of,
    score,
)
from benchmarks.shared_cache_page import shared_cache
from kvcache_rag import Engine

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = {
    "a": "the red fox sleeps in a den",
    "b": "a blue whale sings in the sea",
    "c": "the green parrot talks all day",
    "d": "a blue paint dries on the red wall",
}
ASKED = [
    ("who sings in the sea", "b"),
    ("what does the parrot say in a day", "c"),
    ("where sleeps the fox", "a"),
]


@pytest.fixture
def questions(tmp_path: Path) -> Questions:
    rows = [json.dumps({"id": name, "text": text}) for name, text in TEXTS.items()]
    (tmp_path / "squad_corpus.jsonl").write_text("\n".join(rows))
    asked = [
        json.dumps({"question": text, "gold": gold, "answers": [gold]}) for text, gold in ASKED
    ]
    (tmp_path / "squad_queries.jsonl").write_text("\n".join(asked))
    return Questions(tmp_path, len(ASKED), 2)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(make_model(), make_tokenizer())


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The cat.", 1.0),
        # F1 of two words against one of them: 2 x 1/2 x 1 / (3/2) = 2/3; no exact match.
        ("black cat", 1 / 3),
        ("\n  cat\nand a dog", 1.0),
        ("dog", 0.0),
        ("", 0.0),
    ],
)
def test_the_score_is_half_f1_and_half_exact_match_of_the_best_answer(
    answer: str, expected: float
) -> None:
    assert score(answer, ["a horse", "cat"]) == pytest.approx(expected)


def test_questions_are_drawn_with_their_answers_and_documents(questions: Questions) -> None:
    assert sorted(questions.texts) == sorted(text for text, _ in ASKED)
    gold = dict(ASKED)
    for number, text in enumerate(questions.texts):
        assert questions.answers[number] == [gold[text]]
        assert questions.retrieved(number, 1) == [TEXTS[gold[text]]]
        assert len(questions.retrieved(number, 2)) == 2
    assert questions.right(1) == 1
    assert np.array_equal(questions.gold, [[*TEXTS].index(gold[text]) for text in questions.texts])


def test_every_arrangement_is_asked_once() -> None:
    found = cells((1, 2), (CACHE, B))
    assert len({cell.name for cell in found}) == len(found) == 2 + 2 * 2 * (1 + 2)
    assert [cell for cell in found if cell.way == TOGETHER and cell.top == 1] == []
    assert {cell.arm for cell in found} == {NO_CACHE, CACHE, B}


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize(("arm", "way"), [(CACHE, "stitched"), (CACHE, TOGETHER), (B, "stitched")])
def test_the_second_pass_finds_what_the_first_missed(
    arm: str, way: str, memory: bool, questions: Questions, engine: Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    cell = Cell(arm, 2, way, memory)
    first, second = passes_of(cell, engine, questions, 3, 2, folder)
    each = 1 if way == TOGETHER else 2
    found = 3 * each
    assert sum(first["hits"].values()) + first["misses"] == found
    assert (second["hits"], second["misses"]) == ({"memory" if memory else "disk": found}, 0)
    assert second["computed_tokens"] < first["prompt_tokens"] == second["prompt_tokens"]
    if arm == CACHE:
        distinct = {
            text if way != TOGETHER else tuple(questions.retrieved(number, 2))
            for number in range(3)
            for text in questions.retrieved(number, 2)
        }
        assert first["misses"] == len(distinct)
    assert not folder.exists()


def test_without_a_cache_everything_is_computed(
    questions: Questions, engine: Engine, tmp_path: Path
) -> None:
    (found,) = passes_of(
        Cell(NO_CACHE, 2, "stitched", False), engine, questions, 2, 1, tmp_path / "kv"
    )
    assert (found["hits"], found["misses"]) == ({}, 0)
    assert found["computed_tokens"] == found["prompt_tokens"]
    assert found["latency"] >= found["ttft"] > 0


def test_bytes_of_a_folder_are_those_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one").write_bytes(b"123")
    (tmp_path / "two").write_bytes(b"4567")
    assert folder_bytes(tmp_path) == 7


def test_a_run_goes_on_where_it_stopped_and_begins_anew_with_other_questions(
    tmp_path: Path,
) -> None:
    file, asked = tmp_path / "found.json", {"drawn": 2}
    first = Report(file, {"questions": asked})
    assert first.cell("one", lambda: [1.5]) == [1.5]

    def refuse() -> Any:
        raise AssertionError("measured although it was kept")

    again = Report(file, {"questions": dict(asked)})
    assert again.cell("one", refuse) == [1.5]
    assert again.cell("two", lambda: 2) == 2
    assert set(json.loads(file.read_text())["cells"]) == {"one", "two"}
    other = Report(file, {"questions": {"drawn": 3}})
    assert other.cell("one", lambda: 9) == 9
    assert set(json.loads(file.read_text())["cells"]) == {"one"}


def test_the_page_shows_what_was_measured_and_names_what_was_not(tmp_path: Path) -> None:
    interval = {"value": 0.5, "low": 0.25, "high": 0.75, "n": 2}
    row = {
        "arm": CACHE, "top": 2, "way": TOGETHER, "memory": True, "pass": 2, "ttft": 0.012,
        "latency": 1.5, "throughput": 2.0, "cpu_seconds": 0.25, "hits": {"memory": 3}, "misses": 0,
        "computed_tokens": 20.0, "prompt_tokens": 300.0,
    }  # fmt: skip
    apart = {"difference": -0.1, "low": -0.2, "high": 0.05}
    found = {
        "about": {"machine": "a machine", "versions": "torch", "date": "today"},
        "questions": {
            "drawn": 60, "documents": 800, "asked_in_passes": 12, "passes": 2,
            "paragraphs_sized": 100,
        },
        "retrieval_seconds": 0.002,
        "not_measured": {A: "it needs a second GPU, and there was none"},
        "cells": {
            "bytes of Chroma": {"found": 1, "load": 9.0},
            Cell(CACHE, 2, TOGETHER, True).name: {"found": [], "load": 2.0},
        },
        "rows": [row],
        "accuracy": [
            {
                "top": 2, "right": 0.75, "cached": interval, "full": interval,
                "cached_minus_full": apart,
            }
        ],
        "sizes": [
            {
                "what": "chunks", "bytes": 2_000_000, "bytes_per_paragraph": 20_000.0,
                "bytes_per_token": 100.0, "of_chroma": 50.0,
            }
        ],
    }  # fmt: skip
    text = shared_cache(found)
    assert "Configuration A was not measured: it needs a second GPU" in text
    assert "|  |  | configuration A | not measured |" in text
    assert "while 2.0 to 2.0 processes" in text
    assert "| 2 | together | cache | memory | 2 | 3 | 0 | 0 | 20 of 300 | 12 | 1.50 |" in text
    assert (
        "| 2 | 75 % | 50.0 (25.0 to 75.0) | 50.0 (25.0 to 75.0) | -10.0 (-20.0 to +5.0) |" in text
    )
    assert "| chunks | 2.0 | 20.0 | 100 | 50 |" in text
    (tmp_path / "shared_cache.json").write_text(json.dumps(found))
    assert text.strip() in serving_report.page(None, None, one_engine=found)
