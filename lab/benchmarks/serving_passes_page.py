"""The sections of docs/serving-benchmarks.md that `benchmarks.serving_passes` measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks.report_tables import markdown
from benchmarks.serving_passes import PAPERS_RATE, PASS_RATE
from benchmarks.serving_results import ARMS, NO_CACHE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PASSES: Final = """\
## By pass over the same questions (figures 10 and 11)

![By pass](serving-passes.svg)

The paper asks one list of questions several times at {papers_rate} requests per second. Here \
{requests} questions of the Zipf stream are asked {passes} times, from empty caches on; arms take \
turns, pass by pass. {papers_rate} requests per second are {beyond:.0f} times what these two cores \
answered without a cache ({capacity:.2f} per second, measured right before), so they come at \
{factor} times that capacity, {rate:.2f} per second, at which that arm's queue is long. All else \
is as above ({machine}; {date}, commit {commit}; `python -m benchmarks.serving_passes`).
Meanwhile {load_low:.1f} to {load_high:.1f} processes wanted the two cores, the benchmark's own \
among them, and a full prefill with its answer took between {full_low:.2f} and {full_high:.2f} s \
before the passes. Few requests, one run: read the order of magnitude. An arm whose chunks are all \
cached answers as many as arrive, and could answer more.

"""
_PARTS: Final = """\
## What a request waits for (figure 2)

![Parts of the latency](serving-parts.svg)

The paper divides the latency of requests without a cache into queue, model and network, by the \
rate of arrivals. Here the same for every arm: the queue is what client and server say that a \
request waited, loading and the rest of the model's work are what the engine says (of a batch, \
the batch's), and what is left is the network: HTTP on loopback, rendering, tokenising. Same \
questions, servers and day as the passes above, whose caches are still there ({factor}x is the \
last pass). In the plot every arm has an axis of its own.

"""


def sections(report: Mapping[str, Any]) -> str:
    """Both sections."""
    runs = report["runs"]
    one = next(run for run in runs if run["pass"])
    capacity = report["capacity"]["per_second"]
    loads, fulls = [run["load"] for run in runs], [run["full_prefill"] for run in runs]
    facts = {
        **report["setup"],
        **report["about"],
        "papers_rate": PAPERS_RATE,
        "requests": one["requests"],
        "passes": max(run["pass"] for run in runs),
        "beyond": PAPERS_RATE / capacity,
        "capacity": capacity,
        "factor": PASS_RATE,
        "rate": PASS_RATE * capacity,
        "load_low": min(loads),
        "load_high": max(loads),
        "full_low": min(fulls),
        "full_high": max(fulls),
    }
    return (
        f"{_PASSES.format_map(facts)}{_by_pass(report)}\n\n"
        f"{_PARTS.format_map(facts)}{_by_rate(report)}\n\n"
    )


def passes_of(report: Mapping[str, Any], arm: str) -> list[Mapping[str, Any]]:
    """The passes of an arm, the cold one first."""
    found = [run for run in report["runs"] if run["arm"] == arm and run["pass"]]
    return sorted(found, key=lambda run: int(run["pass"]))


def rates_of(report: Mapping[str, Any], arm: str) -> list[Mapping[str, Any]]:
    """The runs over warm caches of an arm, and its last pass, by rate."""
    found = [run for run in report["runs"] if run["arm"] == arm and not run["pass"]]
    return sorted([*found, *passes_of(report, arm)[-1:]], key=lambda run: float(run["factor"]))


def arms_of(report: Mapping[str, Any]) -> Iterator[str]:
    """The arms that were run."""
    return (arm for arm in ARMS if passes_of(report, arm))


def _by_pass(report: Mapping[str, Any]) -> str:
    base = {run["pass"]: run for run in passes_of(report, NO_CACHE)}
    rows = []
    for arm in arms_of(report):
        for run in passes_of(report, arm):
            same = base.get(run["pass"])
            rows.append(
                [
                    arm,
                    f"{run['pass']}",
                    f"{run['answered']} of {run['requests']}",
                    f"{run['throughput']:.2f}",
                    *(f"{run[name]:.2f}" for name in ("latency", "p95", "ttft")),
                    f"{100 * run['hits']:.0f} %",
                    f"{run['batch']:.1f}",
                    "" if arm == NO_CACHE else _change(run, same, "throughput"),
                    "" if arm == NO_CACHE else _change(run, same, "latency"),
                ]
            )
    header = ["arm", "pass", "answered", "answers/s", "mean latency s", "p95 s", "TTFT s"]
    header += ["chunks cached", "batch", "throughput against no cache", "latency against no cache"]
    return markdown(header, rows)


def _change(run: Mapping[str, Any], base: Mapping[str, Any] | None, name: str) -> str:
    return "" if base is None else f"{100 * (run[name] / base[name] - 1):+.0f} %"


def _by_rate(report: Mapping[str, Any]) -> str:
    rows = []
    for arm in arms_of(report):
        for run in rates_of(report, arm):
            parts = run["parts"]
            rows.append(
                [
                    arm,
                    f"{run['factor']:g}x",
                    f"{run['rate']:.2f}",
                    *(f"{parts[name]:.3f}" for name in ("queue", "loading", "model", "network")),
                    f"{run['latency']:.3f}",
                    f"{100 * parts['queue'] / run['latency']:.0f} %",
                ]
            )
    header = ["arm", "rate", "arrivals/s", "queue s", "loading s", "model s", "network s"]
    return markdown([*header, "mean latency s", "queue, of all"], rows)
