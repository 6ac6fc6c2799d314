"""What `ingest`, `ask` and `chat` share: where things are, which embedding, which files."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag import InvalidInputError
from kvcache_rag.commands.options import (
    add_max_new_tokens,
    add_options,
    add_policy,
    add_top_k,
    ready,
)
from kvcache_rag.errors import expanded
from llama_index.kvcache_rag.commands.settings import OF_MODELS, Settings, collections_in

if TYPE_CHECKING:
    import argparse

    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.schema import Document

    from kvcache_rag import Engine
    from kvcache_rag.models.minilm import Minilm
    from kvcache_rag.policies.base import ReusePolicy
    from kvcache_rag_documents import FileText
    from llama_index.kvcache_rag import KVCacheLLM, KVCacheVectorStore

TINY: Final = "tiny"
PACKAGED: Final = "smollm2"
"""Read by `ingest` where nothing else is named and its package is installed."""


def default_model() -> str:
    """`PACKAGED` where it is installed; else "", and one has to be named."""
    from kvcache_rag.models import model_names

    try:
        distribution(model_names.PACKAGED[PACKAGED].package)
    except PackageNotFoundError:
        return ""
    return PACKAGED


def add_place(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that all of them share."""
    from kvcache_rag.settings import LocalSettings

    default = Settings()
    group = parser.add_argument_group(
        "model and chunks",
        f"Those of the collection; for a new one {PACKAGED}, where it is installed, and kv_dir "
        f"{default.kv_dir}.",
    )
    add_options(group, LocalSettings, *OF_MODELS, "kv_dir")
    for name, text in (
        ("chroma", f"folder of the Chroma database (default: {default.chroma})"),
        ("embed", "minilm, hash, or a sentence-transformers name or folder (default: minilm)"),
        (
            "collection",
            f"name of the collection (default: {default.collection}; to ask, else the only one)",
        ),
    ):
        kind = str if name == "collection" else expanded
        parser.add_argument(f"--{name}", type=kind, help=text)


def add_answering(parser: argparse.ArgumentParser) -> None:
    """Declare how a question is answered."""
    add_top_k(parser, "default: 4", default=4)
    add_max_new_tokens(parser, 128)
    policy = parser.add_mutually_exclusive_group()
    add_policy(policy)
    policy.add_argument("--full", action="store_true", help="compute every chunk again")


@dataclass(frozen=True)
class Chosen:
    """The collection that is asked, and what answers.

    Attributes:
        settings: How it is to be asked; its `kv_dir` is "" where nothing is to be kept.
        noted: How it was made.
        collection: Of Chroma.
        policy: As it was said; None for the engine's.
    """

    settings: Settings
    noted: Settings
    collection: Any
    policy: ReusePolicy | str | None

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Chosen:
        """What the arguments of `add_place` and `add_answering` say.

        Another model than that of the chunks computes them for itself, and keeps nothing unless it
        is told where.

        Raises:
            InvalidInputError: If they cannot be used, or nothing was ingested.
        """
        noted, settings, collection = _ingested(arguments)
        begin(settings)
        from kvcache_rag import FullRecompute

        policy = FullRecompute() if arguments.full else arguments.policy
        found = cls(settings, noted, collection, policy)
        if found.is_other and arguments.kv_dir is None:
            print(_other_note(noted, settings), file=sys.stderr)
            found = replace(found, settings=replace(settings, kv_dir=""))
        return found

    @property
    def is_other(self) -> bool:
        """Whether another model computed the chunks."""
        return not self.settings.is_by(self.noted)

    def check(self, engine: Engine) -> None:
        """Refuse an engine that cannot find what was ingested.

        Raises:
            InvalidInputError: If its chunks are not those of the collection.
        """
        # A policy may cut chunks in a way of its own, which is another engine.
        is_own = not self.is_other and self.policy is None
        if is_own and self.noted.spec not in ("", engine.spec):
            raise InvalidInputError(
                f"the chunks of {self.noted.collection!r} are not of {self.noted.described} as it "
                "is here now; run ingest again, which computes them anew"
            )


def nothing_in(collection: str) -> InvalidInputError:
    """What to raise where there is nothing to answer from."""
    return InvalidInputError(f"the collection {collection!r} is empty; ingest first")


def begin(settings: Settings) -> None:
    """Refuse what can be refused before anything is loaded, then say that it begins."""
    from kvcache_rag.models.model_names import check_there
    from kvcache_rag.settings import EngineSettings

    names = ("minilm", "hash")
    if settings.embed not in names:
        check_there(settings.embed, "embedding", names=names)
    ready(EngineSettings(model=settings.model, adapter=settings.adapter, backend=settings.backend))


def _other_note(noted: Settings, settings: Settings) -> str:
    return (
        f"note: the chunks of {noted.collection!r} are of {noted.described}; {settings.described} "
        "computes those of a question itself and keeps nothing, unless --kv-dir says where"
    )


