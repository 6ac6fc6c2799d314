"""Throughput and latency of two servers: no cache, a cache each, one shared, and prefetch.

    python -m benchmarks.serving --corpus squad_corpus.jsonl   # about 35 minutes on two cores
    python -m benchmarks.serving --quick                       # a tiny model, less than 90 s

Table V of Shared RAG-DCache (arXiv 2504.11765) in spirit, by rate, with the project's own servers:
every arm is two `kvcache-rag serve` processes on loopback, one torch thread each, started anew on
empty caches, and driven over HTTP (`/v1/chat/completions`).  Answers come whole, so that requests
which wait together may be answered in one batch, in every arm.

- no cache            every request prefills everything (`policy: full`)
- per instance        each instance has a folder of its own, for half of the bytes
- shared              both have one folder, for all of the bytes
- shared + prefetch   and chunks of waiting requests are computed or loaded ahead

The baseline's capacity is measured first: answers per second of the two instances when all requests
are there at once.  Arrivals are open-loop (Poisson): a request is sent when its time has come,
whatever became of those before it, to the instance with the fewest requests; it waits in that
instance's queue.  The requests, their documents and, at one rate, their moments are the same for
all arms.  Latency runs from arrival to the last token.  At 1.2 times its capacity the baseline's
queue grows as long as requests come, and no arm can answer more than arrives: its throughput cannot
exceed the baseline's by more than 1.2 times.  So higher rates are run too.

Arms run one behind the other: interleaved by blocks, every block would begin with an empty queue,
which is what an overloaded server does not have.  So that a machine that got faster or slower in
between is seen, both instances answer some requests without the cache before and after every arm,
and the report has these times.

Which documents are asked for is synthetic: by Zipf's law (exponent 1), or uniformly.  The model has
random weights in a shape of our own.  Documents are those of `--corpus` (JSON
lines; paragraphs of one title joined to at least 1,200 characters), or made up without one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.common import ROOT, described, read, result_file, write
from benchmarks.render import table
from benchmarks.serving_servers import (
    AHEAD,
    ARMS,
    FULL,
    INSTANCES,
    MAIN_SHAPE,
    NO_CACHE,
    OWN,
    REUSE,
    SHARED,
    STREAMS,
    TINY_SHAPE,
    WAYS,
    Asked,
    Load,
    Outcome,
    Place,
    Shape,
    ask,
    draw_requests,
    generated,
    joined,
    question_of,
    run_load,
    running,
    save_model,
)
from kvcache_rag.prompt.template import PromptTemplate
from kvcache_rag_lab.scoring.statistics import (
    LEAST_DIFFERING,
    Comparison,
    Interval,
    paired_bootstrap,
    paired_ratio,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.serving_servers import Outcome


BLOCK: Final = 50  # consecutive requests that are drawn together: they wait in the same queue
PAIRS: Final = ((SHARED, OWN), (AHEAD, SHARED), (SHARED, NO_CACHE), (AHEAD, NO_CACHE))


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
        ratio: Mean latency of `better` by that of `than`, blocks drawn together.
    """

    better: str
    than: str
    saved: Comparison
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
        paired_ratio(fast, slow, blocks),
    )


def runs_of(report: Mapping[str, Any], stream: str, factor: float) -> dict[str, Any]:
    """The runs of one stream and rate, by arm."""
    same = [one for one in report["runs"] if (one["stream"], one["factor"]) == (stream, factor)]
    return {arm: one for arm in ARMS for one in same if one["arm"] == arm}


