"""Prefill at ingestion, whatever vector store the nodes go to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from llama_index.core.schema import BaseNode, TransformComponent

from kvcache_rag.integration import IngestedText, TextPrefiller
from llama_index.kvcache_rag.defaults import kv_llm
from llama_index.kvcache_rag.llm import KVCacheLLM  # noqa: TC001  # pydantic reads it
from llama_index.kvcache_rag.references import llm_text, without_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.llms.llm import LLM


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
    """`prefill` as the last transformation of an `IngestionPipeline`; nodes pass as they are.

        IngestionPipeline([SentenceSplitter(), embedding, KVCachePrefill(llm=llm)], vector_store=…)

    What changes a node's text or metadata stands before it.  Nodes that the pipeline's cache knows
    do not come here again; the KV of theirs that is missing is computed by the first question.

    Attributes:
        llm: The `KVCacheLLM` that will answer; None for `Settings.llm`.
        name: Of the vector store (see `prefill`).
        show_progress: Whether to show a bar.
    """

    llm: KVCacheLLM | None = None
    name: str = ""
    show_progress: bool = False

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised settings."""
        return "KVCachePrefill"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Prefill nodes and hand them on."""
        prefill(nodes, self.llm, name=self.name, show_progress=self.show_progress)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """`__call__` that does not block the event loop."""
        return await asyncio.to_thread(self, nodes, **kwargs)
