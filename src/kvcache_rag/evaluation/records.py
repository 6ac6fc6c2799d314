"""What was asked and answered: one record per question and cell, kept in a file that can go on.

A file holds one JSON object a line: notes (what the answers depend on) and records, in the order in
which they were made.  A run that was cut short is continued by running it again; a run that differs
in what a note says is refused, because its answers could not be told from the others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


class Place(NamedTuple):
    """Which question was answered in which way.

    Attributes:
        task: Name of the task.
        question: Id of the question, unique in its task.
        model: Label of the model.
        policy: Label of the policy.
        codec: Name of the codec; "" where chunks stayed in memory as they were computed.
        k: Documents per question; None for all there are.
    """

    task: str
    question: str
    model: str
    policy: str
    codec: str
    k: int | None


@dataclass(frozen=True)
class Record:
    """One question answered in one way.

    Attributes:
        place: Which question, and how.
        digest: Of question, documents and right answers: another one is another question.
        cluster: The same for questions over the same documents.
        scores: By name of the metric, each from 0 to 1.
        answer: The answer, without white space around it.
        chunk_tokens: Tokens of the documents.
        reused_tokens: Of these, loaded from the store.
        recomputed_tokens: Context tokens that the policy computed again; `chunk_tokens` for a full
            prefill.
        generated_tokens: Tokens of the answer.
        times: Seconds of the same question asked alone, on a warm machine: `ttft` and its parts
            `load`, `stitch`, `recompute`, `prefill`.  Only a sample of the questions has them.
        divergence: Kullback-Leibler divergence, in nats, of the distribution of the answer's first
            token from that of the cell it is compared with; None if it was not asked for.
    """

    place: Place
    digest: str
    cluster: str
    scores: Mapping[str, float]
    answer: str
    chunk_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    generated_tokens: int
    times: Mapping[str, float] | None = None
    divergence: float | None = None

    def to_line(self) -> str:
        """As one line of JSON."""
        values = asdict(self)
        del values["place"]
        merged = {**self.place._asdict(), **values}
        return json.dumps(merged, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Record:
        """From the object of such a line."""
        rest = dict(values)
        place = Place(*(rest.pop(name) for name in Place._fields))
        return cls(place=place, **rest)


@dataclass(frozen=True)
class Records:
    """The answers of one evaluation.

    Attributes:
        rows: In the order of tasks, models, k, cells and questions.
        metrics: Headline metric of each task.
        policies: Each label's policy, as it can be pasted back.
        baseline: Label of the full prefill, None if it was not asked.
    """

    rows: tuple[Record, ...]
    metrics: Mapping[str, str] = field(default_factory=dict)
    policies: Mapping[str, str] = field(default_factory=dict)
    baseline: str | None = None


class RecordFile:
    """Records on disk, appended as they come; in memory only, without a path."""

    def __init__(self, path: Path | None) -> None:
        """Read what is there.

        Args:
            path: A file that exists or shall be made; None keeps records in memory.

        Raises:
            InvalidInputError: If it holds something else.
        """
        self._path = path
        self._records: dict[Place, Record] = {}
        self._notes: dict[str, str] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        number = 0
        try:
            for line in content[:whole].split(b"\n")[:-1]:
                number += 1
                self._keep(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidInputError(
                f"line {number} of {path} is no record of an evaluation; name another file"
            ) from error
        if whole < len(content):  # a run was killed while it wrote
            with path.open("r+b") as file:
                file.truncate(whole)

    def _keep(self, values: dict[str, Any]) -> None:
        if "note" in values:
            self._notes[values["note"]] = str(values["value"])
        else:
            record = Record.from_values(values)
            self._records[record.place] = record  # a later one knows more, such as times

    def note(self, name: str, value: str) -> None:
        """Write down what answers depend on.

        Raises:
            InvalidInputError: If the file was made with another value.
        """
        known = self._notes.get(name)
        if known is None:
            self._notes[name] = value
            self._write([json.dumps({"note": name, "value": value}, ensure_ascii=False)])
        elif known != value:
            raise InvalidInputError(
                f"{self._path} holds answers with {name} {known}, not {value}; name another file "
                "or delete it"
            )

    def get(self, place: Place, digest: str) -> Record | None:
        """The record of a place, None if it is to be made.

        Args:
            place: Which question, and how.
            digest: Of the question.

        Raises:
            InvalidInputError: If the file's question of that id is another one.
        """
        found = self._records.get(place)
        if found is not None and found.digest != digest:
            raise InvalidInputError(
                f"{self._path} holds answers to other questions of {place.task} (seed, sizes or "
                "data have changed); name another file or delete it"
            )
        return found

    def append(self, records: Iterable[Record]) -> None:
        """Keep new records, and write them before returning."""
        new = list(records)
        self._records.update((record.place, record) for record in new)
        self._write([record.to_line() for record in new])

    def _write(self, lines: list[str]) -> None:
        if self._path is not None and lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
