"""Hits of a store with one copy per chunk against a copy per position, in theory and in ours.

    python -m benchmarks.hit_ratio

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
streams, and beside each the same for uniform popularity (alpha 0): the null.  Writes a table, a
plot, and `benchmarks/results/hit_ratio.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
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
from kvcache_rag.evaluation.cost.popularity import lru_hits
from kvcache_rag.evaluation.report import check_plot, figure_class, plain_panel, save_plot
from kvcache_rag.scoring.statistics import Interval, mean_interval, paired_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT: Final = Path(__file__).parent.parent
PAPER_GAIN: Final = 2.86  # at D = 20, C = 100; the exponent follows from it (`exponent_for`)
BUDGET: Final = 100
CHUNKS: Final = 1000
POSITIONS: Final = (5, 20)
# Okabe and Ito's colours, as in the project's other plots.
_COLOURS: Final = {5: "#009E73", 20: "#D55E00"}
_CHUNK: Final = "#0072B2"
_ALPHAS: Final = np.linspace(0, 1.25, 51)


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


def main(given: Sequence[str] | None = None) -> int:
    """Compute, simulate, measure; print a table, write JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=Study.streams)
    parser.add_argument("--requests", type=int, default=Study.requests, help="of each stream")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/hit_ratio.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/hit_ratio.svg")
    arguments = parser.parse_args(given)
    study = Study(requests=arguments.requests, streams=arguments.streams)
    paper = exponent_for(PAPER_GAIN, 20, BUDGET)
    print(
        f"{study.chunks} chunks, room for {study.budget} copies, {study.streams} streams of "
        f"{study.requests} requests; hit ratios in %\n"
        f"the paper's gain of {PAPER_GAIN} at D = 20 and C = {BUDGET} needs alpha = {paper:.3f}; "
        "the number of chunks does not matter"
    )
    started = time.perf_counter()
    alphas = (0.0, 0.6, paper, 1.0, 1.2)
    rows = with_null([row for alpha in alphas for row in study.rows(alpha)])
    show(rows)
    print(f"{time.perf_counter() - started:.0f} s")
    report: dict[str, Any] = {
        **asdict(study),
        "paper": {"gain": PAPER_GAIN, "positions": 20, "budget": BUDGET, "alpha": paper},
        "rows": [asdict(row) for row in rows],
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(rows, study, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
