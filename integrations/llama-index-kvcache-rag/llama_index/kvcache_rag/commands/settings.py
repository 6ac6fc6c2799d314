"""How a collection was made: `ingest` notes it in the collection's metadata, `ask` reads it.

So it goes where the database goes, a copy has it too, and what is deleted leaves nothing behind.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import lasting_adapter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chromadb.api.models.Collection import Collection

    from kvcache_rag.models import WeightFormat

KEY: Final = "kvcache-rag"
"""Of the collection's metadata."""

OF_MODELS: Final = ("model", "backend", "adapter", "weight_format")

# Where 0.1 noted it, and which texts it had read: files beside the database.
_SETTINGS_01, _TEXTS_01 = ".kvcache-rag.json", ".docstore.json"

# Names in what is noted, as it was first written.
_WRITTEN: Final = {"kv_dir": "kv", "chunk_overlap": "overlap"}
# What is left out while it says nothing, as when there was no such thing; and what is where it is.
_SILENT: Final = ("adapter", "backend", "weight_format", "spec", "full")
_PLACE: Final = ("chroma", "collection")
_OF_ANOTHER: Final = {"backend": "transformers", "adapter": None, "weight_format": "auto"}


@dataclass(frozen=True)
class FullPrefill:
    """A question that was answered without cached chunks, to say later what these are worth.

    Attributes:
        tokens: Of its prompt.
        seconds: To its first token.
        machine: Which it was; another one takes another time.
    """

    tokens: int
    seconds: float
    machine: str

    def seconds_for(self, tokens: int, machine: str) -> float | None:
        """About what a prompt of so many tokens takes; None on another machine.

        In proportion: a token costs the same as long as the linear layers cost more than attention,
        which they do up to some thousand tokens, beyond which this is less than the truth.
        """
        return self.seconds * tokens / self.tokens if machine == self.machine else None


