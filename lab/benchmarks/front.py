"""What README and the site's first page show: how soon a model answers, and at what cost.

    python -m benchmarks.front

First a capable model, of which `benchmarks.answers` knows times and answers; then SmolLM2, the
demo's, by `benchmarks.when_not` and `training.smollm2.confirm`.  Sentences for README, tables for
the site; no figure is typed by hand, and what was not measured is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.answers_results import FULL, Results
from benchmarks.answers_scores import (
    LENGTHS,
    RESULTS,
    TUNED,
    against_control,
    first_token,
    halves,
    scores,
    sizes,
    sooner,
)
from benchmarks.when_not_page import Case
from kvcache_rag_lab.evaluation.report import figure_class, plain_panel, save_plot
from tools.readme import put

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BEGIN: Final = "<!-- first figures: written by python -m benchmarks.front -->"
END: Final = "<!-- end of first figures -->"
DOCS: Final = Path(__file__).parents[2] / "docs"
PICTURE: Final = DOCS / "first.svg"
HOME: Final = DOCS / "index.md"
CASES: Final = 4
"""The longest contexts that were measured; docs/when-not.md has all."""
CAPABLE: Final = "answers_qwen05.json"
BLOCK: Final = TUNED / "answers_qwen05-block.json"
CONTROL: Final = TUNED / "answers_qwen05-control.json"
POLICIES: Final = {
    FULL: "full prefill",
    "bestlast": "`BestLast()`, the default",
    "reuse": "`Reuse()`",
}
_HALVES: Final = {1: "the half on which the default was chosen", 2: "asked once, to confirm it"}
_CACHED, _FULL = "#0072B2", "black"

_ANSWERS: Final = """\
**{title}**, as it comes, on one CPU thread: the time to the first
token over about so many tokens of documents, and answers to {rows:,} public questions ({half};
[every policy and set, with intervals]({quality})):

"""
BAR: Final = 0.02
"""Right answers that the default may lose, as a share of all."""
NEAR: Final = 0.03
"""The default is the cheapest policy that lost less than this where policies were chosen."""
_LOST: Final = """
The default loses {lost:.1f} points of right answers to full prefill ({least:.1f} to {most:.1f})\
{bar}:
where the retriever's best chunk is not the right one, and where two documents are needed at once.
"""
_MISSED: Final = " and **misses its bar of at most {bar:.0f}**"
_CHOSEN: Final = """\
On the other {rows:,} questions, on which policies were chosen, it lost {lost:.1f} and was the
cheapest that lost less than {near:.0f}.
"""
_BLOCK: Final = """
Fine-tuned to read cached chunks ({title}), it has by `Reuse()`
{right:.1f} % right and {wrong:.1f} % from a wrong document, on {rows:,} of these questions; one
fine-tuned as long for full prefill has {control:.1f} % by that
({apart:+.1f} points, {low:+.1f} to {high:+.1f}).
"""
_README: Final = """
![First token by full prefill and by `Reuse()`](docs/first.svg)

SmolLM2-135M-Instruct, the demo's model, by `Reuse()` on one CPU thread: over {tokens:,} tokens of
documents the first token comes after {cached} instead of {full}, **{ratio:.0f} times sooner**.
{confirmed}"""
_CONFIRMED: Final = """\
Fine-tuned to read cached chunks (`adapter="block"`, which it takes by itself), it has F1 {block} on
SQuAD so, where one fine-tuned as long for full prefill has {control}.
"""
_TIMES: Final = """
SmolLM2-135M-Instruct, the demo's model, {dtype}, one CPU thread ({processor}); full prefill and
`Reuse()` in turns in one run, medians, every check on, chunks from files
([how, and when it is not worth it](when-not.md)):

| context tokens | first token by full prefill | by `Reuse()` | sooner by |
|---|---|---|---|
"""
_TUNED: Final = """
The same model, fine-tuned to read cached chunks (`adapter="block"`): F1 on {n:,} questions
of SQuAD over five paragraphs each, none trained on, asked once
([card](../integrations/kvcache-rag-smollm2/README.md)). The control was fine-tuned as long under
full attention:

