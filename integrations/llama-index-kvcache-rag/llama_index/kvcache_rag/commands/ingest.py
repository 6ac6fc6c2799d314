"""`kvcache-rag ingest DIR`: embed, store and prefill the files of a folder.

Run again it does only what changed: files are known by their path and the digest of their text,
chunks by theirs.  What a file said stays when it cannot be read any more; what is gone or empty is
taken out.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.integration import is_rich, plain, suffixes
from llama_index.kvcache_rag.commands.corpus import (
    TINY,
    Settings,
    add_place,
    embedding,
    open_store,
    read_documents,
)
from llama_index.kvcache_rag.commands.report import chunk_files, plural, size, stored_chunks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from llama_index.core.storage.docstore import SimpleDocumentStore

    from kvcache_rag.integration import LeftOut
    from llama_index.kvcache_rag import KVCachePrefill, KVCacheVectorStore

HELP = "embed, store and prefill the files of a folder: text, Markdown, PDF, HTML, Word"
_TINY_NOTE: Final = (
    "note: tiny can read made-up facts only, such as the demo's; for texts of your own ingest with "
    "--model smollm2 or a model of yours"
)
_SHOWN: Final = 20  # files left out that are named
_FEW: Final = 5  # of kinds that are never read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder and how it is split and stored."""
    parser.add_argument(
        "folder", metavar="DIR", help="folder with .txt, .md, .pdf, .html, .htm and .docx files"
    )
    add_place(parser)
    parser.add_argument("--chunk-size", type=int, help="longest chunk in tokens (default: 256)")
    parser.add_argument(
        "--overlap", type=int, help="tokens neighbouring chunks share (default: 32)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Bring collection and KV in step with the folder; 0 when they are."""
    from kvcache_rag import InvalidInputError
    from llama_index.kvcache_rag import KVCacheLLM, KVCachePrefill

    documents, left_out = read_documents(arguments.folder)
    settings, before = _settings(arguments)
    if not 0 <= settings.overlap < settings.chunk_size:
        raise InvalidInputError("--overlap must be at least 0 and less than --chunk-size")
    embed_model = embedding(settings.embed)
    llm = KVCacheLLM(
        model_name=settings.model,
        kv_dir=settings.kv,
        adapter=settings.adapter,
        weight_format=settings.weight_format,
    )
    engine = llm.engine  # a model that cannot be loaded leaves nothing behind
    store = open_store(settings, llm)
    docstore = _docstore(settings, before, store)
    held = chunk_files(settings.kv)
    settings.save()
    embedding_beside = KVCachePrefill(llm=llm, embed_model=embed_model, show_progress=True)
    kept = {one.name for one in left_out if not one.is_read} & _known(docstore)
    _ingest(documents, settings, store, docstore, embedding_beside, kept)
    store.prefill_missing(show_progress=True)
    docstore.persist(str(settings.docstore))
    engine.store.sweep()
    missing = _report(settings, store, len(documents) + len(kept), held)
    print("\n".join(_left_out_lines(left_out, kept)), end="\n" if left_out else "")
    if missing:
        reason = engine.store.stats().last_failure or "they were evicted"
        raise InvalidInputError(f"{plural(missing, 'chunk')} could not be kept: {reason}")
    if settings.model == TINY:
        print(_TINY_NOTE, file=sys.stderr)
    return 0


def _settings(arguments: argparse.Namespace) -> tuple[Settings, Settings | None]:
    """The settings to use, and those of the run before in the same collection, if any."""
    given = {
        name: value
        for name in asdict(Settings())
        if (value := getattr(arguments, name)) is not None
    }
    wanted = replace(Settings(), **given)
    before = Settings.find(wanted.chroma, wanted.collection)
    return replace(before or wanted, **given), before


def _docstore(
    settings: Settings, before: Settings | None, store: KVCacheVectorStore
) -> SimpleDocumentStore:
    from llama_index.core.storage.docstore import SimpleDocumentStore

    if before is None or not settings.docstore.is_file() or store.client.count() == 0:
        return SimpleDocumentStore()
    before.check_embedding(settings.embed)
    if (before.chunk_size, before.overlap) != (settings.chunk_size, settings.overlap):
        # Every file is split anew; chunks that stay the same keep their KV.
        settings.docstore.unlink()
        store.clear()
        return SimpleDocumentStore()
    return SimpleDocumentStore.from_persist_path(str(settings.docstore))


def _known(docstore: SimpleDocumentStore) -> set[str]:
    """Ids of the documents that were ingested."""
    return set(docstore.get_all_document_hashes().values())


def _ingest(
    documents: list[Any],
    settings: Settings,
    store: KVCacheVectorStore,
    docstore: SimpleDocumentStore,
    embedding_beside: KVCachePrefill,
    kept: set[str],
) -> None:
    from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
    from llama_index.core.node_parser import SentenceSplitter

    known, there = _known(docstore), {document.doc_id for document in documents}
    # Left behind by a run that was stopped before it could note what it had done.
    store.delete_documents(sorted(there - known))
    # Not by the pipeline, to which what cannot be read now would be gone.
    for gone in sorted(known - there - kept):
        docstore.delete_document(gone)
        store.delete(gone)
    splitter = SentenceSplitter(chunk_size=settings.chunk_size, chunk_overlap=settings.overlap)
    pipeline = IngestionPipeline(
        transformations=[splitter, embedding_beside],
        docstore=docstore,
        vector_store=store,
        docstore_strategy=DocstoreStrategy.UPSERTS,
        disable_cache=True,
    )
    # LlamaIndex's bars and ours would write over each other on a terminal.
    pipeline.run(documents=documents, show_progress=not is_rich(sys.stderr))


def _report(settings: Settings, store: KVCacheVectorStore, files: int, held: dict[str, int]) -> int:
    """Print what is there now; gives how many chunks are not."""
    chunks, found = stored_chunks(store), chunk_files(settings.kv)
    fresh, there = len(chunks & found.keys() - held.keys()), len(chunks & held.keys())
    nbytes = sum(found.get(digest, 0) for digest in chunks)
    print(f"{plural(files, 'file')}, {plural(len(chunks), 'chunk')} in {settings.chroma}")
    print(f"{plural(fresh, 'chunk')} prefilled, {there} were there already")
    print(f"KV of these chunks: {size(nbytes)} in {settings.kv}, by {settings.model}")
    return len(chunks - found.keys())


def _left_out_lines(left_out: tuple[LeftOut, ...], kept: set[str]) -> Iterator[str]:
    """What is not in the collection as it lies in the folder, and why."""
    if not left_out:
        return
    yield f"left out {plural(len(left_out), 'file')}:"
    others = [one for one in left_out if PurePath(one.name).suffix.lower() not in suffixes()]
    named = [one for one in left_out if one not in others]
    for one in named[:_SHOWN]:
        before = "; what it said before is kept" if one.name in kept else ""
        yield f"  {plain(one.name)}: {plain(one.reason)}{before}"
    if len(named) > _SHOWN:
        yield f"  and {len(named) - _SHOWN} more that could not be read"
    if others:
        names = [plain(one.name) for one in others]
        if len(names) > _FEW:
            kinds = Counter(
                plain(PurePath(one.name).suffix) or "without an ending" for one in others
            )
            names = [f"{count} {kind}" for kind, count in kinds.most_common()]
        yield f"  {', '.join(names)}: {others[0].reason}"
