"""Right answers of the sides of `peers` whose answers are not those of a full prefill.

    python -m benchmarks.peers_answers --models smollm2 MODEL.gguf --data ../shared/data
    python -m benchmarks.peers_answers ... --rows 5 --json build/peers_answers.json
    python -m benchmarks.render peers_answers

The first rows of the first half of squad, 2wiki and nq, documents best first, as `answers` asks
them; greedy, 32 tokens.  A peer knows a question's documents in another order: KVBoost warmed with
it, llama.cpp holding it when it is asked with `--cache-reuse`.  Who computes everything has the
answers of a full prefill of its weights.

What `answers` found of ours for the same file is not asked again.  Answers are kept in the work
folder as they come, and a run goes on where it stopped.  The report says nothing of any text; the
shares of right answers are put beside the times of the committed `peers` report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.answers import TOKENS, Retriever, drawn
from benchmarks.answers_scores import FULL, Results
from benchmarks.common import RAW, described, processor_of, read, result_file, write
from benchmarks.peers import (
    Starter,
    add_arguments,
    answered,
    prepare,
    right_answers,
)
from benchmarks.peers_prompts import order_of
from benchmarks.peers_report import exact_side, with_right
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag.prompt.template import PromptTemplate
from kvcache_rag_lab.evaluation.tasks import task_by_name
from kvcache_rag_lab.scoring.ask import Asked
from kvcache_rag_lab.scoring.statistics import mean_interval, paired_bootstrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from benchmarks.peers import Journal, Model
    from kvcache_rag_lab.scoring.question import Task

SETS: Final = {"squad": 100, "2wiki": 50, "nq": 50}
"""Rows of each set."""
_OURS: Final = ("full", "reorder", "few-reorder")
KINDS: Final = {
    **dict.fromkeys(("ours-auto", "ours-int8", "ours-int4", "ours-llama"), _OURS),
    "llama-BF16": ("shift",),
    "llama-Q8_0": ("shift", "cold"),
    "llama-file": ("shift", "cold"),
    "kvboost": ("reorder",),
}
"""What is asked of each side."""
SIDES: Final = ("ours-auto", "kvboost", "llama-file")
# Of the reports of `answers`, whose answers a policy's are.
KNOWN: Final[dict[str, dict[str, tuple[tuple[str, str], ...]]]] = {
    "answers": {
        FULL: (("ours-auto", "full"),),
        "reuse": (("ours-auto", "reorder"),),
        "bestfew": (("ours-auto", "few-reorder"),),
    },
    "llamacpp_answers": {
        FULL: (("ours-llama", "full"), ("llama-file", "cold")),
        "reuse": (("ours-llama", "reorder"),),
        "bestfew": (("ours-llama", "few-reorder"),),
    },
}


@dataclass(frozen=True)
class Rows:
    """Rows of a set.

    Attributes:
        task: The set.
        asked: Its rows, documents best first.
    """

    task: Task
    asked: Sequence[Asked]


def rows_of(options: argparse.Namespace) -> list[Rows]:
    """The rows of all sets."""
    retriever = Retriever(options.work)
    found = []
    for name, count in SETS.items():
        task = task_by_name(name, data=options.data).in_order()
        few = argparse.Namespace(half="first", rows=min(count, options.rows), shard=(0, 1))
        found.append(Rows(task, [*map(Asked.from_question, drawn(task, few, retriever))]))
    return found


def known(sha256: str, sets: Iterable[Rows]) -> Iterator[dict[str, Any]]:
    """What the reports of `answers` have of a file, as records."""
    for report, labels in KNOWN.items():
        kept = read(result_file(report)).get(RAW, {}).values()
        for results in map(Results.from_values, kept):
            if results.about["identity"]["sha256"] != sha256 or not _is_plain(results):
                continue
            for rows in sets:
                for label, places in labels.items():
                    yield from _known(results, rows, label, places)


def _is_plain(results: Results) -> bool:
    """Whether it is about the model as it comes, asked in the form that is the default."""
    asked = all(FULL in rows.found for rows in results.sets.values())
    return asked and not results.about.get("form")


def _known(
    results: Results, rows: Rows, label: str, places: Sequence[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    found = results.sets.get(rows.task.name)
    if found is None:
        return
    columns = found.column(label, "right"), found.column(label, "wrong_document")
    values = dict(zip(found.rows, zip(*columns, strict=True), strict=True))
    for one in rows.asked:
        right, wrong = values.get(one.digest, (None, None))
        if right is not None:
            for side, kind in places:
                place = {"side": side, "kind": kind, "set": rows.task.name, "row": one.digest}
                yield {**place, "cluster": one.cluster, "right": right, "wrong": wrong}


def name_of(model: str, record: Mapping[str, Any]) -> str:
    """What a record is found by."""
    return "/".join((model, *(record[part] for part in ("side", "kind", "set", "row"))))


def prompt_of(renderer: PromptRenderer, asked: Asked) -> dict[str, Any]:
    """One row as text and as ids, and its documents in another order."""
    question, texts = asked.question.question, asked.question.chunks
    ids = renderer.tokenize(question, texts, ())
    other = renderer.tokenize(question, [texts[at] for at in order_of(len(texts), 1)], ())
    return {
        "texts": [*texts],
        "scores": asked.question.scores or None,
        "question": question,
        "prefix": [*ids.prefix],
        "context": [*ids.context],
        "query": [*ids.query],
        "before": [*other.context],
        "new": TOKENS,
    }


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """An answer up to where it ends; sides go on behind that."""
    special = set(tokenizer.all_special_ids)
    end = next((place for place, token in enumerate(tokens) if token in special), len(tokens))
    text: str = tokenizer.decode(tokens[:end])
    return text.strip()


def ask(
    starter: Starter, model: Model, sets: Sequence[Rows], sides: Sequence[str], threads: int
) -> None:
    """Ask the sides, one after the other, what is missing."""
    (instruction,) = {f"{rows.task.instruction}\n\n" for rows in sets}  # sides have one
    renderer = PromptRenderer(PromptTemplate(instruction), model.tokenizer)
    journal, done = starter.journal, starter.journal.done
    todo: dict[str, list[tuple[Rows, Asked, dict[str, str]]]] = defaultdict(list)
    for side, rows in product(sides, sets):
        for one, kind in product(rows.asked, KINDS[side]):
            place = {"side": side, "kind": kind, "set": rows.task.name, "row": one.digest}
            if name_of(model.name, place) not in done:
                todo[side].append((rows, one, place))
    for side, jobs in todo.items():
        started = starter.ready(side, model, threads, instruction)
        if started is None:
            continue
        with closing(started):
            for left, (rows, one, place) in zip(range(len(jobs), 0, -1), jobs, strict=True):
                found = answered(started, {**prompt_of(renderer, one), "kind": place["kind"]})
                record = {"name": name_of(model.name, place), "model": model.name, **place}
                record |= {
                    "cluster": one.cluster,
                    **_scored(rows.task, one, model.tokenizer, found),
                }
                journal.add({"record": record})
                said = record.get("error", record.get("right"))
                print(f"{left:>4} {record['name']} {said}", flush=True)


def _scored(task: Task, asked: Asked, tokenizer: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in found:
        return {"error": found["error"]}
    scores = task.score(text_of(tokenizer, found["tokens"]), asked.question)
    return {"right": scores["containment"], "wrong": scores.get("wrong_document")}


def report_of(facts: Mapping[str, Any], journal: Journal) -> dict[str, Any]:
    """Right answers by model, side and kind, beside full prefill's over the same rows."""
    answers: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = defaultdict(dict)
    failed: dict[str, int] = defaultdict(int)
    for one in journal.records:
        if "error" in one:
            failed[f"{one['model']} {one['side']} {one['kind']}: {one['error']}"] += 1
        else:
            answers[one["model"], one["side"], one["kind"]][one["set"] + one["row"]] = one
    table = []
    for (model, side, kind), found in answers.items():
        exact = answers.get((model, *exact_side(side)), {})
        table.append(
            {
                "model": model,
                "side": side,
                "kind": kind,
                "rows": len(found),
                "right": _share(found.values(), "right"),
                "from a wrong document": _share(found.values(), "wrong"),
                "against full": _apart(found, exact) if exact is not found else None,
            }
        )
    raw = [
        [one["model"], one["side"], one["kind"], one["set"], one["row"], one["right"], one["wrong"]]
        for found in answers.values()
        for one in found.values()
    ]
    return {
        "about": {"benchmark": "peers_answers", "tokens": TOKENS, **facts},
        "peers": journal.facts["peers"],
        "models": journal.facts["models"],
        "failures": dict(failed),
        "answers": table,
        RAW: {"columns": "model side kind set row right wrong", "answers": raw},
    }


