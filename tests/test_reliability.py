"""docs/reliability.md is what the long tests counted, and it leaves none of them out."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests import reliability
from tests.fuzz.targets import TARGETS
from tools.reliability import PAGE, page

WRITES = "    record("
SOAK = Path(__file__).parent / "soak"
KEPT = reliability.counts(reliability.KEPT)
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_is_what_the_counts_say() -> None:
    assert page(TEXT, KEPT) == TEXT


def test_another_figure_would_be_another_page() -> None:
    name, row = next(iter(KEPT.items()))
    other = page(TEXT, {**KEPT, name: replace(row, tried="something else", count=row.count + 1)})
    assert other != TEXT
    assert f"| something else | {row.count + 1:,} |" in other


def test_a_page_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="has not one table"):
        page(TEXT.replace("<!-- counts -->", "counts"), KEPT)


# Long because of what they start, not of how often they try.
SLOW = ("test_build_ray.py", "test_packages.py")


def test_every_long_test_writes_counts_and_every_row_is_of_one() -> None:
    counting = set()
    for path in SOAK.glob("test_*.py"):
        if path.name in SLOW:
            continue
        pieces = re.split(r"(?m)^(?:async )?def ", path.read_text(encoding="utf-8"))
        own = {one.partition("(")[0] for one in pieces if one.startswith("test_") and WRITES in one}
        assert own, f"{path.name} writes no counts"
        counting |= {f"tests/soak/{path.name}::{name}" for name in own}
    assert {row.test.partition("[")[0] for row in KEPT.values()} <= counting
    assert {row.part for row in KEPT.values()} == set(reliability.PARTS)
    assert {f"fuzz-{name}" for name in TARGETS} <= KEPT.keys()


def test_what_a_release_wants_was_tried() -> None:
    total = {
        part: sum(row.count for row in KEPT.values() if row.part == part)
        for part in reliability.PARTS
    }
    assert min(KEPT[f"fuzz-{name}"].count for name in ("header", "keys", "scanner")) >= 1_000_000
    assert KEPT["fuzz-schema"].count >= 100_000
    assert total["kills"] >= 2000
    assert total["damage"] >= 100_000
    assert KEPT["requests"].count >= 50_000


def test_counts_come_back_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reliability, "FRESH", tmp_path / "fresh")
    reliability.record("one", "kills", "`kill -9`", 3, chunks_lost=0, seconds="0.1")
    row = reliability.counts(tmp_path / "fresh")["one"]
    assert (row.part, row.tried, row.count) == ("kills", "`kill -9`", 3)
    assert row.seen == {"chunks lost": 0, "seconds": "0.1"}
    assert row.test.endswith("test_counts_come_back_as_they_were_written")
    assert "| `kill -9` | 3 | chunks lost: 0; seconds: 0.1 |" in page(TEXT, {"one": row})
    with pytest.raises(ValueError, match="no part"):
        reliability.record("one", "luck", "", 1)


def test_counts_of_one_test_that_differ_in_two_words_share_a_row() -> None:
    row = reliability.Count(
        "kills", "put by 8 into 5 MB", 3, {"lost": 0, "most": "1.2"}, "a::b[8]", "", ""
    )
    other = replace(row, tried="put by 1 into 40 MB", count=4, seen={"lost": 1, "most": "0.9"})
    told = "| put by 1, 8 into 5, 40 MB | 7 | lost: 1; most: 0.9 to 1.2 |"
    assert told in page(TEXT, {"one": row, "two": other})
    apart = page(TEXT, {"one": row, "two": replace(other, test="a::c")})
    assert "| put by 8 into 5 MB | 3 |" in apart
    assert "| put by 1 into 40 MB | 4 |" in apart
