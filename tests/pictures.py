"""How large the letters of a picture are on a telephone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 350
"""Pixels that a telephone's page leaves to a picture, of 390."""
LEAST = 10
"""Pixels of letters that can be read there."""


def smallest_letters(svg: Path) -> float:
    """Pixels of the smallest letters on a telephone, in a picture of matplotlib's or ours."""
    text = svg.read_text(encoding="utf-8")
    (width,) = re.findall(r'<svg [^>]*\bwidth="([\d.]+)pt"', text)
    points = [100 * float(scale) for scale in re.findall(r"scale\(([\d.]+) -[\d.]+\)", text)]
    points += [float(size) for size in re.findall(r'font-size="([\d.]+)"', text)]
    pixels = 96 / 72
    return min(points) * pixels * min(1, PAGE / (float(width) * pixels))
