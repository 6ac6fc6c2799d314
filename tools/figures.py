"""Draws stitching.svg, sees-*.svg and states.svg, of docs/how-it-works.md, and README's first.svg.

    python tools/figures.py

What a token sees is drawn from the masks that stitching is tested against (`kv/mask.py`), so the
picture cannot say anything else than the law; first tokens are those of `when_not.json`, whose
program is at commit 00c4d022.
"""

from __future__ import annotations

import json
import statistics
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag.kv.mask import MaskedSequence, block_mask, recompute_mask
from kvcache_rag_lab.evaluation.report import TEXT, WIDTH, new_figure, plain_panel, save_plot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
TIMES: Final = DOCS.parent / "lab" / "benchmarks" / "results" / "when_not.json"
# Tokens of the instruction, of three chunks, of the question.
PREFIX, CHUNKS, QUERY = 2, (4, 5, 4), 3
STARTS: Final = (2, 6, 11)
PARTS: Final = ("instruction", "chunk A", "chunk B", "chunk C", "question")
# Okabe and Ito's colours, as in the project's other plots.
STORED, NOW, PLAIN = "#56B4E9", "#E69F00", "#999999"


def sees(folder: Path = DOCS) -> None:
    """Masks: of a full prefill, of the best two chunks, of stitched ones, of first tokens again.

    Each is a picture of its own, so that a page shows them side by side where there is room.
    """
    chunks = [list(range(size)) for size in CHUNKS]
    context = PREFIX + sum(CHUNKS)
    size = context + QUERY
    again = [place for start in STARTS[1:] for place in (start, start + 1)]
    selected = torch.zeros(context, dtype=torch.bool)
    selected[again] = True
    plain = block_mask(range(PREFIX), chunks, range(QUERY))
    linked = recompute_mask(range(PREFIX), chunks, range(QUERY), selected)
    question = set(range(context, size))
    # The best two are B and A; C is left out.
    few = PREFIX + CHUNKS[1] + CHUNKS[0] + QUERY
    behind = set(range(PREFIX + CHUNKS[1], few))
    panels = (
        ("full", "full prefill", torch.ones(size, size, dtype=torch.bool).tril(), set(range(size))),
        ("few", "BestFew(2)", torch.ones(few, few, dtype=torch.bool).tril(), behind),
        ("stitched", "Reuse()", _by_place(plain), question),
        ("again", "LegoLink(2)", _by_place(linked, again), {*question, *again}),
    )
    parts = dict(zip(PARTS, (PREFIX, *CHUNKS, QUERY), strict=True))
    for name, title, mask, computed in panels:
        figure = new_figure(2.9, width=2.7)
        panel = figure.subplots()
        panel.set_title(title, fontsize=TEXT)
        order = (PARTS[0], PARTS[2], PARTS[1], PARTS[4]) if name == "few" else PARTS
        _cells(panel, mask, computed, {part: parts[part] for part in order})
        save_plot(figure, folder / f"sees-{name}.svg", "sees")


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


