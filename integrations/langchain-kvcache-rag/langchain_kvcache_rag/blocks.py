"""A retrieved document as a content block of a message.

Prompt templates, message histories and graph states carry such blocks as they are, so the model
still sees where each document begins and ends.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from langchain_core.documents import Document

DOCUMENT_TYPE: Final = "text-plain"
"""LangChain's standard type of a block that is a plain-text document."""


def document_block(document: Document) -> dict[str, Any]:
    """A document as a content block, for the content of any message to `ChatKVCache`.

    Args:
        document: Its text is what stands in the prompt; its `title` is only carried along.

    Returns:
        A standard text-plain block; `id` is the document's, or made from a digest of its text.
    """
    text = document.page_content
    block: dict[str, Any] = {
        "type": DOCUMENT_TYPE,
        "mime_type": "text/plain",
        "text": text,
        "id": document.id or _text_id(text),
    }
    title = document.metadata.get("title")
    if isinstance(title, str) and title:
        block["title"] = title
    return block


def _text_id(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"kv:sha256:{digest[:32]}"
