"""Shared RAG-DCache's questions, in one process: passes, documents, tiers, answers, sizes.

    python -m benchmarks.shared_cache --data ../shared/data --work shared-cache.work
    python -m benchmarks.serving_report

SmolLM2 with its adapter `block`, questions of `squad_queries.jsonl` over the paragraphs of
`squad_corpus.jsonl`, retrieved by BM25 (arXiv 2504.11765, sections V and VI).

- passes    the same questions again and again, one or two documents each, with and without memory
            in front of the folder, under every configuration; k = 2 stitched and, as in the paper,
            with the pair computed together
- accuracy  0.5 F1 + 0.5 exact match by the number of documents, cached and by full prefill
- sizes     bytes of the folder of chunks beside those of Chroma's, for the same paragraphs

Configuration B prefetches with a second copy of the model on the CPU; A does it on a GPU of its
own and is measured where there is one besides the model's.  All questions of a pass wait from its
beginning, so prefetching has the whole queue before it.  What is measured is kept in the results
file cell by cell: a run goes on where one was stopped.  Only figures are kept, no text of a row.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from benchmarks.locality_retrieval import Data, bm25, read, read_rows
from benchmarks.machine import commit, described, load
from kvcache_rag import DiskStore, MemoryStore, TieredStore
from kvcache_rag.codecs import CODECS
from kvcache_rag.engine import Engine, like
from kvcache_rag.errors import KVCacheRagError
from kvcache_rag.integration.engine import EngineSettings
from kvcache_rag.policies import Combination, FullRecompute, Reuse
from kvcache_rag_lab.evaluation.tasks import task_by_name
from kvcache_rag_lab.scoring.metrics import best, exact_match, f1_longbench
from kvcache_rag_lab.scoring.statistics import mean_interval, paired_bootstrap
from kvcache_rag_server.prefetch import Prefetcher, twin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.codecs import Codec
    from kvcache_rag.policies.base import ReusePolicy
    from kvcache_rag.stores import ChunkStore

MODEL: Final = "smollm2"
ADAPTER: Final = "block"
NO_CACHE, CACHE, B, A = "no cache", "cache", "configuration B", "configuration A"
TOGETHER: Final = "together"
MEMORY: Final = 1 << 30  # bytes of the memory tier
SEED: Final = 0
ANSWER, PASS_ANSWER = 32, 8  # tokens


@dataclass(frozen=True)
class Cell:
    """One arrangement that is asked in passes.

    Attributes:
        arm: `NO_CACHE`, `CACHE`, `B` or `A`.
        top: Documents per question.
        way: "stitched", or "together" for the pair computed together.
        memory: Whether memory stands in front of the folder.
    """

    arm: str
    top: int
    way: str
    memory: bool

    @property
    def name(self) -> str:
        return f"{self.arm}, {self.top}, {self.way}, {'memory' if self.memory else 'folder'}"

    @property
    def policy(self) -> ReusePolicy:
        if self.arm == NO_CACHE:
            return FullRecompute()
        return Combination() if self.way == TOGETHER else Reuse()


def cells(tops: Sequence[int], arms: Sequence[str]) -> list[Cell]:
    """Every arrangement there is; without a cache neither way nor tier makes a difference."""
    found = [Cell(NO_CACHE, top, "stitched", memory=False) for top in tops]
    for top in tops:
        for way in ("stitched", TOGETHER) if top > 1 else ("stitched",):
            for memory in (False, True):
                found += [Cell(arm, top, way, memory) for arm in arms]
    return found


class Questions:
    """Questions, their right answers, and what BM25 retrieves for them."""

    def __init__(self, folder: Path, count: int, most: int) -> None:
        """Draw `count` questions, and retrieve `most` documents for each.

        Raises:
            ValueError: If a file is missing or not of its form.
        """
        corpus, queries = folder / "squad_corpus.jsonl", folder / "squad_queries.jsonl"
        data = read(corpus, queries)
        rows = read_rows(queries, ("question", "answers"))
        drawn = np.random.default_rng(SEED).permutation(len(rows))[:count]
        self.documents = data.documents
        self.texts = [data.questions[index] for index in drawn]
        self.answers = [rows[index]["answers"] for index in drawn]
        self.gold = data.gold[drawn]
        started = time.perf_counter()
        self.found = bm25(Data(data.documents, self.texts, self.gold), most)
        self.seconds = (time.perf_counter() - started) / count

    def retrieved(self, question: int, top: int) -> list[str]:
        """The texts of its best documents, best first."""
        return [self.documents[index] for index in self.found[question][:top].tolist()]

    def right(self, top: int) -> float:
        """Share of the questions whose own document is among the first `top`."""
        pairs = zip(self.gold.tolist(), self.found, strict=True)
        return fmean(float(own in found[:top]) for own, found in pairs)


# ---------------------------------------------------------------------------------- passes


def store_of(folder: Path, *, memory: bool) -> ChunkStore:
    """A folder, with memory in front of it or not."""
    disk = DiskStore(folder, durable=False)
    return TieredStore(MemoryStore(MEMORY), disk) if memory else disk


def passes_of(
    cell: Cell, engine: Engine, questions: Questions, count: int, passes: int, folder: Path
) -> list[dict[str, Any]]:
    """Ask the first `count` questions `passes` times, beginning with an empty folder.

    Args:
        cell: How.
        engine: With the model; its stores are not used.
        questions: What is asked.
        count: Questions of a pass.
        passes: How often.
        folder: For the chunks; it is removed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    chunks = store_of(folder / "chunks", memory=cell.memory)
    pairs = store_of(folder / "pairs", memory=cell.memory)
    own = like(engine, store=chunks, combinations=pairs, policy=cell.policy)
    ahead = (
        Prefetcher(twin(own, "cpu" if cell.arm == B else "cuda:1")) if cell.arm in (A, B) else None
    )
    try:
        return [
            {"pass": number + 1, **_one_pass(own, ahead, questions, count, cell)}
            for number in range(passes)
        ]
    finally:
        if ahead is not None:
            ahead.close()
        chunks.close()
        pairs.close()
        shutil.rmtree(folder, ignore_errors=True)


