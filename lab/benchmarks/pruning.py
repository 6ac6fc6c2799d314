"""What pruning chunks costs in answers, and what it saves in bytes and time: docs/pruning.md.

    python -m benchmarks.pruning --data ../shared/data --work pruning.work
    python -m benchmarks.pruning_page

SmolLM2 on rows of public question sets and the packaged reader on questions of its generator, one
at a time, over chunks of every press and share, as the model computes them and in 8 bits: how much
the right answer surprises the model, its score over some forms, and the time to its first token
with the chunks in memory.  A row's chunks are prefilled once and scored by all presses in that
pass, which gives the chunks that an engine of each press would store (`tests/
test_benchmark_pruning.py`).  Answers are kept in `--work`, without any text, as they come: a run
goes on where it stopped, and `--minutes` ends it after a row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.machine import commit, described, load
from kvcache_rag import MemoryStore
from kvcache_rag.codecs import Int8, Native
from kvcache_rag.engine import Engine, like
from kvcache_rag.integration.engine import EngineSettings
from kvcache_rag.models.pressing import pruned, scored
from kvcache_rag.policies import Reuse
from kvcache_rag.presses import PRESSES, Press, press_by_name
from kvcache_rag_lab.evaluation.tasks import task_by_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.prefill import Prefiller
    from kvcache_rag_lab.scoring.question import Question, Task

WHOLE: Final = "whole"
SHARES: Final = (0.75, 0.5, 0.25)
INT8_SHARES: Final = (0.5,)
READER_TASKS: Final = ("reader_single", "reader_multi_value", "reader_noise_80")
SETS: Final = ("squad", "hotpotqa")
TOKENS: Final = 16  # of an answer
ROOM: Final = 256 << 20  # bytes of the chunks of one row and form

RESULTS: Final = Path(__file__).parent / "results" / "pruning.json"


@dataclass(frozen=True)
class Form:
    """A form in which a row's chunks are stored.

    Attributes:
        press: Name of the press and the share that it keeps, "" for whole chunks.
        codec: "native" or "int8".
    """

    press: str = ""
    codec: str = "native"

    @property
    def label(self) -> str:
        """Its name in the results."""
        return f"{self.press or WHOLE} {self.codec}"


def forms() -> list[Form]:
    """Everything that is asked over."""
    names = [f"{press}:{share}" for press in PRESSES for share in SHARES]
    halves = [f"{press}:{share}" for press in PRESSES for share in INT8_SHARES]
    return [
        *(Form(name) for name in ("", *names)),
        *(Form(name, "int8") for name in ("", *halves)),
    ]


def engine_of(base: Engine, form: Form, instruction: str) -> Engine:
    """An engine of the model whose chunks are of a form."""
    template = replace(base.template, system=instruction) if instruction else base.template
    store = MemoryStore(ROOM, codec=Int8() if form.codec == "int8" else Native())
    press = press_by_name(form.press) if form.press else None
    return like(base, store=store, template=template, press=press, cost_aware=False)


def fill(engines: dict[Form, Engine], texts: Sequence[str]) -> None:
    """Store chunks in every form, prefilled once."""
    first = next(iter(engines.values()))
    ids = first.tokenize("?", texts).chunks
    presses: dict[str, Press] = {
        form.press: press_by_name(form.press) for form in engines if form.press
    }
    with torch.inference_mode():
        prefiller = prefiller_of(first)
        for one in dict.fromkeys(ids):  # alone, so that no batch rounds otherwise
            (chunk,), places = scored(
                prefiller.model, prefiller.prefix(), [one], [*presses.values()]
            )
            kept = dict(zip(presses, (found for (found,) in places), strict=True))
            for form, engine in engines.items():
                mine = chunk
                if form.press:
                    mine = pruned(chunk, kept[form.press], presses[form.press].keep)
                own = prefiller_of(engine)
                own.store.put(own.key(one), own.stored_form(mine))


def prefiller_of(engine: Engine) -> Prefiller:
    """What an engine computes chunks by."""
    return engine._capturing  # no public name gives the form in which it stores chunks


def stored_bytes(engine: Engine, texts: Sequence[str]) -> int:
    """Bytes of chunks as the engine's store keeps them, keys and values."""
    prefiller = prefiller_of(engine)
    codec = prefiller.store.codec
    return sum(codec.nbytes(prefiller.layout, key.tokens) for key in engine.keys(texts))


