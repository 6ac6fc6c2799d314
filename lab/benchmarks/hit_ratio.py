"""Hits of a store with one copy per chunk against a copy per position, in theory and in ours.

    python -m benchmarks.hit_ratio
    python -m benchmarks.hit_ratio --trace FILE --gigabytes 1 4 16

LazyAttention's model (arXiv 2606.04302): requests ask for chunks by Zipf's law (the i-th in
proportion to i^-alpha), each at one of D positions, all equally likely; a store has room for C
copies.  Where a copy serves any position, C chunks fit; where each position needs a copy of its
own, C / D do.

- formula     the C most popular copies are kept: sums of i^-alpha, as in the paper
- Che         the least recently used copy goes first: the approximation of Che et al. (2002)
- static      the formula's cache on random streams
- lru         the last C copies on the same streams
- store       a `MemoryStore` with room for C chunks on the same streams, hits as it counts them

Gains are hits with one copy per chunk by hits with one per position, with 95 % intervals over
streams, and beside each the same for uniform popularity (alpha 0): the null.

Prompts of several documents follow, with budgets in bytes of a model's keys and values: prefix
caching and Prompt Cache beside both (`prompt_caches` says how each keeps documents).  With
`--trace` the requests of a CSV file are looked at instead, one a row, its document ids in order.
Writes tables, plots, and `lab/benchmarks/results/hit_ratio.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.caching import (
    Requests,
    che_ratio,
    draw,
    exponent_for,
    static_hits,
    static_ratio,
    store_hits,
)
from benchmarks.prompt_caches import WAYS, PromptRow, PromptStudy
from benchmarks.sizes import SHAPES
from kvcache_rag_lab.evaluation.cost.popularity import lru_hits
from kvcache_rag_lab.evaluation.report import check_plot, figure_class, plain_panel, save_plot
from kvcache_rag_lab.scoring.statistics import Interval, mean_interval, paired_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT: Final = Path(__file__).parents[2]
PAPER_GAIN: Final = 2.86  # at D = 20, C = 100; the exponent follows from it (`exponent_for`)
BUDGET: Final = 100
PAPER_ALPHAS: Final = (1.1, 1.5, 2.1)  # of its experiments
CHUNKS: Final = 1000
POSITIONS: Final = (5, 20)
# Okabe and Ito's colours, as in the project's other plots.
_COLOURS: Final = {5: "#009E73", 20: "#D55E00"}
_CHUNK: Final = "#0072B2"
_ALPHAS: Final = np.linspace(0, 2.2, 67)


@dataclass(frozen=True)
class Row:
    """One side at one exponent and number of positions.

    Attributes:
        alpha: Exponent of Zipf's law, 0 for uniform popularity.
        positions: D.
        side: "formula", "Che", "static", "lru" or "store".
        per_chunk: Hit ratio with one copy per chunk.
        per_position: Hit ratio with one copy per chunk and position.
        gain: The first by the second.
        null: The gain of the same side at alpha 0.
    """

    alpha: float
    positions: int
    side: str
    per_chunk: Interval
    per_position: Interval
    gain: Interval
    null: float


@dataclass(frozen=True)
class Study:
    """What is asked of every exponent.

    Attributes:
        chunks: How many there are.
        budget: Copies that fit.
        requests: Of each stream, the first fifth to fill the caches.
        streams: How many of each kind, with seeds 0, 1, ...
    """

    chunks: int = CHUNKS
    budget: int = BUDGET
    requests: int = 5000
    streams: int = 20

    def rows(self, alpha: float) -> list[Row]:
        """All sides at all numbers of positions; `null` is left for `with_null`."""
        hits: dict[str, Callable[[Requests, bool, int], int]] = {
            "static": lambda one, own, count: static_hits(
                one.copies(by_position=own), one.warm, self.budget, count if own else 1
            ),
            "lru": lambda one, own, _: lru_hits(one.copies(by_position=own), one.warm, self.budget),
            "store": lambda one, own, _: store_hits(
                one.copies(by_position=own), one.warm, self.budget
            ),
        }
        rows = []
        shared: dict[str, list[float]] = {}  # chunks of a stream do not depend on the positions
        for count in POSITIONS:
            rows.append(self._computed("formula", static_ratio, alpha, count))
            rows.append(self._computed("Che", che_ratio, alpha, count))
            streams = [
                draw(self.chunks, alpha, count, self.requests, seed) for seed in range(self.streams)
            ]
            counted = self.requests - streams[0].warm
            for side, found in hits.items():
                if side not in shared:
                    shared[side] = [found(one, False, count) / counted for one in streams]
                each = [found(one, True, count) / counted for one in streams]
                measured = (mean_interval(shared[side]), mean_interval(each))
                gain = paired_ratio(shared[side], each)
                rows.append(Row(alpha, count, side, *measured, gain, null=float("nan")))
        return rows

    def _computed(
        self, side: str, ratio: Callable[..., float], alpha: float, positions: int
    ) -> Row:
        one = ratio(self.chunks, alpha, self.budget)
        each = ratio(self.chunks, alpha, self.budget, positions)
        found = [Interval(value, value, value, 0) for value in (one, each, one / each)]
        return Row(alpha, positions, side, found[0], found[1], found[2], null=float("nan"))


def with_null(rows: Sequence[Row]) -> list[Row]:
    """The rows with the gain that uniform popularity gives on the same side."""
    nulls = {(row.positions, row.side): row.gain.value for row in rows if row.alpha == 0}
    return [
        Row(**{**vars(row), "null": nulls.get((row.positions, row.side), row.null)}) for row in rows
    ]


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    print(
        f"{'alpha':>6}{'D':>4}  {'side':<9}{'per chunk':>22}{'per position':>22}{'gain':>24}"
        f"{'gain of the null':>18}"
    )
    for row in rows:
        print(
            f"{row.alpha:>6.3f}{row.positions:>4}  {row.side:<9}{_said(row.per_chunk, 100):>22}"
            f"{_said(row.per_position, 100):>22}{_said(row.gain, 1):>24}{row.null:>18.2f}"
        )


def _said(interval: Interval, unit: float) -> str:
    value = f"{interval.value * unit:.2f}"
    if interval.n == 0:
        return value
    return f"{value} [{interval.low * unit:.2f}, {interval.high * unit:.2f}]"


def show_prompts(rows: Sequence[PromptRow]) -> None:
    """Print the table of prompts of several documents: hit ratios in %."""
    names = "".join(f"{name.replace('_', ' '):>15}" for name in WAYS)
    print(f"{'alpha':>6}{'documents':>11}{'GB':>6}{'room':>6}{names}{'gain':>8}")
    for row in rows:
        alpha = "" if row.alpha is None else f"{row.alpha:.1f}"
        values = "".join(f"{100 * getattr(row, name).value:>15.2f}" for name in WAYS)
        gain = "" if row.gain is None else f"{row.gain.value:.2f}"
        print(f"{alpha:>6}{row.per_prompt:>11.3g}{row.gigabytes:>6g}{row.room:>6}{values}{gain:>8}")


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
    said = f"{PAPER_GAIN}: LazyAttention, 20 positions, {BUDGET} copies"
    panel.axhline(PAPER_GAIN, color="#AAAAAA", linewidth=0.8, label=said)
    panel.set_yscale("log")
    panel.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    panel.set_ylim(top=100)  # room for the legend
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


_LINES: Final = {
    "prefix": ("#999999", "equal prefixes"),
    "prompt_cache": ("#CC79A7", "Prompt Cache"),
    "per_position": ("#D55E00", "one copy per position"),
    "position_free": ("#0072B2", "one copy per document"),
}


def plot_prompts(rows: Sequence[PromptRow], file: Path) -> None:
    """Write the plot of prompts of several documents: hits by budget, a panel per exponent.

    Raises:
        InvalidInputError: If the file cannot be a plot.
        MissingExtraError: If matplotlib is not installed.
    """
    check_plot(file)
    drawn = [row for row in rows if row.alpha is not None]
    counts = sorted({row.per_prompt for row in drawn})
    alphas = sorted({row.alpha for row in drawn if row.alpha is not None})
    figure = figure_class()(figsize=(3.1 * len(alphas), 2.9 * len(counts)), layout="constrained")
    panels = figure.subplots(len(counts), len(alphas), squeeze=False, sharey=True, sharex=True)
    for line, count in zip(panels, counts, strict=True):
        for panel, alpha in zip(line, alphas, strict=True):
            _budgets(panel, [row for row in drawn if (row.alpha, row.per_prompt) == (alpha, count)])
            panel.set_title(f"{count:g} documents a question, exponent {alpha:g}", fontsize=9)
        line[0].set_ylabel("documents found, %", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("GB of keys and values", fontsize=9)
    panels[0][0].legend(frameon=False, fontsize=8)
    save_plot(figure, file, "hit ratio of prompts")


def _budgets(panel: Any, rows: Sequence[PromptRow]) -> None:
    budgets = [row.gigabytes for row in rows]
    for name, (colour, label) in _LINES.items():
        found = [100 * getattr(row, name).value for row in rows]
        panel.plot(budgets, found, color=colour, marker="o", markersize=4, label=label)
    panel.set_xscale("log", base=2)
    panel.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    panel.set_ylim(0, 100)
    plain_panel(panel)


def main(given: Sequence[str] | None = None) -> int:
    """Compute, simulate, measure; print tables, write JSON and plots."""
    arguments = parse(given)
    prompts = PromptStudy(
        shape=arguments.shape, tokens=arguments.tokens, gigabytes=tuple(arguments.gigabytes)
    )
    if arguments.trace is not None:
        return traced(prompts, arguments)
    study = Study(requests=arguments.requests, streams=arguments.streams)
    paper = exponent_for(PAPER_GAIN, 20, BUDGET)
    print(
        f"{study.chunks} chunks, room for {study.budget} copies, {study.streams} streams of "
        f"{study.requests} requests; hit ratios in %\n"
        f"the paper's gain of {PAPER_GAIN} at D = 20 and C = {BUDGET} needs alpha = {paper:.3f}; "
        "the number of chunks does not matter"
    )
    started = time.perf_counter()
    alphas = (0.0, 0.6, paper, 1.0, *PAPER_ALPHAS)
    rows = with_null([row for alpha in alphas for row in study.rows(alpha)])
    show(rows)
    prompts = replace(
        prompts,
        streams=min(prompts.streams, study.streams),
        requests=min(prompts.requests, study.requests),
    )
    prompt_rows = prompts.rows(PAPER_ALPHAS)
    show_prompts(prompt_rows)
    print(f"{time.perf_counter() - started:.0f} s")
    report: dict[str, Any] = {
        **asdict(study),
        "paper": {"gain": PAPER_GAIN, "positions": 20, "budget": BUDGET, "alpha": paper},
        "rows": [asdict(row) for row in rows],
        "prompts_of_several_documents": [_plain(row) for row in prompt_rows],
        "prompts": prompts.facts(),
        "traces": kept(arguments.json).get("traces", []),
    }
    write(arguments.json, report)
    plot(rows, study, arguments.plot)
    plot_prompts(prompt_rows, arguments.plot_prompts)
    return 0


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=Study.streams)
    parser.add_argument("--requests", type=int, default=Study.requests, help="of each stream")
    parser.add_argument(
        "--trace", type=Path, help="CSV: a request a row, its document ids in order"
    )
    parser.add_argument("--shape", choices=SHAPES, default=PromptStudy.shape)
    parser.add_argument("--tokens", type=int, default=PromptStudy.tokens, help="of a document")
    parser.add_argument(
        "--gigabytes", type=float, nargs="+", default=PromptStudy.gigabytes, help="for documents"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "lab/benchmarks/results/hit_ratio.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/hit_ratio.svg")
    parser.add_argument("--plot-prompts", type=Path, default=ROOT / "docs/hit_ratio_prompts.svg")
    parsed = parser.parse_args(given)
    if min(parsed.streams, parsed.requests, parsed.tokens) < 1 or min(parsed.gigabytes) <= 0:
        parser.error("--streams, --requests, --tokens and --gigabytes must be positive")
    return parsed


def traced(study: PromptStudy, arguments: argparse.Namespace) -> int:
    """Look at a trace; its rows take the place of those of a file of its name."""
    try:
        rows = study.traced(arguments.trace)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    show_prompts(rows)
    report = kept(arguments.json)
    others = [row for row in report.get("traces", []) if row["trace"] != arguments.trace.name]
    about = {"shape": study.shape, "tokens": study.tokens}
    report["traces"] = [*others, *({**_plain(row), **about} for row in rows)]
    write(arguments.json, report)
    return 0


def _plain(row: PromptRow) -> dict[str, Any]:
    """Its values, without those that say nothing of it."""
    empty = {"trace"} if row.alpha is not None else {"alpha"}
    return {name: value for name, value in asdict(row).items() if name not in empty}


def kept(file: Path) -> dict[str, Any]:
    """What a results file holds."""
    values: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return values


def write(file: Path, report: dict[str, Any]) -> None:
    """Replace a results file."""
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
