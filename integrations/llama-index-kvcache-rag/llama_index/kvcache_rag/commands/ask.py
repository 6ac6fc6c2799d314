"""`kvcache-rag ask "question"`: answer from what was ingested, reusing the KV of its chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_rag.commands.options import add_json, as_json
from llama_index.kvcache_rag.commands.corpus import Opened, add_answering, add_place, nothing_in
from llama_index.kvcache_rag.commands.report import (
    cost_line,
    far_line,
    figures,
    is_near,
    likely,
    read,
    source_lines,
    sources,
)

if TYPE_CHECKING:
    import argparse

HELP = "answer a question from the ingested files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the question and how to answer it."""
    parser.add_argument("question")
    add_place(parser)
    add_answering(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer as it comes, where it came from, and what it cost; 0 if there was one."""
    from kvcache_rag import InvalidInputError

    if not arguments.question.strip():
        raise InvalidInputError("the question is empty; ask something")
    opened = Opened.from_arguments(arguments)
    from llama_index.kvcache_rag import KVCacheQueryEngine

    engine = KVCacheQueryEngine.from_index(
        opened.index, opened.llm, similarity_top_k=arguments.top_k, streaming=True
    )
    response: Any = engine.query(arguments.question)
    if not response.source_nodes:  # emptied since it was opened
        raise nothing_in(opened.settings.collection)
    _print(arguments, opened, response)
    return 0


def kept(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves."""
    return "what was ingested is as it was"


def _print(arguments: argparse.Namespace, opened: Opened, response: Any) -> None:
    pieces, settings = [], opened.settings
    for piece in response.response_gen:
        pieces.append(piece)
        if not arguments.json:
            print(piece, end="", flush=True)
    metrics = response.metadata["kv_cache"]
    # Behind the answer, so that its first token waits for nothing.
    relevance = (
        {}
        if likely(settings.model) is None
        else read(opened.llm, response.source_nodes, arguments.question)
    )
    found = sources(response.source_nodes, metrics, relevance)
    near = is_near(found, settings)
    cost = figures(metrics, settings, max(one["score"] for one in found))
    if arguments.json:
        said = {
            "question": arguments.question,
            "answer": "".join(pieces),
            "near": near,
            "model": settings.described,
            "policy": metrics["policy"],
            "metrics": cost,
            "sources": found,
        }
        print(as_json(said))
        return
    print("\n")
    if near is False:
        print(far_line(found, settings))
    print("\n".join(source_lines(found)))
    print(cost_line(cost))
