"""PCED: each document is read alone, and a token is said by the one that makes it surest.

Parallel context-of-experts decoding (arXiv 2601.08670): a batch has a row per document, `prefix |
document | question`, and one without documents, `prefix | question`.  At each step the token with
the highest score of any document's row is said, and all rows go on with it:

    (1 + beta) log p - beta log p_none + gamma log r

`p` are the row's probabilities, `p_none` those of the row without documents, `beta` how far both
are apart at the first token (Jensen-Shannon divergence over ln 2), `r` the document's relevance by
its retriever.  Here `p` are probabilities of whole rows and `beta` is one number a row, as the
paper has it; its published code takes logits as they are and a `beta` per token of the vocabulary.

What is stored of one chunk is exact, so a document costs the question's tokens in its row.  The
relevance of other retrievers may need a scale of its own: `gamma` was chosen for scores in 0 to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from kvcache_rag.policies import Reuse
from kvcache_rag.progress import progress_bar
from kvcache_rag_lab.evaluation.runner import weights_digest
from kvcache_rag_lab.scoring.ask import (
    Asked,
    Cell,
    Record,
    RecordFile,
    Workplaces,
    divergences,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvcache_rag.engine import Engine
    from kvcache_rag.stores import ChunkStore
    from kvcache_rag_lab.scoring.ask import Workplace
    from kvcache_rag_lab.scoring.question import Question, Task

PCED: Final = "pced"
LEAST: Final = 0.01
"""Relevance of a document at least; a cosine may be 0 or less."""


@dataclass(frozen=True)
class Experts:
    """The rule, with the paper's numbers.

    Attributes:
        gamma: How much a document's relevance weighs.
        floor: Tokens below this share of a row's likeliest are not said by it.
    """

    gamma: float = 2.5
    floor: float = 0.05

    def betas(self, rows: Tensor) -> Tensor:
        """How far each document's row is from that without, from 0 to 1: `(documents,)`.

        Args:
            rows: Log-probabilities of the first token `(documents + 1, vocabulary)`, last the row
                without documents.
        """
        documents, none = rows[:-1], rows[-1:]
        middle = torch.logaddexp(documents, none) - math.log(2)
        apart = divergences(documents, middle) + divergences(none.expand_as(documents), middle)
        return apart / (2 * math.log(2))

    def token(self, rows: Tensor, betas: Tensor, relevance: Tensor) -> int:
        """What is said next.

        Args:
            rows: As of `betas`, of this token.
            betas: Of the documents.
            relevance: Of the documents, from 0 to 1.
        """
        documents, none = rows[:-1], rows[-1:]
        weight = betas[:, None]
        scores = (1 + weight) * documents - weight * none
        scores += self.gamma * relevance.clamp_min(LEAST).log()[:, None]
        least = documents.amax(-1, keepdim=True) + math.log(self.floor)
        scores = scores.masked_fill(documents < least, -math.inf)
        return int(scores.amax(0).argmax())


class Saying:
    """A logits processor by which all rows of a batch say what the experts agree on."""

    def __init__(self, experts: Experts, relevance: Tensor) -> None:
        self._experts, self._relevance = experts, relevance
        self._betas: Tensor | None = None
        self._tokens = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        rows = scores.float().log_softmax(-1)
        # A context that could not be loaded ahead is read once more, from its first token on.
        if self._betas is None or ids.shape[1] <= self._tokens:
            self._betas, self._tokens = self._experts.betas(rows), ids.shape[1]
        said = torch.full_like(scores, -math.inf)
        said[:, self._experts.token(rows, self._betas, self._relevance)] = 0
        return said


def cell_of(model: str) -> Cell:
    """Where its answers belong; all that is read of documents comes from caches."""
    return Cell(PCED, Reuse(), model)


def ask(
    tasks: Sequence[Task],
    model: str,
    opened: Callable[[], Engine],
    *,
    file: Path,
    store: ChunkStore,
) -> None:
    """Answer what `file` has no answer to.

    Args:
        tasks: Questions, with scores of their documents where somebody retrieved them.
        model: Label of the model.
        opened: Opens it, if anything is to be asked.
        file: Records, as of `evaluate`.
        store: Of documents.
    """
    cell, records, experts = cell_of(model), RecordFile(file), Experts()
    records.note(f"policy {PCED}", repr(experts))
    missing = [
        (task, one)
        for task in tasks
        for one in map(Asked.from_question, task.questions())
        if records.get(cell.place(task.name, one.question.id), one.digest) is None
    ]
    if not missing:
        return
    engine = opened()
    records.note(f"model {model}", weights_digest(engine))
    places = Workplaces(engine, Path(), store=store)
    with progress_bar(len(missing), PCED, "answer", show=True) as bar:
        for task, one in missing:
            place = places.get("", task.instruction)
            records.append([_answered(task, cell, one, place, experts)])
            bar.update(1)


def _answered(task: Task, cell: Cell, one: Asked, place: Workplace, experts: Experts) -> Record:
    question = one.question
    place.prepare(question.chunks)
    answers = place.reader.generate_batch(
        [*((question.question, (chunk,)) for chunk in question.chunks), (question.question, ())],
        policy=cell.policy,
        max_new_tokens=task.max_new_tokens,
        logits_processor=[Saying(experts, relevance(question))],
    )
    text, tokens = answers[0].text.strip(), sum(one.metrics.reused_tokens for one in answers)
    return Record(
        place=cell.place(task.name, question.id),
        digest=one.digest,
        cluster=one.cluster,
        scores=task.score(text, question),
        answer=text,
        chunk_tokens=tokens,
        reused_tokens=tokens,
        recomputed_tokens=0,
        generated_tokens=answers[0].metrics.generated_tokens,
    )


def relevance(question: Question) -> Tensor:
    """Of each document, by who retrieved them; 1 of all where nobody says."""
    return torch.tensor(question.scores or [1.0] * len(question.chunks))
