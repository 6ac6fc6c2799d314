"""Tables say what was measured, claim only what intervals allow, and plots can be read."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import MissingExtraError
from kvcache_rag_lab.evaluation.report import (
    PolicyRow,
    check_plot,
    draw,
    summarise,
    to_json,
    to_markdown,
)
from kvcache_rag_lab.scoring.ask import CLOSED_BOOK, Place, Record, Records
from kvcache_rag_lab.scoring.statistics import mean_interval, paired_bootstrap

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HALF = [1.0, 0.0] * 50
GOOD = [1.0] * 90 + [0.0] * 10
WORSE = [1.0] * 70 + [0.0] * 30
CLUSTERS = [str(index // 2) for index in range(100)]


def answered(
    scores: Sequence[float],
    policy: str,
    *,
    task: str = "kind",
    codec: str = "",
    share: float = 0.0,
    milliseconds: float | None = 10.0,
    texts: str = "right",
    divergence: float | None = None,
) -> list[Record]:
    """Records of one cell; two questions share their documents, five are timed."""

    def times(index: int) -> dict[str, float] | None:
        if milliseconds is None or index >= 5:
            return None
        ttft = (milliseconds + index) / 1000
        return {"ttft": ttft, "choose": share / 500, "recompute": share / 1000}

    return [
        Record(
            place=Place(task, str(index), "tiny", policy, codec, None),
            digest="d",
            cluster=str(index // 2),
            scores={"right": score, "length": 1.0},
            answer=texts if score else "wrong",
            chunk_tokens=200,
            reused_tokens=0 if policy == "full" else 200,
            recomputed_tokens=round(200 * share),
            generated_tokens=3,
            times=times(index),
            divergence=divergence,
        )
        for index, score in enumerate(scores)
    ]


def records(*cells: list[Record]) -> Records:
    rows = tuple(row for cell in cells for row in cell)
    tasks = {row.place.task: "right" for row in rows}
    labels = {row.place.policy: f"Policy({row.place.policy})" for row in rows}
    full, closed = (name if name in labels else None for name in ("full", CLOSED_BOOK))
    return Records(rows, tasks, labels, full, closed)


def rows_of(found: Records) -> dict[str, PolicyRow]:
    (group,) = summarise(found)
    return {row.policy + row.codec: row for row in group.rows}


def test_numbers_of_a_row() -> None:
    full = answered(GOOD, "full", share=1, milliseconds=40)
    rows = rows_of(records(full, answered(WORSE, "some", share=0.15)))
    some = rows["some"]
    assert (some.n, some.scores["length"].value) == (100, 1)
    assert some.quality == mean_interval(WORSE, CLUSTERS)
    assert some.difference == paired_bootstrap(WORSE, GOOD, CLUSTERS)
    assert some.kept is not None
    assert some.kept.value == pytest.approx(70 / 90)
    assert (some.recomputed_share, some.reused_share) == (0.15, 1)
    assert some.ttft is not None
    assert (some.ttft.value, some.ttft.n) == (0.012, 5)
    assert (some.choose, some.recompute) == pytest.approx((0.0003, 0.00015))
    assert rows["full"].difference is None
    assert rows["full"].recomputed_share == 1


def test_what_can_be_told_of_some_questions_is_a_mean_over_these() -> None:
    full, some = (answered([1.0, 0.0, 1.0], name) for name in ("full", "some"))
    told = [
        replace(one, scores={**one.scores, "told": score})
        for one, score in zip(full[:2], (1.0, 0.0), strict=True)
    ]
    found = records([*told, full[2]], some)
    scores = rows_of(found)["full"].scores
    assert (scores["told"].value, scores["told"].n) == (0.5, 2)
    assert "told" not in rows_of(found)["some"].scores
    assert "50.0 |" in to_markdown(summarise(found))


def test_a_ranking_is_claimed_only_where_the_interval_excludes_0() -> None:
    full = answered(GOOD, "full", share=1)
    near = [*GOOD[:89], 0.0, *GOOD[90:]]
    text = to_markdown(summarise(records(full, answered(WORSE, "bad"), answered(near, "near"))))
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line[:2] == "| "}
    assert "-20.0 (" in lines["bad"]
    assert " worse " in lines["bad"]
    assert "-1.0 (" in lines["near"]
    assert "worse" not in lines["near"]


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_a_task_that_full_prefill_cannot_do_is_not_scored(floor: float) -> None:
    options = {"floor": floor} if floor else {}
    (group,) = summarise(records(answered(HALF, "full"), answered([0.0] * 100, "none")), **options)
    text = to_markdown([group])
    assert group.scored is bool(floor)
    assert ("Not scored" in text) is not group.scored
    assert (" worse |" in text) is group.scored


def test_full_prefill_that_beats_closed_book_is_scored_however_low_it_is() -> None:
    full, none = answered(HALF, "full"), answered([0.0] * 100, "none")
    closed = [0.0] * 90 + [1.0, 0.0] * 5
    (group,) = summarise(records(full, none, answered(closed, CLOSED_BOOK)))
    assert group.scored is True
    rows = {row.policy: row for row in group.rows}
    assert rows["full"].above_closed == paired_bootstrap(HALF, closed, CLUSTERS)
    assert rows["none"].above_closed is not None
    assert rows["none"].above_closed.difference == pytest.approx(-0.05)
    assert rows[CLOSED_BOOK].difference is rows[CLOSED_BOOK].above_closed is None
    (group,) = summarise(records(full, none, answered(HALF, CLOSED_BOOK)))
    assert group.scored is False, "what it knows anyway is no reading"
    text = to_markdown([group])
    assert "-50.0 (" in text, "shown all the same"
    assert " worse" not in text.split("\n| policy")[1].split("\n- ")[0]


def test_only_questions_that_all_answered_count() -> None:
    full, some = answered(GOOD, "full"), answered(WORSE, "some")
    (group,) = summarise(records(full, some[:60]))
    assert group.n == 60
    assert [row.n for row in group.rows] == [60, 60]
    assert group.rows[0].quality.value == 1, "the first 60 of the full prefill are right"


def test_codecs_are_compared_with_the_first() -> None:
    native = [answered(GOOD, name, codec="native") for name in ("full", "reuse")]
    coarse = answered(GOOD, "reuse", codec="int4", divergence=0.5, texts="other")
    rows = rows_of(records(*native, coarse))
    assert rows["reusenative"].changed is None
    changed = rows["reuseint4"].changed
    assert changed is not None
    assert changed.value == 0.9
    assert rows["reuseint4"].divergence == (0.5, 0.5)
    assert rows["reuseint4"].difference is not None


def test_json_has_every_interval_and_no_nan() -> None:
    found = records(answered([0.0] * 100, "full"), answered(GOOD, "some"))
    text = json.dumps(to_json(summarise(found), found), allow_nan=False)
    values = json.loads(text)
    assert values["policies"]["some"] == "Policy(some)"
    (group,) = values["groups"]
    assert group["rows"][1]["difference"]["ranked"] is True
    assert group["rows"][1]["kept"]["value"] is None
    assert group["rows"][1]["quality"]["low"] > 0.75
    assert math.isclose(group["rows"][1]["ttft"]["value"], 0.012)


def test_the_plot_has_a_point_per_policy_and_greys_what_is_not_scored(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    easy = [answered(GOOD, "full", milliseconds=40), answered(WORSE, "some <b>")]
    hard = [answered(HALF, "full", task="hard"), answered(HALF, "some <b>", task="hard")]
    draw(summarise(records(*easy, *hard)), file, "full")
    ElementTree.parse(file)
    text = file.read_text(encoding="utf-8")
    for words in ("hard, tiny (not scored)", "time to first token, ms", "some &lt;b&gt;"):
        assert words in text
    assert {"#aaaaaa", "#0072b2"} <= set(re.findall(r"#\w{6}", text.lower()))
    draw(summarise(records(*easy)), file, "full")
    assert "#aaaaaa" not in file.read_text(encoding="utf-8").lower()


def test_a_plot_that_cannot_be_drawn_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInputError, match="must end in"):
        check_plot(tmp_path / "plot.txt")
    with pytest.raises(InvalidInputError, match="no folder"):
        check_plot(tmp_path / "no" / "plot.png")
    untimed = summarise(records(answered(GOOD, "full", milliseconds=None)))
    with pytest.raises(InvalidInputError, match="timed"):
        draw(untimed, tmp_path / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"kvcache-rag\[eval\]"):
        check_plot(tmp_path / "plot.png")
