"""Prefill at ingestion, for any vector store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from llama_index.core.base.embeddings.base import BaseEmbedding  # noqa: TC002  # pydantic reads it
from llama_index.core.bridge.pydantic import SerializeAsAny  # noqa: TC002  # as well
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.core.settings import Settings

from kvcache_rag.errors import NamedArguments
from kvcache_rag.generation import cancellable
from kvcache_rag.integration import beside, standing, written
from llama_index.kvcache_rag.defaults import kv_llm
from llama_index.kvcache_rag.llm import KVCacheLLM
from llama_index.kvcache_rag.prefilling import prefill_nodes

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from typing_extensions import Self


class KVCachePrefill(NamedArguments, TransformComponent):
    """`KVCacheLLM.prefill` as the last transformation of an `IngestionPipeline` or an index.

        steps = [SentenceSplitter(), KVCachePrefill(llm=llm, embed_model=embedding)]
        IngestionPipeline(transformations=steps, vector_store=…).run(documents=documents)
        VectorStoreIndex.from_documents(documents, transformations=steps)

    Put it after every step that changes a node's text or metadata.  Nodes in the pipeline's cache
    do not get here again; the first question computes their missing KV.

    Attributes:
        llm: The `KVCacheLLM` that will answer; None for `Settings.llm`.
        show_progress: Whether to show a bar.
        embed_model: Embeds the nodes while they are prefilled, replacing a separate transformation;
            an index does not embed them again.  With None nodes pass unchanged.
    """

    llm: KVCacheLLM | None = None
    show_progress: bool = False
    embed_model: SerializeAsAny[BaseEmbedding] | None = None

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised settings."""
        return "KVCachePrefill"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Settings, and whose chunks are computed; a pipeline's cache knows its work by both."""
        data = super().to_dict(**kwargs)
        llm = self.llm or Settings._llm  # `Settings.llm` would make one
        if isinstance(llm, KVCacheLLM):
            data["chunks"] = written([llm.to_dict(), llm.chunks_of])
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """What `to_dict` wrote, without whose chunks are computed, which the LLM shows."""
        told = {name: one for name, one in data.items() if name != "chunks"}
        return super().from_dict(told, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        if self.llm is not None:
            self.llm.__getstate__()  # LlamaIndex leaves out without an error what it cannot pickle
        return super().__getstate__()

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Prefill nodes and pass them on."""
        if self.embed_model is None:
            self._compute(nodes)
            return nodes
        with beside(lambda cancelled: self._compute(nodes, cancelled)):
            return self.embed_model(nodes, **kwargs)

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """`__call__` that does not block the event loop."""
        if self.embed_model is None:
            return await asyncio.to_thread(self, nodes, **kwargs)
        computing = asyncio.ensure_future(cancellable(self._compute, nodes))
        embedding = asyncio.ensure_future(self.embed_model.acall(nodes, **kwargs))
        try:
            _, embedded = await asyncio.gather(computing, embedding)
        except BaseException:  # what one fails of, the other need not go on with
            computing.cancel()
            embedding.cancel()
            raise
        return embedded

    def _compute(self, nodes: Sequence[BaseNode], cancelled: threading.Event | None = None) -> None:
        llm = kv_llm(self.llm)
        # A pipeline that replaces documents has deleted their old nodes by now.
        with standing([node.node_id for node in nodes]):
            prefill_nodes(llm.engine, nodes, show_progress=self.show_progress, cancelled=cancelled)
