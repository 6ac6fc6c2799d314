"""A store and a Chroma database that belong together, for tests of the commands that tend them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import chromadb
from small import make_model, make_tokenizer

from kvcache_rag import DiskStore, Engine, PromptTemplate, cli
from kvcache_rag.integration import NewRow, RowPrefiller, Rows
from kvcache_rag.stores.listing import StoredFile, namespaces

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["alpha is here", "beta is there", "gamma is nowhere"]
TEMPLATE = PromptTemplate(system="Read.\n")


class Place:
    """A store, a database with one collection, and an engine that fills both."""

    def __init__(self, folder: Path) -> None:
        self.kv, self.chroma = folder / "kv", folder / "chroma"
        self.client = chromadb.PersistentClient(path=str(self.chroma))
        self.store = DiskStore(self.kv, durable=False)
        self.engine = Engine(make_model(), make_tokenizer(), store=self.store, template=TEMPLATE)
        self.docs = self.prefiller("docs")

    def prefiller(self, name: str) -> RowPrefiller:
        collection = self.client.get_or_create_collection(name, embedding_function=None)
        return RowPrefiller(Rows(collection), self.engine)

    def chunks(self) -> dict[str, StoredFile]:
        return {
            chunk.digest: chunk
            for namespace in namespaces(self.kv)
            for spec in namespace.specs()
            for chunk in spec.chunks()
        }

    def run(self, *words: str) -> int:
        """A command of `store`, with the database where it takes one."""
        action, *rest = words
        place = ["--chroma", str(self.chroma)] if action == "gc" else []
        return cli.main(["store", action, str(self.kv), *place, *rest])


def write(prefiller: RowPrefiller, texts: list[str]) -> None:
    rows = [NewRow(str(at), text, {}, [float(at), 1.0]) for at, text in enumerate(texts)]
    prefiller.write(rows, texts)


def forget(prefiller: RowPrefiller, *ids: str) -> None:
    """Delete rows behind the store's back."""
    prefiller.rows.delete(list(ids))


def age(place: Place, seconds: float) -> None:
    """Let every mark have been made that much earlier."""
    for path in place.kv.rglob("*"):
        if path.is_file():
            status = path.stat()
            os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))
