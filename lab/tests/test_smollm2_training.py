"""What SmolLM2 is fine-tuned on, and what it is confirmed with: nothing leaks, nothing is moved."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.common import described
from training.smollm2.confirm import (
    CLOSED,
    CONFIRM,
    FULL,
    STITCHED,
    Kept,
    Way,
    questions,
    results,
    task,
)
from training.smollm2.data import REFUSAL, Squad, is_apart, write
from training.smollm2.figures import figures

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ARTICLES = 12
PARAGRAPHS = 6


def text_of(article: int, paragraph: int) -> str:
    return f"Town {article} has in its part {paragraph} a tower of {article}x{paragraph} feet."


def name_of(article: int, paragraph: int) -> str:
    return f"A{article}-p{paragraph}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the shape of SQuAD's, of paragraphs written here."""
    folder = tmp_path_factory.mktemp("data")
    places = [(a, p) for a in range(ARTICLES) for p in range(PARAGRAPHS)]
    corpus = [
        {"id": name_of(*place), "title": f"A{place[0]}", "text": text_of(*place)}
        for place in places
    ]
    asked = []
    for article, paragraph in places:
        gold = name_of(article, paragraph)
        documents = [gold] + [
            name_of((article + step) % ARTICLES, (paragraph + 1) % PARAGRAPHS)
            for step in (0, 1, 2, 3)
        ]
        asked += [
            {
                "id": f"{gold}-{number}",
                "question": f"{word} is the tower in part {paragraph} of town {article}?",
                "answers": [f"{article}x{paragraph}", f"{article}x{paragraph} feet"],
                "gold": gold,
                "documents": documents,
            }
            for number, word in enumerate(("How high", "How tall", "How big"))
        ]
    (folder / "train").mkdir()
    for path, rows in (
        ("train/squad_train_corpus.jsonl", corpus),
        ("train/squad_train_questions.jsonl", asked),
        ("squad_corpus.jsonl", corpus),
        ("squad_queries.jsonl", asked),
    ):
        (folder / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_kept_apart_is_never_learned(data: Path, tmp_path: Path) -> None:
    write(data, tmp_path)
    golds = set(Squad.read(data / "train").contexts)
    apart = {gold for gold in golds if is_apart(gold)}
    assert apart
    assert apart != golds
    own = {row["question"] for row in rows(tmp_path / "apart.jsonl")}
    assert len(own) == 3 * len(apart)
    for row in rows(tmp_path / "learned.jsonl"):
        assert not any(question in row["question"] for question in own)


def test_every_answer_stands_in_the_documents_and_no_refused_one_does(
    data: Path, tmp_path: Path
) -> None:
    write(data, tmp_path)
    heights = {
        f"{word} is the tower in part {p} of town {a}?": f"{a}x{p}"
        for word in ("How high", "How tall", "How big")
        for a in range(ARTICLES)
        for p in range(PARAGRAPHS)
    }
    kinds = {"own": 0, "both": 0, "refused": 0}
    for row in rows(tmp_path / "learned.jsonl"):
        shown = " ".join(document["text"] for document in row["documents"])
        if row["answers"] == [REFUSAL]:
            kinds["refused"] += 1
            assert heights[row["question"]] not in shown
            continue
        kinds["both" if "; " in row["answers"][0] else "own"] += 1
        for part in row["answers"][0].split("; "):
            assert part in shown
        assert len(row["documents"]) == 5
    assert min(kinds.values()) > 5


def test_the_set_of_confirmation_has_the_gold_one_and_four_that_do_not_answer(data: Path) -> None:
    asked = questions(data)
    assert len(asked) == 3 * ARTICLES * PARAGRAPHS
    contexts: dict[str, tuple[str, ...]] = {}
    for question in asked:
        gold = question.id.rpartition("-")[0]
        assert contexts.setdefault(gold, question.chunks) == question.chunks
        assert len(set(question.chunks)) == 5
        holding = [
            index
            for index, text in enumerate(question.chunks)
            if any(answer in text for answer in question.answers)
        ]
        assert tuple(holding) == question.relevant
        town = question.chunks[holding[0]].split(" has ")[0]
        assert sum(text.startswith(f"{town} has ") for text in question.chunks) == 3
    assert len({question.relevant for question in asked}) > 1, "the gold one is not always first"


def test_scores_are_of_normalised_texts(data: Path) -> None:
    question = questions(data)[0]
    assert task("t", []).score("It is the 0x0 feet.", question) == {
        "f1": 2 * 0.5 / 1.5,
        "contains": 1,
    }


def test_bars_are_paired_and_resampled_by_paragraph() -> None:
    """Ten paragraphs of four questions; by hand."""
    names = [str(number) for number in range(40)]
    paragraphs = {name: f"p{int(name) // 4}" for name in names}

    def scores(value: Callable[[int], float]) -> dict[str, list[float]]:
        return {name: [value(int(name)), value(int(name))] for name in names}

    bars = results(
        {
            # Whole paragraphs fare alike.
            Way(CONFIRM, "block", STITCHED): scores(lambda number: float(number // 4 < 8)),
            Way(CONFIRM, "base", STITCHED): scores(lambda _: 0.0),
            Way(CONFIRM, "control", FULL): scores(lambda _: 1.0),
            Way(CLOSED, "control", FULL): scores(lambda _: 0.0),
        },
        paragraphs,
    )["bars"]
    assert bars["a"]["holds"]
    assert bars["a"]["f1"][0] == pytest.approx(0.8)
    assert bars["a"]["n"] == 40
    # 2 of 10 paragraphs, not 8 of 40 questions: a wide interval.
    assert bars["a"]["f1"][1] <= 0.5
    assert bars["b"]["f1"][0] == pytest.approx(-0.2)
    assert not bars["b"]["holds"]
    assert bars["c"]["holds"]


def test_the_card_shows_every_way_and_bar_that_was_measured() -> None:
    names = [str(number) for number in range(40)]
    half = {name: [float(int(name) % 2), 1.0] for name in names}
    ways = {
        Way(CONFIRM, "block", STITCHED): half,
        Way(CONFIRM, "base", STITCHED): {name: [0.0, 0.0] for name in names},
        Way(CLOSED, "control", FULL): half,
    }
    confirmed: dict[str, Any] = results(ways, dict(zip(names, names, strict=True)))
    for row, commit in zip(confirmed["scores"], ("abc", "def", "abc"), strict=True):
        row["about"] = {**described("cpu", 1), "commit": commit}
    ability = {
        "divergence": {"mean": 0.25, "n": 100},
        "docstrings": {
            "pieces": 60,
            "perplexity before": 10.0,
            "perplexity after": 10.5,
            "ratio": 1.05,
            "holds": False,
        },
        "device": "cpu",
    }
    shown = figures(confirmed, ability)
    answers, bars, perplexity = shown["tables"].values()
    assert [row["reads"] for row in answers] == [
        "cached chunks, reuse",
        "cached chunks, reuse",
        "no documents",
    ]
    assert answers[0]["F1"].startswith("50.0 (")
    assert len(bars) == 1, "the other bars need ways that were not asked"
    assert bars[0]["points"].startswith("+50.00 (+")
    assert bars[0]["holds"]
    assert perplexity[0]["change"] == "+5.0 %"
    assert not perplexity[0]["holds"]
    assert "commit abc, def; " in shown["description"]
    assert "0.250 nats" in shown["description"]
    assert "nats" not in figures(confirmed)["description"]


def test_scores_of_whole_ways_outlast_the_run(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    way, other = Way(CONFIRM, "block", STITCHED), Way(CLOSED, "base", FULL)
    Kept(path).add(way, "digest", {"q": [0.5, 1.0]}, {"commit": "abc"})
    Kept(path).add(other, "", {"q": [0.0, 0.0]}, {"commit": "def"})
    found = Kept(path).scores
    assert found == {way: ("digest", {"q": [0.5, 1.0]}), other: ("", {"q": [0.0, 0.0]})}
