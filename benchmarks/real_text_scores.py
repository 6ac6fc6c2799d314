"""What the answers of `real_text.py` say: scores, differences, and a mean over the sets."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.scoring.ask import CLOSED_BOOK
from kvcache_rag.scoring.statistics import (
    Comparison,
    Interval,
    macro_difference,
    macro_interval,
    mean_interval,
    paired_bootstrap,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.real_text_records import Scores

FULL: Final = "full"
METRIC: Final = "containment"


def figures(
    scores: Scores, sizes: Mapping[str, int], clusters: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Everything the page shows, as plain values.

    Args:
        scores: Of every answer.
        sizes: How many rows each set shall have.
        clusters: Per set, what its rows share with each other.
    """
    sets = {name: one_set(scores, name, n, clusters[name]) for name, n in sizes.items()}
    return {"metric": METRIC, "sets": sets}


def one_set(scores: Scores, name: str, n: int, clusters: Sequence[str]) -> dict[str, Any]:
    """One set: every policy that has answered all of its rows."""
    columns = {
        label: column
        for label in scores.found.get(name, {})
        if (column := scores.column(name, label, METRIC, n)) is not None
    }
    full, closed = columns.get(FULL), columns.get(CLOSED_BOOK)
    rows: dict[str, dict[str, Any]] = {}
    for label, mine in columns.items():
        apart = scores.column(name, label, "kl", n)
        rows[label] = {
            "score": asdict(mean_interval(mine, clusters)),
            "minus_full": _apart(mine, full, clusters) if label != FULL else None,
            "minus_closed": _apart(mine, closed, clusters) if label != CLOSED_BOOK else None,
            "kl": None if apart is None else statistics.median(apart),
        }
    above = rows.get(FULL, {}).get("minus_closed")
    return {"n": n, "reads": None if above is None else above["low"] > 0, "rows": rows}


def _apart(
    mine: Sequence[float], theirs: Sequence[float] | None, clusters: Sequence[str]
) -> dict[str, Any] | None:
    return None if theirs is None else asdict(paired_bootstrap(mine, theirs, clusters))


def summary(
    scores: Scores,
    found: Mapping[str, Any],
    families: Mapping[str, str],
    labels: Sequence[str],
    clusters: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Means over the sets in which full prefill reads its documents.

    Each family of sets counts alike: what asks the same questions over other documents is one.

    Args:
        scores: Of every answer.
        found: From `figures`.
        families: The sets that may count, and the family of each.
        labels: The policies, of which those that answered every row of these sets have a row.
        clusters: Per set, what its rows share with each other in their family.

    Returns:
        `counted`, `shown_only` and `missing` sets, `families` with how many rows count in each, and
        `rows`.
    """
    sets = found["sets"]
    counted = [name for name in families if sets.get(name, {}).get("reads")]
    shown = [name for name in families if sets.get(name, {}).get("reads") is False]
    missing = [name for name in families if sets.get(name, {}).get("reads") is None]
    grouped: dict[str, list[str]] = {}
    for name in counted:
        grouped.setdefault(families[name], []).append(name)
    groups = list(grouped.values())
    shared = [[one for name in names for one in clusters[name]] for names in groups]
    rows = {}
    for label in labels:
        mine = _columns(scores, sets, groups, label, METRIC)
        full = _columns(scores, sets, groups, FULL, METRIC)
        if not counted or mine is None or full is None:
            continue
        apart = _columns(scores, sets, groups, label, "kl")
        score, points = macro_interval(mine, shared), macro_difference(mine, full, shared)
        rows[label] = _row(score, None if label == FULL else points, apart)
    sizes = {name: len(one) for name, one in zip(grouped, shared, strict=True)}
    return {
        "counted": counted,
        "shown_only": shown,
        "missing": missing,
        "families": sizes,
        "rows": rows,
    }


def _row(
    score: Interval, points: Comparison | None, apart: Sequence[Sequence[float]] | None
) -> dict[str, Any]:
    return {
        "score": asdict(score),
        "minus_full": None if points is None else asdict(points),
        "kl": None if apart is None else statistics.median(one for rows in apart for one in rows),
    }


def _columns(
    scores: Scores,
    sets: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    label: str,
    metric: str,
) -> list[list[float]] | None:
    """Scores of each group of sets; None unless every row has one."""
    columns = []
    for names in groups:
        parts = [scores.column(name, label, metric, sets[name]["n"]) for name in names]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        columns.append([value for part in known for value in part])
    return columns
