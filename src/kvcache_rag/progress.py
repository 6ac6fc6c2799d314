"""A progress bar for long work, and nothing for short or quiet work."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


def progress_bar(total: int, description: str, unit: str, *, show: bool) -> Any:
    """A tqdm bar, also a context manager; it stays silent without `show` or without work."""
    return tqdm(
        total=total, desc=description, unit=unit, disable=not show or total == 0, leave=True
    )
