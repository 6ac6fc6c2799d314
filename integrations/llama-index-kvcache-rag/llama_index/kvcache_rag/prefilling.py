"""Prefill nodes: the text that prompts have of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.utils import metadata_dict_to_node

from kvcache_rag.integration import of_user, prefill_texts
from llama_index.kvcache_rag.references import llm_text, without_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.schema import BaseNode

    from kvcache_rag import Engine
    from kvcache_rag.integration import NewRow, Row
    from kvcache_rag.kv import ChunkKey

CONTENT_KEY = "_node_content"


def prefill_nodes(
    engine: Engine, nodes: Sequence[BaseNode], **options: Any
) -> list[ChunkKey | None]:
    """The key of each node's LLM text, computed where it is missing; see `prefill_texts`."""
    texts = [llm_text(without_reference(node)) for node in nodes]
    return prefill_texts(engine, [node.node_id for node in nodes], texts, **options)


def row_text(row: Row | NewRow) -> str:
    """The text that will stand in prompts for the node of a row.

    The node is read as it will be read back: a tuple in its metadata, say, comes back as a list.
    """
    if row.metadata.get(CONTENT_KEY):
        return llm_text(metadata_dict_to_node(dict(row.metadata), text=row.document))
    return llm_text(TextNode(text=row.document, metadata=of_user(row.metadata)))
