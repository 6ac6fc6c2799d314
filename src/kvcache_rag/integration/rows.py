"""The rows of a Chroma collection, and how rows and documents are written in prompts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from kvcache_rag.errors import InvalidInputError, check_unicode
from kvcache_rag.forks import new_rlock
from kvcache_rag.integration.references import Reference, wrapped_digests

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from importlib.metadata import EntryPoint

    from kvcache_rag.prompt.template import PromptTemplate

    RowText: TypeAlias = Callable[["Row"], str]

Scalar = str | int | float | bool

Where: TypeAlias = dict[str, Any]
"""A metadata condition in Chroma's own form."""

RESERVED: Final = "chroma:document"

GROUP: Final = "kvcache_rag.row_texts"

DOCUMENT: Final = "document"

LLAMA_INDEX: Final = "llama-index"

# LlamaIndex writes a node beside its text; rows of others do not have this.
_NODE: Final = "_node_content"

# SQLite refuses statements with tens of thousands of variables; one membership test stays far
# below.
_MEMBERS: Final = 500

# By collection, for all `Rows` of this process over it.
_WRITERS: Final[dict[str, threading.RLock]] = {}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """One row of a collection.

    Attributes:
        id: Its id.
        document: Its text.
        metadata: Its metadata, without absent values.
        distance: Distance to the query, if there was one.
    """

    id: str
    document: str
    metadata: Mapping[str, Any]
    distance: float = 0.0


@dataclass(frozen=True)
class NewRow:
    """A row to be written.

    Attributes:
        id: Its id; an existing row is replaced, metadata included.
        document: Its text.
        metadata: Flat values; see `flat`.
        embedding: Its vector; None lets the collection embed the document.
    """

    id: str
    document: str
    metadata: Mapping[str, Any]
    embedding: Sequence[float] | None


