"""Ask questions in several ways, and keep the results.

A `Cell` is one way to answer: a policy on a model, over chunks kept in some form.  `Workplaces` are
the engines of one loaded model, one for each form.  An `Asker` answers a batch of questions in each
cell there, and each answer becomes a `Record`, scored by the rule of its `Task`; a `RecordFile`
keeps records, so that a run can go on.

What a check of one's own needs of it (`evaluation.verification`) is there, too: `rotated` orders
ways so that each is asked first in turn, `log_probabilities` and `divergences` compare what they
expect.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import torch
import xxhash

from kvcache_rag.engine import Engine, like, unwarned
from kvcache_rag.errors import ContextTooLongError, InvalidInputError
from kvcache_rag.kv.chunk import canonical_json, digest
from kvcache_rag.policies import FullRecompute
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag.settings import EngineSettings, StoreSettings

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.metrics import Answer
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.stores import ChunkStore
    from kvcache_rag_lab.scoring.question import Question, Task

T = TypeVar("T")


CLOSED_BOOK: Final = "closed book"
"""Label of the cell that asks questions without their documents."""


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
class Cell:
    """One way to answer.

    Attributes:
        label: Of the policy.
        policy: What is reused; the label alone tells cells apart.
        model: Label of the model.
        codec: Name of the codec, whose files chunks go through; "" keeps them in memory as they
            were computed.
        k: Documents per question; None for all there are.
        is_closed: Whether the question is asked without documents.
    """

    label: str
    policy: ReusePolicy = field(compare=False)
    model: str = "tiny"
    codec: str = ""
    k: int | None = None
    is_closed: bool = False

    @property
    def is_baseline(self) -> bool:
        """Whether it is the full prefill that everything is compared with."""
        return self.policy.is_full and not self.is_closed

    def place(self, task: str, question: str) -> Place:
        """Where the answer to a question belongs."""
        return Place(task, question, self.model, self.label, self.codec, self.k)


def make_cells(
    policies: Mapping[str, ReusePolicy],
    models: Sequence[str] = ("tiny",),
    codecs: Sequence[str] = ("",),
    ks: Sequence[int | None] = (None,),
    *,
    closed_book: bool = False,
) -> tuple[Cell, ...]:
    """All combinations; a full prefill reads no chunks, so it is asked with the first codec only.

    Args:
        policies: By label.
        models: Labels.
        codecs: Names, "" for memory.
        ks: Numbers of documents, None for all.
        closed_book: Whether every model is asked without documents, too: what it knows anyway.
    """
    return tuple(
        cell
        for model in models
        for k in ks
        for cell in (
            *(
                Cell(label, policy, model, codec, k)
                for codec in codecs
                for label, policy in policies.items()
                if codec == codecs[0] or not policy.is_full
            ),
            *([closed_cell(model, codecs[0], k)] if closed_book else []),
        )
    )


def closed_cell(model: str = "tiny", codec: str = "", k: int | None = None) -> Cell:
    """Asks questions without their documents."""
    return Cell(CLOSED_BOOK, FullRecompute(), model, codec, k, is_closed=True)


def reference_of(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """What a cell's first tokens are compared with.

    That is the same policy over the first codec, and for the first codec itself the full prefill;
    None for a full prefill, or if it is not among `cells`.
    """
    if cell.is_baseline:
        return None
    same = [peer for peer in cells if (peer.model, peer.k) == (cell.model, cell.k)]
    first = next(peer for peer in same if peer.label == cell.label)
    return first if first != cell else next((peer for peer in same if peer.is_baseline), None)


Model: TypeAlias = "str | os.PathLike[str] | Engine | Callable[[], Engine]"
"""A folder, a hub name, "tiny", an engine, or what makes one when its turn comes."""


@dataclass(frozen=True)
class Workplace:
    """Where one kind of cell is answered.

    A codec is tested through files: one engine writes them, another one, which did not compute the
    chunks, reads them.

    Attributes:
        writer: Prefills chunks.
        reader: Answers; the same engine unless chunks go through files.
    """

    writer: Engine
    reader: Engine

    def prepare(self, texts: Iterable[str]) -> list[ChunkKey]:
        """Prefill and store chunks; returns their keys."""
        return self.writer.add(list(dict.fromkeys(texts)))

    def prepare_joint(self, policy: ReusePolicy, questions: Iterable[Question]) -> None:
        """What a policy keeps as one is there before anything is timed, like single chunks."""
        if policy.joint:
            lists = dict.fromkeys(question.chunks for question in questions)
            self.reader.add_combination([chunks for chunks in lists if chunks])

    def clear(self, keys: Iterable[ChunkKey]) -> None:
        """Drop files; memory has a limit of its own."""
        if self.writer is not self.reader:
            for key in keys:
                self.writer.store.delete(key)


class Workplaces:
    """All workplaces of one model, made when they are first needed.

    Attributes:
        auxiliary: Scores chunks for policies that have no scorer of their own.
    """

    def __init__(
        self,
        base: Engine,
        folder: Path,
        auxiliary: Scorer | None = None,
        store: ChunkStore | None = None,
    ) -> None:
        """Share the model of `base`.

        Args:
            base: An engine of the model.
            folder: An empty folder for files.
            auxiliary: Scores chunks for policies that have no scorer of their own.
            store: For chunks of the codec ""; None for memory.
        """
        self._base, self._folder, self.auxiliary = base, folder, auxiliary
        self._store = store
        self._places: dict[tuple[str, str], Workplace] = {}

    def get(self, codec: str, instruction: str) -> Workplace:
        """The workplace of a codec and an instruction.

        Args:
            codec: Name of a codec, "" for memory.
            instruction: What stands before the chunks, "" for what the model brings along.
        """
        place = (codec, instruction)
        if place not in self._places:
            self._places[place] = self._make(codec, instruction)
        return self._places[place]

    def _make(self, codec: str, instruction: str) -> Workplace:
        if not codec:
            engine = self._engine(self._store, instruction)
            return Workplace(engine, engine)
        folder = self._folder / f"{codec}-{len(self._places)}"
        place = StoreSettings.from_source(None, kv_dir=folder, kv_codec=codec)

        def opened() -> Engine:
            return self._engine(place.open_store(durable=False), instruction)

        writer = opened()
        writer.add(["."])  # writes the prefix, too
        return Workplace(writer, opened())

    def _engine(self, store: ChunkStore | None, instruction: str) -> Engine:
        template = self._base.template
        engine = like(
            self._base,
            store=store,
            combinations=None,
            template=replace(template, system=instruction) if instruction else template,
            auxiliary=self.auxiliary,
            gate=None,
            prompt_memory=0,  # what was asked before changes neither times nor rounding
        )
        return unwarned(engine)


def open_model(model: Model) -> Engine:
    """The engine itself, or a new one."""
    if isinstance(model, Engine):
        return model
    return (
        model() if callable(model) else EngineSettings.from_source(None, model=model).open_engine()
    )


_TIMES: Final = ("ttft", "load", "stitch", "choose", "recompute", "prefill")


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

    @classmethod
    def from_question(cls, question: Question, cluster: str = "") -> Asked:
        """Digest a question; its cluster is that of its documents unless another one is named."""
        texts = [question.question, *question.chunks, "answers", *question.answers]
        groups = ("|".join(group) for group in question.answer_groups)
        return cls(question, _digest([*texts, *groups]), cluster or cluster_of(question))


def questions_digest(questions: Sequence[Question]) -> str:
    """Digest of questions, documents and answers, 64 hexadecimal digits."""
    rows: list[Any] = [
        [
            question.question,
            list(question.chunks),
            list(question.answers),
            [list(g) for g in question.answer_groups],
        ]
        for question in questions
    ]
    return digest("kvcache-rag-questions", canonical_json({"questions": rows}))


def cluster_of(question: Question) -> str:
    """A name that all questions over the same documents share."""
    return _digest(question.chunks)


def _digest(texts: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest(canonical_json({"texts": list(texts)}))


class Asker:
    """Answers batches on the engines of one model.

    Scores come from padded batches, which is cheap.  The time to the first token of a batch says
    nothing about a user's, so a sample of the questions is asked once more, alone.
    """

    def __init__(
        self, workplaces: Workplaces, compared: Sequence[Cell], kept: Path | None = None
    ) -> None:
        """Answer there.

        Args:
            workplaces: Engines of the model.
            compared: All cells, if first tokens are compared between them, else none.
            kept: Folder for the distributions that others are compared with; None keeps none.
        """
        self._workplaces, self._compared, self._kept = workplaces, compared, kept
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
        places = {cell: self._place(cell, task) for cell in used}
        texts = [text for items in todo.values() for item in items for text in item.question.chunks]
        shelf_keys = []
        try:
            for codec, brought in _brought(used, todo).items():
                shelf = self._workplaces.get(codec, task.instruction)
                shelf_keys.append((shelf, shelf.prepare(brought)))
            self._prepare_scorers(used, texts)
            for cell, items in todo.items():
                places[cell].prepare_joint(cell.policy, [item.question for item in items])
            times = self._times(todo, places, timed)
            first = _FirstTokens(task.name, places, self._kept, frozenset(references.values()))
            answered = {
                cell: _answers(task, cell, items, places[cell], first if references else None)
                for cell, items in todo.items()
            }
            records = [
                _record(
                    task,
                    cell,
                    item,
                    answer,
                    _unused_tokens(places[cell], item.question, answer),
                    times.get((cell, item.question.id)),
                    first.divergence(cell, references.get(cell), item),
                )
                for cell, items in todo.items()
                for item, answer in zip(items, answered[cell], strict=True)
            ]
        except ContextTooLongError as error:
            raise ContextTooLongError(
                f"a question of {task.name} does not fit: {error}; or ask with fewer documents"
            ) from error
        finally:
            for shelf, keys in shelf_keys:
                shelf.clear(keys)
        return records

    def times(
        self, task: Task, cells: Sequence[Cell], items: Sequence[Asked]
    ) -> dict[tuple[Cell, str], dict[str, float]]:
        """Ask questions alone, each in every cell, cells in turns, and only for their times.

        Args:
            task: Whose questions these are.
            cells: Ways to answer, over chunks in memory.
            items: The questions.

        Returns:
            Seconds by cell and the question's id, as in a `Record`.
        """
        places = {cell: self._place(cell, task) for cell in cells}
        texts = [text for item in items for text in item.question.chunks]
        for place in {id(place): place for place in places.values()}.values():
            place.prepare(texts)
        self._prepare_scorers(cells, texts)
        wanted = [item.question.id for item in items]
        return self._times(dict.fromkeys(cells, items), places, wanted)

    def _place(self, cell: Cell, task: Task) -> Workplace:
        closed = task.closed_instruction if cell.is_closed else ""
        return self._workplaces.get(cell.codec, closed or task.instruction)

    def _prepare_scorers(self, cells: Iterable[Cell], texts: Sequence[str]) -> None:
        """An auxiliary model has its chunks cached too, as after ingestion."""
        policies = [cell.policy for cell in cells if "relevance" in cell.policy.reads]
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
        for cell, items in todo.items():
            for item in items:
                if item.question.id in timed:
                    question = as_asked(cell, item.question)
                    sampled.setdefault(question.id, []).append((cell, question))
        times = {}
        for turn, pairs in enumerate(sampled.values()):
            for cell, question in rotated(pairs, turn):
                if cell not in self._warm:
                    self._warm.add(cell)
                    _alone(cell, question, places[cell])
                times[cell, question.id] = _alone(cell, question, places[cell])
        return times


def _brought(
    used: Iterable[Cell], todo: Mapping[Cell, Sequence[Asked]]
) -> dict[str, dict[str, None]]:
    """Per codec the texts of the chunks whose keys and values some answer needs, each once."""
    questions = [item.question for items in todo.values() for item in items]
    found: dict[str, dict[str, None]] = {}
    for cell in used:
        if cell.policy.is_full:
            continue
        texts = found.setdefault(cell.codec, {})
        for one in questions:
            retrieved = Retrieved(one.question, one.chunks, one.scores or None)
            places = cell.policy.needs(retrieved)
            texts.update(dict.fromkeys(one.chunks[place] for place in places))
    return found


class _FirstTokens:
    """Scores that the first token of answers was chosen from, `(vocabulary,)` float32.

    What was answered has shown its own; only where a reference was answered in an earlier run, and
    is in no folder, is a prompt computed for it.
    """

    def __init__(
        self,
        task: str,
        places: Mapping[Cell, Workplace],
        folder: Path | None,
        references: frozenset[Cell | None],
    ) -> None:
        self._task = task
        self._places, self._folder, self._references = places, folder, references
        self._found: dict[tuple[Cell, str], Tensor] = {}

    def note(self, cell: Cell, items: Sequence[Asked], scores: Tensor) -> None:
        """Keep what an answer began from, a row of `scores` each."""
        for item, row in zip(items, scores.float().cpu(), strict=True):
            self._found[cell, item.digest] = row
            file = self._file(cell, item)
            if file is not None and cell in self._references:
                aside = file.with_suffix(".new")  # a run that is killed leaves no half of one
                aside.write_bytes(row.numpy().tobytes())
                aside.replace(file)

    def divergence(self, cell: Cell, reference: Cell | None, item: Asked) -> float | None:
        """Kullback-Leibler divergence from the reference's, in nats; None without one."""
        if reference is None:
            return None
        expected, found = (
            self._of(one, item).double().log_softmax(-1) for one in (reference, cell)
        )
        return max(0.0, float(divergences(expected, found)))

    def _of(self, cell: Cell, item: Asked) -> Tensor:
        place = (cell, item.digest)
        if place not in self._found:
            file = self._file(cell, item)
            if file is not None and file.is_file():
                self._found[place] = torch.frombuffer(
                    bytearray(file.read_bytes()), dtype=torch.float32
                )
            else:
                question, engine = as_asked(cell, item.question), self._places[cell].reader
                scores = log_probabilities(engine, question, cell.policy)
                self.note(cell, [item], scores[-1:])
        return self._found[place]

    def _file(self, cell: Cell, item: Asked) -> Path | None:
        if self._folder is None:
            return None
        # Two tasks may ask the same question behind instructions of their own.
        place = map(str, cell.place(self._task, item.digest))
        return self._folder / f"{_digest(list(place))}.float32"


