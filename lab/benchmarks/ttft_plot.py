"""Plots of time to the first token: against the context, and against the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks.ttft_sides import (
    COLD,
    DEFERRED,
    FLOOR,
    NAIVE,
    PAGES,
    PREFIXED,
    RAM,
    RESIDENT,
    TURBORAG,
)
from kvcache_rag_lab.evaluation.report import figure_class, plain_panel, save_plot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.ttft_rows import Row

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_LOOKS: Final = {
    NAIVE: ("black", "o"),
    PREFIXED: ("#999999", "s"),
    TURBORAG: ("#D55E00", "D"),
    COLD: ("#CC79A7", "v"),
    PAGES: ("#0072B2", "^"),
    RAM: ("#009E73", "P"),
    RESIDENT: ("#F0E442", "p"),
    DEFERRED: ("#56B4E9", "X"),
    FLOOR: ("#E69F00", "_"),
}


def draw(rows: Sequence[Row], context_file: Path, batch_file: Path, query: int) -> None:
    """Write both plots; a rerun over the same rows writes the same bytes.

    Args:
        rows: Of one report.
        context_file: Time against tokens of context, batch 1; its suffix decides the format.
        batch_file: Time against rows of a batch, at the context that has most of them.
        query: Tokens of the query in the first plot.
    """
    single = [row for row in rows if row.batch == 1 and row.query == query]
    _plot(single, context_file, lambda row: row.context, "tokens of context")
    batched = [row for row in rows if row.batch > 1]
    if batched:
        context, tokens = batched[0].context, batched[0].query
        same = [row for row in rows if (row.context, row.query) == (context, tokens)]
        _plot(same, batch_file, lambda row: row.batch, f"prompts of {context} tokens in a batch")


def _plot(rows: Sequence[Row], file: Path, place: Callable[[Row], int], label: str) -> None:
    figure = figure_class()(figsize=(6.4, 4.2), layout="constrained")
    panel: Any = figure.subplots()
    for side, (colour, marker) in _LOOKS.items():
        found = sorted(
            (row for row in rows if row.side == side and row.measure == "ttft"), key=place
        )
        if not found:
            continue
        middle = [row.median for row in found]
        bars = [
            [row.median - row.lowest for row in found],
            [row.highest - row.median for row in found],
        ]
        panel.errorbar(
            [place(row) for row in found],
            middle,
            yerr=bars,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1,
            elinewidth=1,
            capsize=2,
            label=side,
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = sorted({place(row) for row in rows})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set_xlabel(label)
    panel.set_ylabel("seconds to the first token")
    panel.legend(fontsize=8, frameon=False)
    plain_panel(panel)
    save_plot(figure, file)
