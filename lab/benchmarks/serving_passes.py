"""The same questions again and again, and what a request waits for: by pass and by rate.

    python -m benchmarks.serving_passes --corpus squad_corpus.jsonl   # some minutes on two cores
    python -m benchmarks.serving_passes --quick                       # a tiny model, about a minute

The axes of figures 10 and 11 of Shared RAG-DCache (arXiv 2504.11765), which ask one list of
questions several times at 40 requests per second, and of its figure 2, which divides the latency of
a request without a cache into queue, model and network by the rate of arrivals.

Servers, documents and arms are those of `benchmarks.serving`, but the servers of all arms are
started at once, on empty caches, and arms take turns pass by pass, so that a machine that gets
slower gets slower for all of them.  One list of questions is asked `PASSES` times: the first pass
is cold, the others find what the ones before left in the caches.  Two CPU cores answer
a few requests per second, so the rate is not 40 but a multiple of the baseline's measured capacity
(`PASS_RATE`), at which its queue is long.  Then the same questions come at `RATES` on the same
servers, and so over warm caches; the last pass is the highest of these rates.

A request's latency is divided by what its server says: the queue, loading chunks, and the rest of
the engine's work; what is left, the network, is HTTP on loopback, rendering and tokenising.  Those
who share a batch each have the time of the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.machine import commit, described, load
from benchmarks.serving import ROOT, prepared, write
from benchmarks.serving_client import run_load
from benchmarks.serving_load import draw_requests
from benchmarks.serving_plans import FULL_PLAN, QUICK_PLAN
from benchmarks.serving_results import ARMS, summary
from benchmarks.serving_run import alike, measure_capacity
from benchmarks.serving_servers import INSTANCES, WAYS, running
from kvcache_rag_lab.scoring.ask import rotated

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.serving_client import Outcome
    from benchmarks.serving_load import Asked
    from benchmarks.serving_run import Setting

PASSES: Final = 3
PASS_RATE: Final = 4.8
"""Arrivals of the passes, as a part of the baseline's capacity."""

RATES: Final = (0.6, 1.2, 2.4)
"""The same, of what comes behind the passes."""

PAPERS_RATE: Final = 40
"""Requests per second in the paper's figures."""

STREAM: Final = "zipf"

_FACTS: Final = (
    "requests",
    "answered",
    "offered",
    "throughput",
    "latency",
    "p95",
    "ttft",
    "hits",
    "prefetched",
    "batch",
)


@dataclass(frozen=True)
class Parts:
    """What requests waited for, means in seconds; together the mean latency.

    Attributes:
        queue: In the client's hands behind their time, and in the instance's queue.
        loading: Of chunks.
        model: The rest of the engine's work.
        network: What is left.
    """

    queue: float
    loading: float
    model: float
    network: float


def parts_of(outcomes: Sequence[Outcome]) -> Parts:
    """Divide the latencies of the requests that were answered."""
    done = [one for one in outcomes if one.answered]

    def mean(seconds: list[float]) -> float:
        return float(np.mean(seconds))

    return Parts(
        queue=mean([one.sent + one.waited for one in done]),
        loading=mean([one.loading for one in done]),
        model=mean([one.model - one.loading for one in done]),
        network=mean([one.total - one.sent - one.waited - one.model for one in done]),
    )


def sent(
    setting: Setting, ports: Sequence[int], policy: str, asked: Sequence[Asked]
) -> dict[str, Any]:
    """Ask a list once, and say what came back.

    Args:
        setting: What all arms have in common.
        ports: Of the servers.
        policy: What is reused.
        asked: The questions and when they arrive.
    """
    outcomes = asyncio.run(run_load(ports, setting.load(asked, policy)))
    found = summary(asked, outcomes)
    facts = {name: getattr(found, name) for name in _FACTS}
    facts["offered"] = facts["offered"] if np.isfinite(facts["offered"]) else None
    return {**facts, "parts": asdict(parts_of(outcomes))}


def measure_passes(
    setting: Setting, names: Sequence[str], requests: int, capacity: float
) -> Iterator[dict[str, Any]]:
    """All passes and rates of all arms, on servers that are started once, arms in turns.

    Args:
        setting: What all arms have in common.
        names: Of the arms.
        requests: Of every pass.
        capacity: The baseline's, requests per second.
    """
    steps = [(PASS_RATE, number) for number in range(1, PASSES + 1)]
    steps += [(factor, 0) for factor in RATES]
    with ExitStack() as stack:
        places = {}
        for name in names:
            place = setting.place(stack.enter_context(tempfile.TemporaryDirectory()))
            places[name] = place, stack.enter_context(running(WAYS[name], place)).ports
        for turn, (factor, number) in enumerate(steps):
            asked = draw_requests(
                STREAM, requests, factor * capacity, len(setting.documents), setting.top_k
            )
            for name in rotated(names, turn):
                place, ports = places[name]
                full = alike(setting, ports)
                yield {
                    "arm": name,
                    "factor": factor,
                    "pass": number,
                    "rate": factor * capacity,
                    "full_prefill": full,
                    **sent(setting, ports, WAYS[name].policy, asked),
                    "load": load(),
                    "cache_bytes": place.held(),
                }


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--corpus", type=Path, help="documents, JSON lines with text and title")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--requests", type=int, help="of every pass (default: 48, quick: 8)")
    parser.add_argument("--json", type=Path, help="the report")
    parsed = parser.parse_args(given)
    if parsed.requests is None:
        parsed.requests = 8 if parsed.quick else 48
    if parsed.requests < 2:
        parser.error("--requests must be at least 2")
    if parsed.json is None:
        folder = "build/quick" if parsed.quick else "lab/benchmarks/results"
        parsed.json = ROOT / folder / "serving-passes.json"
    parsed.instances, parsed.device, parsed.streamed = INSTANCES, "same", False
    return parsed


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write JSON."""
    parsed = parse(given)
    plan = QUICK_PLAN if parsed.quick else FULL_PLAN
    plan = replace(plan, capacity_requests=min(plan.capacity_requests, parsed.requests))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            setting, setup = prepared(parsed, plan, Path(folder))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        about = {**described("cpu", 1), "commit": commit()}
        capacity = measure_capacity(setting, plan.capacity_requests)
        runs: list[dict[str, Any]] = []
        report = {"setup": setup, "about": about, "capacity": capacity, "runs": runs}
        print(f"capacity of the baseline: {capacity['per_second']:.2f} requests/s", flush=True)
        for run in measure_passes(setting, parsed.arms, parsed.requests, capacity["per_second"]):
            runs.append(run)
            write(report, parsed.json)
            show(run)
    print(f"{time.perf_counter() - started:.0f} s")
    return 0


def show(run: dict[str, Any]) -> None:
    """Print one line about a pass."""
    which = f"pass {run['pass']}" if run["pass"] else "warm"
    print(
        f"{run['arm']:<18}{run['factor']:>4}x {which:<7}{run['throughput']:>7.2f} /s"
        f"{run['latency']:>8.2f} s{100 * run['hits']:>6.0f} % hits  {json.dumps(run['parts'])}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
