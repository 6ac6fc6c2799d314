"""What a list of messages asks of the model: a conversation, or a question over chunks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, ToolMessage

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import (
    instructed,
    joined,
    opened,
    reference_to,
    said,
    scores_by_step,
)
from langchain_kvcache_rag.blocks import DOCUMENT_TYPE, SCORE, block_id, block_score

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvcache_rag.integration import Turn

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
        turns: Consecutive ones of one role joined, but for those of tools.
        brought: What messages of system and user say, by which pasted documents are told.
    """

    turns: tuple[Turn, ...]
    brought: tuple[str, ...] = field(default=(), compare=False)

    def opened(self, system_prompt: str | None) -> Conversation:
        """The same, begun with `system_prompt` unless it has a system message of its own."""
        return replace(self, turns=tuple(opened(self.turns, system_prompt)))


class GivenDocument(NamedTuple):
    """A document in messages.

    Attributes:
        place: Its number among all of them, equal and empty ones included.
        id: Its own; None if it has none.
    """

    place: int
    id: str | None


@dataclass(frozen=True)
class Grounded:
    """A question over documents.

    Attributes:
        question: The last message, behind an instruction that could not stand before the chunks;
            "" where a tool spoke last.
        texts: Of the documents, in order, equal ones once, empty ones left out; none if all were
            empty, which is still a question for the engine's own instruction.
        turns: Earlier turns; they stand behind the chunks.
        prefix_mismatch: Whether there was such an instruction.
        scores: Of the texts, where a reranker or several steps say more than their order.
        documents: Whose texts they are; of equal ones the first.
        asked: What the user said last, where the question has more in it, or has none; else "".
    """

    question: str
    texts: tuple[str, ...]
    turns: tuple[Turn, ...] = ()
    prefix_mismatch: bool = False
    scores: tuple[float, ...] | None = None
    documents: tuple[GivenDocument, ...] = field(default=(), compare=False)
    asked: str = ""

    @property
    def all_turns(self) -> tuple[Turn, ...]:
        """Earlier turns and the question."""
        return (*self.turns, said("user", self.question)) if self.question else self.turns


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


def read_messages(
    messages: Sequence[BaseMessage],
    system: str,
    suffix: str = "",
    documents_in: Callable[[str], Sequence[str]] | None = None,
) -> Asked:
    """Sort messages into documents, instruction, history and question.

    Args:
        messages: Oldest first; document blocks may stand in any of them.
        system: The engine's own instruction, which stands before the chunks already.
        suffix: Written behind the last user message.
        documents_in: Finds documents in what a tool said without an artifact.

    Raises:
        InvalidInputError: If a message has a block that is not text, or nothing is asked.
    """
    read = [_Read.of(index, message, documents_in) for index, message in enumerate(messages)]
    places = _places(read)
    texts = tuple(places)
    if not any(one.documents for one in read):
        return _conversation(read, suffix)
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
    turns, is_foreign = instructed([one.turn(texts.index) for one in read], system)
    if suffix and last.role == "tool":
        turns.append(said("user", suffix.strip()))
    elif suffix:
        turns[-1] = said("user", turns[-1]["content"] + suffix)
    question = turns.pop()["content"] if turns[-1]["role"] == "user" else ""
    scores = scores_by_step(_steps(read))
    known = None if scores is None else tuple(scores[text] for text in texts)
    asked = next((one.text for one in reversed(read) if one.role == "user"), "")
    documents = tuple(places.values())
    asked = "" if asked == question else asked
    return Grounded(question, texts, tuple(turns), is_foreign, known, documents, asked)


def _places(read: Sequence[_Read]) -> dict[str, GivenDocument]:
    """The documents by their texts; empty ones are counted and left out."""
    found: dict[str, GivenDocument] = {}
    for place, (text, own) in enumerate(pair for one in read for pair in one.named):
        if text.strip():
            found.setdefault(text, GivenDocument(place, own))
    return found


def _steps(read: Sequence[_Read]) -> Iterator[list[tuple[str, Any]]]:
    """The documents that each call of a tool found, or one turn of the user brought."""
    alone = ("tool", "assistant")
    for _, step in groupby(enumerate(read), lambda at: at[0] if at[1].role in alone else None):
        yield [pair for _, one in step for pair in one.scored if pair[0].strip()]


@dataclass(frozen=True)
class _Part:
    """A text of a message, or a document in it; a text may have documents in it, too."""

    text: str
    is_document: bool = False
    within: tuple[str, ...] = ()
    score: Any = None
    id: str | None = None


