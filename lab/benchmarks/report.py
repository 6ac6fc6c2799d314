"""docs/benchmarks.md, written from lab/benchmarks/results/.

python -m benchmarks.report
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import report_tables as tables
from benchmarks.model_sizes import by_length, by_model
from benchmarks.shapes import QUERY
from benchmarks.ttft_rows import rows_of
from benchmarks.ttft_targets import cpu_targets, gpu_targets, other_targets, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RESULTS: Final = Path(__file__).parent / "results"
PAGE: Final = Path(__file__).parents[2] / "docs" / "benchmarks.md"
_HEAD: Final = """# Benchmarks

How long the first token takes, how fast the rest comes, and what it costs in memory, beside what a
user would run instead. Written by `python -m benchmarks.report` from `lab/benchmarks/results/`; no
figure is typed by hand. Measure again with `make bench`; `make bench-check` fails when a ratio got
more than 15 % worse than the committed one (those of decoding only on the processor that they were
measured on: on another one they are shown and not judged). Beside llama.cpp and KVBoost, on trained
weights: [peers](peers.md) (`make bench-peers`). Your own model, machine and questions: `kvcache-rag
bench MODEL` ([bench](bench.md)).

Random weights in real shapes: they cost what trained ones cost and say nothing about answers (see
[quality](quality.md)). Ratios are formed within one run, whose sides take turns, round by round;
times are medians. The model has one thread; where a core is free, ours loads in a thread of its own
beside the forward pass (a process bound to one core loads before it).

**All that is cached on this page is answered by `Reuse()`**, where a row names no other policy: the
default of a model that was trained for cached chunks. That of any other, `BestLast()`, computes the
best chunks with the question and takes longer ([policies](policies.md)).

- **naive**: stock transformers (sdpa) prefills instruction, chunks and question.
- **prefix-cached**: the same over a copy of the instruction's cache.
- **turborag**: TurboRAG's published way (arXiv 2410.07590) on the same ids and positions: one file
  per chunk with keys from before RoPE, `torch.load`, `torch.cat` per layer, all keys rotated in
  every step. Unlike its script it has sdpa attention, one table of angles per step, the last
  token's logits only, and chunks computed behind the instruction (else logits would differ).
- **disk**, **page cache**, **ram**, **resident** (GPU): ours, from files dropped from the page
  cache (where the file system can), files in it, main memory (pinned for a GPU), the device's.
- **deferred**: chunks in the model's memory, neither copied nor turned (LazyAttention, arXiv
  2606.04302).
- **floor**: the query alone, over a stitched cache that lay in place before the clock started.
- **stock** (decoding): stock transformers over a stock cache of the whole context.

"""
_MEASURED: Final = """`{command}`: {shape}, {dtype}, instruction {prefix} and chunks of {chunk} \
tokens; {machine}; {versions}; {date}.

"""
_COMPUTED: Final = """\
## Larger models, other lengths and batches: computed

