"""`kvcache-rag ingest DIR`: embed, store and prefill the files of a folder.

Run again it does only what changed: files are known by their path and the digest of their text,
chunks by theirs.  What a file said stays when it cannot be read any more; what is gone or empty is
taken out.  A collection is of one folder; another one's files take their place only when told.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.commands.options import add_chunking, check_chunking
from kvcache_rag.errors import expanded
from kvcache_rag.integration import left_out_lines, plain
from llama_index.kvcache_rag.commands.corpus import (
    TINY,
    Settings,
    add_place,
    begin,
    embedding,
    open_store,
    read_documents,
)
from llama_index.kvcache_rag.commands.report import chunk_files, plural, size, stored_chunks

if TYPE_CHECKING:
    import argparse

    from llama_index.core.storage.docstore import SimpleDocumentStore

    from kvcache_rag.integration import LeftOut
    from llama_index.kvcache_rag import KVCachePrefill, KVCacheVectorStore

HELP = "embed, store and prefill the files of a folder: text, Markdown, PDF, HTML, Word"
_TINY_NOTE: Final = (
    "note: tiny can read made-up facts only, such as the demo's; for texts of your own ingest with "
    "--model smollm2 or a model of yours"
)
_SHOWN: Final = 20  # files taken out that are named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder and how it is split and stored."""
    parser.add_argument(
        "folder",
        type=expanded,
        metavar="DIR",
        help="folder with .txt, .md, .pdf, .html, .htm and .docx files",
    )
    add_place(parser)
    add_chunking(parser, "default: 256", overlap=None)
    parser.add_argument(
        "--replace",
        action="store_true",
        help="take out the files of the folder that was ingested before, if it is another one",
    )


def run(arguments: argparse.Namespace) -> int:
    """Bring collection and KV in step with the folder; 0 when they are."""
    from kvcache_rag import InvalidInputError

    settings, before = _settings(arguments)
    is_same = before is not None and (not before.folder or before.is_of(arguments.folder))
    if before is not None and not arguments.replace:
        before.check_folder(arguments.folder)
    check_chunking(settings.chunk_size, settings.chunk_overlap)
    begin(settings)
    from llama_index.kvcache_rag import KVCacheLLM, KVCachePrefill

    # A folder that was ingested may have lost all its files.
    documents, left_out = read_documents(
        arguments.folder, allow_empty=before is not None and before.is_of(arguments.folder)
    )
    embed_model = embedding(settings.embed)
    llm = KVCacheLLM(**settings.of_llm)
    engine = llm.engine  # a model that cannot be loaded leaves nothing behind
    store = open_store(settings, llm)
    held = chunk_files(settings.kv_dir)
    embedding_beside = KVCachePrefill(llm=llm, embed_model=embed_model, show_progress=True)
    with store.replacing():
        docstore = _docstore(settings, before, store)
        settings.save()
        kept = _kept(left_out, _known(docstore)) if is_same else set()
        removed = _ingest(documents, settings, store, docstore, embedding_beside, kept)
        store.prefill_missing(show_progress=True)
    docstore.persist(str(settings.docstore))
    engine.store.sweep()
    missing = _report(settings, store, len(documents) + len(kept), held)
    for line in (*_removed_lines(removed), *left_out_lines(left_out, kept)):
        print(line)
    if missing:
        reason = engine.store.stats().last_failure or "they were evicted"
        raise InvalidInputError(f"{plural(missing, 'chunk')} could not be kept: {reason}")
    if settings.model == TINY:
        print(_TINY_NOTE, file=sys.stderr)
    return 0


def kept(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves."""
    return "chunks that were prefilled are kept, and the same command goes on from there"


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
    if (before.chunk_size, before.chunk_overlap) != (settings.chunk_size, settings.chunk_overlap):
        # Every file is split anew; chunks that stay the same keep their KV.
        settings.docstore.unlink()
        store.clear()
        return SimpleDocumentStore()
    return SimpleDocumentStore.from_persist_path(str(settings.docstore))


def _known(docstore: SimpleDocumentStore) -> set[str]:
    """Ids of the documents that were ingested."""
    return set(docstore.get_all_document_hashes().values())


def _kept(left_out: tuple[LeftOut, ...], known: set[str]) -> set[str]:
    """Ids of documents that cannot be read now, or lie in a folder that cannot."""
    closed = {one.name for one in left_out if not one.is_read}
    return {
        name
        for name in known
        if name in closed or any(str(above) in closed for above in PurePosixPath(name).parents)
    }


def _ingest(
    documents: list[Any],
    settings: Settings,
    store: KVCacheVectorStore,
    docstore: SimpleDocumentStore,
    embedding_beside: KVCachePrefill,
    kept: set[str],
) -> list[str]:
    """Bring the collection in step; gives the documents that were taken out."""
    from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
    from llama_index.core.node_parser import SentenceSplitter

    known, there = _known(docstore), {document.doc_id for document in documents}
    # Left behind by a run that was stopped before it could note what it had done.
    store.delete_documents(sorted(there - known))
    # Not by the pipeline, to which what cannot be read now would be gone.
    removed = sorted(known - there - kept)
    for gone in removed:
        docstore.delete_document(gone)
        store.delete(gone)
    splitter = SentenceSplitter(
        chunk_size=settings.chunk_size, chunk_overlap=settings.chunk_overlap
    )
    pipeline = IngestionPipeline(
        transformations=[splitter, embedding_beside],
        docstore=docstore,
        vector_store=store,
        docstore_strategy=DocstoreStrategy.UPSERTS,
        disable_cache=True,
    )
    pipeline.run(documents=documents)  # its bars and ours would write over each other
    return removed


def _report(settings: Settings, store: KVCacheVectorStore, files: int, held: dict[str, int]) -> int:
    """Print what is there now; gives how many chunks are not."""
    chunks, found = stored_chunks(store), chunk_files(settings.kv_dir)
    fresh, there = len(chunks & found.keys() - held.keys()), len(chunks & held.keys())
    nbytes = sum(found.get(digest, 0) for digest in chunks)
    print(f"{plural(files, 'file')}, {plural(len(chunks), 'chunk')} in {settings.chroma}")
    print(f"{plural(fresh, 'chunk')} prefilled, {there} were there already")
    print(f"KV of these chunks: {size(nbytes)} in {settings.kv_dir}, by {settings.model}")
    return len(chunks - found.keys())


def _removed_lines(removed: list[str]) -> list[str]:
    if not removed:
        return []
    names = ", ".join(map(plain, removed[:_SHOWN]))
    more = f" and {len(removed) - _SHOWN} more" if len(removed) > _SHOWN else ""
    return [f"removed {plural(len(removed), 'file')}: {names}{more}"]
