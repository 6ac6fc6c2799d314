"""Answers of `answers.py`, row by row and without any text, and what they say.

The data sets' licences let figures be published, not texts.  A run whose work folder is gone goes
on from here: what is known is not asked again.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import xxhash

from benchmarks.common import RAW, read, write
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.prompt.words import normalised
from kvcache_rag_lab.scoring.ask import CLOSED_BOOK, Record
from kvcache_rag_lab.scoring.statistics import (
    mean_interval,
    median_interval,
    paired_bootstrap,
    paired_ratio,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kvcache_rag_lab.scoring.ask import Asked, Cell
    from kvcache_rag_lab.scoring.statistics import Comparison, Interval

COMPARED: Final = (
    "full",
    "bestfew",
    "reuse",
    "bestlast:0",
    "bestlast",
    "prophetkv:0.2",
    "cacheblend:0.2",
    "legolink:16",
    "cacheclip:0.2,5,recomputed",
    "ape",
    "random:0.16",
    "fewer",
)
"""What docs/policies.md shows, of those that a model was asked by."""
FULL: Final = "full"
KINDS: Final = {
    "one document": ("squad", "nq"),
    "two documents": ("hotpotqa", "2wiki", "musique"),
}
"""How many documents a question needs, by the sets that ask such."""
HALVES: Final = "1 where the first byte of SHA-256 of a row's id is even, else 2"
COLUMNS: Final = ("right", "f1", "wrong_document", "kl", "answer", "computed", "hit")


@dataclass
class Rows:
    """The rows of one set.

    Attributes:
        rows: `Asked.digest` of each: of question, documents in their order, and right answers.
        half: 1 or 2, see `HALVES`.
        clusters: What rows over the same documents share, whatever their order.
        found: Per label of a policy, a list for each of `COLUMNS` that has something to say, with
            None for what is not known.  `right` is containment, `kl` in nats from full prefill,
            `answer` a digest of the normalised text, `computed` the share of the documents' tokens
            that was computed again, `hit` whether the first document is one that is needed (kept
            with full prefill, the same for all).
    """

    rows: list[str] = field(default_factory=list)
    half: list[int] = field(default_factory=list)
    clusters: list[str] = field(default_factory=list)
    found: dict[str, dict[str, list[Any]]] = field(default_factory=dict)

    def keep(self, asked: Asked, half: int, label: str, values: Mapping[str, Any]) -> None:
        """Take over one answer, in place of what was known of it."""
        if asked.digest not in self.rows:
            self.rows.append(asked.digest)
            self.half.append(half)
            self.clusters.append(_digest("\0".join(sorted(asked.question.chunks))))
        place = self.rows.index(asked.digest)
        columns = self.found.setdefault(label, {})
        for name, value in values.items():
            column = columns.setdefault(name, [])
            column += [None] * (place + 1 - len(column))
            column[place] = value

    def column(self, label: str, name: str) -> list[Any]:
        """A value per row, None where it is not known."""
        column = self.found.get(label, {}).get(name, [])
        return [*column, *[None] * (len(self.rows) - len(column))]


@dataclass
class Results:
    """What is kept of one model.

    Attributes:
        about: Its title, the identity of its file and weights, the form of prompts, the rule of the
            halves.
        sittings: When, where and with what something was asked or timed.
        sets: By name.
        times: By name of a set or of a length: the median context in tokens, and milliseconds to
            the first token per label, row by row.
    """

    about: dict[str, Any]
    sittings: list[dict[str, Any]] = field(default_factory=list)
    sets: dict[str, Rows] = field(default_factory=dict)
    times: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Results:
        """From the `raw` part of a report."""
        sets = {name: Rows(**rows) for name, rows in values["sets"].items()}
        return cls(values["about"], values["sittings"], sets, values["times"])

    @classmethod
    def read(cls, path: Path, name: str) -> Results | None:
        """What a report has of a model; None where there is nothing."""
        values = read(path).get(RAW, {}).get(name)
        return cls.from_values(values) if values else None

    def write(self, path: Path, name: str) -> None:
        """Put it into a report, whose tables are computed anew."""
        kept = read(path).get(RAW, {})
        kept[name] = {
            "about": self.about,
            "sittings": self.sittings,
            "sets": {one: vars(rows) for one, rows in self.sets.items()},
            "times": self.times,
        }
        write(path, report_of(kept))

    def check(self, path: Path, identity: Mapping[str, str]) -> None:
        """Whether these are answers of the same model.

        Raises:
            InvalidInputError: If they are not.
        """
        for name in ("weights", "dtype"):
            if self.about["identity"][name] != identity[name]:
                raise InvalidInputError(
                    f"{path} holds answers with {name} {self.about['identity'][name]}, not "
                    f"{identity[name]}; take another --name or delete it"
                )

    def sat(self, sitting: Mapping[str, Any]) -> None:
        """Remember when something was measured."""
        if sitting["began"] not in {one["began"] for one in self.sittings}:
            self.sittings.append(dict(sitting))

    def known(self, name: str, cells: Iterable[Cell], asked: Sequence[Asked]) -> list[Record]:
        """What need not be asked again, for a `RecordFile`; without scores or text."""
        rows = self.sets.get(name, Rows())
        places = {digest: place for place, digest in enumerate(rows.rows)}
        records = []
        for cell in cells:
            right, kl = rows.column(cell.label, "right"), rows.column(cell.label, "kl")
            for item in asked:
                place = places.get(item.digest)
                if place is not None and right[place] is not None:
                    records.append(_known(name, cell, item, kl[place]))
        return records


def _known(name: str, cell: Cell, item: Asked, kl: float | None) -> Record:
    place = cell.place(name, item.question.id)
    return Record(place, item.digest, item.cluster, {}, "", 0, 0, 0, 0, divergence=kl)


def columns(record: Record, scores: Mapping[str, float]) -> dict[str, Any]:
    """What is kept of an answer.

    Args:
        record: With the answer's text.
        scores: Of this text, by rules of today.
    """
    values = {
        "right": scores["containment"],
        "f1": scores.get("f1"),
        "wrong_document": scores.get("wrong_document"),
        "kl": record.divergence,
        "answer": _digest(normalised(record.answer)),
        "computed": record.recomputed_tokens / max(1, record.chunk_tokens),
    }
    return {name: _short(value) for name, value in values.items() if value is not None}


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())[:8]


def _short(value: float | str) -> float | str:
    """Four significant digits."""
    if isinstance(value, str):
        return value
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded.is_integer() else rounded


LENGTHS: Final = {"1k": 1000, "4k": 4000}
"""Tokens of paragraphs that times are taken of, by the name of the times."""


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


def mean_first_token(results: Results, names: Sequence[str], label: str) -> Interval | None:
    """The same, the mean: of a policy that does more for some questions than for others."""
    values = _ms(results, names, label)
    return mean_interval(values) if values else None


def sooner_on_average(results: Results, names: Sequence[str], label: str) -> Interval | None:
    """Full prefill's mean time to the first token over a label's, of the same rows."""
    names = [name for name in names if label in results.times.get(name, {}).get("ms", {})]
    mine, full = _ms(results, names, label), _ms(results, names, FULL)
    return paired_ratio(full, mine) if mine and len(mine) == len(full) else None


def _ms(results: Results, names: Sequence[str], label: str) -> list[float]:
    return [
        value
        for name in names
        for value in results.times.get(name, {}).get("ms", {}).get(label, ())
    ]


def report_of(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The report: tables, and what they are computed from, row by row and without any text."""
    results = {name: Results.from_values(values) for name, values in kept.items()}
    tables: dict[str, list[dict[str, Any]]] = {
        "scores": [],
        "every policy": [],
        "set by set": [],
        "by documents needed": [],
        "by best document": [],
        "first tokens": [],
    }
    for name, one in results.items():
        for half in halves(one):
            tables["scores"] += _table(name, one, half)
            shown = ("model", "half", "set", "policy", "rows", "right", "against full")
            parts = {part: [part] for part in one.sets}
            kinds = {kind: [part for part in sets if part in parts] for kind, sets in KINDS.items()}
            for table, groups in (("set by set", parts), ("by documents needed", kinds)):
                for group, sets in groups.items():
                    tables[table] += [
                        {column: row.get(column, group) for column in shown}
                        for row in (_table(name, one, half, sets) if sets else ())
                    ]
        asked = {label for rows in one.sets.values() for label in rows.found}
        compared = common(one, [label for label in COMPARED if label in asked])
        for half in halves(compared):
            tables["every policy"] += _table(name, compared, half)
        for part in one.sets:
            for hit, found in by_retriever(one, part).items():
                tables["by best document"] += [
                    {"model": name, "set": part, "needed": hit, "policy": label}
                    | {"rows": count, "right": share}
                    for label, (count, share) in found.items()
                ]
        for length, known in one.times.items():
            tables["first tokens"] += [
                {
                    "model": name,
                    "length": length,
                    "tokens": known["tokens"],
                    "policy": label,
                    "ms": _plain(first_token(one, [length], label)),
                    "sooner": _plain(sooner(one, [length], label)),
                    "mean ms": _plain(mean_first_token(one, [length], label)),
                    "mean, sooner": _plain(sooner_on_average(one, [length], label)),
                }
                for label in known["ms"]
            ]
    titles = {name: one.about["title"] for name, one in results.items()}
    about = {"benchmark": "answers", "halves": HALVES}
    return {"about": about, "models": titles, **tables, RAW: dict(kept)}


def _table(
    name: str, results: Results, half: int, sets: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """A row per policy of a model."""
    count = sum(rows for one, rows in sizes(results, half).items() if not sets or one in sets)
    place = {"model": name, "half": half, "rows": count}
    return [
        place
        | {
            "policy": label,
            "computed again": row["computed"],
            "right": _plain(row["right"]),
            "against full": _apart(row.get("minus_full")),
            "f1": _plain(row["f1"]),
            "same answer": row["same"],
            "kl": row["kl"],
            "from a wrong document": _plain(row["wrong"]),
            "wrong, against full": _apart(row.get("wrong_minus_full")) if label != FULL else None,
        }
        for label, row in scores(results, half, sets).items()
    ]


def _plain(found: Interval | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {"value": found.value, "low": found.low, "high": found.high}


def _apart(found: Comparison | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {"value": found.difference, "low": found.low, "high": found.high}
