"""Write the table of docs/reliability.md from what the long tests counted.

python tools/reliability.py [--take]

Every long test writes its counts to build/reliability/ when it has passed.  `--take` keeps those of
this checkout in tests/soak/counts/, beside the ones that were there.  The words around the table
are written by hand; no figure in it is.  Counts of one test whose words differ in two places at
most share a row.
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

_TABLE: Final = re.compile(r"(?<=<!-- counts -->\n).*?(?=<!-- end -->)", re.DOTALL)
_DIFFER: Final = 2


def page(text: str, rows: Mapping[str, Count]) -> str:
    """A page with its table written anew.

    Args:
        text: The page; the table stands between `<!-- counts -->` and `<!-- end -->`.
        rows: By name; in the table they stand by part, in the order of their names.

    Raises:
        ValueError: If the page has not exactly one table.
    """
    if len(_TABLE.findall(text)) != 1:
        raise ValueError("the page has not one table between its marks")
    return _TABLE.sub(lambda _: _table(rows), text)


def _table(rows: Mapping[str, Count]) -> str:
    groups: list[list[Count]] = []
    for part in PARTS:
        for row in (rows[name] for name in sorted(rows) if rows[name].part == part):
            same = next((one for one in groups if _alike(one[0], row)), None)
            if same is None:
                groups.append([row])
            else:
                same.append(row)
    lines = ["| tried | how often | what happened |", "|---|--:|---|", *map(_line, groups)]
    where = "; ".join(sorted({f"{row.date}, {row.machine}" for row in rows.values()}))
    return "\n".join([*lines, f"\n{where}.\n"])


def _alike(one: Count, other: Count) -> bool:
    """Whether two counts of one test are tried in nearly the same words."""
    ours, theirs = one.tried.split(), other.tried.split()
    of_one_test = one.test.partition("[")[0] == other.test.partition("[")[0]
    differ = sum(word != word2 for word, word2 in zip(ours, theirs, strict=False))
    return of_one_test and len(ours) == len(theirs) and differ <= _DIFFER


def _line(group: Sequence[Count]) -> str:
    tried = zip(*(row.tried.split() for row in group), strict=True)
    each = (", ".join(sorted(dict.fromkeys(at), key=_by_number)) for at in tried)
    words = " ".join(each).replace(",,", ",")
    names = dict.fromkeys(name for row in group for name in row.seen)
    seen = "; ".join(
        f"{name}: {_together([row.seen.get(name) for row in group])}" for name in names
    )
    return f"| {words} | {sum(row.count for row in group):,} | {seen} |"


def _by_number(word: str) -> float:
    return float(word) if re.fullmatch(r"[\d.]+", word) else 0


def _together(values: Sequence[float | str | None]) -> str:
    """The sum of counts; of texts the least and the most."""
    numbers, texts = [], set()
    for value in values:
        if isinstance(value, str):
            texts.add(value)
        elif value is not None:
            numbers.append(value)
    if not texts:
        return f"{sum(numbers):,}"
    ordered = sorted(texts, key=_by_number)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


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
