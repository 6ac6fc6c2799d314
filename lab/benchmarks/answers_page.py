"""Writes what policies cost in answers: to docs/quality.md, docs/policies.md and docs/dial.svg.

    python -m benchmarks.answers_page
    python -m benchmarks.answers_page --policies full reuse cacheclip:0.2

From `lab/benchmarks/results/answers_*.json`, one for each model; no figure in it is typed by hand.
With `--policies` nothing is written, and tables are printed of these policies alone, over the rows
that all of them answered.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.answers_results import FULL
from benchmarks.answers_scores import (
    LENGTHS,
    RESULTS,
    by_retriever,
    common,
    every,
    first_token,
    halves,
    scores,
    sizes,
    sooner,
)
from benchmarks.quality_document import ANSWERS
from benchmarks.quality_document import put as put_part
from benchmarks.report_tables import markdown
from kvcache_rag_lab.evaluation.report import figure_class, plain_panel, save_plot
from kvcache_rag_lab.scoring.ask import CLOSED_BOOK
from tools.readme import put

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.answers_results import Results
    from kvcache_rag_lab.scoring.statistics import Comparison, Interval

BEGIN: Final = "<!-- answers by policy: written by python -m benchmarks.answers_page -->"
END: Final = "<!-- end of answers by policy -->"
DOCS: Final = Path(__file__).parents[2] / "docs"
PICTURE: Final = DOCS / "dial.svg"
FEWER: Final = "fewer"
MISSING: Final = "Not measured.\n"
_HALVES: Final = {1: "first half, on which policies were chosen", 2: "second half, to confirm it"}
COMPARED: Final = (
    FULL,
    "reuse",
    "bestlast:0",
    "bestlast",
    "prophetkv:0.2",
    "cacheblend:0.2",
    "legolink:16",
    "cacheclip:0.2,5,recomputed",
    "ape",
    "random:0.16",
    FEWER,
)
"""What docs/policies.md and the picture show, of those that a model was asked by."""
_COLUMNS: Final = (
    "policy",
    "computed again",
    "right %",
    "points against full prefill",
    "F1 %",
    "same answer %",
    "KL",
    "from a wrong document %",
    "points against full prefill",
    "first token, ms",
)
_LEGEND: Final = """
**Right**: the words of a right answer stand in the answer, side by side. **F1**: SQuAD's, of the
sets that have one (all but nq); it favours short answers, as "right" does long ones. **From a wrong
document**: the answer is wrong, and its words stand in a document that does not hold the right one.
**Same answer**: word for word full prefill's, but for case, punctuation and articles. **KL**: of
the answer's first token from full prefill's, in nats, median. In brackets 95 % intervals;
differences are paired by question, and questions over the same documents are resampled together.
"""
_BESIDE: Final = f"""\
These rows, the first of each set, are asked by

    MODEL=path/to/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf NAME=qwen05
    python -m benchmarks.answers --model $MODEL --name $NAME --data ../shared/data \\
        --work answers.work --rows 40 --batch 4 --auxiliary smollm2 \\
        --policies {" ".join(COMPARED)}
    python -m benchmarks.answers ... --collect

