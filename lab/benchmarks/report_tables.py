"""The tables of docs/benchmarks.md, from the rows of `ttft`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks.memory import Peak
from benchmarks.shapes import QUERY, config_of
from benchmarks.ttft_rows import median_of, ratio_of, rows_of
from benchmarks.ttft_sides import (
    DEFERRED,
    FLOOR,
    NAIVE,
    PAGES,
    RAM,
    RESIDENT,
    STOCK,
    TURBORAG,
)
from kvcache_rag_lab.evaluation.cost.flops import DecoderShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.ttft_rows import Row

FLOPS_CASES: Final = ((8192, 128), (1024, 20), (4096, 20), (16384, 20))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; what is "" was not measured."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.0f}"


def _times(ratio: float | None, digits: int = 1) -> str:
    return "" if ratio is None else f"{ratio:.{digits}f}x"


def _cases(rows: Sequence[Row]) -> list[tuple[int, int, int]]:
    return list(dict.fromkeys(row.case for row in rows))


def contexts(report: Mapping[str, Any]) -> str:
    """Shaped as TurboRAG's table 3, without its scores: random weights have none."""
    rows = rows_of(report)
    lines = []
    for case in _cases(rows):
        if case[2] > 1:
            continue
        ours = median_of(rows, case, PAGES)
        sooner = ratio_of(rows, case, NAIVE, PAGES)
        lines.append(
            [
                f"{case[0]:,}",
                f"{case[1]}",
                _ms(median_of(rows, case, NAIVE)),
                _ms(median_of(rows, case, TURBORAG)),
                _ms(ours),
                _times(sooner),
                _times(ratio_of(rows, case, PAGES, TURBORAG), 2),
            ]
        )
    header = ["context tokens", "query tokens", "naive TTFT ms", "TurboRAG's way, here ms"]
    return markdown([*header, "ours TTFT ms", "speedup", "ours / TurboRAG's"], lines)


def seconds(report: Mapping[str, Any]) -> str:
    """In short: seconds to the first token of a short question, and how fast it goes on."""
    rows = rows_of(report)
    sides = (NAIVE, TURBORAG, PAGES, RAM, DEFERRED, FLOOR)
    cases = [case for case in _cases(rows) if case[1:] == (QUERY, 1)]
    lines = []
    for case in cases:
        medians = [median_of(rows, case, side) for side in sides]
        cells = ["" if value is None else _seconds(value) for value in medians]
        lines.append([f"{case[0]:,}", *cells, _times(ratio_of(rows, case, NAIVE, PAGES), 0)])
    header = ["context tokens", "stock transformers", "TurboRAG's way", "cached on disk"]
    header += ["in memory", "deferred", "question alone", "disk is sooner by"]
    longest = max(cases)
    ours, stock = (median_of(rows, longest, side, "decode") for side in (RAM, STOCK))
    further = ""
    if ours is not None and stock is not None:
        further = (
            f"\nOver {longest[0]:,} tokens, the tokens behind the first come at {ours:.1f} a "
            f"second, from stock\ntransformers at {stock:.1f}.\n"
        )
    said = "{machine}; {versions}; {date}".format_map(report)
    return f"{said}:\n\n{markdown(header, lines)}\n{further}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value:.3f} s"


def batches(report: Mapping[str, Any]) -> str:
    """Shaped as TurboRAG's table 5: by batch, nothing loaded from disk; with throughput."""
    rows = rows_of(report)
    side = RESIDENT if report["device"] == "cuda" else RAM
    shape, lines = DecoderShape.of(config_of(report["shape"])), []
    for case in _batch_cases(rows):
        naive, ours = median_of(rows, case, NAIVE), median_of(rows, case, side)
        flops = shape.prompt(case[0], case[1], report["prefix"], case[2])
        lines.append(
            [
                f"{case[2]}",
                _ms(naive),
                _ms(ours),
                _times(ratio_of(rows, case, NAIVE, side)),
                "" if naive is None else f"{case[2] / naive:.2f}",
                "" if ours is None else f"{case[2] / ours:.2f}",
                f"{flops.full / 1e12:.2f}",
                f"{flops.cached / 1e12:.3f}",
                f"-{100 * flops.reduction:.2f} %",
                _times(ratio_of(rows, case, side, FLOOR), 3),
            ]
        )
    header = ["batch", "naive TTFT ms", "ours TTFT ms", "speedup", "naive prompts/s"]
    header += ["ours prompts/s", "naive TFLOPs", "ours TFLOPs", "reduction", "over floor"]
    return markdown(header, lines)


