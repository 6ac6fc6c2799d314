"""LlamaIndex nodes as rows of a collection, in the form that LlamaIndex's own Chroma store writes.

So a collection made by that store can be opened here, and the other way round.  Rows that no
LlamaIndex wrote become text nodes with the row's metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_index.core.schema import BaseNode, MetadataMode, TextNode
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from kvcache_rag.integration import REFERENCE_KEYS, NewRow, Reference, Row, flat
from llama_index.kvcache_rag.references import attach, without_reference

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

CONTENT_KEY = "_node_content"
DOCUMENT_KEY = "document_id"


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


def to_node(row: Row | NewRow) -> BaseNode:
    """A new node from a row, with the row's reference if it has one."""
    node = _bare_node(row)
    reference = Reference.from_metadata(row.metadata)
    if reference is not None:
        attach(node, reference)
    return node


def _bare_node(row: Row | NewRow) -> BaseNode:
    if row.metadata.get(CONTENT_KEY):
        return metadata_dict_to_node(dict(row.metadata), text=row.document)
    return TextNode(id_=row.id, text=row.document, metadata=_user_metadata(row.metadata))


def _user_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key not in REFERENCE_KEYS}
