"""What a model's own reading says of documents: how it ranks them, and whether any says it.

    python -m benchmarks.reading --model MODEL.gguf --name qwen05 --data DATA --work reading.work
    python -m benchmarks.reading --name qwen05 --data DATA --work reading.work --table

The first reads every row (`Engine.read`), one line a row in WORK/NAME.jsonl, and goes on where it
was; with `--pairs` also the question over the best document and each other one, stitched as they
are.  The second prints, without a model:

- ranks: how often a needed document stands first, and all needed ones among the best two and three,
  with nDCG@10, by the retriever's scores, by what policies rank by (scores and words), by reading
  alone, and by both; also without scores
- says none: whether questions that a document answers are told from those that none answers, as the
  area under the curve (AUROC): rows of SQuAD, Natural Questions, the two-hop sets and RGB without
  their relevant documents, and notes of a household in two languages (`benchmarks.household`)

Rows are split in halves and documents put in order as by `benchmarks.answers`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.answers import EMBEDDING, RETRIEVERS, SETS, Retriever, retrieved
from benchmarks.household import LANGUAGES
from benchmarks.render import markdown
from kvcache_rag import Engine
from kvcache_rag.errors import KVCacheRagError
from kvcache_rag.policies.bestread import with_reading
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag.progress import progress_bar
from kvcache_rag_lab.scoring.ask import Workplaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcache_rag_lab.scoring.question import Question

TWO: Final = ("hotpotqa", "2wiki", "musique")
RGB: Final = ("rgb_en", "rgb_zh")
Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Read what is missing, or print tables."""
    options = _options(arguments)
    try:
        if options.table:
            for line in tables(options):
                print(line)
        else:
            read(options)
    except (KVCacheRagError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reading", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", help="to read with")
    parser.add_argument("--adapter", default="none")
    parser.add_argument("--name", required=True, help="of the model, in files")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=[*SETS, *RGB])
    parser.add_argument("--half", choices=("first", "second", "all"), default="first")
    parser.add_argument("--rows", type=int, help="of each set (default: all)")
    parser.add_argument("--retriever", choices=RETRIEVERS, default=EMBEDDING)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    options.shard, options.documents = (0, 1), None
    if not options.table and not options.model:
        parser.error("--model is needed to read with")
    return options


# ---------------------------------------------------------------------------- reading
def read(options: argparse.Namespace) -> None:
    """Read every row that is not there yet."""
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    engine = Engine.from_pretrained(options.model, adapter=options.adapter, prompt_memory=0)
    file = options.work / f"{options.name}.jsonl"
    known = {(one["set"], one["id"]) for one in _records(file)}
    todo = [
        *_of_households(engine),
        *_of_sets(engine, options),
    ]
    todo = [one for one in todo if (one[0], one[1]) not in known]
    with (
        file.open("a", encoding="utf-8") as out,
        progress_bar(len(todo), "reading", "row", show=True) as bar,
    ):
        for name, id_, make in todo:
            record = {"set": name, "id": id_, **make(pairs=options.pairs and name in SETS)}
            out.write(json.dumps(record) + "\n")
            out.flush()
            bar.update(1)


_Todo = tuple[str, str, "Callable[..., Record]"]


def _of_households(engine: Engine) -> Iterator[_Todo]:
    for language, book in LANGUAGES.items():
        for number, (question, relevant) in enumerate(book.asked):
            make = partial(record_of, engine, question, book.notes, (), relevant)
            yield f"household {language}", str(number), make


def _of_sets(engine: Engine, options: argparse.Namespace) -> list[_Todo]:
    retriever = Retriever(options.work, options.retriever)
    places = Workplaces(engine, options.work, None, None)
    rows: list[list[_Todo]] = []
    for name in options.sets:
        task = retrieved(name, options, retriever)
        asked = places._engine(None, task.instruction)
        rows.append([(name, one.id, _maker(asked, one)) for one in task.questions()])
    # In turn, so that what was read so far is of all sets.
    longest = max(map(len, rows), default=0)
    return [each[at] for at in range(longest) for each in rows if at < len(each)]


def _maker(engine: Engine, row: Question) -> Callable[..., Record]:
    return partial(record_of, engine, row.question, row.chunks, row.scores, row.relevant)


def record_of(
    engine: Engine,
    question: str,
    chunks: Sequence[str],
    scores: Sequence[float],
    relevant: Sequence[int],
    *,
    pairs: bool = False,
) -> Record:
    """What reading says of one row."""
    reading = engine.read(question, chunks)
    found: Record = {
        "relevant": [*relevant],
        "scores": [*scores],
        "words": [*Retrieved(question, tuple(chunks), None).without_order],
        "ranked_by": [*Retrieved(question, tuple(chunks), scores or None).relevance],
        "likelihoods": reading.likelihoods,
        "without": reading.without,
        "question_tokens": reading.question_tokens,
        "read_tokens": reading.read_tokens,
    }
    if pairs:
        best = _order(reading.likelihoods)[0]
        found["pairs"] = _over(engine, question, chunks, best)
    engine.delete(engine.keys(list(chunks)))
    return found