class _Begun:
    """A logits processor that changes nothing and remembers what the first token is chosen from."""

    def __init__(self) -> None:
        self.scores: Tensor | None = None
        self._tokens = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        # A context that could not be loaded ahead is read once more, from its first token on.
        if self.scores is None or ids.shape[1] <= self._tokens:
            self.scores, self._tokens = scores.clone(), ids.shape[1]
        return scores


def as_asked(cell: Cell, question: Question) -> Question:
    """The question as a cell asks it."""
    if not cell.is_closed:
        return question
    words = question.closed_question or question.question
    return replace(question, question=words, chunks=(), relevant=(), scores=())


def rotated(ways: Sequence[T], turn: int) -> tuple[T, ...]:
    """The same in turns: whoever is asked later finds a warmer machine."""
    first = turn % len(ways)
    return (*ways[first:], *ways[:first])


def log_probabilities(
    engine: Engine, question: Question, policy: ReusePolicy, answer_ids: Sequence[int] = ()
) -> Tensor:
    """What follows the prompt, and each of `answer_ids`: `(1 + ids, vocabulary)` float64."""
    logits = engine.logits(question.question, question.chunks, policy=policy, answer_ids=answer_ids)
    return logits[-1 - len(answer_ids) :].double().log_softmax(-1)