@dataclass(frozen=True)
class _Read:
    """Role and parts of one message, and what else chat templates read of it."""

    role: str
    parts: tuple[_Part, ...]
    more: tuple[tuple[str, Any], ...] = ()
    found: Mapping[str, Document] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        index: int,
        message: BaseMessage,
        documents_in: Callable[[str], Sequence[str]] | None,
    ) -> _Read:
        kind = message.role if isinstance(message, ChatMessage) else message.type
        role = _ROLES.get(kind)
        if role is None:
            raise InvalidInputError(
                f"message {index} has the role {kind!r}; use system, user, assistant or tool"
            )
        artifact = _artifact(message)
        documents: Sequence[str] = [one.page_content for one in artifact]
        if not documents and documents_in is not None and role == "tool":
            documents = documents_in(message.text)
        parts: list[_Part] = []
        content = message.content
        for block in [content] if isinstance(content, str) else content:
            if isinstance(block, str):
                parts.append(_Part(block, within=tuple(whole_texts(block, documents))))
                continue
            sort = block.get("type")
            if sort not in _SILENT:
                found, is_document = _text_of(index, block), sort == DOCUMENT_TYPE
                within = [] if is_document else whole_texts(found, documents)
                own = block_id(block) if is_document else None
                parts.append(_Part(found, is_document, tuple(within), block_score(block), own))
        by_text = {one.page_content: one for one in reversed(artifact)}
        return cls(role, tuple(parts), tuple(_beside(message).items()), by_text)

    @property
    def documents(self) -> list[str]:
        """Texts of the documents in it."""
        return [text for text, _ in self._parted]

    @property
    def scored(self) -> list[tuple[str, Any]]:
        """These texts with what their blocks, or the tool's artifact, have for a score."""
        return [(text, self._score(text, part)) for text, part in self._parted]

    def _score(self, text: str, part: _Part) -> Any:
        if part.is_document:
            return part.score
        found = self.found.get(text)
        return None if found is None else found.metadata.get(SCORE)

    @property
    def named(self) -> list[tuple[str, str | None]]:
        """These texts with the ids of their documents."""
        found = self.found
        return [
            (text, found[text].id if text in found and not part.is_document else part.id)
            for text, part in self._parted
        ]

    @property
    def _parted(self) -> list[tuple[str, _Part]]:
        return [
            (text, part)
            for part in self.parts
            for text in ([part.text] * part.is_document or part.within)
        ]

    @property
    def text(self) -> str:
        """What is said beside the documents."""
        return "\n".join(part.text for part in self.parts if part.text and not part.is_document)

    def turn(self, place: Callable[[str], int] | None = None) -> Turn:
        """The message as chat templates read it.

        Args:
            place: The number of a document among the chunks, from 0.  What a tool found is part of
                the conversation, so it refers to them.
        """
        if self.role != "tool" or place is None:
            return {**said(self.role, self.text), **dict(self.more)}
        lines = []
        for part in self.parts:
            if not part.is_document:
                lines.append(referring(part.text, part.within, lambda text: place(text) + 1))
            elif part.text.strip():
                lines.append(reference_to(part.text, place(part.text) + 1))
        return {**said("tool", "\n".join(filter(None, lines))), **dict(self.more)}


def _artifact(message: BaseMessage) -> list[Document]:
    """The documents that a tool handed over beside what it said."""
    artifact = message.artifact if isinstance(message, ToolMessage) else None
    found = artifact if isinstance(artifact, (list, tuple)) else [artifact]
    return [one for one in found if isinstance(one, Document)]


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


def _conversation(read: Sequence[_Read], suffix: str) -> Conversation:
    turns = joined(one.turn() for one in read)
    if not turns:
        raise InvalidInputError("there is no message with text; ask something")
    if suffix:
        turn = turns[-1]
        is_user = turn["role"] == "user"
        turns[-1:] = (
            [said("user", turn["content"] + suffix)] if is_user else [turn, said("user", suffix)]
        )
    brought = tuple(one.text for one in read if one.role in ("system", "user"))
    return Conversation(tuple(turns), brought)


def whole_texts(content: str, texts: Sequence[str]) -> list[str]:
    """Those of `texts` that stand in `content`, one behind the other, each as words of its own."""
    found, at = [], 0
    for text in texts:
        start = content.find(text, at) if text.strip() else -1
        end = start + len(text)
        if start < 0 or _in_word(content, start) or _in_word(content, end):
            continue
        found.append(text)
        at = end
    return found


def _in_word(text: str, place: int) -> bool:
    """Whether a place between two characters is within a word."""
    return text[place - 1 : place].isalnum() and text[place : place + 1].isalnum()


def referring(content: str, texts: Sequence[str], place: Callable[[str], int]) -> str:
    """What a tool said, with the documents in it as references to where they stand as chunks.

    Args:
        content: With each of `texts` in it, as a whole.
        texts: In the order in which they stand in `content`.
        place: The number of a document in the prompt, from 1.
    """
    parts, at = [], 0
    for text in texts:
        start = content.index(text, at)
        parts += [content[at:start], reference_to(text, place(text))]
        at = start + len(text)
    return "".join([*parts, content[at:]])
