"""A retrieved document as a content block of a message.

Prompt templates, message histories and graph states pass such blocks on unchanged, so the model
still sees where each document begins and ends.
"""

from __future__ import annotations

import hashlib
import warnings
from typing import TYPE_CHECKING, Any, Final

from langchain_core.documents import Document
from langchain_core.prompts import StringPromptTemplate, format_document

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import Shown, check_unicode, whole_scores

if TYPE_CHECKING:
    from kvcache_rag.integration import MetadataWatch

DOCUMENT_TYPE: Final = "text-plain"
"""LangChain's standard type for a plain-text document block."""

SCORE: Final = "relevance_score"
"""The metadata key that rerankers write their score to; "score" might be a distance."""


def document_block(
    document: Document, document_prompt: StringPromptTemplate | None = None
) -> dict[str, Any]:
    """Make a content block of a document, for any message to `ChatKVCache`.

    Args:
        document: The document; its `title` is carried along but not read.
        document_prompt: Writes the text for the prompt, as in `document_text`.

    Returns:
        A standard text-plain block; `id` is the document's, or a digest of its text, and `extras`
        has a reranker's score.

    Raises:
        InvalidInputError: If it is not a document, or as for `document_text`.
    """
    text = document_text(checked_document(document), document_prompt)
    block: dict[str, Any] = {
        "type": DOCUMENT_TYPE,
        "mime_type": "text/plain",
        "text": text,
        "id": document.id or _text_id(text),
    }
    title = document.metadata.get("title")
    if isinstance(title, str) and title:
        block["title"] = title
    score = whole_scores([document.metadata.get(SCORE)])
    if score is not None:
        block["extras"] = {SCORE: score[0]}
    return block


def block_score(block: dict[str, Any]) -> Any:
    """The score that a block carries, if it is one of `document_block`'s with one."""
    extras = block.get("extras")
    return extras.get(SCORE) if isinstance(extras, dict) else None


def block_id(block: dict[str, Any]) -> str | None:
    """The id of the document that a block is of, None where it has none."""
    own = block.get("id")
    return own if isinstance(own, str) and own != _text_id(block["text"]) else None


def _text_id(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"kv:sha256:{digest[:32]}"


def checked_document(document: Any) -> Document:
    """`document` if it is one.

    Raises:
        InvalidInputError: If it is something else.
    """
    if not isinstance(document, Document):
        made = "Document(text)" if isinstance(document, str) else "one such as a retriever gives"
        raise InvalidInputError(
            f"a document is needed, not a {type(document).__name__}; give {made}"
        )
    return document


def document_text(document: Document, document_prompt: StringPromptTemplate | None = None) -> str:
    """The text of a document in prompts, which is its chunk.

    Args:
        document: A text and its metadata.
        document_prompt: A PromptTemplate over `page_content` and metadata names, as for LangChain's
            `create_stuff_documents_chain`; None for the text alone.

    Raises:
        InvalidInputError: If it is not a PromptTemplate or names metadata that the document lacks,
            or the text is not valid Unicode.
    """
    if document_prompt is None:
        text = document.page_content
        return check_unicode(f"the document {document.id or text[:40]!r}", text)
    wanted = checked_prompt(document_prompt).input_variables
    missing = sorted({*wanted} - {"page_content", *document.metadata})
    name = document.id or document.page_content[:40]
    if missing:
        raise InvalidInputError(
            f"the document {name!r} has {' and '.join(f'no {one!r}' for one in missing)} in its "
            "metadata, which document_prompt names; add it, or leave it out of the prompt"
        )
    try:
        text = format_document(document, document_prompt)
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"document_prompt cannot write the document {name!r}: {error}"
        ) from error
    return check_unicode(f"the document {name!r}", text)


def warn_of_changes(
    document: Document, document_prompt: StringPromptTemplate, watch: MetadataWatch
) -> None:
    """Warn once of a field of metadata that makes another chunk of one text again and again.

    Args:
        document: As it was retrieved; without an id nothing tells it from another.
        document_prompt: Says what the model reads of it.
        watch: Remembers what was read before.
    """
    if document.id is None:
        return

    def shown() -> Shown:
        named = {*document_prompt.input_variables} & {*document.metadata}
        return Shown(document.page_content, {name: document.metadata[name] for name in named})

    written = document_text(document, document_prompt)
    for name in watch.changed(document.id, written, shown):
        warnings.warn(
            f"the metadata field {name!r} changes while the text stays, and document_prompt makes "
            "it part of what the model reads, so nothing cached of such a document can be reused; "
            f"leave {{{name}}} out of document_prompt",
            stacklevel=2,
        )


def checked_prompt(document_prompt: Any) -> StringPromptTemplate:
    """`document_prompt` if it is one.

    Raises:
        InvalidInputError: If it is none; LangChain's prompts of chats make messages, not a text.
    """
    if not isinstance(document_prompt, StringPromptTemplate):
        raise InvalidInputError(
            "document_prompt must be a PromptTemplate over page_content and metadata, not a "
            f"{type(document_prompt).__name__}; make one by PromptTemplate.from_template(...)"
        )
    return document_prompt
