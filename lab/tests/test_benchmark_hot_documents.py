"""The benchmark of hot documents: what each way finds, by hand, and a run on the small reader."""

from __future__ import annotations

import json
from math import factorial
from typing import TYPE_CHECKING

import pytest

from benchmarks import hot_documents
from benchmarks.hot_documents import (
    COPIED,
    DEFERRED,
    FULL,
    PLACED,
    PREFIX,
    WAYS,
    found_of,
    orders,
    share_found,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("order", "prefix", "placed"),
    [
        ((0, 1, 2, 3, 4), (0, 1, 2), (0, 1, 2)),
        ((0, 1, 3, 2, 4), (0, 1), (0, 1)),
        ((0, 3, 2, 1, 4), (0,), (0, 2)),
        ((3, 1, 2, 0, 4), (), (1, 2)),
        ((3, 4, 0, 1, 2), (), ()),
    ],
)
def test_what_each_way_finds_of_an_order(
    order: tuple[int, ...], prefix: tuple[int, ...], placed: tuple[int, ...]
) -> None:
    hot = tuple(place for place in range(5) if order[place] < 3)
    assert found_of(FULL, order) == ()
    assert found_of(PREFIX, order) == prefix
    assert found_of(PLACED, order) == placed
    assert found_of(COPIED, order) == found_of(DEFERRED, order) == hot


def test_over_all_orders_the_shares_are_those_of_counting() -> None:
    assert len(set(orders())) == factorial(5)
    # A document stands at a given place in one of 5 orders: three of five, a fifth of the time.
    assert share_found(PLACED, orders()) == pytest.approx(3 / 5 / 5)
    # The first, the first two, all three at the beginning: 1/5 + 1/20 + 1/60 documents of five.
    assert share_found(PREFIX, orders()) == pytest.approx((1 / 5 + 1 / 20 + 1 / 60) / 5)
    assert share_found(COPIED, orders()) == pytest.approx(3 / 5)


def test_a_run_times_every_way_on_the_same_questions(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["--model", "tiny", "--words", "12", "--questions", "2", "--json", str(file)]
    assert hot_documents.main(words) == 0
    rows = {row["way"]: row for row in json.loads(file.read_text())["rows"]}
    assert tuple(rows) == WAYS
    assert len({row["prompt_tokens"] for row in rows.values()}) == 1
    assert rows[FULL]["of_full"]["value"] == 1
    assert all(row["cpu_ms"] > 0 for row in rows.values())
