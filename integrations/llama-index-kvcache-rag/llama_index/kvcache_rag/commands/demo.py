"""`kvcache-rag demo`: a whole RAG app in a minute, on a small model that comes with the package.

Documents of made-up facts are embedded, stored and prefilled; then questions are answered from the
stored caches and, over the same chunks in the same run, by full prefill.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.kvcache_rag.commands.corpus import Settings, embedding, open_store
from llama_index.kvcache_rag.commands.report import (
    chunk_files,
    milliseconds,
    plural,
    size,
    stored_chunks,
)

if TYPE_CHECKING:
    import argparse

    from kvcache_rag.reader import ReaderExample, ReaderQuestion
    from llama_index.kvcache_rag import KVCacheLLM, KVCacheQueryEngine, KVCacheVectorStore

HELP = "ask a small model about made-up documents, from stored caches and by full prefill"
MODEL = "tiny"
DOCUMENTS, FACTS, QUESTIONS = 40, 4, 24
ENOUGH = 0.8


@dataclass(frozen=True)
class Outcome:
    """One question, answered both ways over the same chunks.

    Attributes:
        question: As it was asked.
        answer: From stored caches.
        expected: The right answer.
        is_right: Whether they agree.
        is_found: Whether the document that has the answer was retrieved.
        misses: Chunks whose cache was not stored.
        stitched: Seconds to the first token from stored caches.
        full: Seconds to the first token by full prefill.
        reused_tokens: Tokens that were not computed.
    """

    question: str
    answer: str
    expected: str
    is_right: bool
    is_found: bool
    misses: int
    stitched: float
    full: float
    reused_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is asked and where it is kept."""
    parser.add_argument("--seed", type=int, default=1, help="decides the documents (default: 1)")
    parser.add_argument(
        "--dir", default=".kvcache-rag-demo", help="where to keep everything, to be used again"
    )
    parser.add_argument("--top-k", type=int, default=8, help="chunks per question (default: 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Ingest, ask, compare; 1 if too few answers are right or one was not wholly from the store."""
    from kvcache_rag import InvalidInputError
    from kvcache_rag.reader import make_corpus

    if arguments.top_k < 1:
        raise InvalidInputError("--top-k must be at least 1")
    root = Path(arguments.dir)
    settings = Settings(
        model=MODEL,
        kv=str(root / "kv"),
        chroma=str(root / "chroma"),
        collection=f"demo-{arguments.seed}",
    )
    corpus = make_corpus(arguments.seed, documents=DOCUMENTS, facts=FACTS, questions=QUESTIONS)
    engines, facts = _prepare(settings, corpus, arguments)
    if not arguments.json:
        _print_start(facts)
    outcomes = _ask(engines, corpus, talks=not arguments.json)
    summary = _summary(outcomes)
    if arguments.json:
        questions = [asdict(outcome) for outcome in outcomes]
        print(json.dumps({**facts, **summary, "questions": questions}, indent=2))
    else:
        _print_end(summary, arguments.top_k)
    return 0 if summary["right"] >= ENOUGH and summary["misses"] == 0 else 1


def _prepare(
    settings: Settings, corpus: ReaderExample, arguments: argparse.Namespace
) -> tuple[tuple[KVCacheQueryEngine, KVCacheQueryEngine], dict[str, Any]]:
    """Both engines, and what ingestion did."""
    from llama_index.core import VectorStoreIndex

    from kvcache_rag import FullRecompute
    from llama_index.kvcache_rag import KVCacheLLM, KVCacheQueryEngine

    held = chunk_files(settings.kv)
    llm = KVCacheLLM(model_name=settings.model, kv_dir=settings.kv, max_new_tokens=24)
    store, embed_model = open_store(settings, llm), embedding(settings.embed)
    _fill(store, corpus, embed_model, show_progress=not arguments.json)
    index = VectorStoreIndex.from_vector_store(store, embed_model=embed_model)
    common: dict[str, Any] = {"similarity_top_k": arguments.top_k, "streaming": True}
    stitched = KVCacheQueryEngine.from_index(index, llm, **common)
    full = KVCacheQueryEngine.from_index(index, llm, policy=FullRecompute(), **common)
    chunks, found = stored_chunks(store), chunk_files(settings.kv)
    facts = {
        "seed": arguments.seed,
        "model": _describe(llm),
        "documents": len(corpus.documents),
        "chunks": len(chunks),
        "prefilled": len(chunks - held.keys()),
        "bytes": sum(found.get(digest, 0) for digest in chunks),
        "folder": settings.kv,
    }
    return (stitched, full), facts


def _fill(
    store: KVCacheVectorStore, corpus: ReaderExample, embed_model: Any, *, show_progress: bool
) -> None:
    from llama_index.core.schema import TextNode

    nodes = [
        TextNode(id_=f"document-{index}", text=text) for index, text in enumerate(corpus.documents)
    ]
    held = {node.node_id: node.get_content() for node in store.get_nodes()}
    missing = [node for node in nodes if held.get(node.node_id) != node.text]
    for node, vector in zip(
        missing, embed_model.get_text_embedding_batch([node.text for node in missing]), strict=True
    ):
        node.embedding = vector
    if missing:
        store.add(missing, show_progress=show_progress)
    # Also what another model of the same name, or an eviction, left without a cache.
    store.prefill_missing(show_progress=show_progress)


def _describe(llm: KVCacheLLM) -> str:
    parameters = sum(weights.numel() for weights in llm.engine.model.parameters())
    return f"{llm.model_name} ({parameters / 1e6:.2f} M parameters)"


def _ask(
    engines: tuple[KVCacheQueryEngine, KVCacheQueryEngine], corpus: ReaderExample, *, talks: bool
) -> list[Outcome]:
    from llama_index.core.schema import QueryBundle

    stitched, full = engines
    outcomes = []
    for number, question in enumerate(corpus.questions):
        bundle = QueryBundle(question.text)
        nodes = stitched.retrieve(bundle)
        if number == 0:
            # The first forward pass of a process is slower; neither side should pay for it.
            for engine in (stitched, full):
                list(_stream(engine, bundle, nodes))
        if talks:
            print(f"{number + 1:3d} {question.text}\n    ", end="")
        # The sides take turns in going first, so that neither always finds warm caches.
        later = None if number % 2 else _answer(full, bundle, nodes)
        text, metrics = _answer(stitched, bundle, nodes, talks=talks)
        _, baseline = later or _answer(full, bundle, nodes)
        outcome = _outcome(question, text, metrics, baseline, nodes)
        if talks:
            _print_row(outcome)
        outcomes.append(outcome)
    return outcomes


def _stream(engine: KVCacheQueryEngine, bundle: Any, nodes: Any) -> Any:
    response: Any = engine.synthesize(bundle, nodes)
    return response.response_gen


def _answer(
    engine: KVCacheQueryEngine, bundle: Any, nodes: Any, *, talks: bool = False
) -> tuple[str, dict[str, Any]]:
    response: Any = engine.synthesize(bundle, nodes)
    text = ""
    for piece in response.response_gen:
        text += piece
        if talks:
            print(piece, end="", flush=True)
    return text, response.metadata["kv_cache"]


def _outcome(
    question: ReaderQuestion,
    text: str,
    metrics: dict[str, Any],
    baseline: dict[str, Any],
    nodes: Any,
) -> Outcome:
    found = {node.node.node_id for node in nodes}
    return Outcome(
        question=question.text,
        answer=text,
        expected=question.answer,
        is_right=" ".join(text.split()) == question.answer,
        is_found=all(f"document-{index}" in found for index in question.documents),
        misses=metrics["misses"],
        stitched=metrics["ttft"],
        full=baseline["ttft"],
        reused_tokens=metrics["reused_tokens"],
    )


def _summary(outcomes: list[Outcome]) -> dict[str, Any]:
    count = len(outcomes)
    return {
        "right": sum(outcome.is_right for outcome in outcomes) / count,
        "recall": sum(outcome.is_found for outcome in outcomes) / count,
        "misses": sum(outcome.misses for outcome in outcomes),
        "ttft_ratio": statistics.median(outcome.full / outcome.stitched for outcome in outcomes),
        "ttft_stitched": statistics.median(outcome.stitched for outcome in outcomes),
        "ttft_full": statistics.median(outcome.full for outcome in outcomes),
    }


def _print_start(facts: dict[str, Any]) -> None:
    print(f"seed {facts['seed']}, model {facts['model']}")
    print(f"{plural(facts['documents'], 'document')}, {plural(facts['chunks'], 'chunk')}; ", end="")
    if facts["prefilled"]:
        print(f"{plural(facts['prefilled'], 'chunk')} prefilled now, ", end="")
    else:
        print("no chunk prefilled: all caches were there from an earlier run, ", end="")
    print(f"{size(facts['bytes'])} in {facts['folder']}\n")
    print(
        "    answer                    expected                  right"
        "  stitched      full  ratio reused"
    )


def _print_row(outcome: Outcome) -> None:
    # The answer stands there already, as it was streamed.
    padding = " " * max(1, 26 - len(outcome.answer))
    print(
        f"{padding}{outcome.expected:<25} {'yes' if outcome.is_right else 'NO':<5}"
        f" {milliseconds(outcome.stitched):>9} {milliseconds(outcome.full):>9}"
        f" {outcome.full / outcome.stitched:5.1f}x {outcome.reused_tokens:6d}"
    )


def _print_end(summary: dict[str, Any], top_k: int) -> None:
    print(
        f"\nright {summary['right']:.0%}, the right document among the {top_k} retrieved "
        f"{summary['recall']:.0%}, chunks without a stored cache: {summary['misses']}"
    )
    print(
        f"median time to the first token: {milliseconds(summary['ttft_stitched'])} stitched, "
        f"{milliseconds(summary['ttft_full'])} full prefill; "
        f"median ratio {summary['ttft_ratio']:.1f}x"
    )
    print("this model is tiny; larger ones and longer contexts gain far more: `make bench`")
