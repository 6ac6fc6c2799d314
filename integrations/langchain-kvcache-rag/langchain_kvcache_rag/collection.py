"""A Chroma collection that prefills what LangChain's stock store writes.

That store writes texts in columns and gets them back with the metadata it wrote.  The references to
KV that stand beside that metadata are seen here alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from langchain_core.documents import Document

from kvcache_rag.integration import PrefilledCollection, Reference, of_user
from langchain_kvcache_rag.blocks import document_text
from langchain_kvcache_rag.columns import new_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from chromadb.api.models.Collection import Collection
    from langchain_core.prompts import StringPromptTemplate

    from kvcache_rag import Engine
    from kvcache_rag.integration import NewRow, References, Row


class KVSource(Protocol):
    """What prefills and remembers references; `ChatKVCache` is one."""

    @property
    def engine(self) -> Engine:
        """What prefills, loaded when it is first asked for."""

    @property
    def references(self) -> References:
        """Where the references of rows are noted when they are read."""


class DocumentCollection(PrefilledCollection):
    """A collection of documents, whose references are noted for the chat model."""

    def __init__(
        self,
        collection: Collection,
        source: KVSource | None,
        *,
        show_progress: bool = False,
        document_prompt: StringPromptTemplate | None = None,
    ) -> None:
        """As of the base class; `document_prompt` writes what of a row stands in prompts."""
        super().__init__(collection, source, show_progress=show_progress)
        self._source, self._document_prompt = source, document_prompt

    def text(self, row: Row | NewRow) -> str:
        document = Document(row.document, metadata=of_user(row.metadata), id=row.id)
        return document_text(document, self._document_prompt)

    def shown(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Metadata as the user wrote it; the reference beside it is noted."""
        reference = Reference.from_metadata(metadata)
        if reference is not None and self._source is not None:
            self._source.references.note(reference)
        return of_user(metadata)

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
            InvalidInputError: If there is not one of everything per id, or a metadata cannot be
                stored; nothing is prefilled.
        """
        if documents is None or others:
            self.collection.upsert(ids, embeddings, metadatas, documents, **others)
        else:
            rows = new_rows(ids, embeddings, metadatas, documents)
            self.write(rows, show_progress=show_progress, embed=embed)

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
        self.write(self._absent(rows), select=self._absent)

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
        self.write(rows, select=self._present)

    def _absent(self, rows: Sequence[NewRow]) -> list[NewRow]:
        known = self._by_id(rows)
        return [row for row in rows if row.id not in known]

    def _present(self, rows: Sequence[NewRow]) -> list[NewRow]:
        known = self._by_id(rows)
        return [row for row in rows if row.id in known]

    def _by_id(self, rows: Sequence[NewRow]) -> dict[str, Row]:
        found = self._rows.get(ids=[row.id for row in rows], metadata_only=True)
        return {row.id: row for row in found}

    # ------------------------------------------------------------------ reading
    def search(self, *args: Any, **options: Any) -> Any:
        found: Any = self.collection.search(*args, **options)
        found["metadatas"] = [
            None if column is None else [None if one is None else self.shown(one) for one in column]
            for column in found.get("metadatas") or []
        ]
        return found
