"""A Chroma collection that prefills what is written, for code that knows nothing of KV.

The stock store works on it as on any other: it writes texts and gets them back with the metadata it
wrote.  The references to KV that stand beside that metadata are seen here alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from langchain_core.documents import Document

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import Reference, RowPrefiller, Rows
from langchain_kvcache_rag.blocks import document_text
from langchain_kvcache_rag.columns import listed, new_rows, of_user, without_ghosts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from chromadb.api.models.Collection import Collection
    from langchain_core.prompts import StringPromptTemplate

    from kvcache_rag import Engine
    from kvcache_rag.integration import NewRow, References, Row

_T = TypeVar("_T")


class KVSource(Protocol):
    """What prefills and remembers references; `ChatKVCache` is one."""

    @property
    def engine(self) -> Engine:
        """What prefills, loaded when it is first asked for."""

    @property
    def references(self) -> References:
        """Where the references of rows are noted when they are read."""


def behind(proxy: Any, attribute: str, name: str) -> Any:
    """An attribute of what a proxy stands for."""
    # Copying asks a proxy for its magic methods before it has anything behind it.
    if name.startswith("__") or name == attribute:
        raise AttributeError(name)
    return getattr(getattr(proxy, attribute), name)


class PrefilledCollection:
    """A Chroma collection with references to KV beside its rows' metadata.

    Calls may have any size; empty ones do nothing.  What is not defined here is Chroma's own.
    """

    def __init__(
        self,
        collection: Collection,
        source: KVSource | None,
        *,
        show_progress: bool = False,
        document_prompt: StringPromptTemplate | None = None,
    ) -> None:
        """Wrap `collection`; it stays usable beside."""
        self.collection = collection
        self._rows = Rows(collection)
        self._source, self._show_progress = source, show_progress
        self._document_prompt = document_prompt

    def __getattr__(self, name: str) -> Any:
        return behind(self, "collection", name)

    @property  # type: ignore[misc]  # nobody sets it
    def __class__(self) -> Any:
        """For `isinstance`, which asks for the type first: it is a collection of Chroma's, too."""
        return type(self.collection)

    @property
    def prefiller(self) -> RowPrefiller:
        """The KV side of the rows."""
        engine = None if self._source is None else self._source.engine
        return RowPrefiller(self._rows, engine, str(self.collection.id))

    # ------------------------------------------------------------------ writing
    def upsert(
        self,
        ids: Any,
        embeddings: Any = None,
        metadatas: Any = None,
        documents: Any = None,
        *,
        embed: Callable[[list[str]], Sequence[Sequence[float]]] | None = None,
        show_progress: bool | None = None,
        **others: Any,
    ) -> None:
        """Prefill documents and write them; an existing row is replaced, metadata included.

        Args:
            ids: The last of equal ones wins.
            embeddings: A vector per id; None lets `embed` compute them beside the prefilling, or
                without one Chroma's embedding function.
            metadatas: A mapping or None per id.
            documents: Texts; without them this is Chroma's own `upsert`.
            embed: Gives the vectors of texts.
            show_progress: Whether to show a bar while prefilling; None for the store's setting.
            others: `images` and `uris`; with them this is Chroma's own `upsert`.

        Raises:
            ContextTooLongError: If a text does not fit the context window; nothing is written.
            InvalidInputError: If there is not one of everything per id, or a metadata cannot be
                stored; nothing is prefilled.
        """
        if documents is None or others:
            self.collection.upsert(ids, embeddings, metadatas, documents, **others)
        else:
            rows = new_rows(ids, embeddings, metadatas, documents)
            self._write(rows, show_progress, embed=embed)

    def add(
        self,
        ids: Any,
        embeddings: Any = None,
        metadatas: Any = None,
        documents: Any = None,
        **others: Any,
    ) -> None:
        """`upsert` that leaves existing rows as they are."""
        if documents is None or others:
            self.collection.add(ids, embeddings, metadatas, documents, **others)
            return
        rows = new_rows(ids, embeddings, metadatas, documents)
        self._write(self._absent(rows), select=self._absent)

    def update(
        self,
        ids: Any,
        embeddings: Any = None,
        metadatas: Any = None,
        documents: Any = None,
        **others: Any,
    ) -> None:
        """`upsert` of existing rows alone; without `metadatas` they keep theirs."""
        if documents is None or others:
            self.collection.update(ids, embeddings, metadatas, documents, **others)
            return
        rows = new_rows(ids, embeddings, metadatas, documents)
        known = self._by_id(rows)
        rows = [row for row in rows if row.id in known]
        if metadatas is None:
            rows = [replace(row, metadata=of_user(known[row.id].metadata)) for row in rows]
        # A row that was deleted while its new text was prefilled stays deleted.
        self._write(rows, select=self._present)

    def _absent(self, rows: Sequence[NewRow]) -> list[NewRow]:
        known = self._by_id(rows)
        return [row for row in rows if row.id not in known]

    def _present(self, rows: Sequence[NewRow]) -> list[NewRow]:
        known = self._by_id(rows)
        return [row for row in rows if row.id in known]

    def _by_id(self, rows: Sequence[NewRow]) -> dict[str, Row]:
        found = self._rows.get(ids=[row.id for row in rows], metadata_only=True)
        return {row.id: row for row in found}

    def _write(
        self, rows: Sequence[NewRow], show_progress: bool | None = None, **options: Any
    ) -> None:
        last = list({row.id: row for row in rows}.values())
        if last:
            shows = self._shows(show_progress)
            texts = [*map(self._text, last)]
            self.prefiller.write(last, texts, show_progress=shows, **options)

    def prefill_missing(self, *, show_progress: bool | None = None) -> int:
        """Prefill every row whose KV is not stored; returns how many references were written."""
        return self.prefiller.fill(self._text, show_progress=self._shows(show_progress))

    def _text(self, row: Row | NewRow) -> str:
        """What of a row stands in prompts."""
        document = Document(row.document, metadata=of_user(row.metadata), id=row.id)
        return document_text(document, self._document_prompt)

    def _shows(self, show_progress: bool | None) -> bool:
        return self._show_progress if show_progress is None else show_progress

    # ------------------------------------------------------------------ deleting
    def delete(
        self, ids: Any = None, where: Any = None, where_document: Any = None, **options: Any
    ) -> dict[str, int]:
        """Delete rows by id, by conditions, or by all together, and release their KV.

        Returns:
            As Chroma's: how many were `deleted`.

        Raises:
            InvalidInputError: If it is not said which; `clear` deletes all.
        """
        if where is None and where_document is None:
            if ids is None:
                raise InvalidInputError("say which rows to delete by ids, where or where_document")
            if options.get("limit") is not None:
                raise InvalidInputError("limit= needs where= or where_document=; ids are the limit")
        return self._drop(
            ids=None if ids is None else listed(ids),
            where=where,
            where_document=where_document,
            **options,
        )

    def clear(self) -> None:
        self._drop()

    def _drop(self, **which: Any) -> dict[str, int]:
        with self._rows.writing():
            rows = self._rows.get(metadata_only=True, **which)
            prefiller = self._prefiller_of(rows)
            if prefiller is None:
                self._rows.delete([row.id for row in rows])
            else:
                prefiller.delete(rows)
        return {"deleted": len(rows)}

    def drop_by(self, delete: Callable[[], None]) -> None:
        """Run `delete`, which drops the collection, and release everything that it claimed."""
        with self._rows.writing():
            rows = self._rows.get(metadata_only=True)
            prefiller = self._prefiller_of(rows)
            delete()
        engine = None if prefiller is None else prefiller.engine
        if engine is not None:
            held = {Reference.from_metadata(row.metadata) for row in rows}
            keys = [one.resolve(engine) for one in held if one is not None]
            engine.release([key for key in keys if key is not None], str(self.collection.id))

    def replace_by(self, ids: Sequence[str], write: Callable[[], _T]) -> _T:
        """Run `write`, which may replace rows without prefilling, and release what they held."""
        with self._rows.writing():
            rows = self._rows.get(ids=ids, metadata_only=True)
            prefiller = self._prefiller_of(rows)
            written = write()
            if prefiller is not None:
                prefiller.release(rows)
        return written

    def _prefiller_of(self, rows: Sequence[Row]) -> RowPrefiller | None:
        """What releases the rows' KV, loaded before they go; None if there is nothing to release.

        So a model that cannot be loaded is known before anything is deleted, and none is loaded for
        rows without references.
        """
        held = any(Reference.from_metadata(row.metadata) for row in rows)
        return self.prefiller if held else None

    # ------------------------------------------------------------------ reading
    def get(self, ids: Any = None, **options: Any) -> Any:
        """As Chroma's; no ids are no rows."""
        if ids is not None and not listed(ids):
            # Chroma refuses an empty list of ids, but knows how an answer without rows looks.
            include = {name: options[name] for name in ("include",) if name in options}
            return self.collection.get(limit=0, **include)
        found: Any = self.collection.get(ids=ids, **options)
        if found["metadatas"] is not None:
            found["metadatas"] = [self._read(one) or None for one in found["metadatas"]]
        return found

    def query(self, *args: Any, **options: Any) -> Any:
        """As Chroma's, without rows that another process deleted."""
        found: Any = self.collection.query(*args, **options)
        if found["metadatas"] is None:
            return found
        if found["documents"] is not None:
            found = without_ghosts(found)
        found["metadatas"] = [
            [self._read(one) or None for one in column] for column in found["metadatas"]
        ]
        return found

    def search(self, *args: Any, **options: Any) -> Any:
        found: Any = self.collection.search(*args, **options)
        found["metadatas"] = [
            None if column is None else [self._read(one) for one in column]
            for column in found.get("metadatas") or []
        ]
        return found

    def _read(self, metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Metadata as the user wrote it; the reference beside it is noted."""
        if metadata is None:
            return None
        reference = Reference.from_metadata(metadata)
        if reference is not None and self._source is not None:
            self._source.references.note(reference)
        return of_user(metadata)
