"""docs/serving-benchmarks.md and its plots, from `results`; no figure is typed by hand.

python -m benchmarks.serving_report
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import serving_passes_page
from benchmarks.locality_page import section
from benchmarks.report_tables import markdown
from benchmarks.serving_paired import paired, table
from benchmarks.serving_results import (
    AHEAD,
    MAIN,
    NO_CACHE,
    OWN,
    SHARED,
    claims,
    rates,
    runs_of,
)
from benchmarks.shared_cache_page import shared_cache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RESULTS: Final = Path(__file__).parent / "results"
PAGE: Final = Path(__file__).parents[2] / "docs" / "serving-benchmarks.md"
NAMES: Final = ("serving", "serving-spare", "serving-passes", "locality", "shared_cache")
DRIFT: Final = 0.1  # of the machine's speed, from which a comparison of arms is marked
_HEAD: Final = """# Serving benchmarks

Two servers under load, and how few documents serve most questions: figures 1, 2, 10, 11 and table V
of Shared RAG-DCache (arXiv 2504.11765) in spirit, on our own machine, and by rate and by documents
per request, which the paper does not have. Written by `python -m benchmarks.serving_report` from
`lab/benchmarks/results/`; no figure is typed by hand. Measure again with `make bench-serving`,
`python -m benchmarks.serving_passes` and `python -m benchmarks.locality`. What of the paper is
shown where: [papers](papers.md).

Whatever is cached is answered by `Reuse()`, which asks for a model that was trained for cached
chunks; the default of any other, `BestLast()`, takes longer ([policies](policies.md)).

"""
_WAYS: Final = """Every arm is {instances} `kvcache-rag serve` processes of one torch thread each \
on {machine} ({versions}; {date}), started anew on empty caches and driven over HTTP on loopback; \
answers come {form}. Each request brings {top_k} documents and gets {answer_tokens} tokens.

- **no cache**: every request prefills everything (`policy: full`); all others have `policy: reuse`.
- **per instance**: each instance has a folder of cached chunks of its own, for half of the bytes.
- **shared**: both use one folder, for all of the bytes.
- **shared + prefetch**: and chunks of waiting requests are computed or loaded ahead (device: \
{prefetch_device}).

Documents: {corpus}, {documents} of {document_tokens:,.0f} tokens on average; all of their keys \
and values take {document_megabytes:,.0f} MB, and the caches of an arm may hold \
{cache_megabytes:,.0f} MB together. The model has random weights in a shape of our own ({shape}): \
it costs what a trained one costs and says nothing about answers. Which documents are asked for is \
**synthetic**: by Zipf's law with exponent 1, or uniformly (the null), each request {top_k} \
different ones.

Arrivals are open-loop (Poisson, one seed): a request goes to the instance with the fewest \
requests when its time has come, and waits there. The baseline's capacity, {capacity:.2f} answers \
per second, was measured with {capacity_requests} requests that were all there at once; a request \
alone on each instance took it {full_prefill:.3f} s. Latency runs from the arrival to the last \
token. The client took at most {client_share:.1f} % of a core.

Arms run one behind the other, because blocks of arms that take turns would all begin with an \
empty queue. What a full prefill with its answer took on both instances at once, right before and \
after every arm, was {drift}.

"""
_WHOLE: Final = (
    "whole, so that requests that wait together may share a batch, in every arm; the time to the "
    "first token is then what the client waited, less what the server spent behind that token"
)
_THROUGHPUT: Final = """**What throughput can say.** At {factor}x the baseline's capacity no arm \
can answer more than arrives, so its throughput can be at most about {factor}x the baseline's, \
whatever it could do. What an arm could do shows at rates at which it, too, has a queue: the \
highest rate below.

"""
_SPARE: Final = """## Prefetching on a processor to spare

