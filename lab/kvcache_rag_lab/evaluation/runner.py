"""Ask the same questions in every way: policies x models x codecs x numbers of documents.

Every cell answers exactly the same questions, batch by batch (`scoring.ask`), so differences are
paired.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.chunk import canonical_json
from kvcache_rag.models.weights import model_identity
from kvcache_rag.progress import progress_bar
from kvcache_rag_lab.scoring.ask import (
    Asked,
    Asker,
    Cell,
    Model,
    RecordFile,
    Records,
    Workplaces,
    cluster_of,
    make_cells,
    open_model,
    reference_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.stores import ChunkStore
    from kvcache_rag_lab.scoring.question import Task


__all__ = ["BATCH", "TIMED", "Cell", "Records", "evaluate", "make_cells"]

BATCH: Final = 32

TIMED: Final = 16


def evaluate(
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    *,
    models: Mapping[str, Model] | None = None,
    n: int | None = None,
    seed: int = 0,
    file: Path | None = None,
    batch: int = BATCH,
    timed: int = TIMED,
    auxiliary: Scorer | None = None,
    divergence: bool = False,
    store: ChunkStore | None = None,
    first_tokens: Path | None = None,
    show_progress: bool = False,
) -> Records:
    """Ask every question of every task in every cell.

    Args:
        tasks: What is asked.
        cells: How, from `make_cells`.
        models: By label; a label that is not there is itself a folder, a hub name or "tiny".
        n: Questions per task; None for all there are.
        seed: Of the questions.
        file: Where records are kept as they come; what it holds is not asked again, unless it
            lacks times or divergences that are wanted now.
        batch: Questions answered at a time.
        timed: So many questions of each task are asked alone too, for their times.
        auxiliary: Scores chunks for policies that need it and bring none.
        divergence: Compare the first token's distribution with that of the same policy over the
            first codec of its kind, or else with that of full prefill.
        store: Keeps chunks of the codec "" for later runs; None keeps them in memory, for this one.
        first_tokens: A folder that keeps the distributions which others are compared with, so that
            a run that adds policies computes no full prefill again.
        show_progress: Whether to show a bar.

    Raises:
        InvalidInputError: If `file` was made with other settings, two cells are the same, or a
            number cannot be used.
        ContextTooLongError: If a question with its documents does not fit a model.
        UnsupportedModelError: If a model's chunks cannot be reused.
    """
    if batch < 1 or timed < 0 or not tasks or not cells:
        raise InvalidInputError(
            "an evaluation needs a task, a cell, batch of at least 1 and timed of at least 0"
        )
    if len({cell.place("", "") for cell in cells}) < len(cells):
        raise InvalidInputError("two cells have the same labels; give each policy one of its own")
    records = RecordFile(file)
    for cell in cells:
        records.note(f"policy {cell.label}", repr(cell.policy))
        if "relevance" in cell.policy.reads and auxiliary is not None:
            records.note("the auxiliary", repr(auxiliary))
    run = _Run(tasks, cells, records, n, seed, batch, timed, divergence)
    with progress_bar(run.missing(), "eval", "answer", show=show_progress) as bar:
        for label in dict.fromkeys(cell.model for cell in cells):
            if run.missing(label):
                engine = open_model((models or {}).get(label, label))
                records.note(f"model {label}", weights_digest(engine))
                with tempfile.TemporaryDirectory() as folder:
                    places = Workplaces(engine, Path(folder), auxiliary, store)
                    run.ask(label, places, bar, first_tokens)
                del engine  # before the next one is loaded
    return run.result()


def weights_digest(engine: Engine) -> str:
    """What tells the weights of a model, as they are, from others."""
    adapter = engine._adapter
    # llama.cpp has no weights of torch, and they do not change.
    is_own = adapter.abilities.memory == "own"
    named = adapter.weights.identity if is_own else model_identity(engine.model)
    # It leaves chunks as they are, and so their names, but not answers.
    acting = {"question adapter": adapter.question_adapter} if adapter.question_adapter else {}
    return xxhash.xxh3_128_hexdigest(canonical_json({**named, **acting}))


class _Run:
    """The questions of a run, and what is still to be asked."""

    def __init__(
        self,
        tasks: Sequence[Task],
        cells: Sequence[Cell],
        records: RecordFile,
        n: int | None,
        seed: int,
        batch: int,
        timed: int,
        divergence: bool,
    ) -> None:
        self.tasks, self.cells, self.records = tasks, cells, records
        self.batch, self.timed, self.divergence = batch, timed, divergence
        self.ks = tuple(dict.fromkeys(cell.k for cell in cells))
        self.asked = {
            (task.name, k): _drawn(task, n, seed, k, clusters)
            for task in tasks
            for clusters in [_clusters(task, n, seed)]
            for k in self.ks
        }
        self.timed_ids = {
            place: frozenset(item.question.id for item in asked[:timed])
            for place, asked in self.asked.items()
        }

    def missing(self, model: str | None = None) -> int:
        """How many answers are still to be made, of one model or of all."""
        return sum(
            len(self._todo(task, cell, self.asked[task.name, cell.k]))
            for task in self.tasks
            for cell in self.cells
            if model in (None, cell.model)
        )

    def _todo(self, task: Task, cell: Cell, asked: Sequence[Asked]) -> list[Asked]:
        timed = self.timed_ids[task.name, cell.k]
        compared = self.divergence and reference_of(cell, self.cells) is not None
        items = []
        for item in asked:
            record = self.records.get(cell.place(task.name, item.question.id), item.digest)
            if (
                record is None
                or (record.times is None and item.question.id in timed)
                or (record.divergence is None and compared)
            ):
                items.append(item)
        return items

    def ask(self, model: str, workplaces: Workplaces, bar: Any, kept: Path | None) -> None:
        """Make what is missing of one model, whose cells take turns over each batch."""
        asker = Asker(workplaces, self.cells if self.divergence else (), kept)
        for task, k, batch in self._batches():
            cells = [cell for cell in self.cells if (cell.model, cell.k) == (model, k)]
            todo = {cell: self._todo(task, cell, batch) for cell in cells}
            todo = {cell: items for cell, items in todo.items() if items}
            if todo:
                self.records.append(asker.ask(task, todo, self.timed_ids[task.name, k]))
                bar.update(sum(map(len, todo.values())))

    def _batches(self) -> Iterator[tuple[Task, int | None, Sequence[Asked]]]:
        for task in self.tasks:
            for k in self.ks:
                # Of like length, because a batch is computed as wide as its longest prompt.
                asked = sorted(self.asked[task.name, k], key=_characters)
                for start in range(0, len(asked), self.batch):
                    yield task, k, asked[start : start + self.batch]

    def result(self) -> Records:
        """All records that were asked for."""
        rows = [
            self.records.get(cell.place(task.name, item.question.id), item.digest)
            for task in self.tasks
            for cell in self.cells
            for item in self.asked[task.name, cell.k]
        ]
        full = next((cell.label for cell in self.cells if cell.is_baseline), None)
        closed = next((cell.label for cell in self.cells if cell.is_closed), None)
        return Records(
            rows=tuple(row for row in rows if row is not None),
            metrics={task.name: task.metric for task in self.tasks},
            policies={cell.label: repr(cell.policy) for cell in self.cells},
            baseline=full,
            closed=closed,
        )


def _characters(item: Asked) -> int:
    return sum(map(len, item.question.chunks))


def _drawn(
    task: Task, n: int | None, seed: int, k: int | None, clusters: Mapping[str, str]
) -> list[Asked]:
    """The questions of a task at one `k`, in an order that is the same in every run."""
    asked = [
        Asked.from_question(question, clusters.get(question.id, ""))
        for question in task.questions(n, seed, k)
    ]
    if not asked:
        raise InvalidInputError(f"{task.name} has no questions; give data that holds some")
    if len({item.question.id for item in asked}) < len(asked):
        raise InvalidInputError(f"two questions of {task.name} have the same id; number them anew")
    return asked


def _clusters(task: Task, n: int | None, seed: int) -> dict[str, str]:
    """What questions share, by all of their documents: fewer may be theirs at a smaller `k`."""
    return {question.id: cluster_of(question) for question in task.questions(n, seed, None)}
