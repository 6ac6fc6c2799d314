"""An evaluation as Markdown: one table per task, model and number of documents."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.evaluation.report import Group, Row
    from kvcache_rag.evaluation.statistics import Comparison, Interval


def to_markdown(groups: Sequence[Group]) -> str:
    """A table per group, and below them what the columns mean."""
    parts = [_table(group) for group in groups]
    return "\n".join([*parts, _legend(groups)])


def _table(group: Group) -> str:
    columns = _columns(group)
    lines = [f"### {group.title}: {group.metric}, n = {group.n}", ""]
    if group.scored is False:
        lines += ["Not scored: full prefill is below 60 %.", ""]
    lines.append("| " + " | ".join(columns) + " |")
    lines.append("|" + "---|" * len(columns))
    for row in group.rows:
        cells = _cells(group, row)
        lines.append("| " + " | ".join(cells[name] for name in columns) + " |")
    return "\n".join([*lines, ""])


def _columns(group: Group) -> list[str]:
    """Only those in which some row has something to say."""
    rows = group.rows
    wanted = {
        "policy": True,
        "codec": any(row.codec for row in rows),
        "quality %": True,
        "minus full": any(row.difference for row in rows),
        "of full %": any(row.kept for row in rows),
        "changed %": any(row.changed for row in rows),
        "KL mean / max": any(row.divergence for row in rows),
        "computed again": True,
        "TTFT ms": any(row.ttft for row in rows),
    }
    return [name for name, shown in wanted.items() if shown]


def _cells(group: Group, row: Row) -> dict[str, str]:
    found = row.divergence
    return {
        "policy": row.policy.replace("|", "\\|"),  # a union; bare it would end the cell
        "codec": row.codec or "none",
        "quality %": _percent(row.quality),
        "minus full": _difference(group, row.difference),
        "of full %": _percent(row.kept),
        "changed %": _percent(row.changed),
        "KL mean / max": "" if found is None else f"{found[0]:.2g} / {found[1]:.2g}",
        "computed again": f"{100 * row.recomputed_share:.1f} %",
        "TTFT ms": _milliseconds(row.ttft),
    }


def _percent(share: Interval | None) -> str:
    if share is None or not math.isfinite(share.value):
        return ""
    return f"{100 * share.value:.1f} ({100 * share.low:.1f} to {100 * share.high:.1f})"


def _difference(group: Group, found: Comparison | None) -> str:
    if found is None:
        return ""
    text = f"{100 * found.difference:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
    if not found.ranked or not group.scored:
        return text
    return f"{text} {'better' if found.difference > 0 else 'worse'}"


def _milliseconds(time: Interval | None) -> str:
    if time is None:
        return ""
    return f"{1000 * time.value:.1f} ({1000 * time.low:.1f} to {1000 * time.high:.1f})"


def _legend(groups: Sequence[Group]) -> str:
    timed = max((row.ttft.n for group in groups for row in group.rows if row.ttft), default=0)
    lines = [
        "In brackets: 95 % intervals; those of differences and shares of full prefill are paired, "
        'over the same questions, resampled by context. "better" and "worse" stand only where '
        "the interval excludes 0 and the task is scored.",
        "Computed again: tokens, as a share of the documents' tokens.",
    ]
    if timed:
        lines.append(f"TTFT: median of {timed} questions per task asked one at a time, in turns.")
    if any(row.changed for group in groups for row in group.rows):
        lines.append("Changed: answers unlike those over the first codec.")
    if any(row.divergence for group in groups for row in group.rows):
        lines.append(
            "KL: of the answer's first token, in nats, from the same policy over the first codec; "
            "for the first codec from full prefill."
        )
    return "\n".join(f"- {line}" for line in lines) + "\n"