| as it comes, `Reuse()` | `block`, `Reuse()` | control, full prefill | control, no documents |
|---|---|---|---|
"""


def of_answers(results: Results | None) -> dict[str, Any] | None:
    """Scores and times by policy, of the last half that was asked; None without any."""
    asked = halves(results) if results is not None else []
    if results is None or not asked:
        return None
    half = asked[-1]
    lengths = [name for name in LENGTHS if name in results.times]
    found = scores(results, half)
    shown = [label for label in POLICIES if label in found]
    return {
        "title": results.about["title"],
        "rows": sum(sizes(results, half).values()),
        "half": _HALVES[half],
        "lengths": lengths,
        "lost": found["bestlast"]["minus_full"] if "bestlast" in found else None,
        "chosen": chosen(results) if half > 1 else None,
        "tuned": of_tuned(Results.read(BLOCK), Results.read(CONTROL)),
        "policies": {
            label: {
                "right": found[label]["right"].value,
                "wrong": found[label]["wrong"].value,
                "ms": [first_token(results, [name], label) for name in lengths],
                "sooner": [sooner(results, [name], label) for name in lengths],
            }
            for label in shown
        },
    }


def chosen(results: Results) -> dict[str, Any] | None:
    """What the default lost on the first half, if no cheaper policy lost less than `NEAR`."""
    lost = {
        label: -row["minus_full"].difference
        for label, row in scores(results, 1).items()  # the cheapest first
        if "minus_full" in row
    }
    if next((label for label in lost if lost[label] < NEAR), "") != "bestlast":
        return None
    return {"rows": sum(sizes(results, 1).values()), "lost": 100 * lost["bestlast"]}


def of_tuned(block: Results | None, control: Results | None) -> dict[str, Any] | None:
    """The model trained for blocks and its control, of the second half; None without any."""
    found = against_control(block, control, 2) if block and control else None
    return {"title": block.about["title"], **found} if block and found else None


def readme(times: Mapping[str, Any], answers: Any, confirmed: Any) -> str:
    """What stands between README's marks; arguments as of `home`."""
    case = Case.of(times["cases"][-1])
    tuned = ""
    if confirmed and len(confirmed["bars"]) == len("abc"):
        f1 = _f1(confirmed["scores"])
        block, control = f1["block", "reordered"][0], f1["control", "full prefill"][0]
        tuned = _CONFIRMED.format(block=f"{100 * block:.0f}", control=f"{100 * control:.0f}")
    said = _README.format(
        tokens=case.tokens,
        cached=_said(case.cached),
        full=_said(case.full),
        ratio=case.ratio,
        confirmed=tuned,
    )
    return _answers(answers, "docs/quality.md") + said if answers else said.lstrip("\n")


def home(times: Mapping[str, Any], answers: Any, confirmed: Any) -> str:
    """What stands between the marks of the site's first page.

    Args:
        times: Of `benchmarks.when_not`.
        answers: From `of_answers`; None where there are none.
        confirmed: Of `training.smollm2.confirm`; None where there is none.
    """
    facts = times["facts"]
    parts = [_answers(answers, "quality.md")] if answers else []
    parts += [
        _TIMES.format(dtype=facts["dtype"], processor=facts["machine"].partition(",")[0]),
        *(_time(Case.of(row)) for row in times["cases"][-CASES:]),
    ]
    if confirmed and len(confirmed["bars"]) == len("abc"):
        parts.append(_confirmed(confirmed["scores"]))
    return "".join(parts)


def draw(times: Mapping[str, Any], file: Path = PICTURE) -> None:
    """Write the picture; the same results give the same bytes."""
    figure = figure_class()(figsize=(5, 3.2), layout="constrained")
    _draw_times(figure.subplots(), [Case.of(row) for row in times["cases"]])
    save_plot(figure, file, "first")


