"""docs/peers.md, written from lab/benchmarks/results/peers.json.

python -m benchmarks.peers_page
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.peers_figures import CASES, LENGTHS, Crossover
from benchmarks.report_tables import markdown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

RESULTS: Final = Path(__file__).parent / "results" / "peers.json"
PAGE: Final = Path(__file__).parents[2] / "docs" / "peers.md"
# Times closer than this are called equal.
_EQUAL: Final = 0.05
# Processes more than cores before a machine is called busy with other work.
_SPARE: Final = 0.5
# Cases of the table in short; the page has all.
SHORT_CASES: Final = {
    "new order": "Chunks known, in a new order",
    "same prefix": "The same chunks in the same order, another question",
}
_SHORT: Final = """## In short

On {threads}, {contexts} tokens of chunks, medians, ours by `Reuse()`. Who has the first
token sooner need not end sooner, so the last column says from how many tokens on who does.

"""
_HEAD: Final = """# Beside llama.cpp, KVBoost and stock transformers

The same prompts and the same weights (SmolLM2-135M-Instruct, greedy) on one machine; the sides take
turns at every prompt, each in a process of its own. Written by `python -m benchmarks.peers_page`
from what `make bench-peers` measured; no figure is typed by hand, and whoever wins is named.

{machine}; {versions}; {peers}; commit {commit}; {date}; {minutes:g} minutes; {load:g} processes
wanted to run on average. A prompt is an instruction of {prefix} tokens, chunks of {chunk} tokens (a
context counts these alone) and a question of {query}. Seconds to the first token are medians
(**p50**) with the 95th percentile (**p95**, of few samples nearly the longest); the times of
llama.cpp include its HTTP on the same machine, ours and those of transformers are calls.

"""
_BUSY: Final = """**The machine was busy with other work, so these figures are rough.**

"""
_SIDES: Final = """## The sides

- **ours**: `Engine`, `Reuse()`, chunks in files in the page cache, every check on; `auto`, `int8`
  and `int4` are its `weight_format`.
- **llama.cpp**: `llama-server`, compiled here with native flags, one slot, weights converted from
  the same file; {flash}.
- **stock**: transformers' `generate()` in bfloat16, with its own `DynamicCache`.
- **KVBoost**: its default settings (blocks of 128 tokens, seams recomputed) around that same model.

The file of the weights is GGUF Q4_1. Ours (`auto`), stock and KVBoost dequantise it to bfloat16;
`BF16`, `F16` and `Q8_0` of llama.cpp are made of it by `llama-quantize`; `int8` and `int4` of ours
are rounded anew from bfloat16.

What each can reuse, as read in its source and as its count of reused tokens shows below:

- **ours**: every known chunk, in any order and any company; keys are turned to their new places.
  What a chunk would have read from the chunks before it is missing: answers are approximate.
- **llama.cpp** without `--cache-reuse`: the longest equal beginning of the slot's last prompt, and
  the answer is that of a full prefill. With it (here from {run} tokens on) equal runs behind that
  beginning are shifted as well, but only forwards: the search in the old prompt never goes back, so
  of chunks in a new order those are found that still stand behind each other. A shifted run keeps
  what it once read of the chunks before it: approximate, too.
- **KVBoost**: an equal beginning, in whole blocks. Each block was encoded alone, at its place, and
  the last tokens of each are recomputed when they are put together: approximate as well. A block
  that is found in another place makes it run a forward pass over everything that was found (its
  CacheBlend), which costs what a prefill costs. What it has encoded for an answer it encodes again,
  block by block, to keep it.
- **stock**: an equal beginning, if the caller keeps the cache of it.

"""
_KINDS: Final = {
    "reorder": (
        "Chunks known, in a new order",
        "Every chunk was in an earlier prompt, in another order; only the instruction stands where "
        "it stood.",
    ),
    "prefix": (
        "The same chunks in the same order, another question",
        "What prompt caches are made for.",
    ),
    "unknown": (
        "Nothing known",
        "A full prefill on every side; `ours, kept` is ours where the chunks are unknown and are "
        "prefilled one by one and written, so that they are known afterwards.",
    ),
}
_CROSS: Final = """## End to end, and where the peer is sooner

Seconds for {lengths} generated tokens, from the first token and the median time of the further
ones; the first token's ratio and the further tokens' ratio are the peer's time over ours, above 1
where ours is faster. "Peer from" says from how many generated tokens on the peer is done sooner,
"ours from" the same of ours; a dash is never.

