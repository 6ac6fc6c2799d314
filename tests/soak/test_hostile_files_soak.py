"""Damaged and hostile files by the thousand, nested ten times deeper than in the short test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hostile import MEGABYTES, SECONDS, SEEDS, read_all
from tests.reliability import record

if TYPE_CHECKING:
    from tests.soak.conftest import Amount

LEVELS = 100_000


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", SEEDS)
def test_no_file_does_more_than_fail(kind: str, amount: Amount) -> None:
    count = amount(200, 2_000)
    done = read_all(kind, 2, count, LEVELS)
    assert done.faults == ()
    limits = f"{SECONDS} s and {MEGABYTES} MB at most for each"
    tried = f"damaged or hostile .{kind} files read, {limits}"
    seen = {"texts": done.texts, "one sentence": done.refused, "anything else": 0}
    record(f"hostile-{kind}", "damage", tried, count, **seen, slowest=f"{done.slowest:.1f} s")
