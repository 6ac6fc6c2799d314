"""docs/quality.md has parts that different programs write; each replaces its own and no other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

READER: Final = "the packaged reader: python -m benchmarks.quality"
ANSWERS: Final = "public questions: python -m benchmarks.answers_page"
PARTS: Final = (ANSWERS, READER)

_TITLE: Final = "# Quality\n\n"


def put(page: Path, part: str, text: str) -> None:
    """Write a part of the page, whose headings go down a level."""
    found = parts(page)
    found[part] = lowered(text)
    page.write_text(
        _TITLE + "\n".join(f"<!-- {name} -->\n\n{found.get(name, '')}" for name in PARTS),
        encoding="utf-8",
    )


def parts(page: Path) -> dict[str, str]:
    """The parts of the page as they stand there."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    marks = "|".join(map(re.escape, PARTS))
    _, *pieces = re.split(rf"\n?<!-- ({marks}) -->\n\n", text)  # name, part, name, part, ...
    return dict.fromkeys(PARTS, "") | dict(zip(pieces[::2], pieces[1::2], strict=True))


def lowered(text: str) -> str:
    """The same with every heading a level lower."""
    lines = text.splitlines(keepends=True)
    return "".join(f"#{line}" if line.startswith("#") else line for line in lines)
