"""What the answers of `answers.py` say: scores and differences, over rows that all were asked."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.answers_results import FULL, Results, Rows
from kvcache_rag_lab.scoring.ask import CLOSED_BOOK
from kvcache_rag_lab.scoring.statistics import mean_interval, median_interval, paired_bootstrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag_lab.scoring.statistics import Interval

RESULTS: Final = Path(__file__).parent / "results"
TUNED: Final = RESULTS / "tuned"
"""Of a model fine-tuned under the block mask, and of its control, each one file."""
LENGTHS: Final = {"1k": 1000, "4k": 4000}
"""Tokens of paragraphs that times are taken of, by the name of the times."""


def every(folder: Path = RESULTS) -> list[Results]:
    """The results of all models, in the order of their files' names."""
    found = [Results.read(path) for path in sorted(folder.glob("answers_*.json"))]
    return [one for one in found if one is not None]


def sizes(results: Results, half: int) -> dict[str, int]:
    """How many rows of a half full prefill answered, by set."""
    found = {name: len(_places(results, name, half)) for name in results.sets}
    return {name: rows for name, rows in found.items() if rows}


def common(results: Results, labels: Sequence[str]) -> Results:
    """Only these labels, over the rows that all of them answered."""
    sets = {}
    for name, rows in results.sets.items():
        right = zip(*(rows.column(label, "right") for label in labels), strict=True)
        places = [place for place, values in enumerate(right) if None not in values]
        found = {
            label: {
                column: [rows.column(label, column)[place] for place in places]
                for column in rows.found.get(label, {})
            }
            for label in labels
        }
        sets[name] = Rows(
            [rows.rows[place] for place in places],
            [rows.half[place] for place in places],
            [rows.clusters[place] for place in places],
            found,
        )
    return replace(results, sets=sets)


def by_retriever(results: Results, name: str) -> dict[bool, dict[str, tuple[int, float]]]:
    """Right answers of a set, by whether the first document is one that is needed.

    Returns:
        Of each of both, where there are any, per label that answered all of them in both halves:
        how many there are, and the share of right answers.
    """
    rows = results.sets[name]
    hits, found = rows.column(FULL, "hit"), {}
    for hit in (True, False):
        places = [place for place, value in enumerate(hits) if value is not None and value == hit]
        right = {label: rows.column(label, "right") for label in rows.found}
        whole = {
            label: (len(places), statistics.fmean(column[place] for place in places))
            for label, column in right.items()
            if places and all(column[place] is not None for place in places)
        }
        if whole:
            found[hit] = whole
    return found


def against_control(block: Results, control: Results, half: int) -> dict[str, Any] | None:
    """What a model trained for blocks answers by `Reuse()`, beside its control's full prefill.

    Returns:
        Of the rows of a half that both answered: how many, "right" and "wrong" of the model trained
        for blocks, "control" (right) and "minus_control"; None without such rows.
    """
    told = []
    for name, mine in block.sets.items():
        theirs = control.sets.get(name, Rows())
        full = dict(zip(theirs.rows, theirs.column(FULL, "right"), strict=True))
        right, wrong = (mine.column("reuse", of) for of in ("right", "wrong_document"))
        for place, digest in enumerate(mine.rows):
            if mine.half[place] == half and None not in (right[place], full.get(digest)):
                cluster = name, mine.clusters[place]
                told.append((right[place], full[digest], wrong[place], cluster))
    if not told:
        return None
    ours, others, from_wrong, clusters = zip(*told, strict=True)
    return {
        "rows": len(told),
        "right": mean_interval(ours, clusters),
        "wrong": statistics.fmean(value for value in from_wrong if value is not None),
        "control": mean_interval(others, clusters),
        "minus_control": paired_bootstrap(ours, others, clusters),
    }


def halves(results: Results) -> list[int]:
    """Those of which anything was asked."""
    return [half for half in (1, 2) if sizes(results, half)]


def scores(results: Results, half: int, sets: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Per label that answered every row that full prefill did, what came of it.

    Rows of all sets count alike.  Rows over the same documents are drawn together.

    Args:
        results: Of a model.
        half: 1 or 2.
        sets: Which; none: all.

    Returns:
        Full prefill first, closed book last, and between them who computes less again before who
        computes more.
    """
    names = [name for name in sets or results.sets if _places(results, name, half)]
    labels = dict.fromkeys(label for name in names for label in results.sets[name].found)
    found = {label: _row(results, half, names, label) for label in labels}
    rows = {label: row for label, row in found.items() if row is not None}

    def order(label: str) -> tuple[bool, bool, float]:
        return label == CLOSED_BOOK, label != FULL, rows[label]["computed"]

    return {label: rows[label] for label in sorted(rows, key=order)}


def _row(results: Results, half: int, names: Sequence[str], label: str) -> dict[str, Any] | None:
    def column(of: str, name: str) -> list[Any]:
        return [
            results.sets[one].column(of, name)[place]
            for one in names
            for place in _places(results, one, half)
        ]

    right, full = column(label, "right"), column(FULL, "right")
    if not right or None in right:
        return None
    shared = [
        (name, results.sets[name].clusters[place])
        for name in names
        for place in _places(results, name, half)
    ]
    told = zip(column(label, "wrong_document"), column(FULL, "wrong_document"), shared, strict=True)
    wrong = [one for one in told if None not in one]
    paired = zip(column(label, "f1"), shared, strict=True)
    f1 = [one for one in paired if None not in one]  # not every set has one
    said = zip(column(label, "answer"), column(FULL, "answer"), strict=True)
    kl = [value for value in column(label, "kl") if value is not None]
    row = {
        "right": mean_interval(right, shared),
        "f1": mean_interval(*zip(*f1, strict=True)) if f1 else None,
        "same": statistics.fmean(mine == other for mine, other in said),
        "kl": statistics.median(kl) if kl else None,
        "wrong": None,
        "computed": statistics.fmean(column(label, "computed")),
        "ms": first_token(results, names, label),
    }
    if label != FULL:
        row["minus_full"] = paired_bootstrap(right, full, shared)
    if wrong:
        mine, others, clusters = zip(*wrong, strict=True)
        row["wrong"] = mean_interval(mine, clusters)
        row["wrong_minus_full"] = paired_bootstrap(mine, others, clusters)
    return row


def _places(results: Results, name: str, half: int) -> list[int]:
    rows = results.sets[name]
    right = rows.column(FULL, "right")
    return [
        place for place, mine in enumerate(rows.half) if mine == half and right[place] is not None
    ]


def first_token(results: Results, names: Sequence[str], label: str) -> Interval | None:
    """Median milliseconds, of the rows that were timed of some sets or lengths."""
    values = _ms(results, names, label)
    return median_interval(values) if values else None


def sooner(results: Results, names: Sequence[str], label: str) -> Interval | None:
    """Full prefill's time to the first token over a label's, row by row: the median."""
    names = [name for name in names if label in results.times.get(name, {}).get("ms", {})]
    mine, full = _ms(results, names, label), _ms(results, names, FULL)
    if not mine or len(mine) != len(full):
        return None
    return median_interval([other / one for one, other in zip(mine, full, strict=True)])


def _ms(results: Results, names: Sequence[str], label: str) -> list[float]:
    return [
        value
        for name in names
        for value in results.times.get(name, {}).get("ms", {}).get(label, ())
    ]
