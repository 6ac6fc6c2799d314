"""Ask a batch of questions in several ways, on one model.

Scores come from padded batches, which is cheap.  The time to the first token of a batch says
nothing about a user's, so a sample of the questions is asked once more, alone, the cells taking
turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.evaluation.cells import reference_of
from kvcache_rag.evaluation.records import Record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch import Tensor

    from kvcache_rag.evaluation.cells import Cell
    from kvcache_rag.evaluation.engines import Workplace, Workplaces
    from kvcache_rag.evaluation.question import Question
    from kvcache_rag.evaluation.tasks import Task
    from kvcache_rag.metrics import Answer

_TIMES: Final = ("ttft", "load", "stitch", "recompute", "prefill")


@dataclass(frozen=True)
class Asked:
    """A question with what identifies it.

    Attributes:
        question: The question, with its documents.
        digest: Of question, documents and right answers.
        cluster: The same for questions over the same documents.
    """

    question: Question
    digest: str
    cluster: str


class Asker:
    """Answers batches on the engines of one model."""

    def __init__(self, workplaces: Workplaces, compared: Sequence[Cell]) -> None:
        """Answer there.

        Args:
            workplaces: Engines of the model.
            compared: All cells, if first tokens are compared between them, else none.
        """
        self._workplaces, self._compared = workplaces, compared
        self._warm: set[Cell] = set()

    def ask(
        self, task: Task, todo: Mapping[Cell, Sequence[Asked]], timed: Collection[str]
    ) -> list[Record]:
        """Answer some questions in each cell.

        Args:
            task: Whose questions these are.
            todo: What is missing, per cell.
            timed: Ids of questions that are asked alone too.

        Raises:
            ContextTooLongError: If a question with its documents does not fit.
        """
        references = {cell: reference_of(cell, self._compared) for cell in todo if self._compared}
        used = dict.fromkeys((*todo, *filter(None, references.values())))
        places = {cell: self._workplaces.get(cell.codec, task.instruction) for cell in used}
        reused = dict.fromkeys(cell.codec for cell in used if not cell.policy.is_full)
        shelves = [self._workplaces.get(codec, task.instruction) for codec in reused]
        texts = [text for left in todo.values() for one in left for text in one.question.chunks]
        held = []
        try:
            held = [(shelf, shelf.prepare(texts)) for shelf in shelves]
            self._prepare_scorers(used, texts)
            _prepare_combinations(todo, places)
            times = self._times(todo, places, timed)
            first = _FirstTokens(places)
            records = []
            for cell, left in todo.items():
                answers = _answers(task, cell, left, places[cell])
                for one, answer in zip(left, answers, strict=True):
                    seconds = times.get((cell, one.question.id))
                    divergence = first.divergence(cell, references.get(cell), one.question)
                    records.append(_record(task, cell, one, answer, seconds, divergence))
        except ContextTooLongError as error:
            raise ContextTooLongError(
                f"a question of {task.name} does not fit: {error}; or ask with fewer documents"
            ) from error
        finally:
            for shelf, keys in held:
                shelf.clear(keys)
        return records

    def _prepare_scorers(self, cells: Iterable[Cell], texts: Sequence[str]) -> None:
        """An auxiliary model has its chunks cached too, as after ingestion."""
        policies = [cell.policy for cell in cells if cell.policy.needs_scorer]
        scorers = [policy.auxiliary or self._workplaces.auxiliary for policy in policies]
        for scorer in {id(scorer): scorer for scorer in scorers}.values():
            prefill = getattr(scorer, "prefill", None)
            if prefill is not None:
                prefill(list(dict.fromkeys(texts)))

    def _times(
        self,
        todo: Mapping[Cell, Sequence[Asked]],
        places: Mapping[Cell, Workplace],
        timed: Collection[str],
    ) -> dict[tuple[Cell, str], dict[str, float]]:
        """Times of the sampled questions, asked alone."""
        sampled: dict[str, list[tuple[Cell, Question]]] = {}
        for cell, left in todo.items():
            for one in left:
                if one.question.id in timed:
                    sampled.setdefault(one.question.id, []).append((cell, one.question))
        found = {}
        for turn, pairs in enumerate(sampled.values()):
            first = turn % len(pairs)
            for cell, question in (*pairs[first:], *pairs[:first]):
                if cell not in self._warm:
                    self._warm.add(cell)
                    _alone(cell, question, places[cell])
                found[cell, question.id] = _alone(cell, question, places[cell])
        return found


def _prepare_combinations(
    todo: Mapping[Cell, Sequence[Asked]], places: Mapping[Cell, Workplace]
) -> None:
    """What a policy keeps as one is there before anything is timed, like single chunks."""
    for cell, left in todo.items():
        if cell.policy.joint:
            lists = dict.fromkeys(one.question.chunks for one in left)
            places[cell].reader.add_combination([chunks for chunks in lists if chunks])


class _FirstTokens:
    """Distributions of the first token of answers; those compared with are computed once."""

    def __init__(self, places: Mapping[Cell, Workplace]) -> None:
        self._places = places
        self._kept: dict[tuple[Cell, str], Tensor] = {}

    def divergence(self, cell: Cell, reference: Cell | None, question: Question) -> float | None:
        """Kullback-Leibler divergence from the reference's, in nats; None without one."""
        if reference is None:
            return None
        theirs, mine = self._of(reference, question), self._of(cell, question)
        return max(0.0, float((theirs.exp() * (theirs - mine)).sum()))

    def _of(self, cell: Cell, question: Question) -> Tensor:
        place = (cell, question.id)
        if place not in self._kept:
            reader = self._places[cell].reader
            logits = reader.logits(question.question, question.chunks, policy=cell.policy)
            self._kept[place] = logits[-1].double().log_softmax(-1)
        return self._kept[place]


def _alone(cell: Cell, question: Question, place: Workplace) -> dict[str, float]:
    answer = place.reader.generate(
        question.question, question.chunks, policy=cell.policy, max_new_tokens=1
    )
    return {name: getattr(answer.metrics, name) for name in _TIMES}


def _answers(task: Task, cell: Cell, left: Sequence[Asked], place: Workplace) -> list[Answer]:
    batch = [(one.question.question, one.question.chunks) for one in left]
    return place.reader.generate_batch(
        batch, policy=cell.policy, max_new_tokens=task.max_new_tokens
    )


def _record(
    task: Task,
    cell: Cell,
    one: Asked,
    answer: Answer,
    times: Mapping[str, float] | None,
    divergence: float | None,
) -> Record:
    metrics, text = answer.metrics, answer.text.strip()
    chunk_tokens = metrics.reused_tokens + metrics.prefilled_tokens
    return Record(
        place=cell.place(task.name, one.question.id),
        digest=one.digest,
        cluster=one.cluster,
        scores=task.score(text, one.question),
        answer=text,
        chunk_tokens=chunk_tokens,
        reused_tokens=metrics.reused_tokens,
        recomputed_tokens=chunk_tokens if cell.policy.is_full else metrics.recomputed_tokens,
        generated_tokens=metrics.generated_tokens,
        times=times,
        divergence=divergence,
    )
