"""What `add` prefills of a node, and whether it shows a bar meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.kvcache_rag.references import llm_text, without_reference
from llama_index.kvcache_rag.rows import to_node

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from kvcache_rag.integration import NewRow, Row


def row_text(row: Row | NewRow) -> str:
    """The text that will stand in prompts for the node of a row.

    The node is read as it will be read back: a tuple in its metadata, say, comes back as a list.
    """
    return llm_text(without_reference(to_node(row)))


def shows_progress(kwargs: Mapping[str, Any], caller: FrameType) -> bool:
    """Whether the ingestion that calls `add` shows bars.

    LlamaIndex does not hand its `show_progress` on to vector stores, so it is read where it stands:
    in the frame of the index or pipeline that calls.
    """
    if "show_progress" in kwargs:
        return bool(kwargs["show_progress"])
    ingests = str(caller.f_globals.get("__name__", "")).startswith("llama_index.core.")
    return ingests and caller.f_locals.get("show_progress") is True