def _cells(panel: Any, mask: torch.Tensor, computed: set[int], parts: Mapping[str, int]) -> None:
    """One square per pair of tokens: the row's token sees the column's."""
    size = len(mask)
    for row, column in mask.nonzero().tolist():
        colour = NOW if row in computed else STORED
        panel.add_patch(_patch((column + 0.06, row + 0.06), 0.88, 0.88, colour))
    edges = [0, *accumulate(parts.values())]
    for edge in edges[1:-1]:
        for line in (panel.axhline, panel.axvline):
            line(edge, color=PLAIN, linewidth=0.6)
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    panel.set_xticks(middles, [*parts], rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    panel.set_yticks(middles, [*parts], fontsize=8)
    panel.tick_params(length=0)
    panel.set_xlim(0, size)
    panel.set_ylim(size, 0)
    panel.set_aspect("equal")
    for side in panel.spines.values():
        side.set_color(PLAIN)


def stitching(file: Path = DOCS / "stitching.svg") -> None:
    """Above, chunks that are prefilled apart; below, those that a question needs, in its order."""
    figure, panel = _drawing(46)
    panel.text(0, 43, "Offline, once per chunk: to disk", fontsize=TEXT, weight="bold")
    for number, name in enumerate("ABCD"):
        parts = [("instr.", 10, PLAIN), (f"chunk {name}", 17, STORED)]
        _row(panel, 31 * (number % 2), 36 - 7 * (number // 2), parts)
    for height, line in ((21, "For a question:"), (17.5, "D and C fit it")):
        panel.text(0, height, line, fontsize=TEXT, weight="bold")
    parts = [("instr.", 10, PLAIN), ("chunk D", 17, STORED), ("chunk C", 17, STORED)]
    _row(panel, 0, 7, [*parts, ("question", 16, NOW)])
    for source, target in ((49.5, 18.5), (18.5, 35.5)):
        _arrow(panel, (source, 28.6), (target, 11.6))
    panel.text(27, 3, "loaded, keys rotated", fontsize=TEXT, ha="center")
    panel.text(52, 3, "computed", fontsize=TEXT, ha="center")
    save_plot(figure, file, "stitching")


def states(file: Path = DOCS / "states.svg") -> None:
    """The state of a recurrent layer on its way through a prompt of stored chunks."""
    figure, panel = _drawing(33)
    panel.text(10, 29, "stored with them:", fontsize=TEXT)
    for middle, names in ((18.5, "$F_D, A_D$"), (35.5, "$F_C, A_C$")):
        panel.text(middle, 25.5, names, fontsize=TEXT, ha="center")
    parts = [("instr.", 10, PLAIN), ("chunk D", 17, STORED), ("chunk C", 17, STORED)]
    _row(panel, 0, 19, [*parts, ("question", 16, NOW)])
    # Where the state stands, and what it is there.
    places = ((10, "$S_p$"), (27, "$F_D$"), (44, ""))
    for place, state in places:
        panel.plot([place - 0.2], [14], marker="o", markersize=6, color=PLAIN)
        panel.text(place - 0.2, 9, state, fontsize=TEXT, ha="center")
    panel.text(44, 9, "$F_C + A_C\\,(F_D - S_p)$", fontsize=TEXT, ha="center")
    for source, target in ((10.8, 26), (27.8, 43), (44.8, 59)):
        _arrow(panel, (source, 14), (target, 14))
    panel.text(0, 4, "the state after each part", fontsize=TEXT)
    save_plot(figure, file, "states")


def first(file: Path = DOCS / "first.svg") -> None:
    """The first token by full prefill and from cached chunks, by tokens of documents."""
    cases = json.loads(TIMES.read_text(encoding="utf-8"))["cases"]
    tokens = [case["context_tokens"] for case in cases]
    figure = new_figure(3)
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
            fontsize=TEXT,
            color=colour,
        )
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xticks(range(0, tokens[-1], 1000))
    panel.set_xlim(0, tokens[-1] * 1.4)
    panel.set_xlabel("tokens of documents", fontsize=TEXT)
    panel.set_ylabel("seconds to the first token", fontsize=TEXT)
    plain_panel(panel)
    save_plot(figure, file, "first")


def _drawing(height: float) -> tuple[Any, Any]:
    """A picture 60 units wide and so many high, without axes."""
    figure = new_figure(WIDTH * height / 60)
    panel = figure.subplots()
    panel.set_axis_off()
    panel.set_xlim(0, 60)
    panel.set_ylim(0, height)
    return figure, panel


def _arrow(panel: Any, source: tuple[float, float], target: tuple[float, float]) -> None:
    look = {"arrowstyle": "->", "color": PLAIN, "linewidth": 1.2}
    panel.annotate("", target, source, arrowprops=look)


def _row(panel: Any, left: float, bottom: float, parts: Sequence[tuple[str, float, str]]) -> None:
    # Dark on every fill, by day and by night.
    style = {"ha": "center", "va": "center", "fontsize": TEXT, "color": "#111111"}
    for text, width, colour in parts:
        panel.add_patch(_patch((left, bottom), width - 0.4, 4, colour))
        panel.text(left + width / 2, bottom + 2, text, **style)
        left += width


def _patch(corner: tuple[float, float], width: float, height: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=colour, edgecolor="none")


if __name__ == "__main__":
    stitching()
    sees()
    states()
    first()
