"""docs/quality.md says of every claim what the answers say, whichever way they go."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import pytest

from benchmarks.quality_page import page
from benchmarks.quality_scores import FULL, Scores
from kvcache_rag.evaluation.report import summarise
from kvcache_rag.scoring.ask import Place, Record, Records

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvcache_rag.evaluation.report import Group

QUESTIONS = 200
SINGLE, CROSS, NEEDLE = "reader_single", "reader_pronoun", "niah_reader_single"
WAYS = (FULL, "reordered", "LegoLink", "CacheBlend", "CacheClip")
MODELS = ("before", "control", "block")
FACTS = {
    "n": QUESTIONS,
    "steps": 3,
    "rate": 1e-3,
    "date": "today",
    "machine": "here",
    "torch": "2",
    "transformers": "5",
}
MEASURE = {"what": "held out", "loss": [2.0, 1.0], "exact_match": [0.5, None]}
REPORTS = {"block": {"measures": {"one": MEASURE}, "verdict": ["no regression"]}}


def answered(
    task: str, model: str, policy: str, right: float, k: int | None = None
) -> list[Record]:
    """Records of one cell: the first questions are answered right; each has its own documents."""
    return [
        Record(
            place=Place(task, str(number), model, policy, "", k),
            digest="d",
            cluster=str(number),
            scores={"exact": float(number < round(right * QUESTIONS)), "length": 7.0},
            answer="",
            chunk_tokens=100,
            reused_tokens=100,
            recomputed_tokens={FULL: 100, "reordered": 0}.get(policy, 20),
            generated_tokens=1,
            times={"ttft": 0.004, "recompute": 0.001},
        )
        for number in range(QUESTIONS)
    ]


def together(rows: Iterable[Record]) -> Records:
    """As an evaluation gives them."""
    found = tuple(rows)
    return Records(
        found, {row.place.task: "exact" for row in found}, {name: name for name in WAYS}, FULL
    )


@lru_cache(maxsize=64)  # pages have most of their parts in common
def part(
    task: str, right: frozenset[tuple[tuple[str, str, str], float]], k: int | None = None
) -> tuple[Records, list[Group]]:
    """All models and policies on a task; what `right` does not name is right in 0.9."""
    shares = dict(right)
    found = together(
        row
        for model in MODELS
        for policy in WAYS
        for row in answered(task, model, policy, shares.get((task, model, policy), 0.9), k)
    )
    return found, summarise(found)


def written(right: Mapping[tuple[str, str, str], float]) -> str:
    """The page about these shares of right answers."""
    tasks = {
        "main": (SINGLE, None),
        "noise": ("reader_noise_20", None),
        "needles": (NEEDLE, None),
        "cross": (CROSS, None),
        "more": (CROSS, None),
        "k": (CROSS, 2),
    }
    parts = {
        name: part(task, frozenset(one for one in right.items() if one[0][0] == task), k)
        for name, (task, k) in tasks.items()
    }
    return page(
        {name: groups for name, (_, groups) in parts.items()},
        {name: records for name, (records, _) in parts.items()},
        REPORTS,
        FACTS,
        single=[SINGLE],
        cross=[CROSS],
        needles=[NEEDLE],
        lego=8,
    )


def line(text: str, start: str) -> list[str]:
    """Cells of the first row that starts so."""
    row = next(one for one in text.splitlines() if one.startswith(f"| {start} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_scores_are_paired_by_question_whatever_their_order() -> None:
    half = answered(SINGLE, "before", FULL, 0.5)
    some = answered(SINGLE, "before", "reordered", 0.25)
    found = Scores([*half, *reversed(some)])
    compared = found.compare([SINGLE], ("before", "reordered"), ("before", FULL))
    assert compared.difference == pytest.approx(-0.25)
    assert compared.n == QUESTIONS
    assert found.mean([SINGLE], "before", FULL) == 0.5
    with pytest.raises(KeyError):
        found.compare([SINGLE], ("before", "reordered"), ("block", FULL))


def test_the_better_full_prefill_is_the_one_compared_with() -> None:
    low, high = answered(SINGLE, "before", FULL, 0.5), answered(SINGLE, "control", FULL, 0.6)
    best = answered(SINGLE, "block", FULL, 0.9)
    assert Scores([*low, *high, *best]).best_full(SINGLE) == "control"
    assert Scores([*low, *best]).best_full(SINGLE) == "before"


@pytest.mark.parametrize(("block", "verdict"), [(0.9, "yes"), (0.85, "no")])
def test_a_regression_of_single_hop_is_said(block: float, verdict: str) -> None:
    text = written({(SINGLE, "block", "reordered"): block})
    assert line(text, "single")[-1] == verdict
    assert line(text, f"all, n = {QUESTIONS}")[-1] == verdict


@pytest.mark.parametrize(("after", "verdict"), [(0.5, "yes"), (0.49, "no")])
def test_a_drop_is_halved_or_it_is_not(after: float, verdict: str) -> None:
    text = written({(CROSS, "before", "reordered"): 0.1, (CROSS, "block", "reordered"): after})
    for name in ("pronoun, 6 documents", "pronoun, k = 2"):
        cells = line(text, name)
        assert cells[1].startswith("-80.0 (")
        assert cells[-1] == verdict


def test_what_the_control_gained_counts_against_fine_tuning() -> None:
    right = {
        (CROSS, "before", "reordered"): 0.1,
        (CROSS, "control", FULL): 1.0,
        (CROSS, "block", "reordered"): 0.55,
    }
    assert line(written(right), "pronoun, 6 documents")[2].startswith("-45.0 (")


@pytest.mark.parametrize(("lego", "verdict"), [(0.86, "yes"), (0.84, "no")])
def test_the_headline_is_of_the_best_policy_that_recomputes(lego: float, verdict: str) -> None:
    right = {(NEEDLE, "before", name): 0.5 for name in ("CacheBlend", "CacheClip")}
    cells = line(written({**right, (NEEDLE, "before", "LegoLink"): lego}), NEEDLE)
    assert cells[-1] == verdict, "stitching alone, with all of it, is no remedy"
    assert cells[1].startswith("100.0 (")


def test_kinds_that_full_prefill_cannot_do_are_not_scored() -> None:
    right = {(CROSS, model, name): 0.5 for model in MODELS for name in WAYS}
    text = written({**right, (CROSS, "before", "reordered"): 0.0})
    kind = text.partition("### pronoun")[2].partition("###")[0]
    assert "Not scored" in kind
    assert "worse" not in kind
    single = written({(SINGLE, "before", "reordered"): 0.0})
    assert "worse" in single.partition("### single")[2].partition("###")[0]


def test_the_page_has_every_part_and_no_hole() -> None:
    text = written({(CROSS, "before", "reordered"): 0.1})
    assert "{" not in text
    headings = [one for one in text.splitlines() if one.startswith("## ")]
    expected = ["What holds and what does not", "Every kind of question", "More ways to choose"]
    expected += ["Cost", "Top-k", "Fine-tuning"]
    assert headings == [f"## {name}" for name in expected]
    assert "| block | held out | 2.000 | 1.000 | 50.0 % |  |" in text
    assert "| before | reordered | 10.0\\* | 10.0\\* |" in text
    assert "| LegoLink | 20.0 % | 4.0 |" in text
