"""Any vector store of LlamaIndex, whose nodes are prefilled when they are added."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import Reference, TextPrefiller
from llama_index.kvcache_rag.defaults import kv_llm
from llama_index.kvcache_rag.ingestion import ingested
from llama_index.kvcache_rag.references import attach, without_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.llms.llm import LLM
    from llama_index.core.schema import BaseNode
    from typing_extensions import Self

    from kvcache_rag import ChunkKey, Engine


class WrappedVectorStore(BasePydanticVectorStore):
    """A vector store that prefills what is added, made by `KVCacheVectorStore.wrap`.

    Questions go to the store as they are, and what is not defined here is the store's own.  Where
    the store keeps nodes with their metadata, each carries the reference to its KV, out of sight of
    LLM and embedding; elsewhere chunks are found by their text.

    Attributes:
        name: By which the store claims its chunks, "" if it claims none.
        show_progress: Whether to show a bar while prefilling.
    """

    stores_text: bool = True
    name: str = ""
    show_progress: bool = False

    _store: BasePydanticVectorStore = PrivateAttr()
    _llm: LLM | None = PrivateAttr(default=None)
    _engine: Engine | None = PrivateAttr(default=None)

    def __init__(
        self,
        store: BasePydanticVectorStore,
        *,
        llm: LLM | None = None,
        engine: Engine | None = None,
        name: str = "",
        show_progress: bool = False,
    ) -> None:
        """As for `KVCacheVectorStore.wrap`."""
        if not isinstance(store, BasePydanticVectorStore):
            raise InvalidInputError(
                f"wrap() takes a vector store of LlamaIndex, not a {type(store).__name__}"
            )
        if isinstance(store, WrappedVectorStore) or hasattr(store, "prefill_missing"):
            raise InvalidInputError(f"a {type(store).__name__} prefills already; use it as it is")
        if llm is not None and engine is not None:
            raise InvalidInputError("give llm= or engine=, not both; an LLM brings its engine")
        fields = {"name": name, "show_progress": show_progress}
        super().__init__(
            stores_text=store.stores_text,
            is_embedding_query=store.is_embedding_query,
            **fields,
        )
        self._store, self._llm, self._engine = store, llm, engine

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised settings."""
        return "WrappedVectorStore"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]  # pydantic's, hidden from types
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(self._store, name)

    @property
    def store(self) -> BasePydanticVectorStore:
        """The store that is wrapped."""
        return self._store

    @property
    def client(self) -> Any:
        return self._store.client

    @property
    def engine(self) -> Engine:
        """What prefills: the one given, or that of the LLM, loaded when it is first needed."""
        return self._engine or kv_llm(self._llm).engine

    @property
    def _prefiller(self) -> TextPrefiller:
        return TextPrefiller(self.engine, self.name)

    # ------------------------------------------------------------------ writing
    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Prefill nodes and add them.

        Raises:
            ContextTooLongError: If a node does not fit the model's context window; nothing is
                added then.
        """
        keys = self._prefill(nodes)
        added = self._store.add(self._referring(nodes, keys), **kwargs)
        self._prefiller.claim(ingested(nodes), keys)
        return added

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """`add` that does not block the event loop."""
        keys = await asyncio.to_thread(self._prefill, nodes)
        added = await self._store.async_add(self._referring(nodes, keys), **kwargs)
        await asyncio.to_thread(self._prefiller.claim, ingested(nodes), keys)
        return added

    def _prefill(self, nodes: Sequence[BaseNode]) -> list[ChunkKey | None]:
        return self._prefiller.prefill(ingested(nodes), show_progress=self.show_progress)

    def _referring(
        self, nodes: Sequence[BaseNode], keys: Sequence[ChunkKey | None]
    ) -> list[BaseNode]:
        """The nodes as the store gets them; those of the caller stay as they are."""
        plain = [without_reference(node) for node in nodes]
        if not self.stores_text:
            return plain  # it keeps no metadata that would come back with the node
        texts, engine = ingested(plain), self.engine
        return [
            node if key is None else _with_reference(node, Reference.of(key, row.text, engine))
            for node, row, key in zip(plain, texts, keys, strict=True)
        ]

    # ------------------------------------------------------------------ deleting
    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes of a document, and release their chunks."""
        self._store.delete(ref_doc_id, **delete_kwargs)
        self._prefiller.drop(documents=[ref_doc_id])

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """`delete` that does not block the event loop."""
        await self._store.adelete(ref_doc_id, **delete_kwargs)
        await asyncio.to_thread(lambda: self._prefiller.drop(documents=[ref_doc_id]))

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete nodes, and release their chunks where the store tells which ones go."""
        ids = node_ids
        if filters is not None:
            try:
                ids = [node.node_id for node in self._store.get_nodes(node_ids, filters)]
            except NotImplementedError:
                ids = []
        self._store.delete_nodes(node_ids, filters, **delete_kwargs)
        self._prefiller.drop(ids=ids or ())

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """`delete_nodes` that does not block the event loop."""
        ids = node_ids
        if filters is not None:
            try:
                ids = [node.node_id for node in await self._store.aget_nodes(node_ids, filters)]
            except NotImplementedError:
                ids = []
        await self._store.adelete_nodes(node_ids, filters, **delete_kwargs)
        await asyncio.to_thread(lambda: self._prefiller.drop(ids=ids or ()))

    def clear(self) -> None:
        """Delete all nodes, and release their chunks."""
        self._store.clear()
        self._prefiller.clear()

    async def aclear(self) -> None:
        """`clear` that does not block the event loop."""
        await self._store.aclear()
        await asyncio.to_thread(self._prefiller.clear)

    # ------------------------------------------------------------------ reading
    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        return self._store.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        return await self._store.aget_nodes(node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return self._store.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return await self._store.aquery(query, **kwargs)

    def persist(self, persist_path: str, fs: Any = None) -> None:
        self._store.persist(persist_path, fs)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A second wrapper of the same store and engine, which are not copied."""
        return type(self)(
            self._store,
            llm=self._llm,
            engine=self._engine,
            name=self.name,
            show_progress=self.show_progress,
        )


def _with_reference(node: BaseNode, reference: Reference) -> BaseNode:
    copy = node.model_copy(
        update={
            "metadata": dict(node.metadata),
            "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys],
            "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys],
        }
    )
    attach(copy, reference)
    return copy
