"""`kvcache-rag ask "question"`: answer from what was ingested, reusing the KV of its chunks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.kvcache_rag.commands.corpus import Settings, add_place, embedding, open_store
from llama_index.kvcache_rag.commands.report import metrics_line

if TYPE_CHECKING:
    import argparse

HELP = "answer a question from the ingested files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the question and how to answer it."""
    parser.add_argument("question")
    add_place(parser)
    parser.add_argument("--top-k", type=int, default=4, help="chunks to answer from (default: 4)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="length of the answer")
    parser.add_argument("--full", action="store_true", help="compute every chunk again")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the answer as it comes, what it cost, and where it came from; 0 if there was one."""
    from llama_index.core import VectorStoreIndex

    from kvcache_rag import FullRecompute, InvalidInputError
    from llama_index.kvcache_rag import KVCacheLLM, KVCacheQueryEngine

    if not arguments.question.strip():
        raise InvalidInputError("the question is empty; ask something")
    if arguments.top_k < 1 or arguments.max_new_tokens < 1:
        raise InvalidInputError("--top-k and --max-new-tokens must be at least 1")
    settings = _settings(arguments)
    llm = KVCacheLLM(
        model_name=settings.model,
        kv_dir=settings.kv,
        adapter=settings.adapter,
        weight_format=settings.weight_format,
        policy=FullRecompute() if arguments.full else None,
        max_new_tokens=arguments.max_new_tokens,
    )
    store = open_store(settings, llm)
    index = VectorStoreIndex.from_vector_store(store, embed_model=embedding(settings.embed))
    engine = KVCacheQueryEngine.from_index(
        index, llm, similarity_top_k=arguments.top_k, streaming=True
    )
    response: Any = engine.query(arguments.question)
    if not response.source_nodes:
        raise InvalidInputError(f"the collection {settings.collection!r} is empty; ingest first")
    _print(arguments, response)
    return 0


def _settings(arguments: argparse.Namespace) -> Settings:
    from kvcache_rag import InvalidInputError

    found = Settings.find(arguments.chroma, arguments.collection)
    names = ("model", "adapter", "weight_format", "kv", "chroma", "embed", "collection")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    settings = replace(found or Settings(), **given)
    if not (Path(settings.chroma) / "chroma.sqlite3").is_file():
        raise InvalidInputError(
            f"there is no database {settings.chroma}; run `kvcache-rag ingest DIR` first"
        )
    if found is not None:
        found.check_embedding(settings.embed)
    return settings


def _print(arguments: argparse.Namespace, response: Any) -> None:
    pieces = []
    for piece in response.response_gen:
        pieces.append(piece)
        if not arguments.json:
            print(piece, end="", flush=True)
    metrics = response.metadata["kv_cache"]
    sources = [_source(found) for found in response.source_nodes]
    if arguments.json:
        answer = "".join(pieces)
        values = {"question": arguments.question, "answer": answer}
        print(json.dumps({**values, "metrics": metrics, "sources": sources}, indent=2))
        return
    print(f"\n\n{metrics_line(metrics)}")
    for number, source in enumerate(sources, start=1):
        print(f"[{number}] {source['file']} ({source['score']:.3f}): {_shortened(source['text'])}")


def _source(found: Any) -> dict[str, Any]:
    node = found.node
    name = node.metadata.get("file_path") or node.ref_doc_id or node.node_id
    return {"file": str(name), "score": float(found.score or 0.0), "text": node.get_content()}


def _shortened(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."