def divergences(expected: Tensor, found: Tensor) -> Tensor:
    """Kullback-Leibler divergences from `expected`, in nats: `(...,)` of `(..., vocabulary)`."""
    terms = expected.exp() * (expected - found)
    # What is impossible adds nothing; a NaN of the model stays one.
    return terms.masked_fill(expected == -math.inf, 0.0).sum(-1)


def _alone(cell: Cell, question: Question, place: Workplace) -> dict[str, float]:
    answer = place.reader.generate(
        question.question,
        question.chunks,
        policy=cell.policy,
        scores=question.scores or None,
        max_new_tokens=1,
    )
    return {name: getattr(answer.metrics, name) for name in _TIMES}


def _answers(
    task: Task, cell: Cell, left: Sequence[Asked], place: Workplace, first: _FirstTokens | None
) -> list[Answer]:
    begun = _Begun()
    questions = [as_asked(cell, item.question) for item in left]
    answers = place.reader.generate_batch(
        [(one.question, one.chunks, (), one.scores or None) for one in questions],
        policy=cell.policy,
        max_new_tokens=task.max_new_tokens,
        logits_processor=None if first is None else [begun],
    )
    if first is not None and begun.scores is not None:
        first.note(cell, left, begun.scores)
    return answers


def _unused_tokens(place: Workplace, question: Question, answer: Answer) -> int:
    """Tokens of the documents that a policy left out."""
    if not answer.metrics.unused_chunks:
        return 0
    used = answer.metrics.answered_from
    texts = [text for number, text in enumerate(question.chunks) if number not in used]
    return sum(map(len, place.reader.tokenize(question.question, texts).chunks))


