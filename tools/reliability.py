"""Write the tables of docs/reliability.md from what the long tests counted.

python tools/reliability.py [--take]

Every long test writes its counts to build/reliability/ when it has passed.  `--take` keeps those of
this checkout in tests/soak/counts/, beside the ones that were there.  The words between the tables
are written by hand; no figure in a table is.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.reliability import FRESH, KEPT, PARTS, Count, counts  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PAGE: Final = ROOT / "docs" / "reliability.md"

_TABLE: Final = re.compile(r"(?<=<!-- counts: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def page(text: str, rows: Mapping[str, Count]) -> str:
    """A page with its tables written anew.

    Args:
        text: The page; a table stands between `<!-- counts: PART -->` and `<!-- end -->`.
        rows: By name; in a table they stand in the order of their names.

    Raises:
        ValueError: If the page has not exactly one table for each part.
    """
    parts = [match[1] for match in _TABLE.finditer(text)]
    if sorted(parts) != sorted(PARTS):
        raise ValueError(f"the page has tables for {parts}, and the parts are {list(PARTS)}")
    return _TABLE.sub(lambda match: match[1] + match[2] + _table(match[1], rows), text)


def _table(part: str, rows: Mapping[str, Count]) -> str:
    own = [rows[name] for name in sorted(rows) if rows[name].part == part]
    lines = ["| tried | how often | what happened | test | when, where |", "|---|--:|---|---|---|"]
    return "\n".join([*lines, *map(_line, own), f"\nTogether: {_total(own)}.\n\n"])


def _line(row: Count) -> str:
    seen = "; ".join(f"{name}: {_figure(value)}" for name, value in row.seen.items())
    test = row.test.rpartition("::")[2].partition("[")[0]
    return f"| {row.tried} | {row.count:,} | {seen} | `{test}` | {row.date}, {row.machine} |"


def _total(rows: Sequence[Count]) -> str:
    return f"{sum(row.count for row in rows):,}"


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def main() -> int:
    """Write the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--take", action="store_true", help="keep this checkout's counts first")
    if parser.parse_args().take:
        KEPT.mkdir(exist_ok=True)
        for path in sorted(FRESH.glob("*.json")):
            shutil.copy(path, KEPT)
    rows = counts(KEPT)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
