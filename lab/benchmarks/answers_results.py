"""Answers of `answers.py`, row by row and without any text, small enough to be committed.

The data sets' licences let figures be published, not texts.  A run whose work folder is gone goes
on from here: what is known is not asked again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import xxhash

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.prompt.words import normalised
from kvcache_rag_lab.scoring.ask import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kvcache_rag_lab.scoring.ask import Asked, Cell

FULL: Final = "full"
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
    def read(cls, path: Path) -> Results | None:
        """What is in a file; None where there is none."""
        if not path.is_file():
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        sets = {name: Rows(**rows) for name, rows in values["sets"].items()}
        return cls(values["about"], values["sittings"], sets, values["times"])

    def write(self, path: Path) -> None:
        """Replace the file in one step."""
        values = {
            "about": self.about,
            "sittings": self.sittings,
            "sets": {name: vars(rows) for name, rows in self.sets.items()},
            "times": self.times,
        }
        aside = path.with_suffix(".new")
        aside.write_text(_lines(values), encoding="utf-8")
        aside.replace(path)

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


def _lines(values: Mapping[str, Any]) -> str:
    """JSON with a line for each list, so that changes can be read."""

    def written(value: Any, depth: int) -> str:
        if not isinstance(value, dict) or depth == 0:
            return json.dumps(value, separators=(",", ":"))
        inner = ",\n".join(
            f"{json.dumps(name)}: {written(entry, depth - 1)}" for name, entry in value.items()
        )
        return "{\n" + inner + "\n}"

    return written(dict(values), 5) + "\n"