def _draw_times(panel: Any, cases: Sequence[Case]) -> None:
    last = cases[-1]
    for name, way, colour, marker in (
        ("full prefill", "full", _FULL, "o"),
        ("by Reuse()", "cached", _CACHED, "s"),
    ):
        places, seconds = zip(*((case.tokens, getattr(case, way)) for case in cases), strict=True)
        panel.plot(places, seconds, color=colour, marker=marker, markersize=4)
        panel.annotate(
            f"{name}\n{_said(seconds[-1])}",
            (last.tokens, seconds[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=colour,
        )
    panel.set_yscale("log")
    panel.set_xlim(0, last.tokens * 1.3)
    panel.set_xlabel("tokens of documents", fontsize=9)
    panel.set_ylabel("seconds to the first token", fontsize=9)
    plain_panel(panel)


def _time(case: Case) -> str:
    full, cached = _said(case.full), _said(case.cached)
    return f"| {case.tokens:,} | {full} | {cached} | {case.ratio:.0f} x |\n"


def _said(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _answers(found: Mapping[str, Any], quality: str) -> str:
    head = _ANSWERS.format(quality=quality, **found)
    columns = ["answered by", *(f"{name} tokens" for name in found["lengths"])]
    columns += ["right answers", "taken from a wrong document"]
    lines = [columns, ["---"] * len(columns)]
    for label, row in found["policies"].items():
        cells = [
            _said(ms.value / 1000)
            + ("" if label == FULL else f", **{ratio.value:.1f} times sooner**")
            for ms, ratio in zip(row["ms"], row["sooner"], strict=True)
        ]
        shares = [f"{100 * row[name]:.1f} %" for name in ("right", "wrong")]
        lines.append([POLICIES[label], *cells, *shares])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    lost, said = found["lost"], head + table
    if lost is not None and lost.high < 0:
        least, most = -100 * lost.high, -100 * lost.low
        bar = _MISSED.format(bar=100 * BAR) if lost.difference < -BAR else ""
        said += _LOST.format(bar=bar, lost=-100 * lost.difference, least=least, most=most)
        if found["chosen"] is not None:
            said += _CHOSEN.format(near=100 * NEAR, **found["chosen"])
    return said + (_tuned(found["tuned"]) if found["tuned"] else "")


def _tuned(found: Mapping[str, Any]) -> str:
    apart = found["minus_control"]
    return _BLOCK.format(
        title=found["title"],
        right=100 * found["right"].value,
        wrong=100 * found["wrong"],
        control=100 * found["control"].value,
        apart=100 * apart.difference,
        low=100 * apart.low,
        high=100 * apart.high,
        rows=found["rows"],
    )


def _f1(scores: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Sequence[float]]:
    """F1 and its interval by model and policy; without documents the policy is "closed book"."""
    return {
        (row["model"], "closed book" if row["task"] == "closed book" else row["policy"]): row["f1"]
        for row in scores
        if row["task"] in ("confirmation", "closed book")
    }


def _confirmed(scores: Sequence[Mapping[str, Any]]) -> str:
    f1 = _f1(scores)
    ways = [
        ("base", "reordered"),
        ("block", "reordered"),
        ("control", "full prefill"),
        ("control", "closed book"),
    ]
    count = next(row["n"] for row in scores if row["task"] == "confirmation")
    return _TUNED.format(n=count) + f"| {' | '.join(_interval(f1[way]) for way in ways)} |\n"


def _interval(values: Sequence[float]) -> str:
    value, low, high = (f"{100 * one:.1f}" for one in values)
    return f"{value} ({low}-{high})"


def main() -> int:
    """Rewrite the picture and both parts, or check the parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether they are right")
    check = parser.parse_args().check
    times, confirmed = (
        json.loads((RESULTS / name).read_text(encoding="utf-8"))
        for name in ("when_not.json", "smollm2_confirmation.json")
    )
    answers = of_answers(Results.read(RESULTS / CAPABLE))
    found = times, answers, confirmed
    if not check:
        draw(times)
    command = "python -m benchmarks.front"
    parts = [
        put(BEGIN, END, readme(*found), command=command, check=check),
        put(BEGIN, END, home(*found), command=command, check=check, page=HOME),
    ]
    return max(parts)


if __name__ == "__main__":
    sys.exit(main())
