"""How a side that is a process of its own says what it did; imports nothing that weighs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


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
