"""Counts of the long tests: what was tried, how often, and what happened.

`python tools/reliability.py` writes docs/reliability.md from those that are kept.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]

FRESH: Final = _ROOT / "build" / "reliability"
"""What the last runs of this checkout counted."""

KEPT: Final = Path(__file__).parent / "soak" / "counts"
"""What the page shows."""

PARTS: Final = ("fuzzing", "damage", "kills", "processes", "requests", "models")
"""Sections of the page, in order."""


@dataclass(frozen=True)
class Count:
    """One row.

    Attributes:
        part: One of `PARTS`.
        tried: What was tried, in a few words.
        count: How often.
        seen: What happened, each in a few words with its figure.
        test: The test that counted.
        machine: Where.
        date: When, as YYYY-MM-DD.
    """

    part: str
    tried: str
    count: int
    seen: dict[str, int | float | str]
    test: str
    machine: str
    date: str


def record(name: str, part: str, tried: str, count: int, **seen: int | float | str) -> None:
    """Write the counts of a test that has passed.

    Args:
        name: Of the row's file.
        part: One of `PARTS`.
        tried: What was tried.
        count: How often.
        seen: What happened; underscores stand for blanks.

    Raises:
        ValueError: If there is no such part.
    """
    if part not in PARTS:
        raise ValueError(f"{part!r} is no part of the page; use one of {PARTS}")
    words = {word.replace("_", " "): value for word, value in seen.items()}
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    machine = (
        f"{os.cpu_count()} processors, {platform.system()}, Python {platform.python_version()}"
    )
    date = datetime.now(timezone.utc).date().isoformat()
    row = Count(part, tried, count, words, test, machine, date)
    FRESH.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(row), indent=1, ensure_ascii=False)
    (FRESH / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


def counts(folder: Path) -> dict[str, Count]:
    """The rows in a folder by name."""
    files = sorted(folder.glob("*.json"))
    return {path.stem: Count(**json.loads(path.read_text("utf-8"))) for path in files}
