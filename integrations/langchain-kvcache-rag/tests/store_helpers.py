"""Stores, embeddings and a Chroma server for the tests of the vector store."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import access
import chromadb
import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from kvcache_rag import MemoryStore
from langchain_kvcache_rag.vector_store import KVCacheChroma

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag import Engine


class Geometry(Embeddings):
    """Vectors made by hand; a text that is not among them has one of its letters.

    Refuses to embed nothing, as some services do.
    """

    def __init__(self, vectors: dict[str, list[float]] | None = None) -> None:
        self.vectors = vectors or {}

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        if not texts:
            raise ValueError("there is nothing to embed")
        return [self.vectors.get(text) or self._letters(text) for text in texts]

    @staticmethod
    def _letters(text: str) -> list[float]:
        return [1.0, *(text.count(letter) / (1 + len(text)) for letter in "aeio")]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def new_name() -> str:
    """Of a collection that nobody has."""
    return f"c-{uuid.uuid4().hex}"


def memory_store(embedding: Embeddings | None = None, **options: Any) -> KVCacheChroma:
    """A store in memory, over a collection of its own."""
    name = options.pop("collection_name", new_name())
    return KVCacheChroma(
        name, embedding or Geometry(), client=chromadb.EphemeralClient(), **options
    )


def metadata_of(store: KVCacheChroma, id_: str) -> dict[str, Any]:
    """A row's metadata as it is stored, references included."""
    raw: Any = access.collection(store)
    found = raw.collection.get(ids=[id_])["metadatas"]
    return dict(found[0] or {})


def texts_of(store: KVCacheChroma) -> dict[str, str]:
    """Texts by id."""
    found = store.get()
    return dict(zip(found["ids"], found["documents"], strict=True))


def survivors(engine: Engine) -> Callable[..., str]:
    """Which of some texts are held."""
    store: Any = engine.store
    MemoryStore.__init__(store)

    def held(*texts: str) -> str:
        store.sweep()
        keys = zip(texts, engine.keys(texts), strict=True)
        return "".join(text for text, key in keys if store.contains(key))

    return held


def plain(value: Any) -> Any:
    """Arrays as lists, at any depth, so that results can be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def library() -> list[Document]:
    """Documents with every kind of metadata that Chroma takes."""
    return [
        Document("red fox", id="a", metadata={"year": 1, "colour": "red", "tags": ["x", "y"]}),
        Document("blue fox", id="b", metadata={"year": 2, "colour": "blue", "rare": True}),
        Document("red hen house", id="c", metadata={"year": 3, "colour": "red", "share": 0.5}),
        Document("a green lake", id="d", metadata={"year": 4, "tags": ["y"]}),
        Document("red foxes", id="e", metadata={"year": 5, "colour": "red"}),
        Document("nothing is known of this one", id="f"),
    ]