def paired(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Seconds that an arm saves against another, request by request, with 95 % intervals."""
    rows = []
    for stream, factor in rates(report):
        runs = runs_of(report, stream, factor)
        for better, than in PAIRS:
            if {better, than} <= runs.keys():
                found = against(runs, better, than)
                rows.append(
                    {
                        "stream": stream,
                        "rate": factor,
                        "arm": better,
                        "than": than,
                        "seconds saved": _bounds(found.saved.difference, found.saved, found),
                        "latency, of the other's": _bounds(found.ratio.value, found.ratio, found),
                        "throughput, of the other's": _ratio(runs, better, than),
                    }
                )
    return rows


def _bounds(value: float, bounds: Comparison | Interval, found: Against) -> Any:
    if not found.has_interval:
        return value
    return {"value": value, "low": bounds.low, "high": bounds.high}


def _ratio(runs: Mapping[str, Any], arm: str, than: str) -> float:
    ratio: float = runs[arm]["summary"]["throughput"] / runs[than]["summary"]["throughput"]
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


_SAMPLE: Final = 5.0  # seconds between two looks at the caches' bytes
_ALIKE: Final = 3  # full prefills by which the machine is measured, before and after


@dataclass(frozen=True)
class Setting:
    """What all arms have in common.

    Attributes:
        model: Folder of model and tokenizer.
        documents: Texts.
        top_k: Documents of each request.
        answer_tokens: Of each answer.
        cache_bytes: Of all caches of an arm together.
    """

    model: Path
    documents: Sequence[str]
    top_k: int
    answer_tokens: int
    cache_bytes: int

    def place(self, work: str) -> Place:
        """An empty folder, as the place of an arm."""
        return Place(self.model, Path(work), self.cache_bytes)

    def load(self, asked: Sequence[Asked], policy: str) -> Load:
        """Requests as the client sends them."""
        return Load(asked, self.documents, self.answer_tokens, policy, str(self.model))


@dataclass(frozen=True)
class Point:
    """A rate of a stream.

    Attributes:
        stream: Name of a stream.
        factor: Arrivals, as a part of the baseline's capacity.
        requests: How many.
    """

    stream: str
    factor: float
    requests: int


def measure_arm(setting: Setting, name: str, point: Point, capacity: float) -> dict[str, Any]:
    """Start the arm's servers on empty caches, send the stream, and say what came back."""
    asked = draw_requests(
        point.stream,
        point.requests,
        point.factor * capacity,
        len(setting.documents),
        setting.top_k,
    )
    arm = WAYS[name]
    with tempfile.TemporaryDirectory() as work:
        place = setting.place(work)
        with running(arm, place) as instances:
            before = alike(setting, instances.ports)
            busy, wall = time.process_time(), time.perf_counter()
            served = instances.processor_seconds()
            load = setting.load(asked, arm.policy)
            outcomes, peak = asyncio.run(_watched(instances.ports, load, place))
            share = (time.process_time() - busy) / (time.perf_counter() - wall)
            served = instances.processor_seconds() - served
            after = alike(setting, instances.ports)
    return {
        "stream": point.stream,
        "factor": point.factor,
        "arm": name,
        "rate": point.factor * capacity,
        "full_prefill_before": before,
        "full_prefill_after": after,
        "client_share": share,
        "processor_seconds": round(served / len(asked), 4),
        "peak_cache_bytes": peak,
        **columns(outcomes, summary(asked, outcomes)),
    }


async def _watched(ports: Sequence[int], load: Load, place: Place) -> tuple[list[Outcome], int]:
    """The outcomes, and the most bytes that the caches held."""
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, place.held())
            await asyncio.sleep(_SAMPLE)

    watcher = asyncio.create_task(watch())
    try:
        outcomes = await run_load(ports, load)
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
    return outcomes, max(peak, place.held())


def alike(setting: Setting, ports: Sequence[int]) -> float:
    """Seconds of a full prefill with its answer, all instances at once: the machine's speed now."""
    asked = Asked(0.0, tuple(range(setting.top_k)), question_of(0))
    body = setting.load([asked], FULL).body(asked)

    async def rounds() -> list[float]:
        seconds: list[float] = []
        for number in range(1 + _ALIKE):
            started = time.perf_counter()
            found = await asyncio.gather(*(ask(port, body, started) for port in ports))
            for one in found:
                if not one.answered:
                    raise RuntimeError(f"a server does not answer: {one.message}")
            if number:  # the first one warms up
                seconds += [one.total for one in found]
        return seconds

    return statistics.median(asyncio.run(rounds()))


def measure_capacity(setting: Setting, requests: int) -> dict[str, float]:
    """Answers per second of the baseline when all requests are there at once."""
    asked = draw_requests("zipf", requests, 1.0, len(setting.documents), setting.top_k, seed=1)
    at_once = [replace(one, at=0.0) for one in asked]
    with tempfile.TemporaryDirectory() as work:
        place = setting.place(work)
        with running(WAYS[NO_CACHE], place) as instances:
            seconds = alike(setting, instances.ports)
            outcomes = asyncio.run(run_load(instances.ports, setting.load(at_once, FULL)))
    found = summary(at_once, outcomes)
    if found.answered < requests:
        raise RuntimeError(f"the baseline answered {found.answered} of {requests} requests")
    return {"requests": requests, "per_second": found.throughput, "full_prefill": seconds}