def _batch_cases(rows: Sequence[Row]) -> list[tuple[int, int, int]]:
    batched = [case for case in _cases(rows) if case[2] > 1]
    if not batched:
        return []
    same = [case for case in _cases(rows) if case[:2] == batched[0][:2]]
    return sorted(same, key=lambda case: case[2])


def loading(report: Mapping[str, Any]) -> str:
    """By batch, with loading counted, and its parts."""
    rows = rows_of(report)
    lines = []
    for case in _batch_cases(rows):
        for row in rows:
            if row.case == case and row.measure == "ttft" and row.parts:
                cells = [_tenths(row.parts.get(part)) for part in ("load", "stitch", "prefill")]
                sooner = _times(ratio_of(rows, case, NAIVE, row.side))
                lines.append([f"{case[2]}", row.side, _ms(row.median), *cells, sooner])
    header = ["batch", "side", "TTFT ms", "load ms", "stitch ms", "query forward ms", "speedup"]
    return markdown(header, lines)


def _tenths(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.1f}"


def flops(report: Mapping[str, Any]) -> str:
    """Operations of the measured shape by the formula of TurboRAG's appendix G."""
    shape, lines = DecoderShape.of(config_of(report["shape"])), []
    for context, query in FLOPS_CASES:
        found = shape.prompt(context, query)
        real = shape.prompt(context, query, report["prefix"])
        lines.append(
            [
                f"{context:,}",
                f"{query}",
                f"{found.full / 1e12:.3f}",
                f"{found.cached / 1e12:.4f}",
                f"-{100 * found.reduction:.2f} %",
                f"-{100 * real.reduction_with_rotation:.2f} %",
            ]
        )
    header = ["context tokens", "query tokens", "naive TFLOPs", "ours TFLOPs", "reduction"]
    return markdown([*header, "with the instruction and the rotation counted"], lines)


def every_side(report: Mapping[str, Any]) -> str:
    """All medians and ranges."""
    rows = rows_of(report)
    lines = []
    for row in rows:
        if row.measure != "ttft":
            continue
        against = ratio_of(rows, row.case, row.side, FLOOR)
        lines.append(
            [
                f"{row.context:,} + {row.query}",
                f"{row.batch}",
                row.side,
                f"{1e3 * row.median:,.1f}",
                f"{1e3 * row.lowest:,.1f}-{1e3 * row.highest:,.1f}",
                f"{row.rounds}",
                _times(against, 3),
                _times(ratio_of(rows, row.case, NAIVE, row.side)),
            ]
        )
    header = ["tokens", "batch", "side", "median ms", "range ms", "rounds", "over floor"]
    return markdown([*header, "sooner than naive"], lines)


def decoding(report: Mapping[str, Any]) -> str:
    """Tokens per second behind the first one."""
    rows = rows_of(report)
    lines = []
    for row in rows:
        if row.measure == "decode":
            ratio = ratio_of(rows, row.case, row.side, STOCK, "decode")
            span = f"{row.lowest:.1f}-{row.highest:.1f}"
            cells = [f"{row.context:,}", f"{row.batch}", row.side, f"{row.median:.1f}", span]
            lines.append([*cells, f"{row.rounds}", _times(ratio, 2)])
    header = ["context tokens", "batch", "side", "tokens/s", "range", "rounds", "of stock"]
    return markdown(header, lines)


def memory(report: Mapping[str, Any]) -> str:
    """Peaks, and what each side has to hold."""
    held = {PAGES: "weights + stitched", RAM: "weights + chunks + stitched"}
    held[DEFERRED] = "weights + chunks"
    lines = []
    for one in report["memory"]:
        peak = Peak(**one)
        cells = (peak.peak, peak.weights, peak.chunks, peak.stitched)
        against = held.get(peak.side)
        ratio = f"{peak.peak / peak.held:.3f} of {against}" if against else ""
        lines.append([peak.side, *(f"{cell / 1e6:,.0f}" for cell in cells), ratio])
    header = ["side", "peak MB", "weights MB", "chunks MB", "stitched MB", "against"]
    return markdown(header, lines)