"""
_CASES: Final = {"reorder": "new order", "shift": "new order", "cold": "nothing known"}
_EXACT: Final = """## How exact

Tokens of an answer compared with those that a full prefill of the same weights on the same side
gave (KVBoost with stock's): share of prompts with the same first token, with all tokens the same,
and how many tokens from the first one on were the same. Even an exact reuse may differ in its
rounding, as other numbers of tokens are multiplied at once.

"""


def page(report: Mapping[str, Any]) -> str:
    """The whole page."""
    rows = report["rows"]
    compared = [Crossover(**one) for one in report["crossovers"]]
    flash = ", ".join(
        f"{weights} with flash attention {found['choice']}"
        for weights, found in sorted(report["flash"].items())
    )
    told = {**report, "peers": "; ".join(report["peers"].values())}
    parts = [
        _HEAD.format_map(told),
        _BUSY if _is_busy(report) else "",
        short(report),
        "## Who wins\n\n",
        verdicts(compared),
        _SIDES.format(flash=flash or "not measured", run=64),
        *(_firsts(rows, name) for name in _KINDS),
        _CROSS.format(lengths=", ".join(map(str, LENGTHS))),
        _ends(rows, compared),
        _long(rows),
        "## Time per further token, and memory\n\n",
        _memory(rows, report["sides"]),
        _EXACT,
        _agreements(rows),
        _failed(report["failures"]),
    ]
    return "".join(parts).rstrip() + "\n"


def short(report: Mapping[str, Any]) -> str:
    """Shortest and longest context on the fewest threads, and who ends sooner."""
    compared = [Crossover(**one) for one in report["crossovers"]]
    if not compared:
        return ""
    threads = min(one.threads for one in compared)
    sizes = [one.context for one in compared if one.threads == threads]
    contexts = sorted({min(sizes), max(sizes)})
    known = {
        (row["threads"], row["context"], row["side"], row["kind"]): row for row in report["rows"]
    }
    own_kinds = {case: kind for case, kind, _ in CASES}
    named = " and ".join(f"{context:,}" for context in contexts)
    parts = [_SHORT.format(**{**report, "threads": _threads(threads), "contexts": named})]
    for case, title in SHORT_CASES.items():
        lines = []
        for one in compared:
            if (one.case, one.threads) != (case, threads) or one.context not in contexts:
                continue
            own = known[threads, one.context, one.ours, own_kinds[case]]
            other = known[threads, one.context, one.peer, one.kind]
            firsts, steps = (
                [row[name] for row in (own, other)] for name in ("first_p50", "step_p50")
            )
            lines.append(
                [
                    f"{one.context:,}",
                    label(one.ours),
                    label(one.peer, one.kind),
                    " / ".join(f"{_seconds(value)} s" for value in firsts),
                    " / ".join(f"{1e3 * value:.0f} ms" for value in steps),
                    _sooner(one),
                ]
            )
        header = ["context", "ours", "peer", "first token: ours / peer", "each further one"]
        header.append("who ends sooner")
        parts.append(f"{title}:\n\n{markdown(header, lines)}\n\n" if lines else "")
    return "".join(parts)


def _sooner(one: Crossover) -> str:
    """Who has the whole answer sooner, by its length."""
    for who, other, start in (
        ("the peer", "ours", one.peer_from),
        ("ours", "the peer", one.ours_from),
    ):
        if start == 1:
            return f"{who}, always"
        if start is not None:
            return f"{other} up to {start - 1:,} tokens, {who} from {start:,} on"
    return "neither"


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def _is_busy(report: Mapping[str, Any]) -> bool:
    return bool(report["load"] > report["cores"] + _SPARE)


def label(side: str, kind: str = "") -> str:
    """A side as the page names it."""
    family, _, form = side.partition("-")
    names = {"llama": "llama.cpp", "kvboost": "KVBoost"}
    name = f"{names.get(family, family)} {form}".rstrip()
    return name + {"shift": ", --cache-reuse", "cold of ours": ", kept"}.get(kind, "")


def verdicts(compared: Sequence[Crossover]) -> str:
    """A sentence per case, threads and peer: who has the first token sooner, who ends sooner."""
    parts = []
    for case, _, _ in CASES:
        lines = []
        mine = [one for one in compared if one.case == case]
        by = sorted(mine, key=lambda one: (one.threads, one.ours, one.peer, one.kind))
        for _, some in groupby(by, lambda one: (one.threads, one.ours, one.peer, one.kind)):
            lines.append(f"- {_verdict([*some])}\n")
        if lines:
            parts.append(f"**{case.capitalize()}**\n\n{''.join(lines)}\n")
    return "".join(parts)


def _verdict(some: Sequence[Crossover]) -> str:
    one = some[0]
    threads = _threads(one.threads)
    told = []
    for name, values in (
        ("first token", [each.first_ratio for each in some]),
        ("further tokens", [each.step_ratio for each in some]),
    ):
        told.append(f"{name}: {_who(values)}")
    crossings = []
    for each in some:
        crossing = _crossing(each)
        if crossing:
            crossings.append(f"at {each.context:,} tokens {crossing}")
    ends = f"; {'; '.join(crossings)}" if crossings else ""
    peer = label(one.peer, one.kind)
    return f"{label(one.ours)} and {peer}, {threads}: {'; '.join(told)}{ends}."


def _who(ratios: Sequence[float]) -> str:
    """Who is sooner, from the peer's times over ours."""
    low, high = min(ratios), max(ratios)
    if low > 1 + _EQUAL:
        return f"ours sooner, {_span(low, high)} times"
    if high < 1 / (1 + _EQUAL):
        return f"the peer sooner, {_span(1 / high, 1 / low)} times"
    if low >= 1 / (1 + _EQUAL) and high <= 1 + _EQUAL:
        return "equal within 5 %"
    return f"mixed, the peer's time is {_span(low, high)} times ours"


def _span(low: float, high: float) -> str:
    first, last = (f"{one:.2g}" if one < 100 else f"{one:.0f}" for one in (low, high))
    return first if first == last else f"{first} to {last}"


def _crossing(one: Crossover) -> str:
    """Who overtakes; nothing where one side is ahead from the first token on for good."""
    if one.peer_from is not None and one.peer_from > 1:
        return f"the peer ends sooner from {one.peer_from:,} generated tokens on"
    if one.ours_from is not None and one.ours_from > 1:
        return f"ours ends sooner from {one.ours_from:,} generated tokens on"
    return ""


def _firsts(rows: Iterable[Mapping[str, Any]], name: str) -> str:
    """A table of first tokens per number of threads."""
    wanted = {"reorder": ("reorder", "shift"), "prefix": ("prefix",), "unknown": ("full", "cold")}
    title, text = _KINDS[name]
    parts = [f"## {title}\n\n{text}\n\n"]
    chosen = [row for row in rows if row["kind"] in wanted[name]]
    for threads in sorted({row["threads"] for row in chosen}):
        some = [row for row in chosen if row["threads"] == threads]
        contexts = sorted({row["context"] for row in some})
        header = ["side"]
        for context in contexts:
            header += [f"{context:,}: p50 s", "p95", "reused", "samples"]
        lines = []
        for side, kind in sorted({(row["side"], row["kind"]) for row in some}, key=_place):
            at = {row["context"]: row for row in some if (row["side"], row["kind"]) == (side, kind)}
            kept = "cold of ours" if kind == "cold" and side.startswith("ours") else kind
            line = [label(side, kept)]
            for context in contexts:
                line += _first(at.get(context))
            lines.append(line)
        parts.append(f"On {_threads(threads)}:\n\n{markdown(header, lines)}\n\n")
    return "".join(parts)


def _first(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return [""] * 4
    reused = f"{row['reused']:,.0f}"
    return [_seconds(row["first_p50"]), _seconds(row["first_p95"]), reused, f"{row['samples']}"]


def _place(side: tuple[str, str]) -> tuple[int, str, str]:
    order = ("ours", "llama", "stock", "kvboost")
    return (order.index(side[0].split("-")[0]), *side)


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _ends(rows: Iterable[Mapping[str, Any]], compared: Sequence[Crossover]) -> str:
    known = {(row["threads"], row["context"], row["side"], row["kind"]): row for row in rows}
    parts = []
    for case, kind, _ in CASES:
        header = ["threads", "context", "ours", "peer"]
        header += [f"{tokens}: ours / peer" for tokens in LENGTHS]
        header += ["first, ratio", "further, ratio", "peer from", "ours from"]
        lines = []
        for one in compared:
            if one.case != case:
                continue
            own = known[one.threads, one.context, one.ours, kind]["ends"]
            other = known[one.threads, one.context, one.peer, one.kind]["ends"]
            ends = [
                f"{_seconds(own[str(tokens)])} / {_seconds(other[str(tokens)])}"
                for tokens in LENGTHS
            ]
            line = [f"{one.threads}", f"{one.context:,}", label(one.ours)]
            line += [label(one.peer, one.kind), *ends]
            line += [f"{one.first_ratio:.2f}", f"{one.step_ratio:.2f}"]
            line += [_from(one.peer_from), _from(one.ours_from)]
            lines.append(line)
        if lines:
            parts.append(f"**{case.capitalize()}**\n\n{markdown(header, lines)}\n\n")
    return "".join(parts)


def _long(rows: Iterable[Mapping[str, Any]]) -> str:
    """Long answers as they were timed, not computed."""
    chosen = [row for row in rows if row["kind"] == "long"]
    if not chosen:
        return ""
    chosen.sort(key=lambda row: (row["threads"], row["context"], *_place((row["side"], ""))))
    lines = []
    for row in chosen:
        times = _seconds(row["first_p50"]), _seconds(row["total_p50"])
        place = f"{row['threads']}", f"{row['context']:,}", label(row["side"])
        lines.append([*place, f"{row['new']}", *times])
    header = ["threads", "context", "side", "generated tokens", "first token s", "the last one s"]
    title = "**Long answers over the same prefix, as they were timed**"
    return f"{title}\n\n{markdown(header, lines)}\n\n"


def _from(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"


def _memory(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """Per side: the largest peak, bytes of its cache, and its time per token."""
    parts = [
        "Peak is the largest resident set of the process while a prompt was answered, at the "
        "longest context; weights that are mapped from a file count there, and not in what is no "
        "file's (anonymous).\n\n"
    ]
    header = ["side", "threads", "context", "ms a token, p50", "p95", "peak MiB", "anonymous MiB"]
    header += ["cache bytes a token, in memory", "on disk"]
    lines = []
    places = sorted({(row["side"], "") for row in rows}, key=_place)
    for side, _ in places:
        mine = [row for row in rows if row["side"] == side]
        for threads in sorted({row["threads"] for row in mine}):
            some = [row for row in mine if row["threads"] == threads]
            context = max(row["context"] for row in some)
            at = [row for row in some if row["context"] == context]
            lines.append(
                [
                    label(side),
                    f"{threads}",
                    f"{context:,}",
                    f"{1e3 * at[0]['step_p50']:.1f}",
                    f"{1e3 * at[0]['step_p95']:.1f}",
                    f"{max(row['peak_mib'] for row in at):.0f}",
                    f"{max(row['anon_mib'] for row in at):.0f}",
                    _bytes(facts.get(side, {}).get("memory_bytes_per_token")),
                    _bytes(facts.get(side, {}).get("disk_bytes_per_token")),
                ]
            )
    return f"{parts[0]}{markdown(header, lines)}\n\n"


def _bytes(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _agreements(rows: Iterable[Mapping[str, Any]]) -> str:
    header = ["side", "case", "context", "threads", "prompts", "first token the same"]
    header += ["all the same", "tokens the same"]
    lines = []
    found = [row for row in rows if row["agreement"]]
    for row in sorted(found, key=lambda row: (*_place((row["side"], row["kind"])), row["threads"])):
        one = row["agreement"]
        lines.append(
            [
                label(row["side"], row["kind"]),
                _CASES.get(row["kind"], "same prefix"),
                f"{row['context']:,}",
                f"{row['threads']}",
                f"{one['prompts']}",
                f"{one['first_equal']:.0%}",
                f"{one['all_equal']:.0%}",
                f"{one['equal_tokens']:.1f} of {one['tokens']}",
            ]
        )
    return f"{markdown(header, lines)}\n\n" if lines else "Nothing was compared.\n\n"


def _failed(failures: Mapping[str, str]) -> str:
    if not failures:
        return ""
    lines = "".join(f"- {name}: {reason}\n" for name, reason in sorted(failures.items()))
    return f"## What failed\n\n{lines}"


def main(words: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parsed = parser.parse_args(words)
    if not parsed.json.is_file():
        print(f"{parsed.json} is missing; run make bench-peers first", file=sys.stderr)
        return 1
    report = json.loads(parsed.json.read_text(encoding="utf-8"))
    parsed.page.write_text(page(report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
