"""The fields of `kv_cache` as `docs/metrics.md` has them: one list for both frameworks."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"


def _first_cells(head: str) -> set[str]:
    table = _PAGE.read_text(encoding="utf-8").partition(f"| {head} |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    return set(re.findall(r"`([^`]+)`", " ".join(cells)))


FIELDS = _first_cells("field")
REASONS = _first_cells("`reason` of a miss")
