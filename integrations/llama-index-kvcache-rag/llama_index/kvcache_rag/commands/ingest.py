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
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.cli import REFUSED
from kvcache_rag.commands.options import add_chunking, add_json, as_json, check_chunking, no_model
from kvcache_rag.errors import expanded
from kvcache_rag.integration import plain
from kvcache_rag_documents import left_out_lines, read_folder, without_lines
from kvcache_rag_documents.extraction import FOLDER
from llama_index.kvcache_rag.commands.corpus import (
    FILE_DIGEST,
    PACKAGED,
    TINY,
    add_place,
    as_document,
    begin,
    default_model,
    embedding,
    open_store,
)
from llama_index.kvcache_rag.commands.report import (
    Ingested,
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
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from llama_index.core.schema import Document

    from kvcache_rag import Metrics
    from kvcache_rag_documents import FolderTexts, LeftOut
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
    add_json(parser)
    parser.add_argument(
        "folder",
        type=expanded,
        metavar="DIR",
        help=FOLDER,
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
    from kvcache_rag_documents.extraction import check_folder

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
    found = read_folder(
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
        known = _as_written(found, _known(settings, before, store))
        settings.note(store.client)
        kept = _kept(found.left_out, known) if is_same else set()
        documents = [as_document(name, file) for name, file in found.files.items()]
        anew = _anew(documents, known)
        removed = _ingest(documents, settings, store, known, embedding_beside, kept)
        store.prefill_missing(show_progress=True)
    engine.store.sweep()
    said = _Report.from_store(settings, store, found, held, kept=kept, removed=removed, anew=anew)
    if before is not None and before.model and not settings.is_by(before):
        print(f"note: {settings.collection!r} was of {before.described}", file=sys.stderr)
    if arguments.json:
        print(as_json(said.as_json))
    else:
        print("\n".join(said.lines))
    if missing := said.missing:
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
    from kvcache_rag.engine import like

    machine, ids = this_machine(), store.client.get(limit=_CHUNKS, include=[])["ids"]
    if not ids or (settings.full is not None and settings.full.machine == machine):
        return
    texts = [node.get_content(MetadataMode.LLM) for node in store.get_nodes(ids)]
    engine = like(llm.engine, prompt_memory=0)  # else the second would go on from the first
    costs: list[Metrics] = []
    # The least is nearest to the truth on a machine that does other things, too; one is enough of a
    # model that takes long.
    while len(costs) < _TIMES and sum(one.total for one in costs) < _SECONDS:
        answer = engine.generate(
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
    before = None if collection is None else Settings.from_collection(collection, wanted.chroma)
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


def _known(
    settings: Settings, before: Settings | None, store: KVCacheVectorStore
) -> dict[str, Ingested]:
    """The documents that are in the collection as they were read, by their ids."""
    if store.client.count() == 0:
        return {}
    sizes = (settings.chunk_size, settings.chunk_overlap)
    if before is None or (before.chunk_size, before.chunk_overlap) != sizes:
        # Every file is split anew; chunks that stay the same keep their KV.
        store.clear()
        return {}
    before.check_embedding(settings.embed)
    return whole_documents(store)


def _as_written(found: FolderTexts, known: dict[str, Ingested]) -> dict[str, Ingested]:
    """Documents of before their files' digests were noted, as they would have been with them."""
    written = dict(known)
    for name, file in found.files.items():
        there = known.get(name)
        if there is not None and not there.file_digest and not file.metadata:
            before = as_document(name, replace(file, digest=""))
            if before.hash == there.hash:
                written[name] = Ingested(as_document(name, file).hash, file.digest)
    return written


def _anew(documents: Sequence[Document], known: Mapping[str, Ingested]) -> dict[str, bool]:
    """Files that say something else than before; whether it is known that they did not change."""
    pairs = ((one, known[one.doc_id]) for one in documents if one.doc_id in known)
    return {
        one.doc_id: bool(there.file_digest)
        for one, there in pairs
        if there.hash != one.hash and there.file_digest in ("", one.metadata[FILE_DIGEST])
    }


def _kept(left_out: tuple[LeftOut, ...], known: Collection[str]) -> set[str]:
    """Ids of documents that cannot be read now, or lie in a folder that cannot."""
    closed = {one.name for one in left_out if not one.is_read}
    return {
        name
        for name in known
        if name in closed or any(str(above) in closed for above in PurePosixPath(name).parents)
    }


def _ingest(
    documents: list[Document],
    settings: Settings,
    store: KVCacheVectorStore,
    known: Mapping[str, Ingested],
    embedding_beside: KVCachePrefill,
    kept: set[str],
) -> list[str]:
    """Bring the collection in step; gives the documents that were taken out."""
    from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
    from llama_index.core.node_parser import SentenceSplitter
    from llama_index.core.storage.docstore import SimpleDocumentStore

    docstore = SimpleDocumentStore()
    for name, one in known.items():
        docstore.set_document_hash(name, one.hash)
    there = {document.doc_id for document in documents}
    # Left behind by a run that was stopped within them.
    store.delete_documents(sorted(there - known.keys()))
    # Not by the pipeline, to which what cannot be read now would be gone.
    removed = sorted(known.keys() - there - kept)
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


@dataclass(frozen=True)
class _Report:
    """What is there now.

    Attributes:
        settings: Of the collection.
        found: What the folder says.
        kept: Files that cannot be read now, of which what they said before is there.
        removed: Files that were taken out.
        anew: Files that are read differently now than when they were prefilled; whether it is
            known that they did not change.
        chunks: Of the collection.
        prefilled: Of these, now.
        there: Of these, before.
        missing: Of these, none, as they could not be kept.
        nbytes: Of their KV.
    """

    settings: Settings
    found: FolderTexts
    kept: set[str]
    removed: list[str]
    anew: dict[str, bool]
    chunks: int
    prefilled: int
    there: int
    missing: int
    nbytes: int

    @classmethod
    def from_store(
        cls,
        settings: Settings,
        store: KVCacheVectorStore,
        found: FolderTexts,
        held: Mapping[str, int],
        **files: Any,
    ) -> _Report:
        """Count chunks; `held` are those of before."""
        chunks, files_now = stored_chunks(store), chunk_files(settings.kv_dir)
        return cls(
            settings,
            found,
            **files,
            chunks=len(chunks),
            prefilled=len(chunks & files_now.keys() - held.keys()),
            there=len(chunks & held.keys()),
            missing=len(chunks - files_now.keys()),
            nbytes=sum(files_now.get(digest, 0) for digest in chunks),
        )

    @property
    def files(self) -> int:
        """In the collection."""
        return len(self.found.files) + len(self.kept)

    def _anew(self, *, known: bool) -> list[str]:
        return [name for name, is_known in self.anew.items() if is_known is known]

    @property
    def lines(self) -> list[str]:
        """For people."""
        settings = self.settings
        return [
            f"{plural(self.files, 'file')}, {plural(self.chunks, 'chunk')} in {settings.chroma}",
            f"{plural(self.prefilled, 'chunk')} prefilled, {self.there} were there already",
            f"KV of these chunks: {size(self.nbytes)} in {settings.kv_dir}",
            f"model {settings.described}, embedding {settings.embed}",
            *_named(self._anew(known=True), "prefilled anew, as they are read differently now,"),
            *_named(
                self._anew(known=False),
                "prefilled anew, as they changed or are read differently now,",
            ),
            *_named(self.removed, "removed"),
            *without_lines(self.found.files),
            *left_out_lines(self.found.left_out, self.kept),
        ]

    @property
    def as_json(self) -> dict[str, Any]:
        """For programs."""
        settings, found = self.settings, self.found
        return {
            "collection": settings.collection,
            "chroma": settings.chroma,
            "kv_dir": settings.kv_dir,
            "model": settings.described,
            "embedding": settings.embed,
            "files": self.files,
            "chunks": self.chunks,
            "prefilled": self.prefilled,
            "there": self.there,
            "bytes": self.nbytes,
            "read_differently": self._anew(known=True),
            "changed_or_read_differently": self._anew(known=False),
            "removed": self.removed,
            "without": {name: one.without for name, one in found.files.items() if one.without},
            "left_out": [
                {"name": one.name, "reason": one.reason, "kept": one.name in self.kept}
                for one in found.left_out
            ],
        }


def _named(names: list[str], what: str) -> list[str]:
    if not names:
        return []
    shown = ", ".join(map(plain, names[:_SHOWN]))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what} {plural(len(names), 'file')}: {shown}{more}"]