def _over(engine: Engine, question: str, chunks: Sequence[str], best: int) -> tuple[float, ...]:
    """Likelihoods over the best chunk and each other one; over it alone at its own place."""
    with engine._turn() as bound, torch.inference_mode():
        wanted = bound.to_read(question, list(chunks))
        contexts = [
            (wanted.chunks[best], chunk) if number != best else (chunk,)
            for number, chunk in enumerate(wanted.chunks)
        ]
        return bound.reader.likelihoods(contexts, wanted.asked)


def _records(file: Path) -> list[Record]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------------------- tables
def tables(options: argparse.Namespace) -> Iterator[str]:
    """Both tables, as Markdown."""
    rows = _records(options.work / f"{options.name}.jsonl")
    ranked = [row for row in rows if row["relevant"] and row["set"] in (*SETS, *RGB)]
    by_set = {one["set"]: [row for row in ranked if row["set"] == one["set"]] for one in ranked}
    lines = [line for name, mine in by_set.items() for line in _ranks(name, mine)]
    yield markdown(["set", "rows", "by", "first", "all in 2", "all in 3", "nDCG@10"], lines)
    yield ""
    head = ["answered against", "rows", "nats", "per token", "share", "scores"]
    yield markdown(head, _none_rows(rows))


def _ways(row: Record) -> dict[str, Sequence[float]]:
    """What documents may be ranked by."""
    ways: dict[str, Sequence[float]] = {}
    if row["scores"]:
        ways["scores"] = row["scores"]
        ways["scores, words"] = row["ranked_by"]
    ways["words"] = row["words"]
    ways["reading"] = row["likelihoods"]
    if row["scores"]:
        ways["reading, scores, words"] = with_reading(
            row["ranked_by"], row["likelihoods"], is_scored=True
        )
    ways["reading, words"] = with_reading(row["words"], row["likelihoods"], is_scored=False)
    return ways


def _ranks(name: str, rows: Sequence[Record]) -> Iterator[list[str]]:
    for way in _ways(rows[0]):
        orders = [(_order(_ways(row)[way]), {*row["relevant"]}) for row in rows]
        yield [
            name,
            str(len(rows)),
            way,
            _percent(order[0] in needed for order, needed in orders),
            _percent(len(needed & {*order[:2]}) == min(2, len(needed)) for order, needed in orders),
            _percent(len(needed & {*order[:3]}) == min(3, len(needed)) for order, needed in orders),
            f"{mean(gain(order, needed) for order, needed in orders):.3f}",
        ]


def _order(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda place: -values[place])


def _percent(values: Iterator[bool]) -> str:
    return f"{100 * mean(values):.0f}"


def gain(order: Sequence[int], needed: set[int], most: int = 10) -> float:
    """NDCG of the first places: each needed document counts 1 over the logarithm of its place."""
    gained = [1 / math.log2(place + 2) for place, one in enumerate(order[:most]) if one in needed]
    whole = sum(1 / math.log2(place + 2) for place in range(min(most, len(needed))))
    return sum(gained) / whole if whole else 0.0


_NATS: Final[dict[str, Callable[[float, Record], float]]] = {
    "nats": lambda best, row: best - row["without"],
    "per token": lambda best, row: (best - row["without"]) / row["question_tokens"],
    "share": lambda best, row: (best - row["without"]) / -row["without"],
}


def _none_rows(rows: Sequence[Record]) -> Iterator[list[str]]:
    for language, book in LANGUAGES.items():
        mine = [row for row in rows if row["set"] == f"household {language}"]
        if len(mine) < len(book.asked):
            continue
        answered, far, near = ([mine[number] for number in numbers] for numbers in book.numbers)
        for what, others in (("other things", far), ("the same things", near)):
            yield _line(f"household {language}, {what}", answered, others)
    for names in (("squad", "nq"), TWO, ("rgb_en",), ("rgb_zh",)):
        mine = [row for row in rows if row["set"] in names and row["relevant"]]
        without = [_without_relevant(row) for row in mine]
        pairs = [(row, cut) for row, cut in zip(mine, without, strict=True) if cut["likelihoods"]]
        if pairs:
            kept, cut = zip(*pairs, strict=True)
            yield _line(f"{', '.join(names)} without their documents", kept, cut)


def _without_relevant(row: Record) -> Record:
    left = [place for place in range(len(row["likelihoods"])) if place not in row["relevant"]]
    names = [name for name in ("likelihoods", "scores") if row[name]]
    return {**row, **{name: [row[name][place] for place in left] for name in names}}


def _line(what: str, answered: Sequence[Record], others: Sequence[Record]) -> list[str]:
    both = (answered, others)
    cells = [what, f"{len(answered)}, {len(others)}"]
    for measure in _NATS.values():
        values = [[measure(max(row["likelihoods"]), row) for row in rows] for rows in both]
        cells.append(f"{auroc(*values):.3f}")
    if not all(row["scores"] for row in (*answered, *others)):
        return [*cells, ""]
    scores = [[max(row["scores"]) for row in rows] for rows in both]
    return [*cells, f"{auroc(*scores):.3f}"]


def auroc(higher: Sequence[float], lower: Sequence[float]) -> float:
    """How often one of the first is above one of the second; equal ones count half."""
    return mean((one > other) + (one == other) / 2 for one in higher for other in lower)


if __name__ == "__main__":
    sys.exit(main())