def _record(
    task: Task,
    cell: Cell,
    one: Asked,
    answer: Answer,
    unused_tokens: int,
    times: Mapping[str, float] | None,
    divergence: float | None,
) -> Record:
    metrics, text = answer.metrics, answer.text.strip()
    used_tokens = metrics.reused_tokens + metrics.prefilled_tokens + metrics.fresh_tokens
    chunk_tokens = used_tokens + unused_tokens
    again = metrics.recomputed_tokens + metrics.fresh_tokens
    return Record(
        place=cell.place(task.name, one.question.id),
        digest=one.digest,
        cluster=one.cluster,
        scores=task.score(text, one.question),
        answer=text,
        chunk_tokens=chunk_tokens,
        reused_tokens=metrics.reused_tokens,
        recomputed_tokens=chunk_tokens if cell.is_baseline else again,
        generated_tokens=metrics.generated_tokens,
        times=times,
        divergence=divergence,
    )


@dataclass(frozen=True)
class Record:
    """One question answered in one way.

    Attributes:
        place: Which question, and how.
        digest: Of question, documents and right answers: another one is another question.
        cluster: The same for questions over the same documents.
        scores: By name of the metric, each from 0 to 1.
        answer: The answer, without white space around it.
        chunk_tokens: Tokens of the documents, also of those that a policy left out.
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
        closed: Label of the questions without documents, None if they were not asked.
    """

    rows: tuple[Record, ...]
    metrics: Mapping[str, str] = field(default_factory=dict)
    policies: Mapping[str, str] = field(default_factory=dict)
    baseline: str | None = None
    closed: str | None = None


class RecordFile:
    """Records on disk, appended as they come; in memory only, without a path.

    One JSON object a line: notes (what the answers depend on) and records, in the order in which
    they were made.  A run that was cut short is continued by running it again; a run that differs
    in what a note says is refused, because its answers could not be told from the others.
    """

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
        end = content.rfind(b"\n") + 1
        number = 0
        try:
            for line in content[:end].split(b"\n")[:-1]:
                number += 1
                self._keep(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidInputError(
                f"line {number} of {path} is no record of an evaluation; name another file"
            ) from error
        if end < len(content):  # a run was killed while it wrote
            with path.open("r+b") as file:
                file.truncate(end)

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
        record = self._records.get(place)
        if record is not None and record.digest != digest:
            raise InvalidInputError(
                f"{self._path} holds answers to other questions of {place.task} (seed, sizes or "
                "data have changed); name another file or delete it"
            )
        return record

    def append(self, records: Iterable[Record]) -> None:
        """Keep new records, and write them before returning."""
        new = list(records)
        self._records.update((record.place, record) for record in new)
        self._write([record.to_line() for record in new])

    def _write(self, lines: list[str]) -> None:
        if self._path is not None and lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
