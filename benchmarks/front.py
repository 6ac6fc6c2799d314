"""What README and the site's first page show: how much sooner SmolLM2 answers, at what cost.

    python -m benchmarks.front

The picture is for both; sentences for README, tables for the site.  Times by `benchmarks.when_not`,
answers by `benchmarks.real_text` and `training.smollm2.confirm`; no figure is typed by hand, and
what was not measured is left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.real_text_page import RESULTS, counted_sets, read
from benchmarks.real_text_scores import FULL
from benchmarks.when_not_page import Case
from kvcache_rag.evaluation.report import figure_class, plain_panel, save_plot
from kvcache_rag.scoring.ask import CLOSED_BOOK
from tools.readme import put

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BEGIN: Final = "<!-- first figures: written by python -m benchmarks.front -->"
END: Final = "<!-- end of first figures -->"
DOCS: Final = Path(__file__).parent.parent / "docs"
PICTURE: Final = DOCS / "first.svg"
HOME: Final = DOCS / "index.md"
CASES: Final = 4
"""The longest contexts that were measured; docs/when-not.md has all."""
POLICIES: Final = {
    FULL: "full prefill",
    "reordered": "`Reuse()`",
    "legolink:16": "`LegoLink(16)`",
    "cacheblend:0.2": "`CacheBlend(0.2)`",
    CLOSED_BOOK: "no documents",
}
_SAID: Final = {
    FULL: "by full prefill",
    "reordered": "from cached chunks as they are (`Reuse()`)",
    "cacheblend:0.2": "with a fifth of their tokens computed again (`CacheBlend(0.2)`)",
    CLOSED_BOOK: "without documents",
}
_CACHED, _FULL = "#0072B2", "black"

_README: Final = """\
SmolLM2-135M-Instruct on one CPU thread, both ways in turns: over {tokens:,} tokens of documents
the first token comes after {cached} instead of {full}, **{ratio:.0f} times sooner**.

![First token by full prefill and from cached chunks; right answers by policy](docs/first.svg)

Right answers over {counted}:
{answers}{confirmed}.
"""
_CONFIRMED: Final = """.
Fine-tuned to read cached chunks (`adapter="block"`), the same model has F1 {block} on SQuAD from
cached chunks, where one fine-tuned as long for full prefill has {control}"""
_TIMES: Final = """SmolLM2-135M-Instruct, {dtype}, one CPU thread ({processor}); both ways in turns
in one run, medians, every check on, chunks from files
([how, and when it is not worth it](when-not.md)):

| context tokens | first token by full prefill | from cached chunks | sooner by |
|---|---|---|---|
"""
_ANSWERS: Final = """
What it costs in answers, in percent of those that contain a right one: the mean over
{counted}. [What these policies are](policies.md); [intervals, and every set](quality.md).

"""
_TUNED: Final = """
The same model, fine-tuned to read cached chunks (`adapter="block"`): F1 on {n:,} questions
of SQuAD over five paragraphs each, none trained on, asked once
([card](../integrations/kvcache-rag-smollm2/README.md)). The control was fine-tuned as long under
full attention:

| as it comes, cached | `adapter="block"`, cached | control, full prefill | control, no documents |
|---|---|---|---|
"""


def readme(times: Mapping[str, Any], answers: Any, confirmed: Any) -> str:
    """What stands between README's marks; arguments as of `home`."""
    case = Case.of(times["cases"][-1])
    found = answers["quality"]["summary"]
    scores = [
        f"{_percent(found['rows'][label])} % {said}"
        for label, said in _SAID.items()
        if label in found["rows"]
    ]
    tuned = ""
    if confirmed and len(confirmed["bars"]) == len("abc"):
        f1 = _f1(confirmed["scores"])
        block, control = f1["block", "reordered"][0], f1["control", "full prefill"][0]
        tuned = _CONFIRMED.format(block=f"{100 * block:.0f}", control=f"{100 * control:.0f}")
    return _README.format(
        tokens=case.tokens,
        cached=_said(case.cached),
        full=_said(case.full),
        ratio=case.ratio,
        counted=counted_sets(found["families"]),
        answers=",\n".join(scores),
        confirmed=tuned,
    )