@dataclass(frozen=True)
class Settings:
    """How a collection was made.

    Attributes:
        model: As for `LocalSettings`, like the next four; "" where it is not known.
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
        spec: Of the engine that computed its chunks, "" where that was not noted.
        full: What a question cost without them; None where that was not measured.
    """

    model: str = ""
    kv_dir: str = "kv"
    chroma: str = "chroma"
    embed: str = "minilm"
    collection: str = "docs"
    chunk_size: int = 256
    chunk_overlap: int = 32
    backend: str = "transformers"
    adapter: str | None = None
    weight_format: WeightFormat = "auto"
    folder: str = ""
    spec: str = ""
    full: FullPrefill | None = None

    @property
    def of_llm(self) -> dict[str, Any]:
        """What `KVCacheLLM` is told of them."""
        names = ("backend", "adapter", "weight_format")
        how = {name: getattr(self, name) for name in names}
        return {"model_name": self.model, "kv_dir": self.kv_dir or None, **how}

    @property
    def described(self) -> str:
        """The model, for people."""
        adapter = f", adapter {self.adapter}" if self.adapter else ""
        backend = "" if self.backend == Settings.backend else f", by {self.backend}"
        rounded = f" in {self.weight_format}" if self.weight_format in ("int8", "int4") else ""
        return f"{self.model}{rounded}{adapter}{backend}"

    def told(self, given: Mapping[str, Any]) -> Settings:
        """As they are with what was said now; what was noted of a model is not of another one."""
        said = dict(given)
        for name, lasting in (("model", _absolute), ("adapter", lasting_adapter)):
            if said.get(name):
                said[name] = lasting(said[name])
        fresh = {} if said.get("model", self.model) == self.model else _OF_ANOTHER
        found = replace(self, **{**fresh, **said})
        return found if found.is_by(self) else replace(found, spec="", full=None)

    def is_by(self, other: Settings) -> bool:
        """Whether the same model computes the chunks, as far as it was named."""
        return all(getattr(self, name) == getattr(other, name) for name in OF_MODELS)

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

    # ------------------------------------------------------------------ noting
    def note(self, collection: Collection) -> None:
        """Write them into the collection, in the place of what an older version had beside it."""
        held = collection.metadata or {}
        # Chroma refuses to be told the metric again, which it keeps elsewhere.
        kept = {name: value for name, value in held.items() if not name.startswith("hnsw:")}
        collection.modify(metadata={**kept, KEY: self.to_text()})
        for suffix in (_SETTINGS_01, _TEXTS_01):
            with suppress(OSError):
                os.unlink(_beside(self.chroma, self.collection, suffix))

    def to_text(self) -> str:
        """As JSON; with paths in such a way that database, chunks and files can move together."""
        above = _above(self.chroma)
        values = {
            **asdict(self),
            "kv_dir": os.path.relpath(self.kv_dir, above),
            "model": _absolute(self.model),
            "embed": _absolute(self.embed),
            "adapter": self.adapter and lasting_adapter(self.adapter),
            "folder": os.path.relpath(os.path.realpath(self.folder), os.path.realpath(above)),
        }
        silent = {name for name in _SILENT if getattr(self, name) == getattr(Settings, name)}
        silent |= {*_PLACE, *(() if self.folder else ("folder",))}
        said = {_WRITTEN.get(name, name): one for name, one in values.items() if name not in silent}
        return json.dumps(said, indent=2)

    @classmethod
    def from_text(cls, text: str, chroma: str, collection: str) -> Settings:
        """Read them back, for the database and the collection in which they stood.

        Raises:
            InvalidInputError: If the text is not of this form.
        """
        try:
            values, names = json.loads(text), {old: name for name, old in _WRITTEN.items()}
            found = cls(**{names.get(name, name): value for name, value in values.items()})
            full: Any = found.full
            above = _above(chroma)
            files = found.folder and os.path.normpath(Path(above).resolve() / found.folder)
            return replace(
                found,
                chroma=chroma,
                collection=collection,
                kv_dir=os.path.normpath(os.path.join(above, found.kv_dir)),
                folder=files,
                full=full and FullPrefill(**full),
            )
        except (AttributeError, RecursionError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"what ingest noted of the collection {collection!r} in {chroma} cannot be read "
                f"({error}); ingest its files into another --collection"
            ) from error

    @classmethod
    def from_collection(cls, collection: Any, chroma: str) -> Settings | None:
        """Those that were noted in a collection; None if there are none.

        Raises:
            InvalidInputError: If they cannot be read.
        """
        text, name = (collection.metadata or {}).get(KEY), str(collection.name)
        if text is None:
            text = _text_01(chroma, name)
        return None if text is None else cls.from_text(text, chroma, name)


def this_machine() -> str:
    """What seconds depend on, beside the model."""
    import torch

    from kvcache_rag.models.processors import processor

    return f"{processor()}, {torch.get_num_threads()} thread(s)"


def collections_in(chroma: str) -> dict[str, Any]:
    """The collections of a database by their names; where there is none, none, and none is made."""
    if not (Path(chroma) / "chroma.sqlite3").is_file():
        return {}
    from kvcache_rag.commands.collections import all_collections
    from kvcache_rag.commands.doctor import folder_facts
    from kvcache_rag.progress import tell

    tell(f"opening {chroma}")
    # Chroma writes into one that it only reads, and says the file's error alone.
    if problem := folder_facts(Path(chroma))["problem"]:
        raise InvalidInputError(
            f"{chroma} cannot be written ({problem}), which Chroma needs even to be asked; copy "
            "it to where it can, and name that by --chroma"
        )
    import chromadb

    client = chromadb.PersistentClient(path=os.path.abspath(chroma))
    return {str(one.name): one for one in all_collections(client)}


def _above(chroma: str) -> str:
    """The folder that a database lies in."""
    return os.path.normpath(os.path.join(chroma, os.pardir))


def _beside(chroma: str, collection: str, suffix: str) -> str:
    return f"{os.path.normpath(chroma)}.{collection}{suffix}"


def _text_01(chroma: str, collection: str) -> str | None:
    """What version 0.1 noted of a collection, in a file beside its database."""
    path = Path(_beside(chroma, collection, _SETTINGS_01))
    if not path.is_file():  # a pipe would be waited for
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} cannot be read ({error}); delete it") from error


def _absolute(name: str) -> str:
    """A folder or a GGUF file by its whole path, anything else as it is."""
    path = Path(name)
    return str(path.resolve()) if path.is_dir() or path.suffix == ".gguf" else name
