"""Draws stitching.svg, sees.svg and states.svg, of docs/how-it-works.md, and README's first.svg.

    python tools/figures.py

What a token sees is drawn from the masks that stitching is tested against (`kv/mask.py`), so the
picture cannot say anything else than the law; first tokens are those of `benchmarks.when_not`.
"""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag.kv.mask import MaskedSequence, block_mask, recompute_mask
from kvcache_rag_lab.evaluation.report import figure_class, plain_panel, save_plot

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
TIMES: Final = DOCS.parent / "lab" / "benchmarks" / "results" / "when_not.json"
# Tokens of the instruction, of three chunks, of the question.
PREFIX, CHUNKS, QUERY = 2, (4, 5, 4), 3
STARTS: Final = (2, 6, 11)
PARTS: Final = ("instruction", "chunk A", "chunk B", "chunk C", "question")
# Okabe and Ito's colours, as in the project's other plots.
STORED, NOW, PLAIN = "#56B4E9", "#E69F00", "#999999"


def sees(file: Path = DOCS / "sees.svg") -> None:
    """Three masks: of a full prefill, of stitched chunks, and with first tokens computed again."""
    chunks = [list(range(size)) for size in CHUNKS]
    context = PREFIX + sum(CHUNKS)
    size = context + QUERY
    again = [place for start in STARTS[1:] for place in (start, start + 1)]
    selected = torch.zeros(context, dtype=torch.bool)
    selected[again] = True
    plain = block_mask(range(PREFIX), chunks, range(QUERY))
    linked = recompute_mask(range(PREFIX), chunks, range(QUERY), selected)
    panels = (
        ("full prefill", torch.ones(size, size, dtype=torch.bool).tril(), set(range(size))),
        (
            "Reuse(): only the question is computed",
            _by_place(plain),
            set(range(context, size)),
        ),
        (
            "LegoLink(2): and the first 2 tokens of a chunk",
            _by_place(linked, again),
            {*range(context, size), *again},
        ),
    )
    figure = figure_class()(figsize=(10.4, 4.1), layout="constrained")
    for panel, (title, mask, computed) in zip(figure.subplots(1, 3), panels, strict=True):
        _cells(panel, mask, computed)
        panel.set_title(title, fontsize=9)
    names = {"read from the cache": STORED, "computed for this question": NOW}
    handles = [_patch((0, 0), 1, 1, colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save_plot(figure, file, "sees")


def _by_place(sequence: MaskedSequence, again: Sequence[int] = ()) -> torch.Tensor:
    """`(size, size)` bool by place in the prompt, of which the mask's sequence may have copies.

    Args:
        sequence: Every chunk but the first has a copy of the instruction before it.
        again: Places of the tokens whose copies stand before the question.
    """
    size = PREFIX + sum(CHUNKS) + QUERY
    places = [*range(PREFIX + CHUNKS[0])]
    for start, length in zip(STARTS[1:], CHUNKS[1:], strict=True):
        places += [*range(PREFIX), *range(start, start + length)]
    places += [*again, *range(size - QUERY, size)]
    found = torch.zeros(size, size, dtype=torch.bool)
    for row, place in enumerate(places):
        found[place] = False  # a token's last copy is what the question sees
        found[place, torch.tensor(places)[sequence.allowed[row]]] = True
    return found


def _cells(panel: Any, mask: torch.Tensor, computed: set[int]) -> None:
    """One square per pair of tokens: the row's token sees the column's."""
    size = len(mask)
    for row, column in mask.nonzero().tolist():
        colour = NOW if row in computed else STORED
        panel.add_patch(_patch((column + 0.06, row + 0.06), 0.88, 0.88, colour))
    edges = [0, PREFIX]
    for length in (*CHUNKS, QUERY):
        edges.append(edges[-1] + length)
    for edge in edges[1:-1]:
        for line in (panel.axhline, panel.axvline):
            line(edge, color=PLAIN, linewidth=0.6)
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    panel.set_xticks(middles, PARTS, rotation=45, ha="right", fontsize=8)
    panel.set_yticks(middles, PARTS, fontsize=8)
    panel.tick_params(length=0)
    panel.set_xlim(0, size)
    panel.set_ylim(size, 0)
    panel.set_aspect("equal")
    for side in panel.spines.values():
        side.set_color(PLAIN)


def stitching(file: Path = DOCS / "stitching.svg") -> None:
    """Above, chunks that are prefilled apart; below, those that a question needs, in its order."""
    figure = figure_class()(figsize=(10.4, 4.2), layout="constrained")
    panel = figure.subplots()
    panel.set_axis_off()
    panel.set_xlim(0, 104)
    panel.set_ylim(0, 42)
    panel.text(0, 40, "Offline, once per chunk", fontsize=10, weight="bold")
    for number, name in enumerate("ABCD"):
        _row(panel, 26 * number, 33, [("instr.", 5, PLAIN), (f"chunk {name}", 15, STORED)])
    panel.text(
        0, 29.5, "on disk: keys and values, computed behind the instruction alone", fontsize=8
    )
    panel.text(0, 15, "For a question: chunks D and B were retrieved", fontsize=10, weight="bold")
    parts = [("instr.", 5, PLAIN), ("chunk D", 15, STORED), ("chunk B", 15, STORED)]
    _row(panel, 20, 7, [*parts, ("question", 18, NOW)])
    for source, target in ((26 * 3 + 12.5, 34), (26 + 15, 47.5)):
        panel.annotate(
            "",
            (target, 11.4),
            (source, 32.6),
            arrowprops={"arrowstyle": "->", "color": PLAIN, "linewidth": 1.2},
        )
    panel.text(40, 3.6, "loaded; keys rotated to their new positions", fontsize=8, ha="center")
    panel.text(64, 3.6, "computed", fontsize=8, ha="center")
    save_plot(figure, file, "stitching")


def states(file: Path = DOCS / "states.svg") -> None:
    """The state of a recurrent layer on its way through a prompt of stored chunks."""
    figure = figure_class()(figsize=(10.4, 2.5), layout="constrained")
    panel = figure.subplots()
    panel.set_axis_off()
    panel.set_xlim(0, 104)
    panel.set_ylim(0, 25)
    parts = [("instr.", 8, PLAIN), ("chunk D", 28, STORED), ("chunk B", 28, STORED)]
    _row(panel, 2, 14, [*parts, ("question", 26, NOW)])
    arrow = {"arrowstyle": "->", "color": PLAIN, "linewidth": 1.2}
    # Where the state stands, and what it is there.
    places = ((10, "$S_p$"), (38, "$S = F_D$"), (66, "$S = F_B + A_B\\,(F_D - S_p)$"))
    for place, state in places:
        panel.plot([place - 0.2], [10], marker="o", markersize=6, color=PLAIN)
        panel.text(place - 0.2, 5.5, state, fontsize=9, ha="center")
    for source, target in ((10.6, 37), (38.6, 65), (66.6, 91)):
        panel.annotate("", (target, 10), (source, 10), arrowprops=arrow)
    for middle, name in ((24, "stored with it: $F_D, A_D$"), (52, "stored with it: $F_B, A_B$")):
        panel.text(middle, 20.5, name, fontsize=8, ha="center")
    panel.text(79, 20.5, "computed from this state", fontsize=8, ha="center")
    save_plot(figure, file, "states")


def first(file: Path = DOCS / "first.svg") -> None:
    """The first token by full prefill and from cached chunks, by tokens of documents."""
    cases = json.loads(TIMES.read_text(encoding="utf-8"))["cases"]
    tokens = [case["context_tokens"] for case in cases]
    figure = figure_class()(figsize=(5, 3.2), layout="constrained")
    panel = figure.subplots()
    for name, side, colour, marker in (
        ("full prefill", "full", "black", "o"),
        ("by Reuse()", "cached", "#0072B2", "s"),
    ):
        seconds = [statistics.median(case[side]) for case in cases]
        last = seconds[-1]
        panel.plot(tokens, seconds, color=colour, marker=marker, markersize=4)
        panel.annotate(
            f"{name}\n{last:.2f} s" if last >= 1 else f"{name}\n{1000 * last:.0f} ms",
            (tokens[-1], last),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=colour,
        )
    panel.set_yscale("log")
    panel.set_xlim(0, tokens[-1] * 1.3)
    panel.set_xlabel("tokens of documents", fontsize=9)
    panel.set_ylabel("seconds to the first token", fontsize=9)
    plain_panel(panel)
    save_plot(figure, file, "first")


def _row(panel: Any, left: float, bottom: float, parts: Sequence[tuple[str, float, str]]) -> None:
    # Dark on every fill, by day and by night.
    style = {"ha": "center", "va": "center", "fontsize": 8, "color": "#111111"}
    for text, width, colour in parts:
        panel.add_patch(_patch((left, bottom), width - 0.4, 4, colour))
        panel.text(left + width / 2, bottom + 2, text, **style)
        left += width


def _patch(
    corner: tuple[float, float], width: float, height: float, colour: str, label: str = ""
) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=colour, edgecolor="none", label=label)


if __name__ == "__main__":
    stitching()
    sees()
    states()
    first()
