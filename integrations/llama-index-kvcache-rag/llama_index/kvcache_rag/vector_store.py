"""LlamaIndex's Chroma store over a collection that prefills its rows.

`add` computes the KV of every node's LLM text and writes a reference into the row; `delete`,
`delete_nodes`, `clear` and updates delete it.  Rows without a reference (in an older collection)
answer too: the first question that needs them computes their KV, or `prefill_missing` does for all.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.vector_stores.types import (
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.vector_stores.chroma import ChromaVectorStore

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import (
    PathText,  # pydantic reads it
    refuse_unknown,
)
from llama_index.kvcache_rag.collection import open_collection
from llama_index.kvcache_rag.llm import KVCacheLLM
from llama_index.kvcache_rag.rows import DOCUMENT_KEY, NodeCollection, to_row

if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from contextlib import AbstractContextManager
    from os import PathLike

    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection
    from llama_index.core.schema import BaseNode
    from typing_extensions import Self

    from kvcache_rag import Engine

_NO_LLM: Final = object()
_PLACE = ("persist_dir", "host", "port", "ssl", "headers")


class KVCacheVectorStore(ChromaVectorStore):
    """`ChromaVectorStore` (persistent, HTTP or in memory) with prefilled rows.

    Queries, filters and MMR are the stock store's.  Calls may have any size, an existing id is
    replaced, `doc_ids` and `node_ids` of a query count, and the async forms do not block.

    One process owns a persistent directory; several share a collection through `chroma run` and
    `host=`.

    Attributes:
        collection_name: Name of the collection.
        persist_dir: Folder of a persistent client.
        host: Server, with `port`, `ssl` and `headers`.
        collection_kwargs: Further arguments for a new collection, such as
            `{"configuration": {"hnsw": {"space": "cosine"}}}`.
        show_progress: Whether to show a bar while prefilling; LlamaIndex does not pass on the
            setting of an index or a pipeline.
    """

    flat_metadata: bool = False

    collection_name: str | None = None
    persist_dir: PathText | None = None
    host: str | None = None
    port: str | int | None = None
    ssl: bool = False
    headers: dict[str, str] | None = Field(default=None, exclude=True, repr=False)
    collection_kwargs: dict[str, Any] = Field(default_factory=dict)
    show_progress: bool = False

    _llm: KVCacheLLM | None = PrivateAttr(default=None)
    _engine: Engine | None = PrivateAttr(default=None)
    _reopens: bool = PrivateAttr(default=False)
    _lost: bool = PrivateAttr(default=False)

    def __init__(
        self,
        chroma_collection: Collection | None = None,
        *,
        client: ClientAPI | None = None,
        llm: KVCacheLLM | None = None,
        engine: Engine | None = None,
        kv_dir: str | PathLike[str] | None = None,
        **fields: Any,
    ) -> None:
        """Open a collection, or take an open one.

        Args:
            chroma_collection: An open collection; else `fields` or `client` say where it is.
            client: A Chroma client for `collection_name`, which may be new.
            llm: Prefills with its engine.
            engine: Prefills, if there is no `llm`.  With neither, nothing is prefilled.
            kv_dir: Where the KV goes, for an `llm` that has not loaded its engine yet.
            fields: The attributes of the class.

        Raises:
            InvalidInputError: If an argument is unknown, or nothing says where the collection or
                the KV is.
        """
        own = ("chroma_collection", "client", "llm", "engine", "kv_dir")
        refuse_unknown(
            fields, {*type(self).model_fields, *own}, f"argument of {type(self).__name__}"
        )
        if llm is not None and engine is not None:
            raise InvalidInputError("give llm= or engine=, not both; an LLM brings its engine")
        if kv_dir is not None:
            if llm is None:
                raise InvalidInputError("kv_dir= needs llm=; an engine already has its store")
            llm.keep_in(kv_dir)
        reopens = chroma_collection is None and client is None
        if chroma_collection is None:
            chroma_collection = open_collection(
                fields.get("collection_name") or "",
                client=client,
                options=fields.get("collection_kwargs"),
                **{name: fields[name] for name in _PLACE if fields.get(name) is not None},
            )
        fields["collection_name"] = getattr(
            chroma_collection, "name", fields.get("collection_name")
        )
        super().__init__(chroma_collection, **fields)
        self.show_progress = fields.get("show_progress", False)
        wrapped: Any = NodeCollection(chroma_collection, self)
        self._collection = wrapped
        self._llm, self._engine, self._reopens = llm, engine, reopens

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised settings."""
        return "KVCacheVectorStore"

    @classmethod
    def from_collection(cls, collection: Collection, **options: Any) -> Self:
        """A store over an open collection; `options` are arguments of the constructor."""
        return cls(collection, **options)

    @classmethod
    def from_params(  # type: ignore[override]  # keywords alone, `client` among them
        cls, collection_name: str, **options: Any
    ) -> Self:
        """A store over a new or existing collection."""
        return cls(collection_name=collection_name, **options)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Settings, with the LLM's under "llm".

        "llm" is None for an engine, or an LLM made from an engine or a loaded model, which cannot
        be saved.
        """
        data = super().to_dict(**kwargs)
        if self._llm is not None and self._llm.is_settings:
            data["llm"] = self._llm.to_dict()
        elif self._llm is not None or self._engine is not None or self._lost:
            data["llm"] = None
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """The store that `to_dict` saved.

        Args:
            data: Result of `to_dict`.
            kwargs: Arguments of the constructor, which take precedence: `client=` for a collection
                that was passed in, `llm=` or `engine=`.
        """
        given = dict(data)
        llm, has_own = given.pop("llm", _NO_LLM), {"llm", "engine"} & kwargs.keys()
        if isinstance(llm, dict) and not has_own:
            kwargs["llm"] = KVCacheLLM.from_dict(llm)
        store = super().from_dict(given, **kwargs)
        store._lost = llm is None and not has_own
        return store

    @property
    def client(self) -> Collection:
        collection: Collection = self._prefilled.collection
        return collection

    @property
    def engine(self) -> Engine | None:
        """The engine that prefills: the one given, or `llm`'s, loaded on first use."""
        return self._engine if self._llm is None else self._llm.engine

    @property
    def _prefilled(self) -> NodeCollection:
        return cast("NodeCollection", self._collection)

    def _refuse_lost(self) -> None:
        if self._lost:
            raise InvalidInputError(
                "this store was read from a dict, which cannot hold the engine that it prefilled "
                "with; give llm= or engine= to from_dict"
            )

    # ------------------------------------------------------------------ writing
    def add(
        self, nodes: Sequence[BaseNode], *, show_progress: bool | None = None, **_: Any
    ) -> list[str]:
        """Prefill nodes and write them; a node whose id exists replaces that row.

        A node that cannot be prefilled, because it does not fit the model's context window or the
        model cannot be loaded, is written without a reference to KV, and one warning names it.

        Args:
            nodes: Nodes with embeddings.
            show_progress: Whether to show a bar; None for the store's setting.

        Raises:
            InvalidInputError: If the store was read from a dict and lost its engine.
            ValueError: If a node has no embedding; nothing is prefilled then.
        """
        self._refuse_lost()
        shows = self.show_progress if show_progress is None else show_progress
        self._prefilled.write([*map(to_row, nodes)], show_progress=shows)
        return [node.node_id for node in nodes]

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """`add` that does not block the event loop."""
        return await asyncio.to_thread(self.add, nodes, **kwargs)

    def prefill_missing(self, *, show_progress: bool = False) -> int:
        """Prefill every row whose KV is not stored, and write the missing or outdated references.

        Returns:
            Number of rows whose reference was written.

        Raises:
            InvalidInputError: If the store has neither `llm` nor `engine`.
        """
        self._refuse_lost()
        return self._prefilled.prefill_missing(show_progress=show_progress)

    # ------------------------------------------------------------------ deleting
    def replacing(self) -> AbstractContextManager[None]:
        """A context for deleting and rewriting nodes, in which unchanged chunks keep their KV.

        As in `with store.replacing(): index.refresh_ref_docs(documents)`.  At the end of the
        block the KV of nodes that were not written again is deleted.
        """
        return self._prefilled.replacing()

    def delete_documents(self, ref_doc_ids: Sequence[str], keep: Container[str] = ()) -> None:
        """`delete` for many documents in few calls; nodes with ids in `keep` stay."""
        self._prefilled.delete_holding(DOCUMENT_KEY, ref_doc_ids, keep)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """`delete` that does not block the event loop."""
        await asyncio.to_thread(self.delete, ref_doc_id, **delete_kwargs)

    def delete_nodes(  # type: ignore[override]  # the stock store says a list of filters, and takes one
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **_: Any
    ) -> None:
        """Delete nodes by id, by filters, or both combined; with neither nothing is deleted."""
        if filters is not None and filters.filters:
            node_ids = [node.node_id for node in self.get_nodes(node_ids, filters)]
        self._prefilled.delete(node_ids or [])

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **_: Any
    ) -> None:
        """`delete_nodes` that does not block the event loop."""
        await asyncio.to_thread(self.delete_nodes, node_ids, filters)

    def clear(self) -> None:
        self._prefilled.clear()

    async def aclear(self) -> None:
        """`clear` that does not block the event loop."""
        await asyncio.to_thread(self.clear)

    # ------------------------------------------------------------------ reading
    def get_nodes(  # type: ignore[override]  # as above
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Nodes by id, by filters, both combined, or all."""
        return super().get_nodes(node_ids, filters)  # type: ignore[arg-type]  # as above

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """`get_nodes` that does not block the event loop."""
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes nearest to a query, each with the reference to its KV.

        Args:
            query: As for the stock store, with `doc_ids` and `node_ids`.
            kwargs: Arguments of the stock store.
        """
        if query.node_ids:
            # Chroma fails on ids that it does not hold.
            kwargs["ids"] = self._collection.get(ids=query.node_ids, include=[])["ids"]
            if not kwargs["ids"]:
                return VectorStoreQueryResult(nodes=[], similarities=[], ids=[])
        if query.doc_ids:
            document = MetadataFilter(
                key=DOCUMENT_KEY, value=query.doc_ids, operator=FilterOperator.IN
            )
            filters: list[Any] = [document, *([query.filters] if query.filters else [])]
            query = replace(query, filters=MetadataFilters(filters=filters))
        return super().query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """`query` that does not block the event loop."""
        return await asyncio.to_thread(self.query, query, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A second store over the same collection and engine, which are not copied."""
        return type(self)(self.client, llm=self._llm, engine=self._engine, **self._fields())

    def __getstate__(self) -> dict[str, Any]:
        """What a copy in another process is opened from; models stay here.

        Raises:
            InvalidInputError: If the collection was handed in: another process could not find it.
        """
        if not self._reopens or self._engine is not None:
            raise InvalidInputError(
                "a store over an open collection, client or engine cannot be pickled; "
                "make it by from_params with persist_dir= or host=, and llm="
            )
        return {"fields": self._fields(), "llm": self._llm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the collection again."""
        KVCacheVectorStore.__init__(self, llm=state["llm"], **state["fields"])

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}
