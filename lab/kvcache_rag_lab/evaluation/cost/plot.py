"""The plot of `kvcache-rag bench`: first tokens, the gain, and how chunks recur."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag_lab.evaluation.cost.speed import DEVICE, FILES, FULL, MEMORY
from kvcache_rag_lab.evaluation.report import (
    TEXT,
    check_plot,
    new_figure,
    plain_panel,
    save_plot,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# Okabe and Ito's colours, as in the project's other plots.
_LOOKS: Final = {
    FULL: ("black", "o", "full prefill"),
    MEMORY: ("#0072B2", "s", "chunks from memory"),
    FILES: ("#D55E00", "^", "chunks from files"),
    DEVICE: ("#009E73", "D", "chunks in the GPU's memory"),
}
_GREY: Final = "#777777"

_LETTERS: Final = 54
"""Of a line of the title."""


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Write the plot; the same report gives the same bytes.

    Args:
        report: What the command writes as JSON.
        file: Its suffix decides the format.

    Raises:
        InvalidInputError: If the file cannot be a plot.
        MissingExtraError: If matplotlib is not installed.
    """
    check_plot(file)
    contexts = report["speed"]["contexts"]
    recurrence = (report["corpus"] or {}).get("recurrence")
    count = 3 if recurrence else 2
    figure = new_figure(3.2 * count + 0.4)
    panels = figure.subplots(count)
    _first_tokens(panels[0], contexts)
    _gains(panels[1], contexts)
    if recurrence:
        _hottest(panels[2], recurrence)
    for panel in panels:
        panel.legend(frameon=False, fontsize=TEXT)
        plain_panel(panel)
    model = report["model"]
    title = f"{model['name']}, {model['dtype']}: {report['machine']['machine']}"
    figure.suptitle(fill(title, _LETTERS), fontsize=TEXT)
    save_plot(figure, file, "bench")


def _first_tokens(panel: Any, contexts: Sequence[Mapping[str, Any]]) -> None:
    for side in contexts[0]["sides"]:
        colour, marker, label = _LOOKS[side]
        found = [one["sides"][side]["first_token"] for one in contexts]
        panel.errorbar(
            [one["context"] for one in contexts],
            [times["p50"] for times in found],
            yerr=[
                [times["p50"] - min(times["seconds"]) for times in found],
                [times["p95"] - times["p50"] for times in found],
            ],
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1,
            elinewidth=1,
            capsize=2,
            label=label,
        )
    panel.set_yscale("log")
    panel.set_ylabel("seconds to the first token\n(median, fastest to p95)", fontsize=TEXT)
    _by_context(panel, contexts)


def _gains(panel: Any, contexts: Sequence[Mapping[str, Any]]) -> None:
    for side in contexts[0]["sooner"]:
        colour, marker, label = _LOOKS[side]
        found = [one["sooner"][side] for one in contexts]
        values = [one["value"] for one in found]
        bars = None
        if all(one["low"] is not None for one in found):
            bars = [
                [one["value"] - one["low"] for one in found],
                [one["high"] - one["value"] for one in found],
            ]
        panel.errorbar(
            [one["context"] for one in contexts],
            values,
            yerr=bars,
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1,
            capsize=2,
            label=label,
        )
    panel.axhline(1, color=_GREY, linewidth=0.8, linestyle="--")
    panel.set_yscale("log")
    panel.set_ylabel("times sooner than full prefill", fontsize=TEXT)
    _by_context(panel, contexts)


def _by_context(panel: Any, contexts: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator

    places = [one["context"] for one in contexts]
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [f"{place:,}" for place in places])
    panel.minorticks_off()
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xlabel("tokens of context", fontsize=TEXT)


def _hottest(panel: Any, recurrence: Mapping[str, Any]) -> None:
    for name, colour, style, label in (
        ("curve", "#0072B2", "-", "these questions"),
        ("null_curve", _GREY, "--", "questions spread at random"),
    ):
        shares = recurrence[name]
        places = [100 * number / (len(shares) - 1) for number in range(len(shares))]
        values = [100 * share for share in shares]
        panel.plot(places, values, color=colour, linestyle=style, label=label)
    panel.set_xlim(0, 100)
    panel.set_ylim(0, 100)
    panel.set_xlabel("chunks asked for most, %", fontsize=TEXT)
    panel.set_ylabel("share of what is retrieved, %", fontsize=TEXT)
