"""The section of docs/serving-benchmarks.md about one engine, from `benchmarks.shared_cache`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks.report_tables import markdown

if TYPE_CHECKING:
    from collections.abc import Mapping

_HEAD: Final = """\
## Passes, documents, answers and bytes (in one process)

`python -m benchmarks.shared_cache`: SmolLM2-135M with its adapter `block` on {machine} ({versions};
{date}). {drawn} questions drawn from `squad_queries.jsonl` over the {documents} paragraphs of
`squad_corpus.jsonl`, retrieved by BM25 in {retrieval:.1f} ms each (development data).

"""
_PASSES: Final = """\
**The same {asked_in_passes} questions again and again**, beginning with an empty folder. All of a
pass wait from its beginning; latency is the mean time from there to the end of an answer of eight
tokens. Memory in front of the folder is 1 GiB, the folder lies in the page cache. With two
documents "together" is the paper's way (`Combination()`: the pair in its order is computed and kept
as one), "stitched" keeps each by itself (`Reuse()`, as with one document). Configuration B
prefetches with a second copy of the model on the CPU; it can gain only where a core is idle.
{missing}

By the clock, arrangements one after the other, of few questions, while {load} processes wanted to
run: what is computed and found, and the processor's seconds (of all threads), compare better than
milliseconds.

"""
_ACCURACY: Final = """\
**Answers by the number of documents.** Half F1 plus half exact match, in points, greedy, {drawn}
questions; 95 % intervals, questions about one paragraph drawn together. "Cached" is by `Reuse()`,
"full" prefills the same prompt; "found" is how often the question's own paragraph is among those
retrieved.

"""
_SIZES: Final = """\
**Bytes beside the vector database's**, for the first {paragraphs_sized} paragraphs: the folder of
chunks with all that belongs to it, and Chroma's with MiniLM's vectors (384 numbers), the texts and
a reference to each chunk. Chroma's has a fixed part, so the quotient rises as a collection grows.

"""


def shared_cache(found: Mapping[str, Any]) -> str:
    """The whole section, as far as its parts were measured."""
    asked, about = found["questions"], found["about"]
    parts = [_HEAD.format(**about, **asked, retrieval=1e3 * found["retrieval_seconds"])]
    if "rows" in found:
        missing = " ".join(
            f"{arm[0].upper()}{arm[1:]} was not measured: {why}."
            for arm, why in found["not_measured"].items()
        )
        measured = [f"{row['arm']}, {row['top']}, {row['way']}, " for row in found["rows"]]
        loads = [
            cell["load"]
            for name, cell in found["cells"].items()
            if name.startswith(tuple(measured))
        ]
        load = f"{min(loads):.1f} to {max(loads):.1f}"
        parts.append(_PASSES.format(**asked, missing=missing, load=load) + _passes(found) + "\n\n")
    if "accuracy" in found:
        parts.append(_ACCURACY.format(**asked) + _accuracy(found) + "\n\n")
    if "sizes" in found:
        parts.append(_SIZES.format(**asked) + _sizes(found) + "\n\n")
    return "".join(parts)


def _passes(found: Mapping[str, Any]) -> str:
    header = [
        "documents", "way", "arm", "in front of the folder", "pass", "found in memory",
        "found in the folder", "missed", "tokens computed, of the prompt's", "first token ms",
        "latency s", "answers/s", "CPU s an answer",
    ]  # fmt: skip
    rows = []
    for row in found["rows"]:
        is_cached = row["arm"] != "no cache"
        hits = row["hits"]
        rows.append(
            [
                f"{row['top']}",
                row["way"] if is_cached and row["top"] > 1 else "",
                row["arm"],
                ("memory" if row["memory"] else "nothing") if is_cached else "",
                f"{row['pass']}",
                f"{hits.get('memory', 0)}" if is_cached else "",
                f"{hits.get('disk', 0)}" if is_cached else "",
                f"{row['misses']}" if is_cached else "",
                f"{row['computed_tokens']:.0f} of {row['prompt_tokens']:.0f}",
                f"{1e3 * row['ttft']:,.0f}",
                f"{row['latency']:.2f}",
                f"{row['throughput']:.2f}",
                f"{row['cpu_seconds']:.2f}",
            ]
        )
    rows += [["", "", arm, *["not measured"] * 10] for arm in found["not_measured"]]
    return markdown(header, rows)


def _accuracy(found: Mapping[str, Any]) -> str:
    rows = []
    for row in found["accuracy"]:
        apart = row["cached_minus_full"]
        rows.append(
            [
                f"{row['top']}",
                f"{100 * row['right']:.0f} %",
                _points(row["cached"]),
                _points(row["full"]),
                _points({**apart, "value": apart["difference"]}, "+"),
            ]
        )
    return markdown(["documents", "found", "cached", "full", "cached less full"], rows)


def _points(interval: Mapping[str, float], sign: str = "") -> str:
    value, low, high = (f"{100 * interval[name]:{sign}.1f}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _sizes(found: Mapping[str, Any]) -> str:
    rows = [
        [
            row["what"],
            f"{row['bytes'] / 1e6:,.1f}",
            f"{row['bytes_per_paragraph'] / 1e3:,.1f}",
            f"{row['bytes_per_token']:,.0f}",
            f"{row['of_chroma']:,.0f}",
        ]
        for row in found["sizes"]
    ]
    header = ["folder", "MB", "kB a paragraph", "bytes a token", "times Chroma's"]
    return markdown(header, rows)
