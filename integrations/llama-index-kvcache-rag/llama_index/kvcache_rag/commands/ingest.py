"""`kvcache-rag ingest DIR`: embed, store and prefill the files of a folder.

Run again it does only what changed: files are known by their path and the digest of their text,
chunks by theirs.  What a file said stays when it cannot be read any more; what is gone or empty is
taken out.  A collection is of one folder; another one's files take their place only when told.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.cli import REFUSED
from kvcache_rag.commands.options import add_chunking, check_chunking
from kvcache_rag.commands.which_model import no_model
from kvcache_rag.errors import expanded
from kvcache_rag.integration import left_out_lines, plain
from llama_index.kvcache_rag.commands.corpus import (
    PACKAGED,
    TINY,
    add_place,
    begin,
    default_model,
    embedding,
    open_store,
    read_documents,
)
from llama_index.kvcache_rag.commands.report import (
    chunk_files,
    plural,
    size,
    stored_chunks,
    whole_documents,
)
from llama_index.kvcache_rag.commands.settings import (
    FullPrefill,
    Settings,
    collections_in,
    this_machine,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from llama_index.core.storage.docstore import SimpleDocumentStore

    from kvcache_rag import Metrics
    from kvcache_rag.integration import LeftOut
    from llama_index.kvcache_rag import KVCacheLLM, KVCachePrefill, KVCacheVectorStore

HELP = "embed, store and prefill the files of a folder: text, Markdown, PDF, HTML, Word"
_TINY_NOTE: Final = (
    "note: tiny can read made-up facts only, such as the demo's; for texts of your own ingest with "
    "--model smollm2 or a model of yours"
)
_EXAMPLE: Final = "ingest notes --model Qwen/Qwen2.5-0.5B-Instruct"
_TIMES, _SECONDS = 3, 3.0  # that a question without cached chunks is measured at most
_CHUNKS: Final = 4  # of the question that is measured: as many as `ask` takes unless told
_SHOWN: Final = 20  # files taken out that are named
_OF_IP: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_NAME: Final = re.compile(  # Chroma's rule
    rf"(?!.*[.][.])(?!(?:{_OF_IP}[.]){{3}}{_OF_IP}\Z)[a-zA-Z0-9][a-zA-Z0-9._-]{{1,510}}[a-zA-Z0-9]"
)


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
    from kvcache_rag.integration.extraction import check_folder

    check_folder(Path(arguments.folder))
    settings, before = _settings(arguments)
    if no_model(settings.model, _EXAMPLE):
        return REFUSED
    with _private():
        return _run(arguments, settings, before)


def _run(arguments: argparse.Namespace, settings: Settings, before: Settings | None) -> int:
    from kvcache_rag import InvalidInputError

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
    _check_writable("--kv-dir", settings.kv_dir)
    _check_writable("--chroma", settings.chroma)
    embed_model = embedding(settings.embed)
    llm = KVCacheLLM(**settings.of_llm)
    engine = llm.engine  # a model that cannot be loaded leaves nothing behind
    is_known = before is not None and before.spec == engine.spec
    settings = replace(settings, spec=engine.spec, full=settings.full if is_known else None)
    store = open_store(settings, llm)
    held = chunk_files(settings.kv_dir)
    embedding_beside = KVCachePrefill(llm=llm, embed_model=embed_model, show_progress=True)
    with store.replacing():
        docstore = _docstore(settings, before, store)
        settings.note(store.client)
        kept = _kept(left_out, _known(docstore)) if is_same else set()
        removed = _ingest(documents, settings, store, docstore, embedding_beside, kept)
        store.prefill_missing(show_progress=True)
    engine.store.sweep()
    missing = _report(settings, store, len(documents) + len(kept), held)
    if before is not None and before.model and not settings.is_by(before):
        print(f"note: {settings.collection!r} was of {before.described}", file=sys.stderr)
    for line in (*_removed_lines(removed), *left_out_lines(left_out, kept)):
        print(line)
    if missing:
        reason = engine.store.stats().last_failure or "they were evicted"
        raise InvalidInputError(f"{plural(missing, 'chunk')} could not be kept: {reason}")
    _measure(settings, store, llm)
    if settings.model == TINY:
        print(_TINY_NOTE, file=sys.stderr)
    return 0


def kept(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves."""
    return "chunks that were prefilled are kept, and the same command goes on from there"


def _check_writable(option: str, place: str) -> None:
    from kvcache_rag import InvalidInputError
    from kvcache_rag.commands.doctor import folder_facts

    if problem := folder_facts(Path(place))["problem"]:
        raise InvalidInputError(f"{place} cannot be written: {problem}; name another {option}")


