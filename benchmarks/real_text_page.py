"""Writes the part of docs/quality.md about real text from the figures of `real_text.py`.

    python -m benchmarks.real_text_page

No figure in it is typed by hand; what was not measured is said to be so.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.quality_document import REAL_TEXT, put
from benchmarks.real_text import INT8, MAIN, MOVED, NOISE, PLACES, SETS, SOME, TUNING
from benchmarks.real_text_scores import FULL
from kvcache_rag.scoring.ask import CLOSED_BOOK
from kvcache_rag.scoring.statistics import median_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RESULTS: Final = Path(__file__).parent / "results"
NAMES: Final = {
    FULL: "full prefill",
    "reordered": "`Reuse()`",
    "legolink:16": "`LegoLink(16)`",
    "cacheblend:0.2": "`CacheBlend(0.2)`",
    CLOSED_BOOK: "closed book",
    INT8: "`Reuse()`, stored as int8",
    "composite": '`Reuse("composite")`',
    "cacheclip:0.2": "`CacheClip(ratio=0.2)`",
}
# Of the family that the adapter was trained on, if with other rows.
LEARNT: Final = ("squad",)

_HEAD: Final = """# SmolLM2 on real text

What a policy costs in right answers: SmolLM2-135M-Instruct ({dtype}, greedy) over public question
sets, by full prefill, from cached chunks, and without documents (**closed book**).
[What the policies are](policies.md).

