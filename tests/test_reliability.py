"""docs/reliability.md is what the long tests counted, and it leaves none of them out."""

from __future__ import annotations

import re
from pathlib import Path

from tests import reliability
from tests.fuzz.targets import TARGETS
from tools.reliability import PAGE, page

WRITES = "    record("
SOAK = Path(__file__).parent / "soak"
KEPT = reliability.counts(reliability.KEPT)
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_is_what_the_counts_say() -> None:
    assert page(TEXT, KEPT) == TEXT


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
