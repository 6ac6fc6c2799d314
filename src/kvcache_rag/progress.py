"""A progress bar for long work, and nothing for short or quiet work."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


def progress_bar(
    total: int, description: str, unit: str, *, show: bool, scaled: bool = False
) -> Any:
    """A tqdm bar, also a context manager; it stays silent without `show` or without work.

    Args:
        total: How many units there are.
        description: What is done.
        unit: What is counted.
        show: Whether to show it.
        scaled: Whether to write thousands as "k".
    """
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        disable=not show or total == 0,
        leave=True,
        unit_scale=scaled,
    )
