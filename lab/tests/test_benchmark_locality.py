"""Shares and curves by hand, a null that is drawn as it says, retrieval of texts written here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks import locality
from benchmarks.locality import curve_of, null_counts, row_of, shares_of
from benchmarks.locality_page import section
from benchmarks.locality_retrieval import RETRIEVERS, Data, read

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [
    "The lighthouse keeper polishes the great lamp every evening.",
    "A baker kneads dough before dawn and sells bread at noon.",
    "The ferry crosses the strait twice a day, even in winter.",
    "Owls hunt at night and sleep in the old barn.",
]
QUESTIONS = [
    ("Who polishes the lamp?", 0),
    ("When does the baker knead dough?", 1),
    ("How often does the ferry cross?", 2),
    ("Who sells bread?", 1),
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    corpus, queries = tmp_path / "corpus.jsonl", tmp_path / "queries.jsonl"
    corpus.write_text(
        "".join(json.dumps({"id": f"d{n}", "text": text}) + "\n" for n, text in enumerate(TEXTS))
    )
    queries.write_text(
        "".join(json.dumps({"question": q, "gold": f"d{n}"}) + "\n" for q, n in QUESTIONS)
    )
    return corpus, queries


# -------------------------------------------------------------------------------- shares, curves
def test_the_share_is_the_fewest_documents_that_serve_so_many_retrievals() -> None:
    # 5 + 3 of 10 are 80 %, 5 are 50 %, 5 + 3 + 1 are 90 %; of five documents.
    counts = np.array([1, 5, 0, 3, 1])
    assert shares_of(counts).tolist() == pytest.approx([1 / 5, 2 / 5, 3 / 5])


def test_the_curve_starts_at_nothing_ends_at_all_and_adds_the_hottest_first() -> None:
    curve = curve_of(np.array([1, 5, 0, 3, 1]))
    assert curve[[0, 20, 40, 60, 80, 100]].tolist() == pytest.approx([0, 0.5, 0.8, 0.9, 1, 1])
    assert curve[10] == pytest.approx(0.25), "half of the hottest document serves half of its share"
    assert (np.diff(curve) >= -1e-12).all()


def test_several_draws_are_treated_row_by_row() -> None:
    draws = np.array([[1, 5, 0, 3, 1], [2, 2, 2, 2, 2]])
    assert shares_of(draws)[0].tolist() == shares_of(draws[0]).tolist()
    assert curve_of(draws)[1][50] == pytest.approx(0.5), "evenly used documents lie on the diagonal"


# ------------------------------------------------------------------------------------------ null
def test_the_null_draws_as_many_different_documents_as_each_question_retrieved() -> None:
    sizes = np.array([2, 2, 1])
    counts = null_counts(2, sizes, draws=50)
    assert (counts.sum(axis=1) == 5).all()
    assert (counts >= 2).all(), "two different ones of two documents are both"


def test_the_null_is_uniform_and_spread_as_a_binomial() -> None:
    counts = null_counts(10, np.ones(400, dtype=np.int64), draws=400)
    assert counts.mean(axis=0) == pytest.approx([40] * 10, abs=1.5)
    assert counts.var() == pytest.approx(400 * 0.1 * 0.9, rel=0.1)


def test_questions_of_one_document_are_skewed_and_even_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    everyday = Data(TEXTS, ["?"] * 400, np.zeros(400, dtype=np.int64))
    row = row_of(everyday, "gold label", 1, draws=50)
    assert row.shares["90"] == 1 / 4
    assert row.shares["90"] < row.null_shares["90"].low
    even = Data(["x"] * 50, ["?"] * 400, rng.integers(0, 50, 400))
    row = row_of(even, "gold label", 1, draws=200)
    null = row.null_shares["50"]
    assert null.low - 0.03 <= row.shares["50"] <= null.high + 0.03
    assert null.value < 0.5, "even blind questions are not spread evenly"


# ------------------------------------------------------------------------------------- retrieval
def test_words_find_their_document(files: tuple[Path, Path]) -> None:
    data = read(*files)
    for name in ("BM25", "hashing embedding"):
        assert [found[0] for found in RETRIEVERS[name](data, 1)] == [0, 1, 2, 1], name
    assert [found.tolist() for found in RETRIEVERS["gold label"](data, 4)] == [[0], [1], [2], [1]]


def test_bm25_by_hand() -> None:
    # Two documents of two words; "a" stands in one of them, "b" in both.
    data = Data(["a b", "b b"], ["a", "b", "c"], np.array([0, 1, 0]))
    found = RETRIEVERS["BM25"](data, 2)
    assert found[0].tolist() == [0], "what shares no word is not retrieved"
    # Weight of "b": 1 x 2.5 / (1 + 1.5) against 2 x 2.5 / (2 + 1.5).
    assert found[1].tolist() == [1, 0]
    assert found[2].tolist() == []


# --------------------------------------------------------------------------------------- command
def test_without_data_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert locality.main([]) == 2
    assert "name them by --corpus and --queries" in capsys.readouterr().err
    assert locality.main(["--corpus", "absent.jsonl", "--queries", "absent.jsonl"]) == 2
    assert "there is no file absent.jsonl" in capsys.readouterr().err
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"id": "d0"}\n')
    assert locality.main(["--corpus", str(broken), "--queries", str(broken)]) == 2
    assert "line 1 lacks one of id, text" in capsys.readouterr().err


def test_the_command_writes_counts_but_no_text(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "out" / "locality.json", tmp_path / "locality.svg"
    words = ["--corpus", str(files[0]), "--queries", str(files[1]), "--draws", "20"]
    assert locality.main([*words, "--tops", "1", "2", "--json", str(out), "--plot", str(plot)]) == 0
    report = json.loads(out.read_text())
    assert [(row["retriever"], row["top"]) for row in report["rows"]] == [
        ("gold label", 1),
        ("BM25", 1),
        ("hashing embedding", 1),
        ("BM25", 2),
        ("hashing embedding", 2),
    ]
    gold = report["rows"][0]
    assert gold["right"] == 1
    assert gold["retrievals"] == 4
    assert gold["shares"]["50"] == 1 / 4, "the baker is asked about twice"
    assert "lighthouse" not in out.read_text()
    assert str(tmp_path) not in out.read_text()
    assert plot.read_text().startswith("<?xml")
    text = section(report)
    assert "| gold label | 1 | 100.0 % | 25.0 |" in text
    assert "4 questions of `queries.jsonl` over 4 paragraphs of `corpus.jsonl`" in text
    first = plot.read_bytes()
    assert locality.main([*words, "--tops", "1", "2", "--json", str(out), "--plot", str(plot)]) == 0
    assert plot.read_bytes() == first