Two servers on two cores leave nothing idle, and prefetching uses what is idle. Here one server of \
one torch thread answers, and a second copy of its model computes chunks of waiting requests on \
the other core (`--prefetch {prefetch_device}`: the paper's configuration B). Its baseline's \
capacity is {capacity:.2f} answers per second; all else is as above ({date}; `python -m \
benchmarks.serving --instances 1 --device {prefetch_device}`).

"""


def page(
    report: Mapping[str, Any] | None,
    locality: Mapping[str, Any] | None,
    spare: Mapping[str, Any] | None = None,
    passes: Mapping[str, Any] | None = None,
    one_engine: Mapping[str, Any] | None = None,
) -> str:
    """The whole page, as far as there are measurements."""
    parts = [_HEAD]
    if report is None:
        parts.append("## Under load\n\nNot measured yet.\n\n")
    else:
        parts.append("## What holds and what does not\n\n" + _claims(report))
        parts.append("## How it was measured\n\n" + _ways(report))
        parts.append(_throughput(report))
        parts.append(_gains(report))
        parts.append(paired(report))
        if report.get("shares"):
            parts.append(_shares(report))
    if passes is not None:
        parts.append(serving_passes_page.sections(passes))
    if spare is not None:
        facts = {**spare["setup"], **spare["about"], "capacity": spare["capacity"]["per_second"]}
        parts.append(_SPARE.format_map(facts) + f"{_arms(spare)}\n\n{table(spare)}\n\n")
    if locality is not None:
        parts.append(section(locality))
    if one_engine is not None:
        parts.append(shared_cache(one_engine))
    return "".join(parts).rstrip() + "\n"


def _claims(report: Mapping[str, Any]) -> str:
    said = {True: "holds", False: "does not hold", None: ""}
    rows = []
    for claim in claims(report):
        measured = "" if claim.measured is None else f"{claim.measured:.3g}"
        missing = claim.bound and claim.measured is None
        rows.append(
            [claim.text, claim.bound, measured, "not measured" if missing else said[claim.holds]]
        )
    return markdown(["claim", "asked for", "measured", ""], rows) + "\n\n"


def _ways(report: Mapping[str, Any]) -> str:
    setup, about, capacity = report["setup"], report["about"], report["capacity"]
    shape = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setup["shape"].items())
    return _WAYS.format_map(
        {
            **setup,
            **about,
            "shape": shape,
            "form": "piece by piece" if setup["streamed"] else _WHOLE,
            "document_megabytes": setup["document_bytes"] / 1e6,
            "cache_megabytes": setup["cache_bytes"] / 1e6,
            "capacity": capacity["per_second"],
            "capacity_requests": capacity["requests"],
            "full_prefill": capacity["full_prefill"],
            "client_share": 100 * max(one["client_share"] for one in report["runs"]),
            "drift": _drift(report),
        }
    )


def _drift(report: Mapping[str, Any]) -> str:
    names = ("full_prefill_before", "full_prefill_after")
    times = [one[name] for one in report["runs"] for name in names]
    spread = max(times) / min(times) - 1
    said = f"between {min(times):.3f} and {max(times):.3f} s"
    if spread > DRIFT:
        said += (
            f": **the machine's speed changed by {100 * spread:.0f} % between arms**, which the "
            "comparisons below contain"
        )
    return said


def _throughput(report: Mapping[str, Any]) -> str:
    """By rate of arrivals."""
    text = _THROUGHPUT.format(factor=MAIN[1]) + _arms(report)
    plots = "![By rate](serving-rates.svg)\n\n![In the queue](serving-queue.svg)"
    return f"## Throughput and latency by rate\n\n{plots}\n\n{text}\n\n"


def _arms(report: Mapping[str, Any]) -> str:
    """A row per stream, rate and arm that was run."""
    rows = []
    for stream, factor in rates(report):
        for arm, run in runs_of(report, stream, factor).items():
            found = run["summary"]
            full = run["full_prefill_before"], run["full_prefill_after"]
            rows.append(
                [
                    stream,
                    f"{factor:g}x",
                    arm,
                    f"{found['answered']:,} of {found['requests']:,}",
                    f"{found['offered']:.2f}",
                    f"{found['throughput']:.2f}",
                    *(f"{found[name]:.2f}" for name in ("latency", "median", "p95", "ttft")),
                    "" if found["waited"] is None else f"{found['waited']:.2f}",
                    f"{100 * found['hits']:.0f} %",
                    f"{100 * found['declined']:.0f} %",
                    f"{100 * found['prefetched']:.0f} %",
                    f"{found['batch']:.1f}",
                    f"{run['processor_seconds']:.3f}",
                    f"{run['peak_cache_bytes'] / 1e6:,.0f}",
                    f"{full[0]:.2f}, {full[1]:.2f}",
                ]
            )
    header = ["stream", "rate", "arm", "answered", "arrivals/s", "answers/s", "mean latency s"]
    header += ["median s", "p95 s", "TTFT s", "in the queue s", "chunks cached", "declined"]
    header += [
        "prefetched",
        "batch",
        "CPU s a request",
        "peak cache MB",
        "full prefill before, after s",
    ]
    return markdown(header, rows)


def _gains(report: Mapping[str, Any]) -> str:
    """Table V: gains over no cache."""
    rows = []
    for stream, factor in rates(report):
        runs = runs_of(report, stream, factor)
        if NO_CACHE not in runs:
            continue
        base = runs[NO_CACHE]["summary"]
        for arm in (OWN, SHARED, AHEAD):
            if arm in runs:
                found = runs[arm]["summary"]
                rows.append(
                    [
                        stream,
                        f"{factor:g}x",
                        arm,
                        _change(found["throughput"], base["throughput"]),
                        _change(found["latency"], base["latency"]),
                        _change(found["ttft"], base["ttft"]),
                    ]
                )
    header = ["stream", "rate", "arm", "throughput", "mean latency", "mean TTFT"]
    text = (
        "Against no cache. The paper's best set-up: +16.8 % and +25.2 % throughput, -36.8 % and "
        "-29.8 % latency (one and two documents); its abstract: up to +71 % and -65 %.\n\n"
    )
    return f"## Gains (table V)\n\n{text}{markdown(header, rows)}\n\n"


def _change(new: float, old: float) -> str:
    return f"{100 * (new / old - 1):+.0f} %"


def _shares(report: Mapping[str, Any]) -> str:
    """By documents of a request alone."""
    rows = [
        [
            f"{row['documents']}",
            row["arm"],
            f"{row['prompt_tokens']:,.0f}",
            f"{1e3 * row['first']:,.0f}",
            f"{1e3 * row['rest']:,.0f}",
            f"{100 * row['first_share']:.0f} %",
        ]
        for row in report["shares"]
    ]
    header = ["documents", "arm", "prompt tokens", "to the first token ms", "behind it ms"]
    text = (
        "One request at a time, medians; cached by `Reuse()`.\n\n![Shares](serving-shares.svg)\n\n"
    )
    title = "## Prefill and decoding"
    return f"{title}\n\n{text}{markdown([*header, 'first token, of all'], rows)}\n\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and its plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parsed = parser.parse_args(arguments)
    files = {name: parsed.results / f"{name}.json" for name in NAMES}
    found = {
        name: json.loads(file.read_text("utf-8")) for name, file in files.items() if file.is_file()
    }
    if not found.keys() & {"serving", "locality"}:
        print(f"{parsed.results} holds neither serving.json nor locality.json", file=sys.stderr)
        return 1
    from benchmarks.locality_plot import plot
    from benchmarks.serving_plot import draw, draw_passes

    folder = parsed.page.parent
    if "serving" in found:
        draw(found["serving"], folder)
    if "serving-passes" in found:
        draw_passes(found["serving-passes"], folder)
    if "locality" in found:
        plot(found["locality"], folder / "locality.svg")
    text = page(
        found.get("serving"),
        found.get("locality"),
        found.get("serving-spare"),
        found.get("serving-passes"),
        found.get("shared_cache"),
    )
    parsed.page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
