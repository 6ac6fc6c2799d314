"""How a side that is a process of its own says what it did; imports nothing that weighs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def result(ttft: float, total: float, tokens: Sequence[int], reused: int) -> dict[str, Any]:
    """What every side says about a job: seconds, tokens, and how many of the prompt were reused."""
    step = (total - ttft) / (len(tokens) - 1) if len(tokens) > 1 else 0.0
    return {
        "ttft": ttft,
        "total": total,
        "step": step,
        "tokens": [*map(int, tokens)],
        "reused": reused,
    }


def answer_jobs(ask: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer jobs, one a line of the input, until it ends."""
    # Libraries may print; the lines of the answers have the output to themselves.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps({"peak_mib": _peak()}), file=output, flush=True)
    for line in sys.stdin:
        found = ask(json.loads(line))
        print(json.dumps({**found, "peak_mib": _peak()}), file=output, flush=True)


def _peak() -> float:
    """The largest resident set of this process so far, in MiB."""
    said = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in said.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
