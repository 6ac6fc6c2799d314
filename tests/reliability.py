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
    """One row."""

    part: str  # one of `PARTS`
    tried: str  # what, in a few words
    count: int  # how often
    seen: dict[str, int | float | str]  # what happened, each in a few words with its figure
    test: str  # that counted
    machine: str
    date: str  # as YYYY-MM-DD


def record(name: str, part: str, tried: str, count: int, **seen: int | float | str) -> None:
    """Write the counts of a test that has passed into a row's file; underscores are blanks."""
    assert part in PARTS, f"{part!r} is no part of the page; use one of {PARTS}"
    words = {word.replace("_", " "): value for word, value in seen.items()}
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    system = f"{platform.system()}, Python {platform.python_version()}"
    machine = f"{os.cpu_count()} processors, {system}"
    date = datetime.now(timezone.utc).date().isoformat()
    row = Count(part, tried, count, words, test, machine, date)
    FRESH.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(row), indent=1, ensure_ascii=False)
    (FRESH / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


def counts(folder: Path) -> dict[str, Count]:
    """The rows in a folder by name."""
    files = sorted(folder.glob("*.json"))
    return {path.stem: Count(**json.loads(path.read_text("utf-8"))) for path in files}