def _measure(settings: Settings, store: KVCacheVectorStore, llm: KVCacheLLM) -> None:
    """Note what a question costs without cached chunks, once for each model and machine."""
    from llama_index.core.schema import MetadataMode

    from kvcache_rag import FullRecompute

    machine, ids = this_machine(), store.client.get(limit=_CHUNKS, include=[])["ids"]
    if not ids or (settings.full is not None and settings.full.machine == machine):
        return
    texts = [node.get_content(MetadataMode.LLM) for node in store.get_nodes(ids)]
    costs: list[Metrics] = []
    # The least is nearest to the truth on a machine that does other things, too; one is enough of a
    # model that takes long.
    while len(costs) < _TIMES and sum(one.total for one in costs) < _SECONDS:
        answer = llm.engine.generate(
            "What is this about?",
            chunks=texts,
            policy=FullRecompute(),
            overflow="drop_lowest",
            max_new_tokens=1,
        )
        costs.append(answer.metrics)
    least = min(costs, key=lambda one: one.ttft)
    full = FullPrefill(least.prompt_tokens, least.ttft, machine)
    replace(settings, full=full).note(store.client)


@contextmanager
def _private() -> Iterator[None]:
    """New files are this user's alone, also those that Chroma makes: texts are in them."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _settings(arguments: argparse.Namespace) -> tuple[Settings, Settings | None]:
    """The settings to use, and those of the run before in the same collection, if any."""
    from kvcache_rag import InvalidInputError

    names = (one.name for one in fields(Settings))
    given = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    wanted = Settings().told(given)
    collection = collections_in(wanted.chroma).get(wanted.collection)
    if collection is None and _NAME.fullmatch(wanted.collection) is None:
        raise InvalidInputError(
            f"--collection {wanted.collection!r} is no name that Chroma takes; say 3 to 512 "
            "letters of a to z, digits, and in between also . _ -, no .. and no IP address"
        )
    before = None if collection is None else Settings.of(collection, wanted.chroma)
    if collection is not None and before is None and not arguments.replace and collection.count():
        raise InvalidInputError(
            f"the collection {wanted.collection!r} in {wanted.chroma} has rows that ingest did not "
            f"write; say --collection NAME for a second one beside it, or --replace to have the "
            f"files of {arguments.folder} in their place"
        )
    settings = (before or wanted).told(given)
    if not 0 <= settings.chunk_overlap < settings.chunk_size:
        raise InvalidInputError("--chunk-overlap must be at least 0 and less than --chunk-size")
    settings = replace(settings, model=settings.model or default_model())
    return replace(settings, adapter=_adapter(settings)), before


def _adapter(settings: Settings) -> str | None:
    """What is noted: of a model that has one by itself, whether it was here."""
    from kvcache_rag.integration import chosen_adapter
    from kvcache_rag.models.adapters import NO_ADAPTER

    if settings.adapter is None and settings.model == PACKAGED:
        return str(chosen_adapter(settings.model, None) or NO_ADAPTER)
    return settings.adapter


def _docstore(
    settings: Settings, before: Settings | None, store: KVCacheVectorStore
) -> SimpleDocumentStore:
    """The documents that are in the collection as they were read, for the pipeline to compare."""
    from llama_index.core.storage.docstore import SimpleDocumentStore

    found = SimpleDocumentStore()
    if store.client.count() == 0:
        return found
    sizes = (settings.chunk_size, settings.chunk_overlap)
    if before is None or (before.chunk_size, before.chunk_overlap) != sizes:
        # Every file is split anew; chunks that stay the same keep their KV.
        store.clear()
        return found
    before.check_embedding(settings.embed)
    for name, digest in whole_documents(store).items():
        found.set_document_hash(name, digest)
    return found


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
    # Left behind by a run that was stopped within them.
    store.delete_documents(sorted(there - known))
    # Not by the pipeline, to which what cannot be read now would be gone.
    removed = sorted(known - there - kept)
    store.delete_documents(removed)
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
    # Its bars and ours would write over each other; what files say is in the collection alone.
    pipeline.run(documents=documents, store_doc_text=False)
    return removed


def _report(settings: Settings, store: KVCacheVectorStore, files: int, held: dict[str, int]) -> int:
    """Print what is there now; gives how many chunks are not."""
    chunks, found = stored_chunks(store), chunk_files(settings.kv_dir)
    fresh, there = len(chunks & found.keys() - held.keys()), len(chunks & held.keys())
    nbytes = sum(found.get(digest, 0) for digest in chunks)
    print(f"{plural(files, 'file')}, {plural(len(chunks), 'chunk')} in {settings.chroma}")
    print(f"{plural(fresh, 'chunk')} prefilled, {there} were there already")
    print(f"KV of these chunks: {size(nbytes)} in {settings.kv_dir}")
    print(f"model {settings.described}, embedding {settings.embed}")
    return len(chunks - found.keys())


def _removed_lines(removed: list[str]) -> list[str]:
    if not removed:
        return []
    names = ", ".join(map(plain, removed[:_SHOWN]))
    more = f" and {len(removed) - _SHOWN} more" if len(removed) > _SHOWN else ""
    return [f"removed {plural(len(removed), 'file')}: {names}{more}"]
