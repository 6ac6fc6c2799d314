"""How a node carries the reference of its row's KV to the answering side.

The reference is extra metadata of the *row*, never part of the user's node, because anything in
`node.metadata` would change the node's hash (a docstore would ingest it again) and leak into
prompts.  A node read back carries a copy under keys that are excluded from LLM and embedding text.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from llama_index.core.schema import BaseNode, MetadataMode

from kvcache_rag.integration import REFERENCE_KEYS, Reference, Shown, check_unicode
from kvcache_rag.integration.question import Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcache_rag.integration import MetadataWatch


def llm_text(node: BaseNode) -> str:
    """The text that stands in the prompt for this node, at ingestion and at answering alike.

    Raises:
        InvalidInputError: If it is not valid Unicode.
    """
    text = node.get_content(metadata_mode=MetadataMode.LLM)
    return check_unicode(f"the text of node {node.node_id!r}", text)


def without_reference(node: BaseNode) -> BaseNode:
    """The node as its user made it: itself, or a copy if it carries a reference from a row."""
    if not any(key in node.metadata for key in REFERENCE_KEYS):
        return node
    return node.model_copy(
        update={
            "metadata": _without(node.metadata),
            "excluded_llm_metadata_keys": _others(node.excluded_llm_metadata_keys),
            "excluded_embed_metadata_keys": _others(node.excluded_embed_metadata_keys),
        }
    )


def warn_of_changes(node: BaseNode, text: str, watch: MetadataWatch) -> None:
    """Warn once of a field of metadata that makes another chunk of the same text again and again.

    Args:
        node: As it was retrieved.
        text: Its LLM text.
        watch: Remembers what was read before.
    """

    def shown() -> Shown:
        hidden = {*node.excluded_llm_metadata_keys, *REFERENCE_KEYS}
        visible = {key: value for key, value in node.metadata.items() if key not in hidden}
        plain = node.get_content(metadata_mode=MetadataMode.NONE)
        return Shown(plain, visible, node.ref_doc_id or "")

    for name in watch.changed(node.node_id, text, shown):
        warnings.warn(
            f"the metadata field {name!r} changes while the text stays, and it is part of what the "
            "model reads, so nothing cached of such a node can be reused; exclude it before nodes "
            f"are added: node.excluded_llm_metadata_keys.append({name!r})",
            stacklevel=2,
        )


def source_of(node: BaseNode, text: str, *, score: float | None = None, place: int = 0) -> Source:
    """A node as what a chunk is of.

    Args:
        node: As it was retrieved.
        text: Its LLM text now; postprocessors may have changed it since it was stored.
        score: If it has one.
        place: Its number among those that were retrieved with it.

    Raises:
        InvalidInputError: If the text is not valid Unicode.
    """
    check_unicode(f"the text of node {node.node_id!r}", text)
    reference = Reference.from_metadata(node.metadata)
    return Source(text, node.node_id, score, place, reference)


def _without(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key not in REFERENCE_KEYS}


def _others(keys: list[str]) -> list[str]:
    return [key for key in keys if key not in REFERENCE_KEYS]
