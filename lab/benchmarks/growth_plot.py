"""The curves of `benchmarks.growth`: cost against size, both logarithmic, with their exponents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvcache_rag_lab.evaluation.report import check_plot, figure_class, plain_panel, save_plot

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Okabe and Ito's colours, as in the project's other plots.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "black")
_MARKERS: Final = "osD^vPX"
_PANELS: Final[dict[str, tuple[str, ...]]] = {
    "chunks in the store": (
        "hit",
        "contains",
        "write of a chunk",
        "write to a full store, processor",
        "opening until the first hit",
        "sweep of all",
        "store du",
    ),
    "tokens of context": ("first token, memory", "first token, files", "first token, anew"),
    "chunks of a prompt (8,192 tokens)": (
        "first token of 8,192 tokens, memory",
        "first token of 8,192 tokens, files",
    ),
}


def plot(report: Mapping[str, Any], file: Path) -> None:
    """Write the plot; the same report gives the same bytes.

    Args:
        report: What `benchmarks.growth` wrote.
        file: Its suffix decides the format.

    Raises:
        InvalidInputError: If the file cannot be a plot.
        MissingExtraError: If matplotlib is not installed.
    """
    check_plot(file)
    figure = figure_class()(figsize=(11.4, 4.2), layout="constrained")
    slopes = {row["curve"]: row["exponent"] for row in report["exponents"]}
    panels = figure.subplots(1, 3, sharey=True)
    for panel, (sizes, curves) in zip(panels, _PANELS.items(), strict=True):
        for curve, colour, marker in zip(curves, _COLOURS, _MARKERS, strict=False):
            points = sorted(
                (size, 1e3 * seconds) for name, size, seconds in report["points"] if name == curve
            )
            label = f"{curve.replace(' of 8,192 tokens', '')}: {slopes.get(curve, 0.0):+.2f}"
            style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4}
            panel.plot(*zip(*points, strict=True), linewidth=1, label=label, **style)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel(sizes, fontsize=9)
        panel.legend(
            loc="upper left", frameon=False, fontsize=7, title="exponent", title_fontsize=7
        )
        plain_panel(panel)
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low, high * (high / low) ** 0.45)  # room for the legends
    panels[0].set_ylabel("milliseconds", fontsize=9)
    save_plot(figure, file, "growth")