def measure_shares(setting: Setting, rounds: int) -> list[dict[str, Any]]:
    """Time to the first token and behind it, one request at a time, by documents per request.

    With the cache every document was asked for before.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        place = replace(setting.place(work), cache_bytes=4 * setting.cache_bytes)
        with running(WAYS[SHARED], place) as instances:
            port = instances.ports[0]
            alike(setting, instances.ports)
            for top in sorted({1, 2, setting.top_k}):
                for policy in (FULL, REUSE):
                    found = [_alone(setting, port, top, policy, turn) for turn in range(rounds)]
                    kept = found[1:]  # the first one fills the cache
                    prompt, first, total = (
                        statistics.median(getattr(one, name) for one in kept)
                        for name in ("prompt_tokens", "first", "total")
                    )
                    rows.append(
                        {
                            "documents": top,
                            "arm": NO_CACHE if policy == FULL else "all cached",
                            "prompt_tokens": prompt,
                            "first": first,
                            "rest": total - first,
                            "first_share": first / total,
                            "rounds": len(kept),
                        }
                    )
    return rows


def _alone(setting: Setting, port: int, top: int, policy: str, turn: int) -> Outcome:
    asked = Asked(0.0, tuple(range(top)), question_of(turn))
    body = setting.load([asked], policy).body(asked)
    outcome = asyncio.run(ask(port, body, time.perf_counter()))
    if not outcome.answered:
        raise RuntimeError(f"a server does not answer: {outcome.message}")
    return outcome


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        shape: Of the model.
        points: Streams and rates, the one of the claims first.
        documents: How many are made up, without a corpus.
        top_k: Documents of each request.
        answer_tokens: Of each answer.
        capacity_requests: By which the baseline's capacity is measured.
        share_rounds: Requests by which prefill and decoding are told apart.
        cached: Part of all documents that fits the caches.
    """

    shape: Shape
    points: tuple[Point, ...]
    documents: int = 400
    top_k: int = 4
    answer_tokens: int = 16
    capacity_requests: int = 80
    share_rounds: int = 6
    cached: float = 0.5


FULL_PLAN: Final = Plan(
    MAIN_SHAPE,
    (
        Point("zipf", 1.2, 1000),
        Point("zipf", 4.8, 300),
        Point("uniform", 1.2, 300),
        Point("zipf", 2.4, 300),
        Point("zipf", 0.6, 60),
    ),
)
QUICK_PLAN: Final = Plan(
    TINY_SHAPE,
    (Point("zipf", 1.2, 24),),
    documents=24,
    top_k=2,
    capacity_requests=8,
    share_rounds=2,
)
SEED: Final = 0
_BYTES: Final = 2  # of a bfloat16
_HEADER: Final = 4096  # bytes of a chunk's file before its data


def nbytes_of(shape: Shape, tokens: int) -> int:
    """Bytes of a chunk's file: keys, values, token ids, header."""
    wide = 64  # of a head
    return shape.layers * 2 * shape.kv_heads * wide * _BYTES * tokens + 4 * tokens + _HEADER


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--corpus", type=Path, help="documents, JSON lines with text and title")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="measure these, keep the others")
    parser.add_argument(
        "--points", nargs="+", metavar="STREAM:RATE", help="measure these, as zipf:1.2; keep others"
    )
    parser.add_argument("--keep", action="store_true", help="measure only what is not there yet")
    parser.add_argument("--requests", type=int, help="of every point, instead of its own")
    parser.add_argument("--json", type=Path, help="the report")
    parsed = parser.parse_args(given)
    if parsed.json is None:
        quick = ROOT / "build" / "quick" / "serving.json"
        parsed.json = quick if parsed.quick else result_file("serving")
    if parsed.requests is not None and parsed.requests < 2:
        parser.error("--requests must be at least 2")
    known = {f"{name}:{point.factor:g}" for name in STREAMS for point in plan_of(parsed).points}
    for point in parsed.points or ():
        if point not in known:
            parser.error(f"--points knows {', '.join(sorted(known))}, not {point}")
    return parsed


def plan_of(parsed: argparse.Namespace) -> Plan:
    """The plan that the command line asks for."""
    plan = QUICK_PLAN if parsed.quick else FULL_PLAN
    if parsed.requests is None:
        return plan
    points = tuple(replace(point, requests=parsed.requests) for point in plan.points)
    return replace(plan, points=points)


def wanted_points(plan: Plan, names: Sequence[str] | None) -> list[Point]:
    """The plan's points, or those of the command line with the requests of their rate."""
    if names is None:
        return list(plan.points)
    requests = {point.factor: point.requests for point in reversed(plan.points)}
    pairs = ((stream, float(rate)) for stream, _, rate in (name.partition(":") for name in names))
    own = {(point.stream, point.factor): point for point in plan.points}
    return [own.get(pair, Point(*pair, requests[pair[1]])) for pair in pairs]