class _Queue:
    """When the question at a place of the queue will have its turn."""

    def __init__(self) -> None:
        self.begun, self.seconds = 0, 0.0

    def turn_in(self, place: int) -> float:
        """Seconds, by the mean of the answers so far."""
        return (place - self.begun) * self.seconds


def _one_pass(
    engine: Engine, ahead: Prefetcher | None, questions: Questions, count: int, cell: Cell
) -> dict[str, Any]:
    contexts = [questions.retrieved(number, cell.top) for number in range(count)]
    queue = _Queue()
    wanted = [
        None
        if ahead is None
        else ahead.want(context, policy=cell.policy, turn_in=partial(queue.turn_in, number))
        for number, context in enumerate(contexts)
    ]
    answers, waited = [], []
    started, busy = time.perf_counter(), time.process_time()
    for number, context in enumerate(contexts):
        queue.begun = number
        prefetch = wanted[number]
        if ahead is not None and prefetch is not None:
            ahead.turn(prefetch)
        answer = engine.generate(questions.texts[number], context, max_new_tokens=PASS_ANSWER)
        answers.append(answer.metrics)
        waited.append(time.perf_counter() - started)
        queue.seconds = waited[-1] / (number + 1)
    busy = time.process_time() - busy
    hits: dict[str, int] = {}
    for metrics in answers:
        for tier, found in metrics.hits.items():
            hits[tier] = hits.get(tier, 0) + found
    return {
        "ttft": median(metrics.ttft for metrics in answers),
        "load": median(metrics.load for metrics in answers),
        "latency": fmean(waited),
        "throughput": count / waited[-1],
        "cpu_seconds": busy / count,
        "hits": hits,
        "misses": sum(metrics.misses for metrics in answers),
        "computed_tokens": fmean(metrics.computed_tokens for metrics in answers),
        "prompt_tokens": fmean(metrics.prompt_tokens for metrics in answers),
    }


