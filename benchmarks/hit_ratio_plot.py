"""Hit ratios and gains against the skew of popularity, from `benchmarks.hit_ratio`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.caching import che_ratio, static_ratio
from benchmarks.hit_ratio import BUDGET, PAPER_GAIN
from kvcache_rag.evaluation.report import check_plot, figure_class, plain_panel, save_plot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.hit_ratio import Row, Study
    from kvcache_rag.scoring.statistics import Interval

# Okabe and Ito's colours, as in the project's other plots.
_COLOURS: Final = {5: "#009E73", 20: "#D55E00"}
_CHUNK: Final = "#0072B2"
_ALPHAS: Final = np.linspace(0, 1.25, 51)


def plot(rows: Sequence[Row], study: Study, file: Path) -> None:
    """Write the plot: lines are computed (Che's approximation), marks are the store's hits.

    Raises:
        InvalidInputError: If the file cannot be a plot.
        MissingExtraError: If matplotlib is not installed.
    """
    check_plot(file)
    figure = figure_class()(figsize=(9.2, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    measured = [row for row in rows if row.side == "store"]
    _hits(left, measured, study)
    _gains(right, measured, study)
    for panel in (left, right):
        panel.set_xlabel("exponent of popularity (0: uniform)", fontsize=9)
        panel.legend(frameon=False, fontsize=8)
        plain_panel(panel)
    save_plot(figure, file, "hit ratio")


def _hits(panel: Any, rows: Sequence[Row], study: Study) -> None:
    one = [100 * che_ratio(study.chunks, alpha, study.budget) for alpha in _ALPHAS]
    panel.plot(_ALPHAS, one, color=_CHUNK, label="one copy per chunk")
    _marks(panel, [(row.alpha, row.per_chunk) for row in rows if row.positions == 20], 100, _CHUNK)
    for positions, colour in _COLOURS.items():
        each = [100 * che_ratio(study.chunks, alpha, study.budget, positions) for alpha in _ALPHAS]
        panel.plot(_ALPHAS, each, color=colour, label=f"one per position, {positions} positions")
        found = [(row.alpha, row.per_position) for row in rows if row.positions == positions]
        _marks(panel, found, 100, colour)
    panel.set_ylabel("hits of a store for 100 of 1000 chunks, %", fontsize=9)
    panel.set_ylim(bottom=0)


def _gains(panel: Any, rows: Sequence[Row], study: Study) -> None:
    for positions, colour in _COLOURS.items():
        for ratio, style, name in (
            (che_ratio, "-", "last used"),
            (static_ratio, ":", "most popular"),
        ):
            gains = [
                ratio(study.chunks, alpha, study.budget)
                / ratio(study.chunks, alpha, study.budget, positions)
                for alpha in _ALPHAS
            ]
            label = f"{positions} positions, {name} kept"
            panel.plot(_ALPHAS, gains, color=colour, linestyle=style, label=label)
        found = [(row.alpha, row.gain) for row in rows if row.positions == positions]
        _marks(panel, found, 1, colour)
    panel.axhline(PAPER_GAIN, color="#AAAAAA", linewidth=0.8)
    panel.annotate(
        f"{PAPER_GAIN}: LazyAttention, 20 positions, {BUDGET} copies",
        (0, PAPER_GAIN * 1.04),
        fontsize=8,
    )
    panel.set_yscale("log")
    panel.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    panel.set_ylabel("times as many hits", fontsize=9)


def _marks(panel: Any, found: Sequence[tuple[float, Interval]], unit: float, colour: str) -> None:
    bars = [
        [unit * max(0.0, one.value - one.low) for _, one in found],
        [unit * max(0.0, one.high - one.value) for _, one in found],
    ]
    panel.errorbar(
        [alpha for alpha, _ in found],
        [unit * one.value for _, one in found],
        yerr=bars,
        color=colour,
        marker="o",
        markersize=4,
        capsize=2,
        linestyle="",
    )