TurboRAG's table 6 is by length and batch, its table 7 by model size. No model of such a size runs
here, so this is what such tables follow from: `python -m benchmarks.model_sizes`, operations by the
formula above for a question of 128 tokens, bytes of keys and values in 16 bits, and the least times
that the hardware allows: 16 lanes of PCIe at the rate of the lanes, and an A100's peak for the full
prefill. Nothing of it is measured; real copies and real prefills take longer. Contexts of 743
tokens are no multiple of a chunk's 512."""
_BY_LENGTH: Final = "By length and batch, Qwen2-7B; every prompt has a context of its own:"
_INGESTION: Final = """\
`Engine.add` of many chunks beside forward passes of the same model over the same ids, without the
instruction before them, at the batch size and with the attention that are fastest. Ours computes no
more than the last layer's keys and values, and writes a batch while it computes the next; the bar
of `show_progress` counts tokens and says the time left. Parts overlap: looking, copying and writing
"beside" are in another thread while the model computes. `cores` is CPU time by wall time: about as
many as there are threads, where nothing else runs.

Embedding beside prefilling is measured with an embedding that waits, as for a service over HTTP,
and with MiniLM on the same cores, both against one after the other. Waiting costs nothing beside
prefilling, so the longer of the two is all that is left. An embedding that computes gains what
cores the model leaves idle: where the model has as many threads as there are cores, both take turns
and there is little to gain. Nothing is embedded by `build` and `rebuild`; a store of LlamaIndex
gets nodes that are embedded (`KVCachePrefill(embed_model=)` in front of it does both), and a
wrapped store of LangChain embeds and writes in one call, before which its chunks are prefilled."""
_GROWTH: Final = """\
`make bench-growth`: one folder of tiny chunks that grows, and a small Llama with random weights
that is asked about longer contexts and more chunks, by `Reuse()` ("anew": by full prefill). The
exponent is the slope of log milliseconds over log size, by least squares: 0 is flat, 1 is linear. A
sweep and `store du` look at every file once; a store with a limit looks around once per tenth of
the limit."""
_TIES: Final = """\
Several guessed tokens are looked at in one pass, which adds bfloat16 numbers in another order. An
answer with guesses is a "near tie" if at its first other token the one without guesses led by no
more than twice that answer's rounding (its largest difference from float32's logits over the same
cached chunks) and the logits of both are no further apart; any other difference is wrong. All sides
answer by `Reuse()`."""
_INT8: Final = """\
`python -m benchmarks.int8_chunks`: SmolLM2 over sixteen chunks in a new order each round, from
files in the page cache, read anew from the medium, and at 100 MB/s, by `Reuse()`. "int8" attends to
what the files hold, "int8 copied" decodes it into the prompt's buffer, where keys are rotated.
Loading is the first token less the floor: the question's own forward pass over a native context
that is there. Memory is the peak of one question above what the process held before it."""
_HITS: Final = """\
`python -m benchmarks.hit_ratio`. **Rows**: requests of one chunk by Zipf's law at positions all
equally likely, with one copy per chunk and with one per chunk and position, beside the gain where
all chunks are equally popular (`null`). **Prompts of several documents**: different documents by
Zipf's law, in an order of chance, with the exponents of LazyAttention's experiments; a budget is
bytes of keys and values of a model's shape, the least recently used copy goes first, and the share
of documents found is counted. `prefix` finds equal prefixes only. `prompt cache` binds a document
to the place at which it was computed, as modules of a schema are (computed for one prompt alone
where it is wanted elsewhere); a schema that has every document at every place is `per position`.
`position free` is one copy per document, which is what this project keeps; `gain` is by `per
position`. A place is the number of a document in its prompt: all have one length. **Traces**:
recorded requests (`--trace FILE`: CSV, a request a row, its document ids in order);
`squad_bm25_top5.csv` is what BM25 retrieves for SQuAD's questions (`python -m benchmarks.locality
--tops 5 --trace FILE`), those about one paragraph one behind another, as in the file."""
_SIDES: Final = """\
`python -m benchmarks.rotated_side`: one question over eight chunks of 512 tokens, each moved by
another distance, bfloat16, milliseconds of the processor per layer. "keys" rotates keys as the
kernel reads them (what the engine does for one question), "query" the query for every chunk, with a
call for each and a merge (what it does for batches), "standing" is "keys" with nothing to rotate:
the least that a kernel could take that rotates the query inside. `off` is the largest difference
from plain attention over rotated copies, of the largest output. What was decided by it:
[experiments](experiments.md)."""
_HOT: Final = """\
`python -m benchmarks.hot_documents`: a question asks for five documents in an order of chance; one
prompt of three of them came before, and nobody asked for the others. `found` is of all 120 orders,
`found here` of the questions that were timed. "equal prefixes" goes on behind the equal beginning
of that prompt; "one per position" finds a document where it stood in that prompt (Prompt Cache's
modules, and a copy per position). It and those below answer by `Reuse()`. Times are to the first
token, of the processor (and `ms` by the clock, beside other work)."""
_OTHERS: Final = (
    (
        "decoding",
        "Decoding: weights in other forms, the attention kernel, guesses from the prompt"
        f"\n\n{_TIES}",
    ),
    ("int8_chunks", f"Chunks in 8 bits\n\n{_INT8}"),
    (
        "hit_ratio",
        f"Hit ratio of one copy per chunk\n\n{_HITS}\n\n![Hit ratio](hit_ratio.svg)\n\n"
        "![Hit ratio of prompts](hit_ratio_prompts.svg)",
    ),
    ("hot_documents", f"Hot documents\n\n{_HOT}"),
    ("rotated_side", f"Which side is rotated\n\n{_SIDES}"),
    ("prefill", "Offline prefill"),
    ("ingestion", f"Ingestion\n\n{_INGESTION}"),
    ("growth", f"Growth\n\n{_GROWTH}\n\n![Growth](growth.svg)"),
    ("deferred_kernel", "Deferred attention's kernel"),
    ("recompute", "Recomputing"),
    ("signing", "Signed chunks\n\nFirst tokens are by `Reuse()`."),
)


_SHORT: Final = """## How much sooner than stock transformers

Qwen2.5-0.5B's shape with **random weights** (they cost what trained ones cost; their answers mean
nothing), bfloat16; instruction 32, chunks of 512, question 20 tokens. All sides go through
`generate()` and take turns in one run (`make bench`), ours by `Reuse()`; medians, every check on,
files in the page cache.

"""
_FLOOR: Final = """\
"Question alone" is the floor: the question's forward pass over a cache that already lies in place.
"Deferred" is `Engine(rotation="deferred")`: chunks are neither copied nor rotated, one copy in
memory serves every prompt at every place, and peak memory is that of the weights and the chunks.
These are CPU ratios; a GPU prefills faster, so its ratios will be smaller (not measured). Your own
machine: [bench](bench.md).

"""


