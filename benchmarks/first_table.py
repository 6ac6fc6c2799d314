"""Writes README's first table: how much sooner SmolLM2 answers, and what that costs in answers.

    python -m benchmarks.first_table

Times by `benchmarks.when_not`, answers by `benchmarks.real_text` and `training.smollm2.confirm`;
no figure is typed by hand, and what was not measured is left out.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Final

from benchmarks.real_text_page import RESULTS, read
from benchmarks.real_text_scores import FULL
from benchmarks.when_not_page import Case
from kvcache_rag.scoring.ask import CLOSED_BOOK
from tools.readme import put

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BEGIN: Final = "<!-- first table: written by python -m benchmarks.first_table -->"
END: Final = "<!-- end of first table -->"
CASES: Final = 4
"""The longest contexts that were measured; docs/when-not.md has all."""
COLUMNS: Final = {
    FULL: "full prefill",
    "reordered": "`Reuse()`",
    "legolink:16": "`LegoLink(16)`",
    "cacheblend:0.2": "`CacheBlend(0.2)`",
    CLOSED_BOOK: "no documents",
}

_TIMES: Final = """SmolLM2-135M-Instruct, {dtype}, one CPU thread ({processor}); both ways in turns
in one run, medians, every check on, chunks from files
([how, and when it is not worth it](docs/when-not.md)):

| context tokens | first token by full prefill | from cached chunks | sooner by |
|---|---|---|---|
"""
_ANSWERS: Final = """
What it costs in answers, in percent of those that contain a right one: {counted},
up to {rows} rows each ({sets}; intervals and every set: [docs/quality.md](docs/quality.md)):

"""
_CONFIRMED: Final = """
The same model, fine-tuned to read cached chunks (`adapter="block"`): F1 on {n:,} questions
of SQuAD over five paragraphs each, none trained on, asked once
([card](integrations/kvcache-rag-smollm2/README.md)). The control was fine-tuned as long under full
attention:

| as it comes, cached | `adapter="block"`, cached | control, full prefill | control, no documents |
|---|---|---|---|
"""


def table(times: Mapping[str, Any], answers: Any, confirmed: Any) -> str:
    """What stands between the marks.

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


def _time(case: Case) -> str:
    full, cached = _said(case.full), _said(case.cached)
    return f"| {case.tokens:,} | {full} | {cached} | {case.ratio:.0f} x |\n"


def _said(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _answers(quality: Mapping[str, Any]) -> str:
    found = quality["summary"]
    shown = [label for label in COLUMNS if label in found["rows"]]
    sizes = [quality["sets"][name]["n"] for name in found["counted"]]
    scores = [f"{100 * found['rows'][label]['score']['value']:.1f}" for label in shown]
    counted = f"the mean over {len(sizes)} public question sets"
    head = _ANSWERS.format(counted=counted, rows=max(sizes), sets=", ".join(found["counted"]))
    lines = [[COLUMNS[label] for label in shown], ["---"] * len(shown), scores]
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _confirmed(scores: Sequence[Mapping[str, Any]]) -> str:
    found = {(row["task"], row["model"], row["policy"]): row for row in scores}
    wanted = [
        ("confirmation", "base", "reordered"),
        ("confirmation", "block", "reordered"),
        ("confirmation", "control", "full prefill"),
        ("closed book", "control", "full prefill"),
    ]
    cells = [_interval(found[way]["f1"]) for way in wanted]
    return _CONFIRMED.format(n=found[wanted[0]]["n"]) + f"| {' | '.join(cells)} |\n"


def _interval(values: Sequence[float]) -> str:
    value, low, high = (f"{100 * one:.1f}" for one in values)
    return f"{value} ({low}-{high})"


def main() -> int:
    """Rewrite or check the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is right")
    arguments = parser.parse_args()
    found = table(
        read(RESULTS / "when_not.json") or {},
        read(RESULTS / "real_text.json"),
        read(RESULTS / "smollm2_confirmation.json"),
    )
    command = "python -m benchmarks.first_table"
    return put(BEGIN, END, found, command=command, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