def prepared(
    parsed: argparse.Namespace, plan: Plan, folder: Path
) -> tuple[Setting, dict[str, Any]]:
    """Model and documents, and what the report says about them.

    Raises:
        ValueError: If the corpus cannot be read.
    """
    documents = joined(parsed.corpus) if parsed.corpus else generated(plan.documents, seed=SEED)
    tokenizer = save_model(plan.shape, documents, folder)
    template = PromptTemplate()
    written = [template.wrap(text) for text in documents]
    tokens = [len(ids) for ids in tokenizer(written, add_special_tokens=False)["input_ids"]]
    total = sum(nbytes_of(plan.shape, count) for count in tokens)
    setting = Setting(
        folder,
        documents,
        plan.top_k,
        plan.answer_tokens,
        int(total * plan.cached),
    )
    return setting, {
        "corpus": parsed.corpus.name if parsed.corpus else "generated",
        "documents": len(documents),
        "document_tokens": round(float(np.mean(tokens)), 1),
        "document_bytes": total,
        "cache_bytes": setting.cache_bytes,
        "top_k": plan.top_k,
        "answer_tokens": plan.answer_tokens,
        "instances": INSTANCES,
        "shape": asdict(plan.shape),
        "block": BLOCK,
        "seed": SEED,
    }


def kept_of(file: Path | None, setup: dict[str, Any]) -> dict[str, Any]:
    """The report of an earlier run of the same set-up, or a new one.

    Raises:
        ValueError: If the file is about another set-up.
    """
    report = read(file) if file else {}
    if report and report["setup"] != setup:
        raise ValueError(f"{file} is about another set-up; name another one by --json")
    return report or {"setup": setup, "runs": []}


def measure(
    parsed: argparse.Namespace, plan: Plan, setting: Setting, report: dict[str, Any]
) -> None:
    """All arms that are wanted, each written when it is done."""
    if "capacity" not in report:
        report["capacity"] = measure_capacity(setting, plan.capacity_requests)
    capacity = report["capacity"]["per_second"]
    print(
        f"capacity of the baseline: {capacity:.2f} requests/s; "
        f"a full prefill and its answer: {report['capacity']['full_prefill']:.3f} s",
        flush=True,
    )
    if "shares" not in report:
        report["shares"] = measure_shares(setting, plan.share_rounds)
        for row in report["shares"]:
            print("  {documents} documents, {arm}: {first:.3f} + {rest:.3f} s".format(**row))
    write(parsed.json, report)
    for point in wanted_points(plan, parsed.points):
        for arm in parsed.arms or ARMS:
            place = (point.stream, point.factor, arm)
            others = [
                one for one in report["runs"] if (one["stream"], one["factor"], one["arm"]) != place
            ]
            if parsed.keep and len(others) < len(report["runs"]):
                continue
            started = time.perf_counter()
            run = measure_arm(setting, arm, point, capacity)
            report["runs"] = [*others, run]
            report["paired"] = paired(report)
            write(parsed.json, report)
            show(run, time.perf_counter() - started)


def show(run: dict[str, Any], seconds: float) -> None:
    """Print one line about an arm."""
    found = run["summary"]
    print(
        f"{run['stream']:<8}{run['factor']:>4}x {run['arm']:<18}{found['throughput']:>7.2f} /s"
        f"{found['latency']:>8.2f} s mean{found['p95']:>8.2f} s p95{found['ttft']:>8.2f} s TTFT"
        f"{100 * found['hits']:>6.1f} % hits, batch {found['batch']:.1f}, "
        f"{found['answered']}/{found['requests']} answered; "
        f"full prefill {run['full_prefill_before']:.3f} -> {run['full_prefill_after']:.3f} s; "
        f"servers {run['processor_seconds']:.3f} CPU s a request, "
        f"client {100 * run['client_share']:.1f} % of a core; {seconds:.0f} s",
        flush=True,
    )


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write JSON."""
    parsed = parse(given)
    plan = plan_of(parsed)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            setting, setup = prepared(parsed, plan, Path(folder))
            is_part = parsed.keep or parsed.arms or parsed.points
            report = kept_of(parsed.json if is_part else None, setup)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        report.pop("about", None)
        report = {"about": {"benchmark": "serving", **described("cpu", 1)}, **report}
        measure(parsed, plan, setting, report)
    print(table(report["paired"]))
    print(f"{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
