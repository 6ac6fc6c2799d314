"""Checks of the numbers and names that policies are made with; no tensor is needed for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from kvcache_rag.kv.mask import PositionScheme


def checked_ratio(
    ratio: float, name: str = "ratio", none: str = "nothing is computed again"
) -> float:
    """A part of the chunk tokens, or of what is named instead; `none` is what 0 means.

    Raises:
        InvalidInputError: Unless it is a number from 0 to 1.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise InvalidInputError(f"{name} must be a number from 0 ({none}) to 1, not {ratio!r}")
    return float(ratio)


def checked_positions(positions: PositionScheme) -> None:
    """Raise `InvalidInputError` unless it is the name of a position scheme."""
    if positions not in ("reordered", "composite"):
        raise InvalidInputError(f'positions must be "reordered" or "composite", not {positions!r}')


def checked_count(name: str, value: int, least: int = 1) -> None:
    """Raise `InvalidInputError` unless `value` is a whole number from `least` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInputError(f"{name} must be a whole number from {least} up, not {value!r}")
