"""Chat in the terminal with a folder of texts; every answer names its sources.

    python examples/docs-chatbot/chat.py [FOLDER] [--model smollm2] [--prefill]

Without a folder these are the docs of kvcache-rag.  Questions may also come by a pipe, one a line.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import run_transformations
from llama_index.core.node_parser import MarkdownNodeParser, SentenceSplitter

from kvcache_rag import KVCacheRagError
from kvcache_rag_documents import read_folder, suffixes
from llama_index.kvcache_rag import HashEmbedding, KVCacheChatEngine, KVCacheLLM

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llama_index.core.base.embeddings.base import BaseEmbedding

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"


def nodes_of(folder: Path) -> list[Any]:
    """The files of a folder, cut at headings and then at sentences."""
    found = read_folder(str(folder))
    for one in found.left_out:
        if one.name.endswith(suffixes()):
            print(f"{one.name} is left out: {one.reason}", file=sys.stderr)
    documents = [
        Document(
            text=text,
            metadata={"file": name},
            # What the model reads is the text alone: the same text is then the same chunk.
            excluded_llm_metadata_keys=["file", "header_path"],
            excluded_embed_metadata_keys=["file"],
        )
        for name, text in found.texts.items()
    ]
    cuts = [MarkdownNodeParser(), SentenceSplitter(chunk_size=256, chunk_overlap=0)]
    return list(run_transformations(documents, cuts))


def embedding(name: str) -> BaseEmbedding:
    """What finds chunks: words alone ("hash", which needs no model), or a model."""
    if name == "hash":
        return HashEmbedding()
    try:
        from llama_index.embeddings.huggingface import HuggingFaceEmbedding

        return HuggingFaceEmbedding(model_name=name)
    except (ImportError, OSError) as error:  # not installed, or not to be had
        raise SystemExit(f"chat: no --embed {name}: {str(error).splitlines()[0]}") from None


def chat_engine(arguments: argparse.Namespace) -> KVCacheChatEngine:
    """A conversation over the folder."""
    llm = KVCacheLLM(model_name=arguments.model, kv_dir=arguments.kv_dir, max_new_tokens=64)
    nodes = nodes_of(arguments.folder)
    if arguments.prefill:
        llm.prefill(nodes, show_progress=True)  # else each when a question first needs it
    index = VectorStoreIndex(nodes, embed_model=embedding(arguments.embed))
    # SmolLM2 is too small to put a question into other words; a larger model does it by itself.
    return KVCacheChatEngine.from_defaults(
        index.as_retriever(similarity_top_k=arguments.top_k),
        llm,
        skip_condense=arguments.model == "smollm2",
    )


def sources(found: Sequence[Any]) -> Iterable[str]:
    """A line for each chunk that an answer was made of."""
    for number, one in enumerate(found, start=1):
        first = " ".join(one.node.get_content().split())[:60]
        yield f"  [{number}] {one.node.metadata['file']}: {first}..."


def answer(engine: KVCacheChatEngine, question: str) -> None:
    """Print an answer as it comes, then its sources and what it cost."""
    response = engine.stream_chat(question)
    for piece in response.response_gen:
        print(piece, end="", flush=True)
    print()
    print(*sources(response.source_nodes), sep="\n")
    if cost := (response.metadata or {}).get("kv_cache"):
        tokens = f"{cost['reused_tokens']} tokens reused, {cost['computed_tokens']} computed"
        print(f"  {tokens}; first token after {cost['ttft']:.2f} s, {cost['policy']}\n", flush=True)


def main() -> None:
    """Answer questions until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DOCS, help="of texts")
    parser.add_argument("--model", default="smollm2", help="hub id, folder, GGUF file or smollm2")
    parser.add_argument("--embed", default="hash", help="hash, or a sentence-transformers model")
    parser.add_argument("--kv-dir", default="kv", help="folder of the chunks' keys and values")
    parser.add_argument("--top-k", type=int, default=4, choices=range(1, 33), metavar="CHUNKS")
    parser.add_argument("--prefill", action="store_true", help="all chunks now, not when needed")
    engine = chat_engine(parser.parse_args())
    prompt = "\nquestion (nothing to end): " if sys.stdin.isatty() else ""
    with suppress(EOFError):
        while question := input(prompt).strip():
            answer(engine, question)


if __name__ == "__main__":
    try:
        main()
    except KVCacheRagError as error:
        sys.exit(f"chat: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
