"""Rows of the benchmark's report, and the ratios that are read off them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from benchmarks.memory import Peak
from benchmarks.stock import Sample, median_parts
from benchmarks.ttft_sides import DEFERRED, FLOOR, NAIVE, PAGES, RAM, RESIDENT, STOCK, TURBORAG
from kvcache_rag_lab.scoring.statistics import LEAST_DIFFERING, Interval, median_interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.ttft_sides import Case

# Not `disk`: how fast a cold file comes is the machine's.
OURS: Final = (PAGES, RAM, RESIDENT, DEFERRED)
DECODING: Final = "decoding, "  # how the names of its ratios begin


@dataclass(frozen=True)
class Row:
    """One side of one case.

    Attributes:
        context: Tokens of the chunks of a row of the batch.
        query: Tokens of its query.
        batch: Rows.
        side: Which side.
        measure: "ttft" in seconds, or "decode" in tokens per second of all rows together.
        median: Of all rounds but the first.
        lowest: Smallest.
        highest: Largest.
        rounds: How many were counted.
        parts: Median seconds of the parts of a ttft.
        samples: What every round measured, in their order.
    """

    context: int
    query: int
    batch: int
    side: str
    measure: str
    median: float
    lowest: float
    highest: float
    rounds: int
    parts: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[float] = ()

    @property
    def case(self) -> tuple[int, int, int]:
        """Context, query and batch."""
        return self.context, self.query, self.batch


def ttft_row(case: Case, side: str, samples: Sequence[Sample]) -> Row:
    """Seconds to the first token."""
    found = [sample.ttft for sample in samples]
    return _row(case, side, "ttft", found, median_parts(list(samples)))


def decode_row(case: Case, side: str, samples: Sequence[Sample]) -> Row:
    """Tokens per second behind the first."""
    return _row(case, side, "decode", [case.batch / sample.step for sample in samples], {})


def _row(
    case: Case, side: str, measure: str, found: Sequence[float], parts: Mapping[str, float]
) -> Row:
    return Row(
        case.context,
        case.query,
        case.batch,
        side,
        measure,
        statistics.median(found),
        min(found),
        max(found),
        len(found),
        parts,
        tuple(found),
    )


def rows_of(report: Mapping[str, Any]) -> list[Row]:
    """The rows of a report that was read from JSON."""
    return [Row(**row) for row in report["rows"]]


def row_of(
    rows: Iterable[Row], case: tuple[int, int, int], side: str, measure: str = "ttft"
) -> Row | None:
    """The row of one side, None if it was not measured."""
    for row in rows:
        if (row.case, row.side, row.measure) == (case, side, measure):
            return row
    return None


def median_of(
    rows: Iterable[Row], case: tuple[int, int, int], side: str, measure: str = "ttft"
) -> float | None:
    """The median of one side, None if it was not measured."""
    found = row_of(rows, case, side, measure)
    return None if found is None else found.median


@dataclass(frozen=True)
class Ratio:
    """One side over another, in one case of one run.

    Attributes:
        value: As `ratio_of` has it.
        low: Lower bound of the 95 % interval of the paired rounds' median; `value` without pairs.
        high: Upper bound.
        rounds: In how many rounds both sides were measured.
        counted: Whether it is of bytes, which need no rounds.
    """

    value: float
    low: float
    high: float
    rounds: int
    counted: bool = False

    @property
    def has_interval(self) -> bool:
        """Whether the bounds mean something: enough paired rounds, or nothing is left to chance."""
        # Of fewer, all lie on one side of the true median in 2 x 0.5^n of the cases.
        return self.counted or self.rounds >= LEAST_DIFFERING

    @property
    def interval(self) -> Interval:
        """The same as plain statistics."""
        return Interval(self.value, self.low, self.high, self.rounds)


def ratios(report: Mapping[str, Any]) -> dict[str, Ratio]:
    """What a change of the code shall not make worse: smaller is better in all of them.

    Returns:
        By name, each within one case of one run: times to the first token over the floor's and,
        from the page cache, over TurboRAG's and a full prefill's; stock's tokens per second over
        ours; peak memory over what it is held against (see `Peak.held`).
    """
    rows = rows_of(report)
    found: dict[str, Ratio | None] = {}
    for case in dict.fromkeys(row.case for row in rows):
        place = "{} + {} tokens, batch {}".format(*case)
        for side in OURS:
            for against in (FLOOR, TURBORAG, NAIVE) if side == PAGES else (FLOOR,):
                found[f"{side} over {against}, {place}"] = bounded_ratio(rows, case, side, against)
            decoded = bounded_ratio(rows, case, STOCK, side, "decode")
            found[f"{DECODING}{STOCK} over {side}, {place}"] = decoded
    for one in report["memory"]:
        peak = Peak(**one)
        if peak.side in OURS:
            name = f"peak memory, {peak.side}, {peak.context} tokens"
            over = peak.peak / peak.held
            found[name] = Ratio(over, over, over, 0, counted=True)
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def ratio_of(
    rows: Sequence[Row], case: tuple[int, int, int], side: str, against: str, measure: str = "ttft"
) -> float | None:
    """One side over another, None if one of them was not measured.

    The median of the rounds' own ratios where both sides have enough of them in common: a machine
    that is slower for a while is so for both.  Else the ratio of their medians.
    """
    ours, other = (row_of(rows, case, one, measure) for one in (side, against))
    if ours is None or other is None or not other.median:
        return None
    pairs = _paired(ours, other)
    return statistics.median(pairs) if pairs else ours.median / other.median


def bounded_ratio(
    rows: Sequence[Row], case: tuple[int, int, int], side: str, against: str, measure: str = "ttft"
) -> Ratio | None:
    """`ratio_of` with the interval of the paired rounds."""
    value = ratio_of(rows, case, side, against, measure)
    ours, other = (row_of(rows, case, one, measure) for one in (side, against))
    if value is None or ours is None or other is None:
        return None
    pairs = _paired(ours, other)
    if not pairs:
        return Ratio(value, value, value, 0)
    found = median_interval(pairs)
    return Ratio(value, found.low, found.high, len(pairs))


def _paired(ours: Row, other: Row) -> list[float]:
    """The ratio of each round; none where too few are of both.

    All begin with the first round that counts, so who has fewer was asked in the other's first.
    """
    common = min(len(ours.samples), len(other.samples))
    if common < LEAST_DIFFERING and len(ours.samples) != len(other.samples):
        return []
    return [one / two for one, two in zip(ours.samples, other.samples, strict=False)]