@dataclass(frozen=True)
class Asking:
    """How rows of a task are asked.

    Attributes:
        task: The task.
        engines: Per form what answers.
        generated: Forms whose answers are generated; of the others the first token is.
        tokens: Of a generated answer at most.
    """

    task: Task
    engines: dict[Form, Engine]
    generated: frozenset[Form]
    tokens: int

    def row(self, question: Question, turn: int) -> dict[str, Any]:
        """Ask one question in every form, in an order that turns from row to row."""
        texts = list(dict.fromkeys(question.chunks))
        fill(self.engines, texts)
        order = [*self.engines]
        order = order[turn % len(order) :] + order[: turn % len(order)]
        found = {form.label: self.form(form, question) for form in order}
        for engine in self.engines.values():
            for key in engine.keys(texts):
                engine.store.delete(key)
        return found

    def form(self, form: Form, question: Question) -> dict[str, Any]:
        """One question over chunks that lie in memory."""
        engine, is_generated = self.engines[form], form in self.generated
        answer = engine.generate(
            question.question,
            question.chunks,
            policy=Reuse(),
            max_new_tokens=min(self.tokens, self.task.max_new_tokens) if is_generated else 1,
        )
        if answer.metrics.misses:
            raise RuntimeError(f"{form.label} lost a chunk that was stored")
        nats, first = expected(engine, question)
        return {
            "scores": self.task.measure(answer.text, question) if is_generated else None,
            "first": first,
            "nats": nats,
            "ttft": round(answer.metrics.ttft, 5),
            "bytes": stored_bytes(engine, list(dict.fromkeys(question.chunks))),
            "tokens": answer.metrics.reused_tokens,
            "rotation": answer.metrics.rotation,
        }


def expected(engine: Engine, question: Question) -> tuple[float, int]:
    """How much the right answer surprises the model, in nats per token, and its own first token."""
    ids = engine.brought_ids(question.answers[0])
    logits = engine.logits(question.question, question.chunks, policy=Reuse(), answer_ids=ids)
    said = logits[-len(ids) - 1 : -1]  # (answer tokens, vocabulary), each behind those before it
    chosen = said.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
    return round(-float(chosen.mean()), 5), int(said[0].argmax())


def ask_all(options: argparse.Namespace, name: str, tasks: Sequence[Task], until: float) -> None:
    """Ask what is missing of some tasks, a row of each in turns."""
    base = EngineSettings(name, adapter="none", dtype=options.dtype, device="cpu").open()
    every = forms()
    native = frozenset(form for form in every if form.codec == "native")
    half = frozenset(form for form in native if not form.press.endswith("0.75"))
    file = options.work / f"{name}.jsonl"
    known = {(row["task"], row["id"]) for row in rows_of(file)}
    for task in tasks:
        engines = {form: engine_of(base, form, task.instruction) for form in every}
        asking = Asking(task, engines, native if name == "tiny" else half, TOKENS)
        for turn, question in enumerate(task.questions(options.n)):
            if (task.name, question.id) in known or time.monotonic() > until:
                continue
            found = asking.row(question, turn)
            row = {"task": task.name, "id": question.id, "load": load(), "found": found}
            with file.open("a", encoding="utf-8") as kept:
                kept.write(json.dumps(row) + "\n")
            print(f"{name}: {task.name} {turn + 1}", flush=True)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """What was answered so far."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def figures(rows: Sequence[dict[str, Any]], metrics: Sequence[str]) -> dict[str, Any]:
    """What the page is made of: per form the figures of every row, in the order of the rows.

    Args:
        rows: Of one task.
        metrics: Names of its scores.
    """
    forms_found = [row["found"] for row in rows]
    return {
        "metrics": [*metrics],
        "rows": len(rows),
        "forms": {
            label: {
                "scores": [found[label]["scores"] for found in forms_found]
                if forms_found[0][label]["scores"]
                else None,
                "nats": [found[label]["nats"] for found in forms_found],
                "first": sum(
                    found[label]["first"] == found[Form().label]["first"] for found in forms_found
                ),
                "ttft_ms": [round(1000 * found[label]["ttft"], 2) for found in forms_found],
                "bytes": sum(found[label]["bytes"] for found in forms_found),
                "rotation": sorted({found[label]["rotation"] for found in forms_found}),
            }
            for label in forms_found[0]
        },
        "tokens": sum(found[Form().label]["tokens"] for found in forms_found),
        "load": [min(row["load"] for row in rows), max(row["load"] for row in rows)],
    }


def main(words: Sequence[str] | None = None) -> int:
    """Ask, and write the results."""
    options = _options(words)
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    before, until = load(), time.monotonic() + 60 * options.minutes
    tasks = {
        "smollm2": [task_by_name(name, data=options.data).in_order() for name in options.sets],
        "tiny": [task_by_name(name, documents=8) for name in READER_TASKS],
    }
    for model in options.models:
        ask_all(options, model, tasks[model], until)
    now = datetime.datetime.now(tz=datetime.timezone.utc)
    about = {
        **described("cpu", options.threads),
        "commit": commit(),
        "ended": now.isoformat(timespec="minutes"),
        "load": [before, load()],
    }
    models: dict[str, dict[str, Any]] = {}
    for model, asked in tasks.items():
        rows = rows_of(options.work / f"{model}.jsonl")
        by_task = {task: [row for row in rows if row["task"] == task.name] for task in asked}
        models[model] = {
            task.name: figures(mine, task.metrics) for task, mine in by_task.items() if mine
        }
    text = json.dumps({"about": about, "answer_tokens": TOKENS, "models": models})
    RESULTS.write_text(f"{text}\n", encoding="utf-8")
    return 0


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the question sets")
    parser.add_argument("--work", type=Path, required=True, help="where answers are kept")
    parser.add_argument("--models", nargs="*", default=["smollm2", "tiny"])
    parser.add_argument("--sets", nargs="*", default=[*SETS])
    parser.add_argument("--n", type=int, default=100, help="rows of each set")
    parser.add_argument("--minutes", type=float, default=40, help="after which no row is begun")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
