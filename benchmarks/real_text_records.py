"""Scores of `real_text.py`, row by row, small enough to be committed.

What a model was asked and what it said stays in the work folder: the data sets' licences let
figures be published, not texts.  Here stands, per set and policy, only how each row was scored and
how far its first token was from full prefill's.  A run whose work folder is gone goes on from here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.scoring.ask import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kvcache_rag.scoring.ask import Asked, Cell

DIGITS = 4


@dataclass
class Scores:
    """Scores of many sets.

    Attributes:
        identity: What the answers depend on; a run with another one starts anew.
        sittings: When and where parts were measured.
        rows: Digests of the rows of each set, in the order of its file.
        found: Per set and label of a policy, per row its scores by metric, with "kl" where it was
            compared with full prefill; None for a row that was not asked.
    """

    identity: dict[str, str]
    sittings: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)
    found: dict[str, dict[str, list[dict[str, float] | None]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, identity: dict[str, str]) -> Scores:
        """What is in a file, or nothing.

        Raises:
            InvalidInputError: If it holds answers of another model or by other rules.
        """
        if not path.is_file():
            return cls(identity)
        values = json.loads(path.read_text(encoding="utf-8"))
        for name, value in identity.items():
            if values["identity"].get(name) != value:
                other = values["identity"].get(name)
                raise InvalidInputError(
                    f"{path} holds answers with {name} {other}, not {value}; name another file or "
                    "delete it"
                )
        found = {
            name: {label: _wide(table) for label, table in labels.items()}
            for name, labels in values["found"].items()
        }
        return cls(identity, values["sittings"], values["rows"], found)

    def write(self, path: Path) -> None:
        """Replace the file in one step."""
        narrow = {
            name: {label: _narrow(table) for label, table in labels.items()}
            for name, labels in self.found.items()
        }
        values = {
            "identity": self.identity,
            "sittings": self.sittings,
            "rows": self.rows,
            "found": narrow,
        }
        aside = path.with_suffix(".new")
        aside.write_text(_lines(values), encoding="utf-8")
        aside.replace(path)

    def begin(self, name: str, asked: Sequence[Asked]) -> None:
        """Say which rows a set has; of other rows than before nothing is known."""
        digests = [item.digest for item in asked]
        before = self.rows.get(name, [])
        if before[: len(digests)] == digests:
            return  # a shorter run of the same rows
        places = {digest: place for place, digest in enumerate(before)}
        for label, table in self.found.get(name, {}).items():
            old = [places.get(digest) for digest in digests]
            self.found[name][label] = [None if place is None else table[place] for place in old]
        self.rows[name] = digests

    def keep(self, name: str, records: Iterable[Record]) -> None:
        """Take over what was measured."""
        places = {digest: place for place, digest in enumerate(self.rows[name])}
        for record in records:
            tables = self.found.setdefault(name, {})
            table = tables.setdefault(record.place.policy, [None] * len(places))
            values = {metric: round(score, DIGITS) for metric, score in record.scores.items()}
            if record.divergence is not None:
                values["kl"] = float(f"{record.divergence:.{DIGITS}g}")
            table[places[record.digest]] = values

    def records(self, name: str, cells: Sequence[Cell], asked: Sequence[Asked]) -> list[Record]:
        """What is known, as an evaluation wants it, without texts."""
        places = {digest: place for place, digest in enumerate(self.rows.get(name, []))}
        records = []
        for cell in cells:
            table = self.found.get(name, {}).get(cell.label, [])
            for item in asked:
                place = places.get(item.digest)
                values = table[place] if place is not None and place < len(table) else None
                if values is not None:
                    records.append(_record(name, cell, item, values))
        return records

    def column(self, name: str, label: str, metric: str, n: int) -> list[float] | None:
        """A score of the first `n` rows of a set; None unless every one has it."""
        table = self.found.get(name, {}).get(label, [])[:n]
        values = [row[metric] for row in table if row is not None and metric in row]
        return values if len(values) == n else None


def _record(name: str, cell: Cell, item: Asked, values: Mapping[str, float]) -> Record:
    scores = {metric: score for metric, score in values.items() if metric != "kl"}
    return Record(
        place=cell.place(name, item.question.id),
        digest=item.digest,
        cluster=item.cluster,
        scores=scores,
        answer="",
        chunk_tokens=0,
        reused_tokens=0,
        recomputed_tokens=0,
        generated_tokens=0,
        divergence=values.get("kl"),
    )


def _narrow(table: Sequence[Mapping[str, float] | None]) -> dict[str, list[float | None]]:
    """A list per metric."""
    names = sorted({name for row in table if row is not None for name in row})
    return {name: [None if row is None else row.get(name) for row in table] for name in names}


def _wide(columns: Mapping[str, Sequence[float | None]]) -> list[dict[str, float] | None]:
    """The other way round."""
    rows: list[dict[str, float] | None] = []
    for values in zip(*columns.values(), strict=True):
        row = {
            name: value for name, value in zip(columns, values, strict=True) if value is not None
        }
        rows.append(row or None)
    return rows


def _lines(values: Mapping[str, Any]) -> str:
    """JSON with a line for each list of numbers, so that changes can be read."""

    def written(value: Any, depth: int) -> str:
        if not isinstance(value, dict) or depth == 0:
            return json.dumps(value, separators=(",", ":"))
        inner = ",\n".join(
            f"{json.dumps(name)}: {written(entry, depth - 1)}" for name, entry in value.items()
        )
        return "{\n" + inner + "\n}"

    return written(dict(values), 4) + "\n"