(then `NAME=qwen15`, `--rows 12 --batch 6` and fewer policies, and `MODEL=smollm2 NAME=smollm2`).
Rows that every policy of a table answered. `bestlast:0` is `BestLast(share=0)`, the best document
alone; `random` computes as many tokens again as CacheClip, drawn by nothing; `fewer` is a full
prefill of the best fifth of the documents, as if no more had been retrieved. Rows were answered one
or several at a time ([quality](quality.md#how-it-was-measured)), which in bfloat16 rounds otherwise
and may make an answer another one.
"""
_HEAD: Final = """# Answers to public questions

What a policy costs in right answers, and how soon they come: rows of SQuAD, Natural Questions,
HotpotQA, 2WikiMultihopQA and MuSiQue, each with the documents that its set brings along, 5 to 20,
best first by an embedding (all-MiniLM-L6-v2), as both frameworks hand them over. Answers are
greedy, of at most 32 tokens. [What the policies are](policies.md).

"""
_DIAL: Final = (
    "![Right answers by time to the first token, and by what is computed again](dial.svg)\n\n"
)
_HOW: Final = """## How it was measured

    MODEL=path/to/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf NAME=qwen05
    python -m benchmarks.answers --model $MODEL --name $NAME --data ../shared/data \\
        --work answers.work --policies full reuse bestlast bestlast:0
    python -m benchmarks.answers ... --half second
    python -m benchmarks.answers ... --part times
    python -m benchmarks.answers ... --collect
    python -m benchmarks.answers_page

Rows are split in two halves by a hash of their ids. What is chosen is chosen on the first; the
second is asked once, to confirm it. Every row counts alike. Models answer in sentences, so a right
answer is looked for in what they say (containment; SQuAD's normalisation; where only yes or no is
right, it is the first word). An answer is from a wrong document if at least 80 % of its words, but
for function words and those of the question, stand in one document that is not marked as relevant,
and fewer in every one that is. First tokens are of rows asked one at a time, policies in turns, one
process, chunks from files.
"""


def every_policy(results: Results) -> Results:
    """Of the policies that are compared those that were asked, over the rows that all answered."""
    asked = {label for rows in results.sets.values() for label in rows.found}
    return common(results, [label for label in COMPARED if label in asked])


def policy_table(results: Results) -> str:
    """A model's table, over all sets."""
    parts = []
    for half in halves(results):
        counted = ", ".join(f"{name} {rows}" for name, rows in sizes(results, half).items())
        title = f"**{results.about['title']}**, {_HALVES[half]} (rows: {counted}):"
        found = scores(results, half)
        lines = [_cells(label, row) for label, row in found.items()]
        parts.append(f"{title}\n\n{markdown(_COLUMNS, lines)}\n")
    return "\n".join(parts)


def _cells(label: str, row: Mapping[str, Any]) -> list[str]:
    is_full, is_closed = label == FULL, label == CLOSED_BOOK
    return [
        named(label),
        "" if is_closed else f"{100 * row['computed']:.0f} %",
        percent(row["right"]),
        points(row.get("minus_full")),
        percent(row["f1"]),
        "" if is_full else f"{100 * row['same']:.0f}",
        "" if row["kl"] is None else f"{row['kl']:.2g}",
        percent(row["wrong"]),
        "" if is_full else points(row.get("wrong_minus_full")),
        milliseconds(row["ms"]),
    ]


def named(label: str) -> str:
    """A label as tables show it."""
    policy = f"`{label}`".replace("|", "\\|")  # bare it would end the cell
    return {FULL: "full prefill", CLOSED_BOOK: "no documents"}.get(label, policy)


def percent(found: Interval | None) -> str:
    """A share with its interval."""
    if found is None:
        return ""
    return f"{100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def points(found: Comparison | None) -> str:
    """A difference with its interval."""
    if found is None:
        return ""
    return f"{100 * found.difference:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def milliseconds(found: Interval | None) -> str:
    """A time with its interval."""
    if found is None:
        return ""
    return f"{found.value:,.0f} ({found.low:,.0f} to {found.high:,.0f})"


def summary(models: Sequence[Results]) -> str:
    """What stands between the marks of docs/policies.md."""
    tables = [policy_table(every_policy(one)) for one in models]
    return "\n".join([*tables, _BESIDE, _LEGEND.lstrip("\n")]) if tables else MISSING


def page(models: Sequence[Results]) -> str:
    """The part of docs/quality.md."""
    parts = [_HEAD]
    if any(timed(one) for one in models):
        parts.append(_DIAL)
    confirmed = [one for one in models if 2 in halves(one)]
    parts += [_LEGEND.lstrip("\n"), "\n", *map(_model, confirmed)] if models else [MISSING, "\n"]
    facts = ["\n", *map(_facts, models)] if models else []
    return "".join([*parts, _HOW, *facts])


def _model(results: Results) -> str:
    parts = [f"## {results.about['title']}\n\n", policy_table(results), "\n"]
    for half in halves(results):
        found = scores(results, half)
        parts += [f"### What holds and what does not: {_HALVES[half]}\n\n", _verdicts(found)]
        parts += [f"### Set by set: {_HALVES[half]}\n\n", _sets(results, half, list(found)), "\n\n"]
    parts.append(_retrieved(results))
    if set(LENGTHS) & set(results.times):
        parts += ["### First tokens by length\n\n", _lengths(results), "\n\n"]
    return "".join(parts)


def _verdicts(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Of each policy what its interval says, and no more."""
    lines = []
    for label, row in found.items():
        if label in (FULL, CLOSED_BOOK):
            continue
        apart, wrong = row["minus_full"], row.get("wrong_minus_full")
        said = f"at most {max(0.0, -100 * apart.low):.1f} points are lost"
        if apart.high < 0:
            said = f"{-100 * apart.high:.1f} to {-100 * apart.low:.1f} points are lost"
        elif apart.low > 0:
            said = f"{100 * apart.low:.1f} to {100 * apart.high:.1f} points are gained"
        if wrong is not None and wrong.low > 0:
            said += ", and more answers are from wrong documents"
        lines.append(f"- {named(label)}: {said}.\n")
    return "".join([*lines, "\n"]) if lines else MISSING


def _sets(results: Results, half: int, labels: Sequence[str]) -> str:
    lines = []
    for name, rows in sizes(results, half).items():
        found = scores(results, half, [name])
        lines.append([name, str(rows), *(_short(found.get(label)) for label in labels)])
    return markdown(["set", "rows", *map(named, labels)], lines)


def _retrieved(results: Results) -> str:
    labels = list(scores(results, halves(results)[-1]))
    lines = []
    for name in results.sets:
        for hit, row in by_retriever(results, name).items():
            told = [f"{100 * row[label][1]:.1f}" if label in row else "" for label in labels]
            lines.append([name, "yes" if hit else "no", str(row[FULL][0]), *told])
    if not lines:
        return ""
    head = ["set", "needed", "rows", *map(named, labels)]
    title = "### Right answers by whether the best document is needed"
    return f"{title}\n\nIn %, of both halves.\n\n{markdown(head, lines)}\n\n"


def _short(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if "minus_full" not in row:
        return percent(row["right"])
    return f"{100 * row['right'].value:.1f}<br>{points(row['minus_full'])}"


def _lengths(results: Results) -> str:
    lines = []
    for name in LENGTHS:
        for label in results.times.get(name, {"ms": {}})["ms"]:
            ratio = sooner(results, [name], label)
            times = "" if label == FULL or ratio is None else _ratio(ratio)
            lines.append(
                [
                    f"{results.times[name]['tokens']:,.0f}",
                    named(label),
                    milliseconds(first_token(results, [name], label)),
                    times,
                ]
            )
    rows = max(len(results.times[name]["rows"]) for name in LENGTHS if name in results.times)
    header = ["tokens", "policy", "first token, ms", "sooner than full prefill by"]
    return (
        f"{rows} questions of SQuAD each, over the paragraph that holds the answer and those\n"
        f"behind it in its file, each a chunk; medians, of ratios question by question.\n\n"
        f"{markdown(header, lines)}"
    )


def compared(results: Results, labels: Sequence[str]) -> str:
    """Tables of some policies, over the rows that all of them answered."""
    results = common(results, labels)
    parts = [policy_table(results)]
    parts += [_sets(results, half, list(scores(results, half))) for half in halves(results)]
    return "\n".join(parts)


def _ratio(found: Interval) -> str:
    return f"{found.value:.1f} x ({found.low:.1f} to {found.high:.1f})"


def _facts(results: Results) -> str:
    """Where figures come from."""
    model, sittings = results.about["identity"], results.sittings
    said = [f"{results.about['title']}: SHA-256 `{model['sha256']}`, {model['dtype']}"]
    if results.about["form"]:
        said.append(f"documents stand as `--form {results.about['form']}`")
    if sittings:
        dates = sorted({one["date"] for one in sittings})
        said.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")
        said.append(f"commit {_each(sittings, 'commit')}")
        said.append(f"{_each(sittings, 'threads')} thread(s)")
        said.append(f"{_each(sittings, 'batch')} row(s) at a time")
        said.append(f"load up to {max(one['load'] for one in sittings):.1f}")
        said += [_each(sittings, "machine"), _each(sittings, "versions")]
    return f"- {'; '.join(said)}.\n"


def _each(sittings: Sequence[Mapping[str, Any]], name: str) -> str:
    return ", ".join(dict.fromkeys(str(one[name]) for one in sittings))


def timed(results: Results) -> bool:
    """Whether a model has a point in the picture."""
    return any(row["ms"] for half in halves(results)[-1:] for row in scores(results, half).values())


def draw(models: Sequence[Results], file: Path = PICTURE) -> None:
    """The picture: of each model what was timed, and every policy by what it computes again."""
    from matplotlib.ticker import LogLocator

    shown = [one for one in models if timed(one)]
    figure = figure_class()(figsize=(9.2, 3.8 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 2, squeeze=False, sharey="row")
    for (by_time, by_share), results in zip(panels, map(every_policy, shown), strict=True):
        rows = scores(results, halves(results)[-1])
        height = -math.inf  # of the label below, so that none hides another
        for label, row in sorted(rows.items(), key=lambda one: one[1]["right"].value):
            if row["ms"] is not None:
                seconds = row["ms"].value / 1000
                _point(by_time, label, row, seconds, (seconds * 1.06, 100 * row["right"].value + 1))
            if label != FEWER:  # computes fewer documents, not a part of them
                share, height = 100 * row["computed"], max(height + 2, 100 * row["right"].value)
                _point(by_share, label, row, share, (max(share, 30) + 2, height))
        by_time.set_title(results.about["title"], fontsize=10)
        by_time.set_xscale("log", subs=[])
        by_time.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        by_time.xaxis.set_major_formatter("{x:g}")
        by_time.margins(x=0.25)
        by_time.set_xlabel("seconds to the first token, where they were measured", fontsize=9)
        by_time.set_ylabel("right answers, % (95 % interval)", fontsize=9)
        by_share.set_xlabel("computed again, % of the documents' tokens", fontsize=9)
        by_share.set_xlim(-5, 125)
        by_share.set_xticks(range(0, 101, 20))
        plain_panel(by_time)
        plain_panel(by_share)
    save_plot(figure, file, "dial")


def _point(
    panel: Any, label: str, row: Mapping[str, Any], place: float, words: tuple[float, float]
) -> None:
    colour = {FULL: "black", CLOSED_BOOK: "#888888"}.get(label, "#0072B2")
    right = row["right"]
    low, high = 100 * (right.value - right.low), 100 * (right.high - right.value)
    style = {"color": colour, "marker": "o", "markersize": 5, "elinewidth": 1, "capsize": 2}
    panel.errorbar(place, 100 * right.value, yerr=[[low], [high]], **style)
    panel.annotate(
        named(label).replace("`", ""),
        (place, 100 * right.value),
        xytext=words,
        fontsize=8,
        color=colour,
        arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.4, "relpos": (0, 0.5)},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the pages")
    parser.add_argument("--policies", nargs="+", help="print tables of these, and write nothing")
    options = parser.parse_args(arguments)
    models = every(options.results)
    if options.policies:
        print("\n".join(compared(one, options.policies) for one in models))
        return 0
    put_part(options.docs / "quality.md", ANSWERS, page(models))
    if any(timed(one) for one in models):
        draw(models, options.docs / PICTURE.name)
    command, policies = "python -m benchmarks.answers_page", options.docs / "policies.md"
    return put(BEGIN, END, summary(models), command=command, check=False, page=policies)


if __name__ == "__main__":
    sys.exit(main())
