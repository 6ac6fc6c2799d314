"""LangChain's messages in the common form: texts, and the documents in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, ToolMessage

from kvcache_rag import InvalidInputError
from kvcache_rag.integration.chat import whole_places
from kvcache_rag.integration.question import FrameworkMessage, MessagePart, Source
from langchain_kvcache_rag.blocks import DOCUMENT_TYPE, SCORE, block_id, block_score

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ROLES: Final = {
    "system": "system",
    "human": "user",
    "ai": "assistant",
    "AIMessageChunk": "assistant",
    "HumanMessageChunk": "user",
    "SystemMessageChunk": "system",
    "tool": "tool",
    "ToolMessageChunk": "tool",
    "function": "tool",
    "FunctionMessageChunk": "tool",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
# What a message may carry beside text without meaning anything to a text model: thoughts are not
# repeated to the model by any chat template, and calls of tools are written from `tool_calls`.
_SILENT: Final = frozenset(
    ("reasoning", "thinking", "redacted_thinking", "tool_call", "tool_call_chunk", "tool_use")
)


def documents_of(message: BaseMessage) -> list[str]:
    """Texts of the document blocks in a message."""
    return [
        block["text"]
        for block in message.content
        if isinstance(block, dict)
        and block.get("type") == DOCUMENT_TYPE
        and isinstance(block.get("text"), str)
    ]


def said_messages(
    messages: Sequence[BaseMessage],
    documents_in: Callable[[str], Sequence[str]] | None = None,
) -> list[FrameworkMessage]:
    """What messages say, and the documents in them.

    Args:
        messages: Oldest first; document blocks may stand in any of them.
        documents_in: Finds documents in what a tool said without an artifact.

    Raises:
        InvalidInputError: If a message has a block that is not text, or nothing is asked of
            documents.
    """
    read = [_said(index, message, documents_in) for index, message in enumerate(messages)]
    if not any(one.sources for one in read):
        return read
    last = read[-1]
    if last.role not in ("user", "tool"):
        raise InvalidInputError(
            "messages with document blocks must end with a human message that asks something, or "
            f"with what a tool said, not with one of type {messages[-1].type!r}"
        )
    if last.role == "user" and not last.text.strip():
        raise InvalidInputError(
            "the last message has no text; put the question into it, beside or behind the "
            "document blocks"
        )
    return read


def _said(
    index: int, message: BaseMessage, documents_in: Callable[[str], Sequence[str]] | None
) -> FrameworkMessage:
    kind = message.role if isinstance(message, ChatMessage) else message.type
    role = _ROLES.get(kind)
    if role is None:
        raise InvalidInputError(
            f"message {index} has the role {kind!r}; use system, user, assistant or tool"
        )
    found = _artifact(message)
    if not found and documents_in is not None and role == "tool":
        found = [Source(text) for text in documents_in(message.text)]
    return FrameworkMessage(role, tuple(_parts(index, message, found)), _beside(message))


def _parts(index: int, message: BaseMessage, found: Sequence[Source]) -> Iterator[MessagePart]:
    texts, known = [one.text for one in found], {one.text: one for one in reversed(found)}
    content = message.content
    for block in [content] if isinstance(content, str) else content:
        kind = "text" if isinstance(block, str) else block.get("type")
        if kind in _SILENT:
            continue
        text = block if isinstance(block, str) else _text_of(index, block)
        if isinstance(block, dict) and kind == DOCUMENT_TYPE:
            yield MessagePart(source=Source(text, block_id(block), block_score(block)))
        else:
            places = whole_places(text, texts)
            within = [(start, start + len(one), known[one]) for start, one in places]
            yield MessagePart(text, within=tuple(within))


def _artifact(message: BaseMessage) -> list[Source]:
    """The documents that a tool handed over beside what it said."""
    artifact = message.artifact if isinstance(message, ToolMessage) else None
    found = artifact if isinstance(artifact, (list, tuple)) else [artifact]
    return [
        Source(one.page_content, one.id, one.metadata.get(SCORE))
        for one in found
        if isinstance(one, Document)
    ]


def _beside(message: BaseMessage) -> dict[str, Any]:
    """What chat templates read of a message beside role and content."""
    if isinstance(message, ToolMessage):
        named = {"name": message.name, "tool_call_id": message.tool_call_id}
        return {name: value for name, value in named.items() if value}
    if not isinstance(message, AIMessage) or not message.tool_calls:
        return {}
    calls = [
        {
            "type": "function",
            "id": call["id"] or "",
            "function": {"name": call["name"], "arguments": call["args"]},
        }
        for call in message.tool_calls
    ]
    return {"tool_calls": calls}


def _text_of(index: int, block: dict[str, Any]) -> str:
    kind = block.get("type")
    text = block.get("text")
    if kind not in ("text", DOCUMENT_TYPE):
        raise InvalidInputError(
            f"message {index} has a block of type {kind!r}; this model reads text only, so give "
            'blocks of type "text" or "text-plain"'
        )
    if not isinstance(text, str):
        raise InvalidInputError(
            f"message {index} has a block of type {kind!r} without a text; put the text itself "
            'into "text"'
        )
    return text
