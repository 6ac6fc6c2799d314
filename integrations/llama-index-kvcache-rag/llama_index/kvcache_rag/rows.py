"""LlamaIndex nodes as rows of a collection, in the form that LlamaIndex's own Chroma store reads.

So a collection made by that store can be opened here, and the other way round.  Rows that no
LlamaIndex wrote become text nodes with the row's metadata.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from llama_index.core.schema import MetadataMode
from llama_index.core.vector_stores.utils import node_to_metadata_dict

from kvcache_rag.integration import (
    REFERENCE_KEYS,
    NewRow,
    PrefilledCollection,
    Reference,
    flat,
    of_user,
)
from llama_index.kvcache_rag.prefilling import CONTENT_KEY, row_text
from llama_index.kvcache_rag.references import without_reference

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from llama_index.core.schema import BaseNode

    from kvcache_rag.integration import Row

DOCUMENT_KEY = "document_id"


class NodeCollection(PrefilledCollection):
    """A collection of nodes, each of which carries the reference of its row to the answering side.

    There it stands under keys that are kept out of the texts for LLM and embedding.
    """

    def text(self, row: Row | NewRow) -> str:
        return row_text(row)

    def shown(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        found = of_user(metadata)
        reference = Reference.from_metadata(metadata)
        if reference is not None and found.get(CONTENT_KEY):
            node = json.loads(found[CONTENT_KEY])
            node["metadata"] = {**node.get("metadata", {}), **reference.to_metadata()}
            for excluded in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys"):
                node[excluded] = [*node.get(excluded, ()), *REFERENCE_KEYS]
            found[CONTENT_KEY] = json.dumps(node)
        return found


def to_row(node: BaseNode) -> NewRow:
    """A node as a row, without reference.

    Raises:
        ValueError: If the node has no embedding.
    """
    plain = without_reference(node)
    return NewRow(
        id=node.node_id,
        document=node.get_content(metadata_mode=MetadataMode.NONE),
        metadata=flat(node_to_metadata_dict(plain, remove_text=True, flat_metadata=False)),
        embedding=node.get_embedding(),
    )
