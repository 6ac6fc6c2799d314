"""Draw docs/house.svg: which folders of the core import which; `make docs` does it, too.

    python tools/house.py

An arrow that follows from two others is left out, and so is what is below everything.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.import_graph import Imports, top  # noqa: E402  # found by the line above

PICTURE: Final = ROOT / "docs" / "house.svg"
BELOW: Final = {"metrics", "progress", "errors", "exports", "forks"}
WIDTH, HEIGHT, ROW, BOX, LETTERS = 250, 22, 34, 96, 11
HEAD: Final = f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}pt" height="%dpt" \
viewBox="0 0 {WIDTH} %d" font-family="sans-serif" font-size="{LETTERS}" text-anchor="middle">
<style>
rect {{ fill: #e8f1f8; stroke: #56779a }} path {{ stroke: #777 }} text {{ fill: #111 }}
@media (prefers-color-scheme: dark) {{ rect {{ fill: #22303c }} text {{ fill: #eee }} }}
</style>
<marker id="end" markerWidth="6" markerHeight="6" refX="6" refY="3" orient="auto">
<path d="M0 0L6 3L0 6z" fill="#777"/></marker>
"""


def arrows() -> dict[str, list[str]]:
    """Every part of the core and those right below it."""
    found: dict[str, set[str]] = defaultdict(set)
    for one in Imports().all(types=True):
        found[top(one.importer)].add(top(one.imported))
    parts = {name: below - BELOW - {name} for name, below in found.items() if name not in BELOW}

    @cache
    def reached(name: str) -> frozenset[str]:
        below = parts.get(name, set())
        return frozenset(below).union(*map(reached, below))

    return {
        name: sorted(one for one in below if not any(one in reached(other) for other in below))
        for name, below in sorted(parts.items())
        if not name.startswith("__")
    }


def drawn() -> str:
    """The picture: who imports stands above whom it imports."""
    below = arrows()

    @cache
    def depth(name: str) -> int:
        return max((depth(above) + 1 for above, own in below.items() if name in own), default=0)

    rows: dict[int, list[str]] = defaultdict(list)
    for name in sorted({name for above, own in below.items() for name in (above, *own) if own}):
        rows[depth(name)].append(name)
    places = {
        name: ((2 * column + 1) * WIDTH // (2 * len(names)), row * ROW + HEIGHT // 2 + 1)
        for row, names in rows.items()
        for column, name in enumerate(names)
    }
    lines = [
        f'<path d="M{x} {y}L{end} {under - HEIGHT // 2}" marker-end="url(#end)"/>'
        for name, (x, y) in sorted(places.items())
        for end, under in (places[own] for own in below.get(name, ()))
    ]
    for name, (x, y) in sorted(places.items()):
        corner = f'x="{x - BOX // 2}" y="{y - HEIGHT // 2}"'
        lines.append(f'<rect {corner} width="{BOX}" height="{HEIGHT}" rx="3"/>')
        lines.append(f'<text x="{x}" y="{y + LETTERS // 3}">{name}</text>')
    height = len(rows) * ROW - (ROW - HEIGHT) + 2
    return HEAD % (height, height) + "\n".join(lines) + "\n</svg>\n"


if __name__ == "__main__":
    picture = drawn()
    if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture:
        PICTURE.write_text(picture, encoding="utf-8")