"""
_HOW: Final = """
A **containment** of 100 % means that the words of a right answer stand in the model's answer, side
by side (SQuAD's normalisation); where only yes or no is right, it is the answer's first word. A
135M model answers in sentences, so exact match would say little. **Points** are hundredths of it.
The rows of a set are asked in the order of its file. A set in which full prefill does not surely
beat closed book (95 % interval above 0) is shown below and counts in no mean: there a policy cannot
lose what was never read. Intervals are of 95 %; differences are paired, row by row.

    python -m benchmarks.real_text --data ../shared/data --work real-text.work
    python -m benchmarks.real_text --data ../shared/data --work real-text.work --part ttft
    kvcache-rag eval --model smollm2 --task squad --data ../shared/data --in-order --n 200 \\
        --policies full reordered legolink:16
"""
_FIRST: Final = """| policy | containment % | points against full prefill | KL | TTFT ms, median |
|---|---|---|---|---|
"""
_LEGEND: Final = """
Containment is the mean over
{sets},
each of which counts alike; the five shares of noise of RGB ask the same questions and are one set.
Rows are resampled within sets, those of one question or of the same documents together.
KL: of the answer's first token from full prefill's, in nats, the median of all rows of these sets.
TTFT: {timed}
"""
_SETS: Final = """
## Every set

Containment in %, and below it the points against full prefill. {counts}

"""
_SOME: Final = """
## More ways, on two sets

{ape}CacheClip's auxiliary model is SmolLM2 itself, for want of a smaller one; its windows were
those of 5 of 8, with 20 % of all chunks ([experiments.md](experiments.md)). KL is the median.

"""
_PLACES: Final = """
## Where the gold document stands

The rows of nq with the document that holds the answer first, in the middle or last of ten;
containment in %, and points against full prefill of the same place.

"""
_GEMMA: Final = """
## Gemma 3 270M

The base model, with a sliding window of 512 tokens and two rotary bases; the file that the variable
`KVCACHE_RAG_GEMMA` names, under Google's terms and in no package of ours.

"""
_MISSING: Final = "Not measured.\n"


def page(whole: Mapping[str, Any], adapter: Mapping[str, Any] | None = None) -> str:
    """The part of the page.

    Args:
        whole: Figures of the model as it comes.
        adapter: Of the same model with an adapter; None where there is none.
    """
    asked, times = whole.get("quality"), whole.get("ttft")
    dtype = asked["identity"]["dtype"] if asked else "bfloat16"
    parts = [_HEAD.format(dtype=dtype), _main(asked, times, SETS), _HOW, _facts(asked, times)]
    parts += [_SETS.format(counts=_counts(asked)), _every(asked)]
    parts += [_SOME.format(ape=_ape(asked)), _tables(asked, SOME, MAIN)]
    parts += [_PLACES, _tables(asked, [f"nq_{place}" for place in PLACES], MOVED, only=True)]
    parts += [_GEMMA, _gemma(whole.get("gemma"))]
    if adapter is not None:
        rest = [name for name in SETS if name not in LEARNT]
        learnt = adapter.get("quality")
        parts += ["\n## With an adapter\n\n", _main(learnt, adapter.get("ttft"), rest)]
        parts += [_facts(learnt, adapter.get("ttft")), "\n", _counts(learnt), "\n\n"]
        parts += [_every(learnt)]
    return "".join(parts)


def _main(asked: Any, times: Any, names: Sequence[str]) -> str:
    if not asked:
        return _MISSING
    if not asked["summary"]["rows"]:
        return "In no set that was measured does full prefill surely beat closed book.\n"
    rows = asked["summary"]["rows"]
    lines = [_FIRST]
    for label in (*MAIN, CLOSED_BOOK):
        if label not in rows:
            lines.append(
                f"| {NAMES[label]} | not measured | | | {_median(times, label, names)} |\n"
            )
            continue
        row = rows[label]
        lines.append(
            f"| {NAMES[label]} | {_percent(row['score'])} | {_points(row['minus_full'])} "
            f"| {_nats(row['kl'])} | {_median(times, label, names)} |\n"
        )
    timed = "not measured."
    if times:
        n = sum(len(found[FULL]) for found in times["ms"].values())
        timed = f"{n} questions asked one at a time, policies in turns, one process, one thread."
    sets = counted_sets(asked["summary"]["families"])
    return "".join([*lines, _LEGEND.format(sets=sets, timed=timed)])


def counted_sets(families: Mapping[str, int]) -> str:
    """How many sets count, and with how many rows each."""
    sizes = ", ".join(f"{name} {rows}" for name, rows in families.items())
    return f"{len(families)} public question sets (rows: {sizes})"


def _median(times: Any, label: str, names: Sequence[str]) -> str:
    values = [
        one
        for name, found in (times["ms"] if times else {}).items()
        if name in names
        for one in found[label]
    ]
    if not values:
        return "not measured"
    found = median_interval(values)
    return f"{found.value:.0f} ({found.low:.0f} to {found.high:.0f})"


def _facts(asked: Any, times: Any) -> str:
    lines = []
    for what, part in (("Quality", asked), ("TTFT", times)):
        if part:
            lines += [_measured(what, part)]
    return "\n" + "".join(lines) if lines else ""


def _measured(what: str, part: Mapping[str, Any]) -> str:
    """Where figures come from."""
    model, sittings = part["identity"], part["sittings"]
    first, last = sittings[0], sittings[-1]
    loads = [load for one in sittings for load in one["load"]]
    dates = first["date"] if first["date"] == last["date"] else f"{first['date']} to {last['date']}"
    commits = ", ".join(dict.fromkeys(one["commit"] for one in sittings))
    threads = ", ".join(dict.fromkeys(str(one["threads"]) for one in sittings))
    return (
        f"- {what}: {dates}; {model['file']}, SHA-256 `{model['sha256']}`, {model['dtype']}; "
        f"commit {commits}; {threads} thread(s), load {min(loads):.1f} to {max(loads):.1f}; "
        f"{last['machine']}; {last['versions']}.\n"
    )


def _counts(asked: Any) -> str:
    if not asked:
        return _MISSING.strip()
    found = asked["summary"]
    sentences = [f"In the mean: {', '.join(found['counted']) or 'none'}."]
    if found["shown_only"]:
        sentences.append(
            f"Shown only, because full prefill does not surely beat closed book: "
            f"{', '.join(found['shown_only'])}."
        )
    if found["missing"]:
        sentences.append(f"Not measured: {', '.join(found['missing'])}.")
    return " ".join(sentences)


def _every(asked: Any) -> str:
    if not asked:
        return _MISSING
    labels = (*MAIN, CLOSED_BOOK)
    heads = " | ".join(NAMES[label] for label in labels)
    lines = [
        f"| set | rows | {heads} | full prefill against closed book |\n",
        f"|---|---|{'---|' * 6}\n",
    ]
    for name in SETS:
        found = asked["sets"].get(name, {"rows": {}, "n": 0})
        rows = found["rows"]
        cells = [_cell(rows[label]) if label in rows else "not measured" for label in labels]
        above = _points(rows[FULL]["minus_closed"]) if FULL in rows else ""
        lines.append(f"| {_set(name)} | {found['n'] or ''} | {' | '.join(cells)} | {above} |\n")
    return "".join(lines)


def _set(name: str) -> str:
    return f"{name.removeprefix('rgb_en_noise')} % noise (rgb_en)" if name in NOISE else name


def _cell(row: Mapping[str, Any]) -> str:
    if row["minus_full"] is None:
        return _percent(row["score"])
    return f"{100 * row['score']['value']:.1f}<br>{_points(row['minus_full'])}"


def _tables(asked: Any, names: Sequence[str], labels: Sequence[str], *, only: bool = False) -> str:
    """A table a set, with these labels first and, unless `only`, all others that were asked."""
    lines = []
    for name in names:
        found = asked["sets"].get(name) if asked else None
        lines.append(f"\n### {name.replace('nq_', 'gold document ')}\n\n")
        if not found or not found["rows"]:
            lines.append(_MISSING)
            continue
        others = () if only else tuple(label for label in found["rows"] if label not in labels)
        shown = [label for label in (*labels, *others) if label in found["rows"]]
        lines.append(_table(found, shown))
    return "".join(lines).lstrip("\n") + ("" if lines else _MISSING)


def _table(found: Mapping[str, Any], labels: Sequence[str]) -> str:
    lines = [f"{found['n']} rows.\n\n", "| policy | containment % | points against full prefill "]
    lines.append("| KL |\n|---|---|---|---|\n")
    for label in labels:
        row = found["rows"][label]
        name = NAMES.get(label, label.replace("ape:", "APE, T and S = "))
        lines.append(
            f"| {name} | {_percent(row['score'])} | {_points(row['minus_full'])} "
            f"| {_nats(row['kl'])} |\n"
        )
    return "".join(lines)


def _ape(asked: Any) -> str:
    if not asked or asked["tuning"]["chosen"] is None:
        return "APE's T and S: not tuned yet. "
    tuning = asked["tuning"]
    first, last = tuning["rows"]
    best = asked["sets"][TUNING]["rows"][tuning["chosen"]]
    kept = ", which nothing here is measured on" if first > 1 else ", which are measured, too"
    return (
        f"APE's T and S were chosen from {len(tuning['tried'])} pairs on rows {first} to {last} of "
        f"squad{kept}, by containment and then by KL: {tuning['chosen'].removeprefix('ape:')} "
        f"({100 * best['score']['value']:.0f} % there). hotpotqa has no rows to spare and takes "
        "the same. "
    )


def _gemma(asked: Any) -> str:
    if not asked:
        return _MISSING
    table = _tables(asked, ["squad"], (FULL, "reordered", CLOSED_BOOK))
    return f"{table}\n{_measured('Gemma', asked)}"


def _percent(found: Mapping[str, float]) -> str:
    return f"{100 * found['value']:.1f} ({100 * found['low']:.1f} to {100 * found['high']:.1f})"


def _points(found: Mapping[str, float] | None) -> str:
    if found is None:
        return ""
    value, low, high = (100 * found[name] for name in ("difference", "low", "high"))
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def _nats(found: float | None) -> str:
    return "" if found is None else f"{found:.2g}"


def read(path: Path) -> dict[str, Any] | None:
    """Figures, None where there are none."""
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=Path("docs/quality.md"))
    options = parser.parse_args(arguments)
    whole = read(options.results / "real_text.json") or {}
    put(options.page, REAL_TEXT, page(whole, read(options.results / "real_text_adapter.json")))
    print(f"wrote {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
