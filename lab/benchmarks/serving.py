"""Throughput and latency of two servers: no cache, a cache each, one shared, and prefetch.

    python -m benchmarks.serving --corpus squad_corpus.jsonl   # about 35 minutes on two cores
    python -m benchmarks.serving --quick                       # a tiny model, less than 90 s

Table V of Shared RAG-DCache (arXiv 2504.11765) in spirit, by rate (the passes of its figures 10 and
11, and the parts of figure 2, are `benchmarks.serving_passes`), with the project's own servers:
every arm is two `kvcache-rag serve` processes on loopback, one torch thread each, started anew on
empty caches, and driven over HTTP (`/v1/chat/completions`).  Answers come whole, so that requests
which wait together may be answered in one batch, in every arm (`--streamed`: piece by piece, and
one by one).

- no cache            every request prefills everything (`policy: full`)
- per instance        each instance has a folder of its own, for half of the bytes
- shared              both have one folder, for all of the bytes
- shared + prefetch   and chunks of waiting requests are computed or loaded ahead

With `--instances 1 --device cpu` one server answers and leaves a core to prefetching, in a report
of its own.

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
random weights in a shape of our own (`serving_model`).  Documents are those of `--corpus` (JSON
lines; paragraphs of one title joined to at least 1,200 characters), or made up without one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.machine import described
from benchmarks.serving_load import STREAMS
from benchmarks.serving_model import Shape, generated, joined, save_model
from benchmarks.serving_plans import FULL_PLAN, QUICK_PLAN, SPARE_PLAN, Plan
from benchmarks.serving_results import ARMS, BLOCK, claims
from benchmarks.serving_run import Point, Setting, measure_arm, measure_capacity, measure_shares
from benchmarks.serving_servers import INSTANCES
from kvcache_rag.prompt.template import PromptTemplate

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).parents[2]
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
    parser.add_argument("--device", default="same", help='of prefetching: "same", "cpu", ...')
    parser.add_argument("--instances", type=int, choices=(1, 2), default=INSTANCES, help="servers")
    parser.add_argument("--streamed", action="store_true", help="streams, which share no batch")
    parser.add_argument("--json", type=Path, help="the report")
    parsed = parser.parse_args(given)
    if parsed.json is None:
        name = "serving" if parsed.instances == INSTANCES else "serving-spare"
        folder = "build/quick" if parsed.quick else "lab/benchmarks/results"
        parsed.json = ROOT / folder / f"{name}.json"
    if parsed.requests is not None and parsed.requests < 2:
        parser.error("--requests must be at least 2")
    known = {f"{name}:{point.factor:g}" for name in STREAMS for point in plan_of(parsed).points}
    for point in parsed.points or ():
        if point not in known:
            parser.error(f"--points knows {', '.join(sorted(known))}, not {point}")
    return parsed


def plan_of(parsed: argparse.Namespace) -> Plan:
    """The plan that the command line asks for."""
    full = FULL_PLAN if parsed.instances == INSTANCES else SPARE_PLAN
    plan = QUICK_PLAN if parsed.quick else full
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
        parsed.device,
        parsed.streamed,
        parsed.instances,
    )
    return setting, {
        "corpus": parsed.corpus.name if parsed.corpus else "generated",
        "documents": len(documents),
        "document_tokens": round(float(np.mean(tokens)), 1),
        "document_bytes": total,
        "cache_bytes": setting.cache_bytes,
        "top_k": plan.top_k,
        "answer_tokens": plan.answer_tokens,
        "instances": parsed.instances,
        "shape": asdict(plan.shape),
        "prefetch_device": parsed.device,
        "streamed": parsed.streamed,
        "block": BLOCK,
        "seed": SEED,
    }


def kept_of(file: Path, setup: dict[str, Any]) -> dict[str, Any]:
    """The report of an earlier run of the same set-up, or a new one.

    Raises:
        ValueError: If the file is about another set-up.
    """
    if not file.is_file():
        return {"setup": setup, "runs": []}
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if report["setup"] != setup:
        raise ValueError(f"{file} is about another set-up; name another one by --json")
    return report


def write(report: dict[str, Any], file: Path) -> None:
    """Write the report, a run per line."""
    lines = []
    for name, value in report.items():
        text = json.dumps(value)
        if name in ("runs", "shares"):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if value else "[]"
        lines.append(f" {json.dumps(name)}: {text}")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    partial.replace(file)


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
    write(report, parsed.json)
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
            write(report, parsed.json)
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
            report = kept_of(parsed.json, setup) if is_part else {"setup": setup, "runs": []}
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        report["about"] = described("cpu", 1)
        measure(parsed, plan, setting, report)
    for claim in claims(report):
        if claim.measured is not None:
            holds = {True: "holds", False: "does not hold", None: ""}[claim.holds]
            print(f"{claim.text}: {claim.measured:.3f} {claim.bound} {holds}")
    print(f"{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
