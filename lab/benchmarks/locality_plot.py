"""The curves of `benchmarks.locality`: one panel per number of documents per question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvcache_rag_lab.evaluation.report import check_plot, figure_class, plain_panel, save_plot

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Okabe and Ito's colours, as in the project's other plots.
_COLOURS: Final = {"BM25": "#0072B2", "hashing embedding": "#D55E00", "gold label": "#009E73"}
_NULL: Final = "#777777"


def plot(report: Mapping[str, Any], file: Path) -> None:
    """Write the plot; the same report gives the same bytes.

    Args:
        report: What `benchmarks.locality` wrote.
        file: Its suffix decides the format.

    Raises:
        InvalidInputError: If the file cannot be a plot.
        MissingExtraError: If matplotlib is not installed.
    """
    check_plot(file)
    tops = sorted({row["top"] for row in report["rows"]})
    figure = figure_class()(figsize=(3.4 * len(tops), 3.4), layout="constrained")
    panels = figure.subplots(1, len(tops), squeeze=False, sharey=True)[0]
    for panel, top in zip(panels, tops, strict=True):
        _draw(panel, [row for row in report["rows"] if row["top"] == top])
        panel.set_title(f"{top} document{'s' if top > 1 else ''} per question", fontsize=9)
    panels[0].set_ylabel("share of the retrievals, %", fontsize=9)
    save_plot(figure, file, "locality")


def _draw(panel: Any, rows: list[Mapping[str, Any]]) -> None:
    places = np.linspace(0, 100, len(rows[0]["curve"]))
    for row in rows:
        colour = _COLOURS[row["retriever"]]
        panel.plot(places, 100 * np.array(row["curve"]), color=colour, label=row["retriever"])
    null = 100 * np.array(rows[-1]["null_curve"])
    panel.plot(places, null, color=_NULL, linestyle="--", label="uniform null")
    panel.axhline(50, color="#CCCCCC", linewidth=0.8)
    panel.set_xlabel("hottest documents, %", fontsize=9)
    panel.set_xlim(0, 100)
    panel.set_ylim(0, 100)
    panel.legend(frameon=False, fontsize=8, loc="lower right")
    plain_panel(panel)
