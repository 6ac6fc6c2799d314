"""Prefill at ingestion, whatever vector store the nodes go to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from llama_index.core.base.embeddings.base import BaseEmbedding  # noqa: TC002  # pydantic reads it
from llama_index.core.bridge.pydantic import SerializeAsAny  # noqa: TC002  # as well
from llama_index.core.schema import BaseNode, TransformComponent

from kvcache_rag import cancellable
from kvcache_rag.integration import IngestedText, TextPrefiller, beside
from llama_index.kvcache_rag.defaults import kv_llm
from llama_index.kvcache_rag.llm import KVCacheLLM  # noqa: TC001  # pydantic reads it
from llama_index.kvcache_rag.references import llm_text, without_reference

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from llama_index.core.llms.llm import LLM

    from kvcache_rag import ChunkKey


def prefill(
    nodes: Sequence[BaseNode],
    llm: LLM | None = None,
    *,
    name: str = "",
    show_progress: bool = False,
) -> int:
    """Compute and store the KV of nodes, for a vector store of any kind; what is stored is skipped.

    Args:
        nodes: As they are added to the store; what counts is their LLM text.
        llm: The `KVCacheLLM` that will answer; None for `Settings.llm`.
        name: Of the vector store: its nodes' chunks are claimed under it, until they are deleted
            through `KVCacheVectorStore.wrap(store, name=...)` or found to be unused by
            `kvcache-rag store gc`.  "": chunks go when the limit `kv_max_bytes` drops them.
        show_progress: Whether to show a bar.

    Returns:
        Number of different chunks that the nodes have.

    Raises:
        ContextTooLongError: If a node does not fit the model's context window; nothing is computed
            then.
        InvalidInputError: If the LLM is no `KVCacheLLM`.
    """
    prefiller = TextPrefiller(kv_llm(llm).engine, name)
    texts = ingested(nodes)
    keys = prefiller.prefill(texts, show_progress=show_progress)
    prefiller.claim(texts, keys)
    return len({key for key in keys if key is not None})


def ingested(nodes: Sequence[BaseNode]) -> list[IngestedText]:
    """What is prefilled of nodes."""
    return [
        IngestedText(node.node_id, llm_text(without_reference(node)), node.ref_doc_id or "")
        for node in nodes
    ]


class KVCachePrefill(TransformComponent):
    """`prefill` as the last transformation of an `IngestionPipeline` or an index.

        steps = [SentenceSplitter(), KVCachePrefill(llm=llm, embed_model=embedding)]
        IngestionPipeline(transformations=steps, vector_store=…).run(documents=documents)
        VectorStoreIndex.from_documents(documents, transformations=steps)

    What changes a node's text or metadata stands before it.  Nodes that the pipeline's cache knows
    do not come here again; the KV of theirs that is missing is computed by the first question.

    Attributes:
        llm: The `KVCacheLLM` that will answer; None for `Settings.llm`.
        name: Of the vector store (see `prefill`).
        show_progress: Whether to show a bar.
        embed_model: Embeds the nodes while they are prefilled, in place of a transformation of its
            own; an index embeds no node again.  None: nodes pass as they are.
    """

    llm: KVCacheLLM | None = None
    name: str = ""
    show_progress: bool = False
    embed_model: SerializeAsAny[BaseEmbedding] | None = None

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised settings."""
        return "KVCachePrefill"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Prefill nodes and hand them on."""
        if self.embed_model is None:
            self._claim(nodes, self._compute(nodes))
            return nodes
        with beside(lambda cancelled: self._compute(nodes, cancelled=cancelled)) as keys:
            embedded = self.embed_model(nodes, **kwargs)
        self._claim(nodes, keys.result())
        return embedded

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """`__call__` that does not block the event loop."""
        if self.embed_model is None:
            return await asyncio.to_thread(self, nodes, **kwargs)
        computing = asyncio.ensure_future(cancellable(self._compute, nodes))
        embedding = asyncio.ensure_future(self.embed_model.acall(nodes, **kwargs))
        try:
            keys, embedded = await asyncio.gather(computing, embedding)
        except BaseException:  # what one fails of, the other need not go on with
            computing.cancel()
            embedding.cancel()
            raise
        await asyncio.to_thread(self._claim, nodes, keys)
        return embedded

    def _compute(
        self, nodes: Sequence[BaseNode], cancelled: threading.Event | None = None
    ) -> list[ChunkKey | None]:
        prefiller = TextPrefiller(kv_llm(self.llm).engine, self.name)
        return prefiller.prefill(
            ingested(nodes), show_progress=self.show_progress, cancelled=cancelled
        )

    def _claim(self, nodes: Sequence[BaseNode], keys: Sequence[ChunkKey | None]) -> None:
        TextPrefiller(kv_llm(self.llm).engine, self.name).claim(ingested(nodes), keys)
