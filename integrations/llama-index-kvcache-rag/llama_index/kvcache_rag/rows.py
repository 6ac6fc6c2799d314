"""LlamaIndex nodes as rows of a collection, in the form that LlamaIndex's own Chroma store writes.

So a collection made by that store can be opened here, and the other way round.  Rows that no
LlamaIndex wrote become text nodes with the row's metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_index.core.schema import BaseNode, MetadataMode, TextNode
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from llama_index.kvcache_rag.collection import NewRow, Row, flat
from llama_index.kvcache_rag.references import (
    REFERENCE_KEYS,
    Reference,
    attach,
    without_reference,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

CONTENT_KEY = "_node_content"
DOCUMENT_KEY = "document_id"


def to_row(node: BaseNode, reference: Reference | None) -> NewRow:
    """A node with its embedding as a row; the reference stands beside the node, not in it."""
    plain = without_reference(node)
    metadata = flat(node_to_metadata_dict(plain, remove_text=True, flat_metadata=False))
    if reference is not None:
        metadata.update(reference.to_metadata())
    return NewRow(
        id=node.node_id,
        document=node.get_content(metadata_mode=MetadataMode.NONE),
        metadata=metadata,
        embedding=node.get_embedding(),
    )


def to_node(row: Row) -> BaseNode:
    """A new node from a row, with the row's reference if it has one."""
    node = _bare_node(row)
    reference = Reference.from_metadata(row.metadata)
    if reference is not None:
        attach(node, reference)
    return node


def _bare_node(row: Row) -> BaseNode:
    if row.metadata.get(CONTENT_KEY):
        return metadata_dict_to_node(dict(row.metadata), text=row.document)
    return TextNode(id_=row.id, text=row.document, metadata=_user_metadata(row.metadata))


def _user_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key not in REFERENCE_KEYS}