def _share(records: Iterable[Mapping[str, Any]], part: str) -> dict[str, float] | None:
    told = [one for one in records if one[part] is not None]
    if not told:
        return None
    found = mean_interval([one[part] for one in told], [one["cluster"] for one in told])
    return {"value": found.value, "low": found.low, "high": found.high}


def _apart(
    found: Mapping[str, Mapping[str, Any]], exact: Mapping[str, Mapping[str, Any]]
) -> dict[str, float] | None:
    rows = [row for row in found if row in exact]
    if not rows:
        return None
    mine, full = ([of[row]["right"] for row in rows] for of in (found, exact))
    both = paired_bootstrap(mine, full, [found[row]["cluster"] for row in rows])
    return {"value": both.difference, "low": both.low, "high": both.high}


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask what is missing and write the reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add_arguments(parser, SIDES, tuple(KINDS))
    parser.add_argument("--data", type=Path, required=True, help="folder of NAME.jsonl")
    parser.add_argument("--rows", type=int, default=max(SETS.values()), help="of a set at most")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, default=result_file("peers_answers"), metavar="FILE")
    options = parser.parse_args(arguments)
    if not options.data.is_dir():
        parser.error(f"there is no folder {options.data}; name that of the data sets")
    try:
        starter = prepare(options, "answers.jsonl", {"tokens": TOKENS}, fresh=False)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    sets, journal = rows_of(options), starter.journal
    about = described("cpu", options.threads)
    facts = {
        "machine": processor_of(about["machine"]),
        "versions": about["versions"],
        "date": about["date"],
    }
    for model in options.models:
        for record in known(model.facts()["sha256"], sets):
            name = name_of(model.name, record)
            if name not in journal.done:
                journal.add({"record": {"name": name, "model": model.name, **record}})
        ask(starter, model, sets, options.sides, options.threads)
        write(options.json, report_of(facts, journal))
    times = result_file("peers")
    if options.json == result_file("peers_answers") and "table" in read(times):
        write(times, with_right(read(times), right_answers()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
