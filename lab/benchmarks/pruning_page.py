"""Writes the figures of docs/pruning.md from what `benchmarks.pruning` measured.

    python -m benchmarks.pruning_page

Everything behind the mark on the page is its own; no figure in it is typed by hand.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.pruning import RESULTS, Form
from benchmarks.report_tables import markdown
from kvcache_rag_lab.scoring.statistics import mean_change

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE: Final = Path(__file__).parents[2] / "docs" / "pruning.md"
MARK: Final = "<!-- figures: python -m benchmarks.pruning_page -->\n"
_METRICS: Final = ("containment", "exact_match")
_HEAD: Final = """
## What it costs and saves

**Store 8 bits first**: `Int8()` halves the bytes and nothing measured here changes, where every
press at the same bytes costs answers. Of the presses none is best throughout; pruned and in 8 bits
loses what pruned loses.

{machine}; {date}, commit {commit}; `python -m benchmarks.pruning`.
**Other work ran on the machine** (load {low:.0f} to {high:.0f}), so times are good for comparing
forms of one row, which were asked in turns, all by `Reuse()`, and for nothing else. **Surprise** is
how much the right answer surprises the model, in nats per token, less over whole chunks (95 %
interval, paired by row; below 0 it is surprised less); **same first token** is said of the
answer's, against whole chunks. Answers end after {tokens} tokens, so scores are lower than those of
[quality.md](quality.md) and good for comparing only.

"""


def text(results: Mapping[str, Any]) -> str:
    """What stands behind the mark."""
    about = results["about"]
    groups = [
        (model, task, group)
        for model, tasks in results["models"].items()
        for task, group in tasks.items()
    ]
    head = _HEAD.format(
        machine=about["machine"],
        date=about["date"],
        commit=about["commit"],
        low=min(group["load"][0] for *_, group in groups),
        high=max(group["load"][1] for *_, group in groups),
        tokens=results["answer_tokens"],
    )
    return head + "\n".join(
        f"### {task}, {model} ({group['rows']} rows)\n\n{_table(group)}"
        for model, task, group in groups
    )


def _table(group: Mapping[str, Any]) -> str:
    metric = next(name for name in _METRICS if name in group["metrics"])
    whole = group["forms"][Form().label]
    lines = []
    for label, form in group["forms"].items():
        apart = ""
        if label != Form().label:
            found = mean_change(whole["nats"], form["nats"])
            apart = f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
        ratios = [
            mine / other for mine, other in zip(form["ttft_ms"], whole["ttft_ms"], strict=True)
        ]
        scores = form["scores"]
        place = group["metrics"].index(metric)
        said = [row[place] for row in scores if row is not None] if scores else []
        lines.append(
            [
                label,
                f"{form['bytes'] / whole['bytes']:.2f}",
                f"{100 * statistics.fmean(said):.0f}" if said else "",
                apart,
                f"{form['first']} of {group['rows']}",
                f"{statistics.median(ratios):.2f}",
            ]
        )
    header = [
        "chunks",
        "bytes",
        f"{metric} %",
        "surprise, less whole",
        "same first token",
        "first token's time",
    ]
    return markdown(header, lines) + "\n"


def main() -> int:
    """Write the figures anew."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    own, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    PAGE.write_text(f"{own.rstrip()}\n\n{mark or MARK}{text(results)}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