def home(times: Mapping[str, Any], answers: Any, confirmed: Any) -> str:
    """What stands between the marks of the site's first page.

    Args:
        times: Of `benchmarks.when_not`.
        answers: Of `benchmarks.real_text`; None where there are none.
        confirmed: Of `training.smollm2.confirm`; None where there is none.
    """
    facts = times["facts"]
    parts = [
        _TIMES.format(dtype=facts["dtype"], processor=facts["machine"].partition(",")[0]),
        *(_time(Case.of(row)) for row in times["cases"][-CASES:]),
    ]
    if answers and answers.get("quality") and answers["quality"]["summary"]["rows"]:
        parts.append(_answers(answers["quality"]))
    if confirmed and len(confirmed["bars"]) == len("abc"):
        parts.append(_confirmed(confirmed["scores"]))
    return "".join(parts)


def draw(times: Mapping[str, Any], answers: Any, file: Path = PICTURE) -> None:
    """Write the picture; the same results give the same bytes."""
    figure = figure_class()(figsize=(9.2, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    _draw_times(left, [Case.of(row) for row in times["cases"]])
    _draw_answers(right, answers["quality"]["summary"]["rows"])
    save_plot(figure, file, "first")


def _draw_times(panel: Any, cases: Sequence[Case]) -> None:
    last = cases[-1]
    for name, way, colour, marker in (
        ("full prefill", "full", _FULL, "o"),
        ("cached chunks", "cached", _CACHED, "s"),
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


def _draw_answers(panel: Any, rows: Mapping[str, Any]) -> None:
    shown = [label for label in reversed(POLICIES) if label in rows]
    for place, label in enumerate(shown):
        value, low, high = (100 * rows[label]["score"][name] for name in ("value", "low", "high"))
        style = {"color": {FULL: _FULL, CLOSED_BOOK: "#888888"}.get(label, _CACHED), "capsize": 2}
        error = [[value - low], [high - value]]
        panel.errorbar(value, place, xerr=error, marker="o", markersize=5, **style)
        panel.text(high + 2, place, f"{value:.1f}", va="center", fontsize=8)
    panel.set_yticks(range(len(shown)), [POLICIES[label].replace("`", "") for label in shown])
    panel.set_ylim(-0.6, len(shown) - 0.4)
    panel.set_xlim(0, 40)
    panel.set_xlabel("right answers, % (95 % interval)", fontsize=9)
    plain_panel(panel)


def _percent(row: Mapping[str, Any]) -> str:
    return f"{100 * row['score']['value']:.1f}"


def _time(case: Case) -> str:
    full, cached = _said(case.full), _said(case.cached)
    return f"| {case.tokens:,} | {full} | {cached} | {case.ratio:.0f} x |\n"


def _said(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _answers(quality: Mapping[str, Any]) -> str:
    found = quality["summary"]
    shown = [label for label in POLICIES if label in found["rows"]]
    head = _ANSWERS.format(counted=counted_sets(found["families"]))
    scores = [_percent(found["rows"][label]) for label in shown]
    lines = [[POLICIES[label] for label in shown], ["---"] * len(shown), scores]
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
    times = read(RESULTS / "when_not.json") or {}
    answers = read(RESULTS / "real_text.json")
    found = times, answers, read(RESULTS / "smollm2_confirmation.json")
    if not check:
        draw(times, answers)
    command = "python -m benchmarks.front"
    parts = [
        put(BEGIN, END, readme(*found), command=command, check=check),
        put(BEGIN, END, home(*found), command=command, check=check, page=HOME),
    ]
    return max(parts)


if __name__ == "__main__":
    sys.exit(main())