# ---------------------------------------------------------------------------------- accuracy


def score(answer: str, references: Sequence[str]) -> float:
    """Half F1, half exact match, of the first line that says anything."""
    said = next((line.strip() for line in answer.splitlines() if line.strip()), "")
    return 0.5 * best(f1_longbench, said, references) + 0.5 * best(exact_match, said, references)


def accuracy(engine: Engine, questions: Questions, top: int, policy: ReusePolicy) -> list[float]:
    """The score of every question over its `top` best documents."""
    return [
        score(
            engine.generate(
                text,
                questions.retrieved(number, top),
                max_new_tokens=ANSWER,
                policy=policy,
            ).text,
            questions.answers[number],
        )
        for number, text in enumerate(questions.texts)
    ]


# ---------------------------------------------------------------------------------- sizes


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def chunk_bytes(engine: Engine, texts: Sequence[str], codec: Codec, folder: Path) -> int:
    """Bytes of a folder of these chunks, all that belongs to them included."""
    shutil.rmtree(folder, ignore_errors=True)
    like(engine, store=DiskStore(folder, codec=codec, durable=False)).add(texts)
    taken = folder_bytes(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return taken


def chroma_bytes(texts: Sequence[str], folder: Path) -> int:
    """Bytes of Chroma's folder of these texts with MiniLM's vectors and a reference to a chunk."""
    import chromadb

    from llama_index.kvcache_rag.commands.corpus import embedding

    shutil.rmtree(folder, ignore_errors=True)
    client = chromadb.PersistentClient(str(folder))
    vectors: list[Sequence[float]] = [*embedding("minilm").get_text_embedding_batch([*texts])]
    client.create_collection("paragraphs").add(
        ids=[f"{number}" for number in range(len(texts))],
        documents=list(texts),
        embeddings=vectors,
        metadatas=[{"kv_key": f"{number:064x}"} for number in range(len(texts))],
    )
    del client
    taken = folder_bytes(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return taken


# ---------------------------------------------------------------------------------- the run


class Report:
    """The results file: every cell that was measured, by its name."""

    def __init__(self, file: Path, about: dict[str, Any]) -> None:
        """Go on with a file that holds the same questions; begin anew with others."""
        self.file = file
        values = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        is_same = values.get("questions") == about["questions"]
        self.values: dict[str, Any] = values if is_same else about
        self.values.setdefault("cells", {})

    def cell(self, name: str, measure: Callable[[], Any]) -> Any:
        """What a cell holds, measured and written now unless it was before."""
        known = self.values["cells"]
        if name not in known:
            known[name] = {"found": measure(), "load": load()}
            self.write()
            print(f"{name}: measured", flush=True)
        return known[name]["found"]

    def write(self) -> None:
        """Replace the file in one step."""
        aside = self.file.with_suffix(".new")
        aside.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        aside.replace(self.file)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, or what is left of it."""
    questions = Questions(options.data, options.questions, max(options.tops))
    instruction = task_by_name("squad", data=options.data).instruction
    settings = EngineSettings(MODEL, adapter=ADAPTER, device=options.device)
    engine = settings.open()
    engine = like(engine, template=replace(engine.template, system=instruction))
    device = next(engine.model.parameters()).device.type
    spare = torch.cuda.device_count() > 1 and device == "cuda"
    about = {
        "about": {**described(device, torch.get_num_threads()), "commit": commit()},
        "questions": {
            "drawn": options.questions,
            "documents": len(questions.documents),
            "asked_in_passes": options.asked,
            "passes": options.passes,
            "paragraphs_sized": options.paragraphs,
        },
    }
    report = Report(options.json, about)
    values = report.values
    values["retrieval_seconds"] = questions.seconds
    values["right"] = {f"{top}": questions.right(top) for top in options.tops}
    values["not_measured"] = {} if spare else {A: "it needs a second GPU, and there was none"}
    if "passes" in options.parts:
        arms = (CACHE, B, A) if spare else (CACHE, B)
        rows = values["rows"] = []
        for cell in cells((1, 2), arms):
            times = 1 if cell.arm == NO_CACHE else options.passes
            found = report.cell(
                cell.name,
                partial(
                    passes_of, cell, engine, questions, options.asked, times, options.work / "kv"
                ),
            )
            rows += [{**asdict(cell), **one} for one in found]
            report.write()
    if "accuracy" in options.parts:
        _accuracy(options, engine, questions, report)
    if "sizes" in options.parts:
        values["sizes"] = _sizes(options, engine, questions, report)
    report.write()
    return values


def _accuracy(
    options: argparse.Namespace, engine: Engine, questions: Questions, report: Report
) -> None:
    store = DiskStore(options.work / "answers", durable=False)
    own = like(engine, store=store)
    rows = report.values["accuracy"] = []
    for top in options.tops:
        scores = {
            name: report.cell(
                f"accuracy, {top}, {name}", partial(accuracy, own, questions, top, policy)
            )
            for name, policy in (("cached", Reuse()), ("full", FullRecompute()))
        }
        clusters = [f"{index}" for index in questions.gold.tolist()]
        rows.append(
            {
                "top": top,
                "right": questions.right(top),
                **{name: asdict(mean_interval(each, clusters)) for name, each in scores.items()},
                "cached_minus_full": asdict(
                    paired_bootstrap(scores["cached"], scores["full"], clusters)
                ),
            }
        )
        report.write()


def _sizes(
    options: argparse.Namespace, engine: Engine, questions: Questions, report: Report
) -> list[dict[str, Any]]:
    texts = questions.documents[: options.paragraphs]
    place = options.work / "sizes"
    tokens = sum(key.tokens for key in engine.keys(texts))
    chroma = report.cell("bytes of Chroma", partial(chroma_bytes, texts, place))
    rows: list[dict[str, Any]] = [
        {"what": "Chroma: vectors, texts, references", "bytes": chroma, "of_chroma": 1.0}
    ]
    for name, codec in CODECS.items():
        taken = report.cell(f"bytes of {name}", partial(chunk_bytes, engine, texts, codec(), place))
        rows.append({"what": f"chunks, {name}", "bytes": taken, "of_chroma": taken / chroma})
    for row in rows:
        row["bytes_per_paragraph"] = row["bytes"] / len(texts)
        row["bytes_per_token"] = row["bytes"] / tokens
    return rows


def main(given: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the results."""
    options = parse(given)
    options.work.mkdir(parents=True, exist_ok=True)
    try:
        measure(options)
    except (ValueError, KVCacheRagError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"wrote {options.json}; python -m benchmarks.serving_report writes the page")
    return 0


PARTS: Final = ("passes", "accuracy", "sizes")


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of the squad files")
    parser.add_argument("--work", type=Path, required=True, help="for chunks, removed at the end")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--questions", type=int, default=60, help="whose answers are scored")
    parser.add_argument("--asked", type=int, default=6, help="of them, the first, in passes")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--paragraphs", type=int, default=100, help="whose bytes are counted")
    parser.add_argument("--tops", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--device", default="cpu")
    results = Path(__file__).parent / "results"
    parser.add_argument("--json", type=Path, default=results / "shared_cache.json")
    parsed = parser.parse_args(given)
    counts = (parsed.questions, parsed.asked, parsed.passes, parsed.paragraphs, *parsed.tops)
    if min(counts) < 1 or parsed.asked > parsed.questions or max(parsed.tops) < 2:
        parser.error("counts must be at least 1, --asked at most --questions, a top at least 2")
    return parsed


if __name__ == "__main__":
    sys.exit(main())
