"""A Chroma collection without its sharp edges.

Chroma limits the size of a call, refuses empty ones, silently ignores an `add` of an existing id,
merges metadata on `upsert`, fails on ids it does not hold and returns rows that another process has
deleted.  `Rows` hides all that; it knows nothing of LlamaIndex or of KV.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import chromadb
from chromadb.errors import ChromaError

from kvcache_rag import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection

    from llama_index.kvcache_rag.filters import Where

Scalar = str | int | float | bool
RESERVED: Final = "chroma:document"
# SQLite refuses statements with tens of thousands of variables; one membership test stays far
# below.
_MEMBERS: Final = 500

_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """One row of a collection.

    Attributes:
        id: Its id.
        document: Its text.
        metadata: Its metadata, without absent values.
        embedding: Its vector, if it was asked for.
        distance: To the query, if there was one.
    """

    id: str
    document: str
    metadata: Mapping[str, Any]
    embedding: Sequence[float] | None = None
    distance: float = 0.0


@dataclass(frozen=True)
class NewRow:
    """A row to be written.

    Attributes:
        id: Its id; an existing row is replaced, metadata included.
        document: Its text.
        metadata: Flat values; see `flat`.
        embedding: Its vector.
    """

    id: str
    document: str
    metadata: Mapping[str, Any]
    embedding: Sequence[float]


class Rows:
    """Batched access to a collection."""

    def __init__(self, collection: Collection) -> None:
        """Wrap `collection`; it stays usable beside."""
        self.collection = collection
        # The client is asked, not assumed: hosted databases allow far less than a local one.
        client: Any = getattr(collection, "_client", None)
        limit = client.get_max_batch_size() if hasattr(client, "get_max_batch_size") else 0
        self._batch = limit if limit and limit > 0 else 1000

    def get(
        self,
        *,
        where: Where | None = None,
        ids: Iterable[str] | None = None,
        limit: int | None = None,
        metadata_only: bool = False,
    ) -> list[Row]:
        """Rows by metadata, by id (unknown ones are left out), by both, or all."""
        include = ["metadatas"] if metadata_only else ["metadatas", "documents"]
        rows: list[Row] = []
        for page in self._pages(where, ids, limit, include):
            documents = page.get("documents") or [""] * len(page["ids"])
            found = zip(page["ids"], documents, page["metadatas"], strict=True)
            rows.extend(
                Row(id_, document or "", metadata or {})
                for id_, document, metadata in found
                if metadata_only or not (document is None and metadata is None)
            )
        return rows

    def _pages(
        self, where: Where | None, ids: Iterable[str] | None, limit: int | None, include: Any
    ) -> Iterator[Any]:
        if ids is not None:
            for batch in _batches(list(dict.fromkeys(ids)), self._batch):
                yield self.collection.get(ids=batch, where=where, include=include)
            return
        offset = 0
        while limit is None or offset < limit:
            size = self._batch if limit is None else min(self._batch, limit - offset)
            page = self.collection.get(where=where, limit=size, offset=offset, include=include)
            yield page
            if len(page["ids"]) < size:
                return
            offset += size

    def holding(self, key: str, values: Sequence[str]) -> list[Row]:
        """Rows whose metadata `key` is one of `values`, metadata only."""
        found: list[Row] = []
        for batch in _batches(values, _MEMBERS):
            found += self.get(where={key: {"$in": list(batch)}}, metadata_only=True)
        return found

    def put(self, rows: Sequence[NewRow]) -> list[Row]:
        """Write rows of different ids; returns what they replaced, metadata only."""
        replaced: list[Row] = []
        for batch in _batches(rows, self._batch):
            old = {
                row.id: row for row in self.get(ids=[row.id for row in batch], metadata_only=True)
            }
            vectors: Any = [list(row.embedding) for row in batch]
            self.collection.upsert(
                ids=[row.id for row in batch],
                embeddings=vectors,
                documents=[row.document for row in batch],
                metadatas=[_replacing(row.metadata, old.get(row.id)) for row in batch],
            )
            replaced += old.values()
        return replaced

    def update(self, metadata: Mapping[str, Mapping[str, Scalar]]) -> None:
        """Add metadata to existing rows; ids that are gone are left alone."""
        for batch in _batches(list(metadata), self._batch):
            self.collection.update(ids=batch, metadatas=[dict(metadata[id_]) for id_ in batch])

    def delete(self, ids: Sequence[str]) -> None:
        """Delete rows; ids that are gone are left alone."""
        for batch in _batches(ids, self._batch):
            self.collection.delete(ids=batch)

    def nearest(
        self,
        embedding: Sequence[float],
        count: int,
        *,
        where: Where | None = None,
        ids: Sequence[str] | None = None,
        with_embeddings: bool = False,
        **options: Any,
    ) -> list[Row]:
        """The `count` rows nearest to `embedding`, best first.

        Args:
            embedding: The query's vector.
            count: How many; fewer if there are not so many.
            where: Condition on the metadata.
            ids: Only these rows; they must exist.
            with_embeddings: Whether to bring their vectors along.
            options: Further arguments of Chroma's `query`.
        """
        if count < 1 or (ids is not None and not ids):
            return []
        include: Any = [
            "metadatas",
            "documents",
            "distances",
            *(["embeddings"] if with_embeddings else []),
        ]
        vector: Any = [list(embedding)]
        found: Any = self.collection.query(
            query_embeddings=vector,
            n_results=count,
            where=where,
            ids=None if ids is None else list(ids),
            include=include,
            **options,
        )
        vectors = found["embeddings"][0] if with_embeddings else [None] * len(found["ids"][0])
        columns = (found[name][0] for name in ("ids", "documents", "metadatas", "distances"))
        return [
            Row(id_, document or "", metadata or {}, vector, distance)
            for id_, document, metadata, distance, vector in zip(*columns, vectors, strict=True)
            # Another process deleted the row, and this one's index does not know yet.
            if not (document is None and metadata is None)
        ]


def open_collection(
    name: str,
    *,
    client: ClientAPI | None = None,
    persist_dir: str | None = None,
    host: str | None = None,
    port: int | None = None,
    ssl: bool = False,
    headers: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Collection:
    """Get or create a collection; an existing one keeps its configuration.

    Raises:
        InvalidInputError: If it is not said where the collection is, or twice, or if Chroma
            refuses its name or cannot be reached.
    """
    given = [place for place in (client, persist_dir, host) if place is not None]
    if len(given) != 1:
        raise InvalidInputError(
            "say where the Chroma collection is by exactly one of persist_dir=, host= and client="
        )
    try:
        if persist_dir is not None:
            # Chroma keeps one client per path for the whole process, also after a chdir.
            client = chromadb.PersistentClient(path=os.path.abspath(persist_dir))
        elif host is not None:
            client = chromadb.HttpClient(host, port or 8000, ssl=ssl, headers=dict(headers or {}))
        if client is None:
            raise InvalidInputError("client= must be a Chroma client")
        # Vectors come from LlamaIndex; Chroma's default embedding would download a model.
        return client.get_or_create_collection(name, embedding_function=None, **(options or {}))
    except (ValueError, ChromaError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"cannot open the collection {name!r}: {reason}") from error


def flat(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What of a node's metadata a row can hold: scalars, and non-empty lists of one type.

    Everything else (dictionaries, mixed lists) stays in the serialised node and cannot be filtered
    by.
    """
    values = {
        key: _number_list(value) if isinstance(value, (list, tuple)) else value
        for key, value in metadata.items()
        if isinstance(key, str) and key not in ("", RESERVED)
    }
    return {key: value for key, value in values.items() if _fits(value)}


def _number_list(values: Sequence[Any]) -> list[Any]:
    if {type(value) for value in values} == {int, float}:
        return [float(value) for value in values]
    return list(values)


def _fits(value: Any) -> bool:
    if isinstance(value, list):
        return len({type(one) for one in value}) == 1 and isinstance(value[0], Scalar)
    return isinstance(value, Scalar)


def _replacing(new: Mapping[str, Any], old: Row | None) -> dict[str, Any]:
    """Metadata that, merged by Chroma into the old row's, leaves exactly `new`."""
    gone = dict.fromkeys(key for key in (old.metadata if old else {}) if key not in new)
    return {**new, **gone}


def _batches(items: Sequence[_T], size: int) -> Iterator[list[_T]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
