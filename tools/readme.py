"""Parts of README.md and other pages that programs write, each between two marks of its own."""

from __future__ import annotations

import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def put(begin: str, end: str, text: str, *, command: str, check: bool, page: Path = README) -> int:
    """Write a part, or say whether it is right; the exit status.

    Args:
        begin: Mark before it, a comment.
        end: Mark behind it.
        text: The lines between.
        command: Writes it.
        check: Whether only to compare; 1 if the part is another.
        page: That has the marks.

    Raises:
        SystemExit: If a mark is missing.
    """
    whole = page.read_text(encoding="utf-8")
    before, first, rest = whole.partition(begin)
    _, last, behind = rest.partition(end)
    if not first or not last:
        raise SystemExit(f"{page.name} has lost a mark around {begin}")
    written = f"{before}{begin}\n{text}{end}{behind}"
    if check:
        if written != whole:
            sys.stderr.write(f"a table in {page.name} is stale: {command}\n")
        return int(written != whole)
    page.write_text(written, encoding="utf-8")
    return 0
