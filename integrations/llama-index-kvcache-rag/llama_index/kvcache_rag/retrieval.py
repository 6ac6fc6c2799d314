"""Select rows of a collection: by filters, by ids, by nearness, by nearness and variety (MMR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_index.core.indices.query.embedding_utils import get_top_k_mmr_embeddings
from llama_index.core.vector_stores.types import VectorStoreQueryMode

from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag.filters import all_of, row_filter
from llama_index.kvcache_rag.rows import DOCUMENT_KEY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.vector_stores.types import MetadataFilters, VectorStoreQuery

    from kvcache_rag.integration import Row, Rows, Where

# Candidates fetched per wanted result, from which MMR chooses.
MMR_PREFETCH = 4.0
_OF_CHROMA = frozenset({"where_document"})


@dataclass(frozen=True)
class Retrieval:
    """Reads rows.

    Attributes:
        rows: The collection.
    """

    rows: Rows

    def select(
        self,
        *,
        node_ids: Sequence[str] | None = None,
        filters: MetadataFilters | None = None,
        where: Where | None = None,
        with_documents: bool = False,
        limit: int | None = None,
    ) -> list[Row]:
        """Rows that pass every condition given; no ids (None or an empty list) means any id."""
        wanted = row_filter(filters)
        passes = wanted.predicate
        found = self.rows.get(
            where=all_of([where, wanted.where]),
            ids=node_ids or None,
            # A predicate sees the rows first, so it cannot be told to stop early.
            limit=limit if passes is None else None,
            metadata_only=not with_documents,
        )
        return [row for row in found if passes is None or passes(row.metadata)][:limit]

    def query(self, query: VectorStoreQuery, **options: Any) -> list[Row]:
        """Rows for a query, best first."""
        if query.mode not in (VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR):
            mode = VectorStoreQueryMode(query.mode).value
            raise InvalidInputError(
                f"query mode {mode!r} is not known here; use 'default' or 'mmr'"
            )
        options = dict(options)
        mmr = _MMR.of(query, options)
        where = options.pop("where", None)
        if where is not None and query.filters is not None:
            raise InvalidInputError("give filters in the query or where= for Chroma, not both")
        unknown = options.keys() - _OF_CHROMA
        if unknown:
            raise InvalidInputError(f"query does not know {', '.join(sorted(unknown))}")
        if query.doc_ids:
            where = all_of([where, {DOCUMENT_KEY: {"$in": list(query.doc_ids)}}])
        if not query.query_embedding:
            return self.select(
                node_ids=query.node_ids,
                filters=query.filters,
                where=where,
                with_documents=True,
                limit=query.similarity_top_k,
            )
        if query.mode == VectorStoreQueryMode.MMR:
            candidates = self._nearest(
                query, mmr.candidates, where, with_embeddings=True, **options
            )
            return mmr.choose(query, candidates)
        return self._nearest(query, query.similarity_top_k, where, **options)

    def _nearest(
        self, query: VectorStoreQuery, count: int, where: Where | None, **options: Any
    ) -> list[Row]:
        wanted = row_filter(query.filters)
        where = all_of([where, wanted.where])
        ids = None
        if query.node_ids or wanted.predicate is not None:
            # Chroma fails on ids it does not hold and knows no predicates, so the rows are listed
            # first.
            listed = self.select(node_ids=query.node_ids, filters=query.filters, where=where)
            ids, where = [row.id for row in listed], None
        embedding = query.query_embedding or []
        return self.rows.nearest(embedding, count, where=where, ids=ids, **options)


@dataclass(frozen=True)
class _MMR:
    """Maximal marginal relevance: near to the query, far from what is chosen already."""

    threshold: float | None
    candidates: int

    @classmethod
    def of(cls, query: VectorStoreQuery, options: dict[str, Any]) -> _MMR:
        """Take the MMR arguments out of `options`."""
        threshold = options.pop("mmr_threshold", query.mmr_threshold)
        factor, count = (
            options.pop("mmr_prefetch_factor", None),
            options.pop("mmr_prefetch_k", None),
        )
        if threshold is not None and not 0 <= threshold <= 1:
            raise InvalidInputError(f"mmr_threshold must lie between 0 and 1, not {threshold!r}")
        if factor is not None and count is not None:
            raise InvalidInputError("give mmr_prefetch_factor or mmr_prefetch_k, not both")
        if count is None:
            count = query.similarity_top_k * (MMR_PREFETCH if factor is None else factor)
        return cls(threshold, max(int(count), query.similarity_top_k))

    def choose(self, query: VectorStoreQuery, candidates: list[Row]) -> list[Row]:
        """The chosen ones, in the order they were chosen."""
        if not candidates:
            return []
        _, chosen = get_top_k_mmr_embeddings(
            query_embedding=query.query_embedding or [],
            embeddings=[
                list(row.embedding if row.embedding is not None else ()) for row in candidates
            ],
            similarity_top_k=query.similarity_top_k,
            mmr_threshold=self.threshold,
        )
        return [candidates[index] for index in chosen]
