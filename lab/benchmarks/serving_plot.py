"""Plots of `benchmarks.serving` and `.serving_passes`: by rate, by pass, along the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks.serving_passes_page import arms_of, passes_of, rates_of
from benchmarks.serving_results import AHEAD, ARMS, MAIN, NO_CACHE, OWN, SHARED, rates, runs_of
from kvcache_rag_lab.evaluation.report import figure_class, plain_panel, save_plot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_LOOKS: Final = {
    NO_CACHE: ("black", "o"),
    OWN: ("#D55E00", "s"),
    SHARED: ("#0072B2", "^"),
    AHEAD: ("#009E73", "D"),
}
_FIRST, _REST = "#0072B2", "#E69F00"
_PARTS: Final = {
    "queue": "#BBBBBB",
    "loading": "#009E73",
    "model": "#0072B2",
    "network": "#E69F00",
}
_SMOOTH: Final = 25  # requests whose mean is one point of a line


def draw(report: Mapping[str, Any], folder: Path) -> None:
    """Write `serving-rates.svg`, `serving-queue.svg` and `serving-shares.svg`.

    The same report gives the same bytes.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    save_plot(_by_rate(report), folder / "serving-rates.svg")
    save_plot(_along(report), folder / "serving-queue.svg")
    if report.get("shares"):
        save_plot(_shares(report["shares"]), folder / "serving-shares.svg")


def draw_passes(report: Mapping[str, Any], folder: Path) -> None:
    """Write `serving-passes.svg` and `serving-parts.svg`; the same report gives the same bytes.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    save_plot(_by_pass(report), folder / "serving-passes.svg")
    save_plot(_parts(report), folder / "serving-parts.svg")


def _figure(panels: int, width: float) -> tuple[Any, Sequence[Any]]:
    figure = figure_class()(figsize=(width, 3.6), layout="constrained")
    found = figure.subplots(1, panels, squeeze=False)[0]
    for panel in found:
        plain_panel(panel)
    return figure, found


def _by_rate(report: Mapping[str, Any]) -> Any:
    """Throughput and latency against arrivals, on the Zipf stream."""
    figure, (left, right) = _figure(2, 9.2)
    factors = [factor for stream, factor in rates(report) if stream == MAIN[0]]
    for arm in ARMS:
        runs = [runs_of(report, MAIN[0], factor).get(arm) for factor in factors]
        found = [(one["rate"], one["summary"]) for one in runs if one]
        colour, marker = _LOOKS[arm]
        style = {"color": colour, "marker": marker, "markersize": 5, "label": arm}
        places = [rate for rate, _ in found]
        left.plot(places, [one["throughput"] for _, one in found], **style)
        right.plot(places, [one["latency"] for _, one in found], **style)
    most = report["capacity"]["per_second"] * max(factors, default=1.0)
    left.plot([0, most], [0, most], color="#BBBBBB", linewidth=0.8, label="all that arrives")
    left.set_ylabel("answers per second", fontsize=9)
    right.set_ylabel("mean latency, s", fontsize=9)
    right.set_yscale("log")
    for panel in (left, right):
        panel.set_xlabel("arrivals per second", fontsize=9)
        panel.set_xlim(left=0)
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    return figure


def _by_pass(report: Mapping[str, Any]) -> Any:
    """Throughput and latency by pass over the same questions."""
    figure, panels = _figure(2, 9.2)
    for arm in arms_of(report):
        colour, marker = _LOOKS[arm]
        style = {"color": colour, "marker": marker, "markersize": 5, "label": arm}
        found = passes_of(report, arm)
        for panel, name in zip(panels, ("throughput", "latency"), strict=True):
            panel.plot([one["pass"] for one in found], [one[name] for one in found], **style)
    for panel, text in zip(panels, ("answers per second", "mean latency, s"), strict=True):
        panel.set_ylabel(text, fontsize=9)
        panel.set_xlabel("pass", fontsize=9)
        panel.set_ylim(bottom=0)
        panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def _parts(report: Mapping[str, Any]) -> Any:
    """What the mean latency consists of, by rate, of every arm; arms with a cache on one scale."""
    arms = list(arms_of(report))
    figure, panels = _figure(len(arms), 3.0 * len(arms))
    cached = [panel for panel, arm in zip(panels, arms, strict=True) if arm != NO_CACHE]
    for panel in cached[1:]:
        panel.sharey(cached[0])
    for panel, arm in zip(panels, arms, strict=True):
        runs = rates_of(report, arm)
        names = [f"{run['rate']:.1f}" for run in runs]
        below = [0.0] * len(runs)
        for part, colour in _PARTS.items():
            heights = [run["parts"][part] for run in runs]
            panel.bar(names, heights, bottom=below, color=colour, label=part)
            below = [one + more for one, more in zip(below, heights, strict=True)]
        panel.set_title(arm, fontsize=9)
        panel.set_xlabel("arrivals per second", fontsize=9)
    panels[0].set_ylabel("mean latency, s", fontsize=9)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def _along(report: Mapping[str, Any]) -> Any:
    """Latency of the requests of the main run and of the uniform stream, in their order."""
    streams = [pair for pair in rates(report) if pair[1] == MAIN[1]]
    figure, panels = _figure(max(1, len(streams)), 9.2)
    for panel, (stream, factor) in zip(panels, streams, strict=False):
        for arm, run in runs_of(report, stream, factor).items():
            colour, _ = _LOOKS[arm]
            panel.plot(*_smooth(run["latencies"]), color=colour, linewidth=1.2, label=arm)
        panel.set_title(f"{stream}, arrivals at {factor:g}x the baseline's capacity", fontsize=9)
        panel.set_xlabel("request", fontsize=9)
        panel.set_yscale("log")
    panels[0].set_ylabel(f"latency, s (mean of {_SMOOTH})", fontsize=9)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def _smooth(latencies: Sequence[float | None]) -> tuple[list[int], list[float]]:
    places, means = [], []
    for start in range(0, len(latencies), _SMOOTH):
        held = [one for one in latencies[start : start + _SMOOTH] if one is not None]
        if held:
            places.append(start + _SMOOTH // 2)
            means.append(sum(held) / len(held))
    return places, means


def _shares(rows: Sequence[Mapping[str, Any]]) -> Any:
    """How much of an answer is over when its first token comes."""
    figure, (panel,) = _figure(1, 6.4)
    names = [f"{row['documents']} doc.\n{row['arm']}" for row in rows]
    first = [1e3 * row["first"] for row in rows]
    rest = [1e3 * row["rest"] for row in rows]
    panel.bar(names, first, color=_FIRST, label="to the first token")
    panel.bar(names, rest, bottom=first, color=_REST, label="behind it")
    for place, row in enumerate(rows):
        panel.annotate(
            f"{100 * row['first_share']:.0f} %",
            (place, first[place] + rest[place]),
            ha="center",
            va="bottom",
            fontsize=8,
        )
    panel.set_ylabel("ms of one request alone", fontsize=9)
    panel.legend(frameon=False, fontsize=8)
    return figure