def _ingested(arguments: argparse.Namespace) -> tuple[Settings, Settings, Any]:
    """How the collection was made that is asked, how it is to be asked, and itself."""
    chroma = arguments.chroma or Settings.chroma
    collections = collections_in(chroma)
    if not collections:
        raise InvalidInputError(
            f"there is no database {chroma}; run `kvcache-rag ingest DIR` first, or say --chroma"
        )
    name = arguments.collection
    if name is None:
        name = _only(collections, chroma)
    if name not in collections:
        raise InvalidInputError(
            f"there is no collection {name!r} in {chroma}, only {', '.join(sorted(collections))}"
        )
    if not collections[name].count():
        raise nothing_in(name)
    options = (*OF_MODELS, "kv_dir", "embed")
    said = {option: getattr(arguments, option) for option in options}
    given = {option: value for option, value in said.items() if value is not None}
    found = Settings.from_collection(collections[name], chroma)
    if found is None:
        found = _unnoted(Settings(chroma=chroma, collection=name), given)
    found.check_embedding(given.get("embed", found.embed))
    return found, found.told(given), collections[name]


def _only(collections: dict[str, Any], chroma: str) -> str:
    """The name that `ingest` gives unless told, or else that of the one it gave."""
    if Settings.collection in collections:
        return Settings.collection
    noted = [
        name
        for name, one in collections.items()
        if Settings.from_collection(one, chroma) is not None
    ]
    if len(noted) > 1:
        names = ", ".join(sorted(noted))
        raise InvalidInputError(f"there are several in {chroma} ({names}); say --collection")
    return noted[0] if noted else Settings.collection


def _unnoted(settings: Settings, given: dict[str, Any]) -> Settings:
    """A collection that an app filled, as the command line describes it."""
    needed = {"model", "embed", "kv_dir"}
    if not needed <= given.keys():
        raise InvalidInputError(
            f"ingest noted nothing of the collection {settings.collection!r} in "
            f"{settings.chroma}, so it is not known which model and embedding it is of; say "
            "--model, --embed and --kv-dir, or ingest its files into another --collection"
        )
    return settings.told(given)


def embedding(name: str) -> BaseEmbedding:
    """An embedding by its name on the command line.

    Raises:
        InvalidInputError: If it is not installed or cannot be loaded.
    """
    from llama_index.kvcache_rag import HashEmbedding

    if name == "hash":
        return HashEmbedding()
    if name == "minilm":
        from llama_index.kvcache_rag.commands.minilm_embedding import MinilmEmbedding

        return MinilmEmbedding(minilm())
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    try:
        from llama_index.embeddings.huggingface import HuggingFaceEmbedding
    except ImportError as error:
        raise _not_installed(error, "llama-index-embeddings-huggingface") from error
    try:
        return HuggingFaceEmbedding(model_name=name, device="cpu")
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidInputError(f"cannot load the embedding {name!r}: {reason}") from error


def minilm() -> Minilm:
    """The embedding that is packaged, without LlamaIndex.

    Raises:
        InvalidInputError: If it is not installed.
    """
    from kvcache_rag.models.minilm import Minilm

    try:
        return Minilm.installed()
    except ImportError as error:
        raise _not_installed(error, "'llama-index-kvcache-rag[demo]'") from error


def _not_installed(error: ImportError, brings: str) -> InvalidInputError:
    return InvalidInputError(
        f"this embedding needs {error.name}: pip install {brings}, or use --embed hash"
    )


def open_store(settings: Settings, llm: KVCacheLLM | None) -> KVCacheVectorStore:
    """The collection of `settings`, new or existing."""
    from kvcache_rag.integration import private_folder
    from llama_index.kvcache_rag import KVCacheVectorStore

    private_folder(settings.chroma)  # of what documents say
    return KVCacheVectorStore.from_params(settings.collection, persist_dir=settings.chroma, llm=llm)


FILE_DIGEST: Final = "file_digest"
"""Of the file, in a document's metadata."""


def as_document(name: str, file: FileText) -> Document:
    """A file, identified by its path.

    What is said about it is kept out of the LLM's text: moving a file does not change what its
    chunks say, and a note's own date and tags are not answered in place of those it is about.
    """
    from llama_index.core.schema import Document

    said = {_free(key): value for key, value in file.metadata.items()}
    metadata = {**said, "file_path": name, **({FILE_DIGEST: file.digest} if file.digest else {})}
    return Document(
        text=file.text,
        id_=name,
        metadata=metadata,
        excluded_llm_metadata_keys=[*metadata],
        excluded_embed_metadata_keys=[*metadata],
    )


def _free(key: str) -> str:
    """A name that neither we nor a framework nor Chroma writes in a row."""
    is_taken = key in ("file_path", FILE_DIGEST, "doc_id", "document_id", "ref_doc_id")
    return f"said_{key}" if is_taken or key.startswith(("_", "kv_", "chroma:", "#")) else key
