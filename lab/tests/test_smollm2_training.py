"""What SmolLM2's adapter is confirmed with: nothing leaks, nothing is moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from squad_files import ARTICLES, PARAGRAPHS, write_squad

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
from training.smollm2.figures import figures

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the shape of SQuAD's, of paragraphs written here."""
    return write_squad(tmp_path_factory.mktemp("data"))


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