def page(
    report: Mapping[str, Any], gpu: Mapping[str, Any] | None, others: Mapping[str, Any]
) -> str:
    """The whole page.

    Args:
        report: What `ttft` measured on a CPU.
        gpu: The same on a GPU, None if there was none.
        others: What other benchmarks measured, by the name of their file.
    """
    parts = [_HEAD, _SHORT, tables.seconds(report), "\n", _FLOOR]
    parts.append("## What holds and what does not\n\n")
    parts.append(_MEASURED.format_map(report))
    parts.append("One thread, 4,096 tokens of context, a query of 20.\n\n")
    parts.append(table([*cpu_targets(report), *other_targets(others)]) + "\n\n")
    if gpu is None:
        parts.append("On a GPU, a 7B shape in bfloat16: no GPU was at hand.\n\n")
    else:
        parts.append("On a GPU:\n\n" + _MEASURED.format_map(gpu))
    parts.append(table(gpu_targets(gpu)) + "\n\n")
    apart = ", ".join(f"{side} {value:.1e}" for side, value in report["agreement"].items())
    parts.append(
        "How equal the query's logits are to those from RAM, copying: root mean square difference "
        f"in standard deviations, in {report['dtype']}: {apart}.\n\n"
    )
    parts.append(_figures(report, "On a CPU"))
    if gpu is not None:
        parts.append(_figures(gpu, "On a GPU"))
    parts.append(f"{_COMPUTED}\n\n{by_model()}\n\n{_BY_LENGTH}\n\n{by_length()}\n\n")
    for name, title in _OTHERS:
        if name in others:
            parts.append(f"## {title}\n\n{flat(others[name])}\n\n")
    return "".join(parts).rstrip() + "\n"


def _figures(report: Mapping[str, Any], title: str) -> str:
    suffix = "-gpu" if report["device"] == "cuda" else ""
    sections = [
        (
            "By context (as TurboRAG's table 3)",
            tables.contexts(report) + f"\n\n![TTFT against context](ttft-context{suffix}.svg)",
        ),
        (
            "By batch, nothing read from disk (as TurboRAG's table 5)",
            tables.batches(report) + f"\n\n![TTFT against batch](ttft-batch{suffix}.svg)",
        ),
        ("By batch, with loading and its parts", tables.loading(report)),
        (
            "Operations",
            "By the formula of TurboRAG's appendix G, in which the reduction is the context's "
            "share of the prompt, whatever the model; with 4 H d n operations for a token's "
            "attention in a layer, which its table 5 needs, where the appendix prints 2 H d n. "
            "Loading adds no operation, nor does the cached instruction; the rotation adds what "
            f"the last column shows.\n\n{tables.flops(report)}",
        ),
        ("Decoding", tables.decoding(report)),
        (
            "Peak memory",
            "Above what the process held after its imports, each side in a process of its own; "
            f"the peak begins when the weights are there.\n\n{tables.memory(report)}",
        ),
        ("Every side", tables.every_side(report)),
    ]
    return f"## {title}\n\n" + "".join(f"### {name}\n\n{text}\n\n" for name, text in sections)


def other_reports(folder: Path) -> dict[str, Any]:
    """What other benchmarks measured, as far as it is there."""
    files = {name: folder / f"{name}.json" for name, _ in _OTHERS}
    return {
        name: json.loads(file.read_text("utf-8")) for name, file in files.items() if file.is_file()
    }


def flat(report: Mapping[str, Any]) -> str:
    """A report of plain values and lists of alike rows, as a sentence and tables."""
    facts = [f"{key} {_cell(value)}" for key, value in report.items() if _is_plain(value)]
    parts = ["; ".join(facts) + "."] if facts else []
    for key, value in report.items():
        if isinstance(value, dict) and not _is_interval(value):
            parts.append(f"**{key.replace('_', ' ')}**\n\n{flat(value)}")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            header = [name for name in value[0] if _is_plain(value[0][name])]
            rows = [[_cell(row.get(name)) for name in header] for row in value]
            shown = tables.markdown([name.replace("_", " ") for name in header], rows)
            parts.append(f"**{key.replace('_', ' ')}**\n\n{shown}")
    return "\n\n".join(parts)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float)) or _is_interval(value)


def _is_interval(value: Any) -> bool:
    return isinstance(value, dict) and {"value", "low", "high"} <= set(value)


def _cell(value: Any) -> str:
    if _is_interval(value):
        span = f" ({value['low']:.3g} to {value['high']:.3g})"
        return f"{value['value']:.3g}" + (span if value["low"] < value["high"] else "")
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else f"{value}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and its plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parsed = parser.parse_args(arguments)
    from benchmarks.ttft_plot import draw

    reports = {}
    for device, suffix in (("cpu", ""), ("gpu", "-gpu")):
        file = parsed.results / f"ttft{suffix}.json"
        if file.is_file():
            reports[device] = json.loads(file.read_text("utf-8"))
            folder = parsed.page.parent
            plots = (folder / f"ttft-context{suffix}.svg", folder / f"ttft-batch{suffix}.svg")
            draw(rows_of(reports[device]), *plots, QUERY)
    if "cpu" not in reports:
        print(f"{parsed.results / 'ttft.json'} is missing; run make bench first", file=sys.stderr)
        return 1
    text = page(reports["cpu"], reports.get("gpu"), other_reports(parsed.results))
    parsed.page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