class Rows:
    """A Chroma collection without its sharp edges; knows nothing of frameworks or KV.

    Chroma limits the size of a call, refuses empty ones, silently ignores an `add` of an existing
    id, merges metadata on `upsert`, fails on unknown ids and returns rows that another process has
    deleted.

    Attributes:
        leaving: References of deleted rows, by key, while a replacement delays deleting their KV;
            None otherwise.
    """

    def __init__(self, collection: Any) -> None:
        """Wrap a `chromadb` collection, which stays usable itself."""
        self._collection, self._process = collection, os.getpid()
        # The client is asked, not assumed: hosted databases allow far less than a local one.
        client: Any = getattr(collection, "_client", None)
        limit = client.get_max_batch_size() if hasattr(client, "get_max_batch_size") else 0
        self._batch = limit if limit and limit > 0 else 1000
        self.leaving: dict[str, Reference] | None = None

    @property
    def collection(self) -> Any:
        """The `chromadb` collection.

        Raises:
            InvalidInputError: In a forked process, which lacks the threads that an embedded
                database needs: Chroma would wait for them for ever.
        """
        if self._process != os.getpid() and self._is_embedded:
            raise InvalidInputError(
                "this Chroma database was opened before the process was forked, and cannot be used "
                "in the child; open it in each process, or start a server (chroma run) for all"
            )
        return self._collection

    @property
    def kind(self) -> type:
        """The class of the collection."""
        return type(self._collection)

    @property
    def _is_embedded(self) -> bool:
        client = getattr(self._collection, "_client", None)
        return client is not None and not hasattr(client, "_session")  # that of HTTP

    def writing(self) -> AbstractContextManager[object]:
        """Keep this process's other writers out, so that a write replaces exactly what was read."""
        return _WRITERS.setdefault(str(self.collection.id), new_rlock())

    def check(self, row: NewRow) -> None:
        """Fail as `put` would: the collection is gone, or a vector is missing or of wrong size."""
        query: dict[str, Any] = {"query_texts": [row.document]}
        if row.embedding is not None:
            query = {"query_embeddings": [list(row.embedding)]}
        self.collection.query(**query, n_results=1, include=[])

    def get(
        self,
        *,
        where: Where | None = None,
        ids: Iterable[str] | None = None,
        limit: int | None = None,
        metadata_only: bool = False,
        where_document: Where | None = None,
    ) -> list[Row]:
        """Rows by metadata, text or id, combined, or all; unknown ids are left out."""
        ids = None if ids is None else [check_unicode(f"the id {id_!r}", id_) for id_ in ids]
        include = ["metadatas"] if metadata_only else ["metadatas", "documents"]
        rows: list[Row] = []
        for page in self._pages(
            ids, limit, where=where, where_document=where_document, include=include
        ):
            documents = page.get("documents") or [""] * len(page["ids"])
            columns = zip(page["ids"], documents, page["metadatas"], strict=True)
            rows.extend(
                Row(id_, document or "", metadata or {})
                for id_, document, metadata in columns
                if metadata_only or not (document is None and metadata is None)
            )
        return rows[:limit]

    def columns(
        self,
        ids: Iterable[str] | None,
        limit: int | None = None,
        offset: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """What Chroma's `get` gives, for any number of rows; an empty list of ids gives no rows."""
        if ids is not None and (limit is not None or offset):  # which of them, only Chroma knows
            pages = [self.collection.get(ids=[*ids], limit=limit, offset=offset, **options)]
        else:
            pages = [*self._pages(ids, limit, offset or 0, **options)]
        # Chroma refuses an empty list of ids, but knows how an answer without rows looks.
        return _joined(pages or [self.collection.get(limit=0, **options)])

    def _pages(
        self, ids: Iterable[str] | None, limit: int | None, offset: int = 0, **options: Any
    ) -> Iterator[Any]:
        if ids is not None:
            for batch in _batches(list(dict.fromkeys(ids)), self._batch):
                yield self.collection.get(ids=batch, **options)
            return
        end = None if limit is None else offset + limit
        while end is None or offset < end:
            size = self._batch if end is None else min(self._batch, end - offset)
            page = self.collection.get(limit=size, offset=offset, **options)
            yield page
            if len(page["ids"]) < size:
                return
            offset += size

    def holding(self, key: str, values: Sequence[str]) -> list[Row]:
        """Rows whose metadata `key` is one of `values`, metadata only."""
        rows: list[Row] = []
        for value in values:
            check_unicode(f"the {key} {value!r}", value)
        for batch in _batches(values, _MEMBERS):
            rows += self.get(where={key: {"$in": list(batch)}}, metadata_only=True)
        return rows

    @staticmethod
    def check_texts(rows: Sequence[NewRow]) -> None:
        """Raise `InvalidInputError` for a row with a text that no database can store."""
        for row in rows:
            check_unicode(f"the id {row.id!r}", row.id)
            check_unicode(f"the text of {row.id!r}", row.document)
            for key, value in row.metadata.items():
                for text in (key, value):
                    if isinstance(text, str):
                        check_unicode(f"{key!r} in the metadata of {row.id!r}", text)

    def put(self, rows: Sequence[NewRow], replaced: list[Row] | None = None) -> list[Row]:
        """Write rows of different ids.

        Args:
            rows: The rows, either all with an embedding or all without.
            replaced: Receives the replaced rows, batch by batch, so that they are known even if a
                later batch fails.

        Returns:
            The replaced rows, metadata only.
        """
        replaced = [] if replaced is None else replaced
        for batch in _batches(rows, self._batch):
            old = {
                row.id: row for row in self.get(ids=[row.id for row in batch], metadata_only=True)
            }
            vectors = [list(row.embedding) for row in batch if row.embedding is not None]
            self.collection.upsert(
                ids=[row.id for row in batch],
                embeddings=vectors or None,
                documents=[row.document for row in batch],
                # Chroma refuses an empty dictionary, but not None.
                metadatas=[_replacing(row.metadata, old.get(row.id)) or None for row in batch],
            )
            replaced += old.values()
        return replaced

    def update(self, metadata: Mapping[str, Mapping[str, Scalar]]) -> None:
        """Add metadata to existing rows; missing ids are ignored."""
        for batch in _batches(list(metadata), self._batch):
            self.collection.update(ids=batch, metadatas=[dict(metadata[id_]) for id_ in batch])

    def delete(self, ids: Sequence[str]) -> None:
        """Delete rows; missing ids are ignored."""
        for batch in _batches(ids, self._batch):
            self.collection.delete(ids=batch)

    def nearest(self, embedding: Sequence[float], count: int) -> list[Row]:
        """The `count` rows nearest to a vector, best first; fewer if there are fewer."""
        vector: Any = [list(embedding)]
        columns = ("documents", "metadatas", "distances")
        result: Any = self.collection.query(
            query_embeddings=vector, n_results=count, include=[*columns]
        )
        found = zip(*(result[name][0] for name in ("ids", *columns)), strict=True)
        return [
            Row(id_, document or "", metadata or {}, distance)
            for id_, document, metadata, distance in found
            # Another process deleted the row, and this one's index does not know yet.
            if not (document is None and metadata is None)
        ]


def is_gone(error: Exception) -> bool:
    """Whether an error says that the collection was deleted; by name, as Chroma is not needed."""
    return type(error).__name__ == "NotFoundError"


def flat(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a document that a row can hold: scalars, and non-empty lists of one type.

    Everything else (dictionaries, mixed lists) is left out.
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
        return len({type(item) for item in value}) == 1 and isinstance(value[0], Scalar)
    return isinstance(value, Scalar)


def _replacing(new: Mapping[str, Any], old: Row | None) -> dict[str, Any]:
    """Metadata that, merged by Chroma into the old row's, leaves exactly `new`."""
    gone = dict.fromkeys(key for key in (old.metadata if old else {}) if key not in new)
    return {**new, **gone}


def _joined(pages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Answers of Chroma as one."""
    kept = [page for page in pages if page["ids"]] or pages[:1]
    if len(kept) == 1:
        return kept[0]
    return {
        name: column if column is None or name == "included" else _column(name, kept)
        for name, column in kept[0].items()
    }


def _column(name: str, pages: Sequence[dict[str, Any]]) -> Any:
    if name == "embeddings":
        import numpy as np

        return np.concatenate([page[name] for page in pages])
    return [value for page in pages for value in page[name]]


def _batches(items: Sequence[_T], size: int) -> Iterator[list[_T]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


# ---------------------------------------------------------------------- what stands in prompts
# One text is one chunk, wherever it comes from: only what is written here stands in prompts, so
# that a server, an ingestion and a build of the same documents share their keys and values.
def document_text(text: str, title: str | None = None) -> str:
    """The chunk of a text with a title: the text alone.

    Args:
        text: The text.
        title: For showing the document; not part of the prompt.
    """
    del title
    return text


def fields_text(fields: Mapping[str, Any]) -> str:
    """The chunk of named fields: a line `name: value` for each, sorted by name.

    Values other than texts are written as JSON with sorted names.  A single `{"text": ...}` is that
    text.

    Args:
        fields: JSON values.
    """
    if set(fields) == {"text"} and isinstance(fields["text"], str):
        return document_text(fields["text"])
    return "\n".join(f"{name}: {_written(fields[name])}" for name in sorted(fields))


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def installed_forms() -> dict[str, RowText]:
    """The forms that rows can be read in, by name: "document" first, then those of frameworks.

    A framework registers its form as an entry point in the group `kvcache_rag.row_texts`, which is
    imported on first use.
    """
    forms: dict[str, RowText] = {DOCUMENT: lambda row: row.document}
    for point in entry_points(group=GROUP):
        forms[point.name] = _FrameworkForm(point)
    return forms


class _FrameworkForm:
    """The form of a framework."""

    def __init__(self, point: EntryPoint) -> None:
        self._point = point
        self._text_of: RowText | None = None

    def __call__(self, row: Row) -> str:
        if self._text_of is None:
            self._text_of = self._point.load()
        return self._text_of(row)


def row_text(name: str, template: PromptTemplate) -> RowText:
    """How to read rows.

    Args:
        name: A form; "" lets every row tell: the form its reference was made from, else that of the
            framework that wrote it, else its document.
        template: Template of the chunks that the references were made from.

    Raises:
        InvalidInputError: If no form has that name.
    """
    forms = installed_forms()
    if not name:
        return _OwnForms(forms, template)
    if name not in forms:
        raise InvalidInputError(
            f"there is no form of texts {name!r}; use one of {', '.join(forms)}, or install the "
            "integration that brings it"
        )
    return forms[name]


class _OwnForms:
    """Reads each row in its own form.

    A row's reference holds the digest of the text that its chunk was computed from, so a row that
    has one tells by itself.
    """

    def __init__(self, forms: Mapping[str, RowText], template: PromptTemplate) -> None:
        self._forms, self._template = forms, template

    def __call__(self, row: Row) -> str:
        reference = Reference.from_metadata(row.metadata)
        if reference is not None:
            for form in self._forms.values():
                text = form(row)
                if reference.text in wrapped_digests(text, self._template):
                    return text
        usual = LLAMA_INDEX if _NODE in row.metadata else DOCUMENT
        return self._forms.get(usual, self._forms[DOCUMENT])(row)
