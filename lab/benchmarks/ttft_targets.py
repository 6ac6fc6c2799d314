"""What the speed is held to, and whether a report holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from benchmarks.memory import Peak
from benchmarks.ttft_rows import ratio_of, rows_of
from benchmarks.ttft_sides import DEFERRED, FLOOR, NAIVE, PAGES, RAM, RESIDENT, STOCK, TURBORAG

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.ttft_rows import Row

CPU_CASE: Final = (4096, 20, 1)
GPU_LONG: Final = (16384, 20, 1)
GPU_BATCH: Final = (8192, 128, 8)
# Parts of what `decoding` measures.
FLOORS: Final = "First token, Qwen2.5-0.5B's shape, 4,096 tokens of chunks"
GUESSES: Final = "guesses from the prompt, SmolLM2"


@dataclass(frozen=True)
class Target:
    """One claim.

    Attributes:
        claim: In words.
        bound: The bound.
        at_least: Whether the figure must not be below `bound`; else it must not be above.
        figure: Measured, None if it was not.
    """

    claim: str
    bound: float
    at_least: bool
    figure: float | None

    @property
    def verdict(self) -> str:
        """Say "holds", "does not hold" or "not measured"."""
        if self.figure is None:
            return "not measured"
        good = self.figure >= self.bound if self.at_least else self.figure <= self.bound
        return "holds" if good else "does not hold"


def cpu_targets(report: Mapping[str, Any]) -> list[Target]:
    """The claims about one thread of a CPU, at 4k tokens."""
    rows = rows_of(report)
    over: list[tuple[str, str, str, float]] = [
        ("TTFT from the page cache, over the floor", PAGES, FLOOR, 1.10),
        ("TTFT from RAM, copying, over the floor", RAM, FLOOR, 1.06),
        ("TTFT from RAM, deferred, over the floor", DEFERRED, FLOOR, 1.02),
        ("TTFT from the page cache, over TurboRAG's way", PAGES, TURBORAG, 0.80),
    ]
    found = [
        Target(claim, bound, False, ratio_of(rows, CPU_CASE, side, against))
        for claim, side, against, bound in over
    ]
    sooner = ratio_of(rows, CPU_CASE, NAIVE, PAGES)
    found.append(Target("Naive TTFT, over ours from the page cache", 65, True, sooner))
    decoded = _best(rows, [RAM, DEFERRED])
    found.append(Target("Tokens/s over the stitched context, over stock's", 1.9, True, decoded))
    peaks = {one["side"]: Peak(**one) for one in report["memory"]}
    for side, claim, bound in (
        (PAGES, "Peak memory, over weights and one stitched cache", 1.15),
        (DEFERRED, "Peak memory, deferred, over weights and chunks", 1.05),
    ):
        peak = peaks.get(side)
        found.append(Target(claim, bound, False, peak.peak / peak.held if peak else None))
    return found


def _best(rows: Sequence[Row], sides: Sequence[str]) -> float | None:
    known = [ratio_of(rows, CPU_CASE, side, STOCK, "decode") for side in sides]
    return max((ratio for ratio in known if ratio is not None), default=None)


def gpu_targets(report: Mapping[str, Any] | None) -> list[Target]:
    """The claims about a GPU and a 7B shape; `report` is None without one."""
    rows = rows_of(report) if report else []

    def ratio(case: tuple[int, int, int], side: str, against: str) -> float | None:
        return ratio_of(rows, case, side, against)

    long, batch = "16k tokens from host memory", "8k tokens, batch 8, resident"
    return [
        Target(f"Naive TTFT over ours, {long}", 9.4, True, ratio(GPU_LONG, NAIVE, RAM)),
        Target(f"Naive TTFT over ours, {batch}", 32.8, True, ratio(GPU_BATCH, NAIVE, RESIDENT)),
        Target(f"TTFT over the floor, {long}", 1.15, False, ratio(GPU_LONG, RAM, FLOOR)),
        Target(f"TTFT over the floor, {batch}", 1.15, False, ratio(GPU_BATCH, RESIDENT, FLOOR)),
    ]


def other_targets(reports: Mapping[str, Any]) -> list[Target]:
    """The claims that other benchmarks measure.

    Args:
        reports: By the name of their file.
    """
    rows = reports.get("prefill", {}).get("rows", ())
    rates = [row["ratio"] for row in rows if row["side"] == "memory"]
    ingested: dict[int, list[float]] = {1: [], 2: []}
    for row in reports.get("ingestion", {}).get("rows", ()):
        if row["side"] == "disk, durable":
            ingested.setdefault(row["threads"], []).append(row["ratio"])
    kernel = reports.get("deferred_kernel", {}).get("offsets_against_without")
    return [
        Target(
            "Offline prefill's tokens/s, over bare forwards", 0.95, True, next(iter(rates), None)
        ),
        *(
            Target(
                f"Ingestion's tokens/s, over bare forwards, at any length, threads: {threads}",
                0.95,
                True,
                min(ratios, default=None),
            )
            for threads, ratios in ingested.items()
        ),
        *_decoding_targets(reports.get("decoding", {})),
        *_int8_targets(reports.get("int8_chunks", {})),
        Target("Deferred kernel's time with offsets, over without (GPU)", 1.02, False, kernel),
    ]


def _decoding_targets(report: Mapping[str, Any]) -> list[Target]:
    firsts = {row["first token"]: row["of before's"]["value"] for row in report.get(FLOORS, ())}
    guesses = {row["answers"]: row for row in report.get(GUESSES, ())}
    speed = "tokens/s over those without guesses"
    quoting, missed = (guesses.get(kind, {}) for kind in ("quoting", "no guess right"))
    answers = f"{quoting.get('counted', 'no')} answers that quote"
    wrong = [row["wrong"] for row in guesses.values() if "wrong" in row]
    changed = sum(wrong) if wrong else None
    return [
        Target("The floor, over that of torch's attention", 0.80, False, firsts.get(FLOOR)),
        Target("TTFT from the page cache, over that of before", 0.80, False, firsts.get(PAGES)),
        Target(f"Tokens/s of {answers}, over without guesses", 1.5, True, quoting.get(speed)),
        Target("The same where no guess is right", 0.97, True, missed.get(speed)),
        Target("Answers that guesses change by more than a tie", 0, False, changed),
    ]


def _int8_targets(report: Mapping[str, Any]) -> list[Target]:
    rows = {row["place"]: row for row in report.get("rows", ()) if row["side"] == "int8"}
    peaks = {row["side"]: row["of native's"] for row in report.get("memory", ())}

    def figure(place: str, name: str) -> float | None:
        return rows[place][name]["value"] if place in rows else None

    loading, first = "loading of native's", "of native's"
    return [
        Target(
            "Chunks in 8 bits: load time, over native's", 0.6, False, figure("page cache", loading)
        ),
        Target("The same: TTFT read from the medium", 1.0, False, figure("cold", first)),
        Target("The same: TTFT at 100 MB/s", 0.75, False, figure("100 MB/s", first)),
        Target("The same: peak memory", 0.6, False, peaks.get("int8")),
    ]


def table(targets: Sequence[Target], number: Callable[[float], str] = "{:.3g}".format) -> str:
    """A Markdown table of claims."""
    lines = ["| claim | asked for | measured | |", "|---|---|---|---|"]
    for one in targets:
        sign = "≥" if one.at_least else "≤"
        figure = "" if one.figure is None else number(one.figure)
        lines.append(f"| {one.claim} | {sign} {one.bound:g} | {figure} | {one.verdict} |")
    return "\n".join(lines)
