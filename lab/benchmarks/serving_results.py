"""What the answers of `benchmarks.serving` say: throughput, latency, intervals, targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvcache_rag_lab.scoring.statistics import (
    LEAST_DIFFERING,
    Comparison,
    Interval,
    paired_bootstrap,
    paired_ratio,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.serving_client import Outcome
    from benchmarks.serving_load import Asked

NO_CACHE, OWN, SHARED, AHEAD = "no cache", "per instance", "shared", "shared + prefetch"
ARMS: Final = (NO_CACHE, OWN, SHARED, AHEAD)
BLOCK: Final = 50  # consecutive requests that are drawn together: they wait in the same queue
MAIN: Final = ("zipf", 1.2)  # stream and rate of the claims
THROUGHPUT: Final = 1.71  # the paper's best, +71 %
LATENCY: Final = 0.35  # the paper's best, -65 %
PREFILL: Final = 0.3  # seconds


@dataclass(frozen=True)
class Summary:
    """One arm at one rate.  Times are seconds from a request's arrival.

    Attributes:
        requests: Sent.
        answered: Answered whole.
        seconds: From the first arrival to the last answer's end.
        offered: Arrivals per second.
        throughput: Answers per second, over `seconds`.
        latency: Mean time to the last token.
        median: Median of it.
        p95: 95th percentile of it.
        ttft: Mean time to the first token.
        waited: Mean time in the queue.
        reused: Share of the prompts' tokens that were reused.
        hits: Share of the chunks that were cached when a request's turn came.
        declined: Share of the chunks that were cached and computed all the same.
        prefetched: Share of the requests with something computed or loaded while they waited.
        batch: Mean number of requests answered together.
        share: Of the requests, the part that the first instance answered.
    """

    requests: int
    answered: int
    seconds: float
    offered: float
    throughput: float
    latency: float
    median: float
    p95: float
    ttft: float
    waited: float
    reused: float
    hits: float
    declined: float
    prefetched: float
    batch: float
    share: float


def summary(asked: Sequence[Asked], outcomes: Sequence[Outcome]) -> Summary:
    """Statistics of the requests that were answered; what was not lowers the throughput.

    Raises:
        ValueError: If nothing was answered.
    """
    done = [one for one in outcomes if one.answered]
    if not done:
        said = next((one.message for one in outcomes if one.message), "no request was sent")
        raise ValueError(f"no request was answered: {said}")
    totals = np.array([one.total for one in done])
    last = max(asked[one.number].at + one.total for one in done)
    seconds = last - asked[0].at
    span = asked[-1].at - asked[0].at
    prompts = sum(one.prompt_tokens for one in done)
    chunks = sum(len(asked[one.number].documents) for one in done)
    return Summary(
        requests=len(outcomes),
        answered=len(done),
        seconds=seconds,
        offered=(len(asked) - 1) / span if span else float("inf"),
        throughput=len(done) / seconds,
        latency=float(totals.mean()),
        median=float(np.median(totals)),
        p95=float(np.percentile(totals, 95)),
        ttft=float(np.mean([one.first for one in done])),
        waited=float(np.mean([one.waited for one in done])),
        reused=sum(one.cached_tokens for one in done) / prompts if prompts else 0.0,
        hits=sum(one.hits for one in done) / chunks,
        declined=sum(one.declined for one in done) / chunks,
        prefetched=float(np.mean([one.prefetched for one in done])),
        batch=float(np.mean([one.batch for one in done])),
        share=float(np.mean([one.instance == 0 for one in done])),
    )


@dataclass(frozen=True)
class Against:
    """Latencies of two arms, request by request.

    Attributes:
        better: The arm that is hoped to be faster.
        than: The other one.
        saved: Seconds that `better` saves on average; blocks of requests are drawn together.
        alone: The same as if every request were independent of its neighbours: too narrow.
        ratio: Mean latency of `better` by that of `than`, blocks drawn together.
    """

    better: str
    than: str
    saved: Comparison
    alone: Comparison
    ratio: Interval

    @property
    def has_interval(self) -> bool:
        """Whether enough blocks differ; the bounds of fewer are those of scores, not of seconds."""
        return self.saved.differing >= LEAST_DIFFERING


def against(runs: Mapping[str, Mapping[str, Any]], better: str, than: str) -> Against:
    """Compare two arms of one stream and rate over the requests that both answered.

    Args:
        runs: By arm, with their `latencies` (None where there is no answer).
        better: Name of the first.
        than: Name of the second.
    """
    rows = zip(runs[than]["latencies"], runs[better]["latencies"], strict=True)
    pairs = [(number, *row) for number, row in enumerate(rows) if None not in row]
    blocks = [number // BLOCK for number, *_ in pairs]
    slow, fast = ([float(pair[which]) for pair in pairs] for which in (1, 2))
    return Against(
        better,
        than,
        paired_bootstrap(slow, fast, blocks),
        paired_bootstrap(slow, fast),
        paired_ratio(fast, slow, blocks),
    )


def runs_of(report: Mapping[str, Any], stream: str, factor: float) -> dict[str, Any]:
    """The runs of one stream and rate, by arm."""
    same = [one for one in report["runs"] if (one["stream"], one["factor"]) == (stream, factor)]
    return {arm: one for arm in ARMS for one in same if one["arm"] == arm}


@dataclass(frozen=True)
class Claim:
    """What was asked for, and what was measured.

    Attributes:
        text: What.
        bound: As asked for; "" where the figure stands beside a claim.
        measured: None where it was not measured.
        holds: None where nothing was asked for, or nothing measured.
    """

    text: str
    bound: str
    measured: float | None
    holds: bool | None


def claims(report: Mapping[str, Any]) -> list[Claim]:
    """The targets on the main run, and beside them what the rate of that run cannot show."""
    main = runs_of(report, *MAIN)
    both = {NO_CACHE, AHEAD} <= main.keys()
    at = f"arrivals at {MAIN[1]}x the baseline's capacity"
    ratio = _ratio(main, "latency") if both else None
    found = [
        _claim(f"Mean latency, of no cache's, {at}", f"≤ {LATENCY}", ratio, lambda x: x <= LATENCY)
    ]
    ratio = _ratio(main, "throughput") if both else None
    text = f"Throughput over no cache, {at} (so that it cannot exceed {MAIN[1]} by much)"
    found.append(_claim(text, f"≥ {THROUGHPUT}", ratio, lambda x: x >= THROUGHPUT))
    found += _other_rates(report)
    text = "Seconds of latency saved against per-instance caches, Zipf"
    if {OWN, AHEAD} <= main.keys():
        compared = against(main, AHEAD, OWN)
        saved = compared.saved
        bounds = f"95 %: {saved.low:.3g} to {saved.high:.3g}"
        text += f" ({bounds if compared.has_interval else 'too few requests for an interval'})"
        found.append(Claim(text, "> 0", saved.difference, saved.ranked and saved.low > 0))
    else:
        found.append(Claim(text, "> 0", None, None))
    alone = [one for one in report.get("shares") or () if one["arm"] == NO_CACHE]
    longest = max((one["first"] for one in alone), default=None)
    text = "Seconds of a full prefill, of a request alone"
    return [*found, _claim(text, f"≥ {PREFILL}", longest, lambda x: x >= PREFILL)]


def _other_rates(report: Mapping[str, Any]) -> list[Claim]:
    """Throughput at other rates; at the highest one of the Zipf stream no arrivals limit it."""
    pairs = [pair for pair in rates(report) if pair != MAIN]
    highest = max((factor for stream, factor in pairs if stream == MAIN[0]), default=0.0)
    found = []
    for stream, factor in pairs:
        runs = runs_of(report, stream, factor)
        if not {NO_CACHE, AHEAD} <= runs.keys():
            continue
        text, ratio = f"Throughput over no cache, {stream}, {factor:g}x", _ratio(runs, "throughput")
        if (stream, factor) == (MAIN[0], highest) and highest > MAIN[1]:
            text += " (a queue in every arm)"
            found.append(_claim(text, f"≥ {THROUGHPUT}", ratio, lambda x: x >= THROUGHPUT))
        else:
            found.append(Claim(text, "", ratio, None))
    return found


def _claim(text: str, bound: str, measured: float | None, test: Any) -> Claim:
    return Claim(text, bound, measured, None if measured is None else bool(test(measured)))


def _ratio(runs: Mapping[str, Any], name: str) -> float:
    """Of shared + prefetch by no cache."""
    ratio: float = runs[AHEAD]["summary"][name] / runs[NO_CACHE]["summary"][name]
    return ratio


def rates(report: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Streams and rates that were run, the Zipf stream first, rates ascending."""
    pairs = {(one["stream"], one["factor"]) for one in report["runs"]}
    return sorted(pairs, key=lambda pair: (pair[0] != "zipf", pair[1]))


def columns(outcomes: Sequence[Outcome], summed: Summary) -> dict[str, Any]:
    """A run as plain JSON values: its summary, and what the intervals need of every request."""

    def column(name: str) -> list[float | None]:
        return [round(float(getattr(one, name)), 4) if one.answered else None for one in outcomes]

    return {
        "summary": {key: _finite(value) for key, value in asdict(summed).items()},
        "latencies": column("total"),
        "ttfts": column("first"),
        "failures": sorted({one.message for one in outcomes if not one.answered})[:5],
    }


def _finite(value: float) -> float | None:
    """JSON has no nan."""
    return value if np.isfinite(value) else None
