"""What a list of messages asks of the model: a conversation, or a question over chunks."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage

from kvcache_rag import InvalidInputError
from langchain_kvcache_rag.blocks import DOCUMENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PASTED_CHARACTERS: Final = 1000
"""A longer message without document blocks is taken for one that documents were pasted into."""

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


@dataclass(frozen=True)
class Conversation:
    """Messages without documents.

    Attributes:
        turns: Role and content of each, consecutive ones of one role joined.
        is_pasted: Whether a message looks like one that documents were pasted into.
    """

    turns: tuple[tuple[str, str], ...]
    is_pasted: bool = False

    def as_dicts(self) -> list[dict[str, str]]:
        """The turns as chat templates read them."""
        return _dicts(self.turns)

    def opened(self, system_prompt: str | None) -> Conversation:
        """The same, begun with `system_prompt` unless it has a system message of its own."""
        if not system_prompt or any(role == "system" for role, _ in self.turns):
            return self
        return replace(self, turns=(("system", system_prompt), *self.turns))

    def in_two_roles(self) -> Conversation:
        """The same for chat templates that know users and assistants only."""
        turns = ((role if role == "assistant" else "user", text) for role, text in self.turns)
        return replace(self, turns=tuple(_joined(turns)))


@dataclass(frozen=True)
class Grounded:
    """A question over documents.

    Attributes:
        question: The last message, behind an instruction that could not stand before the chunks.
        texts: Of the documents, in order, equal ones once, empty ones left out; none if all were
            empty, which is still a question for the engine's own instruction.
        turns: Earlier turns; they stand behind the chunks.
        prefix_mismatch: Whether there was such an instruction.
    """

    question: str
    texts: tuple[str, ...]
    turns: tuple[tuple[str, str], ...] = ()
    prefix_mismatch: bool = False

    def history(self) -> list[dict[str, str]]:
        """The earlier turns as the engine reads them."""
        return _dicts(self.turns)


def documents_of(message: BaseMessage) -> list[str]:
    """Texts of the document blocks in a message."""
    return [
        block["text"]
        for block in message.content
        if isinstance(block, dict)
        and block.get("type") == DOCUMENT_TYPE
        and isinstance(block.get("text"), str)
    ]


Asked: TypeAlias = Conversation | Grounded
"""What messages ask."""


def read_messages(messages: Sequence[BaseMessage], system: str, suffix: str = "") -> Asked:
    """Sort messages into documents, instruction, history and question.

    Args:
        messages: Oldest first; document blocks may stand in any of them.
        system: The engine's own instruction, which stands before the chunks already.
        suffix: Written behind the last user message.

    Raises:
        InvalidInputError: If a message has a block that is not text, or nothing is asked.
    """
    read = [_Read.of(index, message) for index, message in enumerate(messages)]
    documents = [text for one in read for text in one.documents]
    if not documents:
        return _conversation(read, suffix)
    texts = tuple(dict.fromkeys(text for text in documents if text.strip()))
    if not isinstance(messages[-1], HumanMessage) and read[-1].role != "user":
        raise InvalidInputError(
            "messages with document blocks must end with a human message that asks something, "
            f"not with one of type {messages[-1].type!r}"
        )
    if not read[-1].text.strip():
        raise InvalidInputError(
            "the last message has no text; put the question into it, beside or behind the "
            "document blocks"
        )
    foreign = [
        one.text
        for one in read
        if one.role == "system" and one.text.strip() not in ("", system.strip())
    ]
    # Only user and assistant turns may stand behind the chunks.
    spoken = (
        (one.role if one.role != "tool" else "user", one.text)
        for one in read
        if one.role != "system"
    )
    *earlier, (_, question) = _joined(spoken)
    question = "\n\n".join([*foreign, question]) + suffix
    return Grounded(question, texts, tuple(earlier), bool(foreign))


@dataclass(frozen=True)
class _Read:
    """Role, text and documents of one message."""

    role: str
    text: str
    documents: tuple[str, ...]

    @classmethod
    def of(cls, index: int, message: BaseMessage) -> _Read:
        kind = message.role if isinstance(message, ChatMessage) else message.type
        role = _ROLES.get(kind)
        if role is None:
            raise InvalidInputError(
                f"message {index} has the role {kind!r}; use system, user, assistant or tool"
            )
        texts: list[str] = []
        documents: list[str] = []
        content = message.content
        for block in [content] if isinstance(content, str) else content:
            if isinstance(block, str):
                texts.append(block)
                continue
            sort = block.get("type")
            if sort not in _SILENT:
                found = _text_of(index, block)
                (documents if sort == DOCUMENT_TYPE else texts).append(found)
        if isinstance(message, AIMessage):
            texts += [
                f"[call of {call['name']}({json.dumps(call['args'])})]"
                for call in message.tool_calls
            ]
        return cls(role, "\n".join(text for text in texts if text), tuple(documents))


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


def _conversation(read: Sequence[_Read], suffix: str) -> Conversation:
    turns = _joined((one.role, one.text) for one in read)
    if not turns:
        raise InvalidInputError("there is no message with text; ask something")
    if suffix:
        role, text = turns[-1]
        turns[-1:] = [(role, text + suffix)] if role == "user" else [*turns[-1:], ("user", suffix)]
    pasted = any(
        one.role in ("system", "user") and len(one.text) > PASTED_CHARACTERS for one in read
    )
    return Conversation(tuple(turns), pasted)


def _joined(turns: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Turns that have text; consecutive ones of one role are one, as chat templates want it."""
    joined: list[tuple[str, str]] = []
    for role, text in turns:
        if not text.strip():
            continue
        if joined and joined[-1][0] == role:
            text = f"{joined.pop()[1]}\n\n{text}"
        joined.append((role, text))
    return joined


def _dicts(turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]
