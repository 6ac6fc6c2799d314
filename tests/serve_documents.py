"""A Chroma database as users have it: made by LlamaIndex, by us, and before us."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import chromadb

from kvcache_rag import DiskStore, Engine
from kvcache_rag.integration import NewRow, RowPrefiller, Rows, hash_vector

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = (
    "Marta Lindqvist keeps the lighthouse of Orrin.",
    "The bakery of Vell sells rye bread on Mondays.",
    "Tomas Brandt draws maps of the northern coast.",
)
QUESTION = "Who keeps the lighthouse of Orrin?"


def database(folder: Path) -> Any:
    return chromadb.PersistentClient(path=str(folder / "chroma"))


def engine(folder: Path, namespace: str = "") -> Engine:
    """An engine of the packaged reader over the folder that servers use too."""
    store = DiskStore(folder / "kv", durable=False)
    return Engine.from_pretrained("tiny", store=store, device="cpu", namespace=namespace)


def write_rows(
    folder: Path,
    name: str,
    texts: tuple[str, ...] = TEXTS,
    *,
    by: Engine | None = None,
    **metadata: Any,
) -> None:
    """Plain rows, as LangChain's store or a script makes them; prefilled if there is an engine."""
    collection = database(folder).get_or_create_collection(name, embedding_function=None)
    rows = [
        NewRow(f"{name}-{at}", text, {"page": at, **metadata}, hash_vector(text))
        for at, text in enumerate(texts)
    ]
    RowPrefiller(Rows(collection), by, str(collection.id)).write(rows, texts)
