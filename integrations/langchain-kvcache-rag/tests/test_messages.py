"""How messages become documents, an instruction, a history and a question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from kvcache_rag import InvalidInputError
from kvcache_rag.integration.question import AskedMessages, Source
from langchain_kvcache_rag.blocks import document_block
from langchain_kvcache_rag.messages import said_messages

if TYPE_CHECKING:
    from collections.abc import Sequence

SYSTEM = "Read.\n"


def block(text: str) -> dict[str, Any]:
    return document_block(Document(text))


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def read(messages: Sequence[BaseMessage], suffix: str = "") -> AskedMessages:
    return AskedMessages.from_messages(said_messages(messages), SYSTEM, suffix=suffix)


def grounded(*messages: BaseMessage) -> AskedMessages:
    asked = read(messages)
    assert asked.is_grounded
    return asked


def conversation(*messages: BaseMessage) -> AskedMessages:
    asked = read(messages)
    assert not asked.is_grounded
    return asked


def question(asked: AskedMessages) -> str:
    """What the last turn asks; "" where a tool spoke last."""
    last = asked.turns[-1]
    return last["content"] if last["role"] == "user" else ""


def earlier(asked: AskedMessages) -> tuple[dict[str, Any], ...]:
    """The turns before the question."""
    return asked.turns[:-1] if asked.is_grounded and question(asked) else asked.turns


def pairs(asked: AskedMessages) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in earlier(asked)]


def texts(asked: AskedMessages) -> tuple[str, ...]:
    return tuple(one.text for one in asked.sources)


def test_a_document_is_a_standard_block() -> None:
    with_id = document_block(Document("text", id="7", metadata={"title": "T", "page": 3}))
    kind = {"type": "text-plain", "mime_type": "text/plain"}
    assert with_id == {**kind, "text": "text", "id": "7", "title": "T"}
    assert HumanMessage([with_id]).content_blocks == [with_id]
    first, again, other = (block(one)["id"] for one in ("text", "text", "other"))
    assert first == again != other, "without an id it has one of its text"
    assert first.startswith("kv:sha256:")


def test_documents_of_all_messages_are_chunks_once_in_order() -> None:
    asked = grounded(
        SystemMessage([block("a")]),
        HumanMessage([block("b"), text("first?")]),
        AIMessage("answer"),
        ToolMessage([block("c"), block("a")], tool_call_id="1"),
        HumanMessage([block(" "), block("b"), text("second?")]),
    )
    assert texts(asked) == ("a", "b", "c")
    assert question(asked) == "second?"
    assert pairs(asked) == [
        ("user", "first?"),
        ("assistant", "answer"),
        ("tool", '[document 3 above: "c"]\n[document 1 above: "a"]'),
    ]
    assert not asked.prefix_mismatch


def test_what_adds_nothing_to_a_question() -> None:
    own = [HumanMessage([block("a"), text("what?")])]
    asked = ({"role": "user", "content": "what?"},)
    empty = grounded(HumanMessage([block(""), text("what?")]))
    assert empty == AskedMessages(asked, is_grounded=True, asked="what?")
    assert grounded(HumanMessage([block("a")]), HumanMessage("what?")) == grounded(*own)
    assert grounded(*own) == AskedMessages(asked, (Source("a"),), is_grounded=True, asked="what?")
    for instruction in ("Read.", " Read.\n\n", SYSTEM):  # it is the engine's own
        assert grounded(SystemMessage(instruction), *own) == grounded(*own)


def test_consecutive_turns_of_one_role_are_joined() -> None:
    asked = grounded(
        HumanMessage("one"),
        AIMessage("two"),
        HumanMessage("three"),
        HumanMessage([block("a"), text("four")]),
    )
    assert pairs(asked) == [("user", "one"), ("assistant", "two")]
    assert question(asked) == "three\n\nfour"
    plain = conversation(HumanMessage("one"), HumanMessage("two"), AIMessage("three"))
    assert pairs(plain) == [("user", "one\n\ntwo"), ("assistant", "three")]


def test_instructions_of_ones_own_stand_in_the_question() -> None:
    asked = grounded(SystemMessage("Be brief."), HumanMessage([block("a"), text("what?")]))
    assert (question(asked), asked.prefix_mismatch) == ("Be brief.\n\nwhat?", True)
    over = read([HumanMessage([block("a"), text("what?")])], " In JSON.")
    assert (question(over), over.is_grounded) == ("what? In JSON.", True)
    plain = read([HumanMessage("what?")], " In JSON.")
    assert plain == AskedMessages(({"role": "user", "content": "what? In JSON."},))


def test_what_a_tool_said_is_a_user_turn_behind_chunks_and_a_tool_turn_without() -> None:
    call = {"name": "find", "args": {"x": 1}, "id": "1", "type": "tool_call"}
    history = [
        HumanMessage("look"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("found", tool_call_id="1"),
    ]
    asked = grounded(*history, AIMessage("so"), HumanMessage([block("a"), text("what?")]))
    called = {"type": "function", "id": "1", "function": {"name": "find", "arguments": {"x": 1}}}
    turns = (
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "found", "tool_call_id": "1"},
    )
    assert earlier(asked) == (*turns, {"role": "assistant", "content": "so"})
    assert conversation(*history).turns == turns


def test_a_conversation_over_documents_may_end_with_what_a_tool_said() -> None:
    call = {"name": "find", "args": {}, "id": "1", "type": "tool_call"}
    looked = [SystemMessage("Be brief."), HumanMessage("look"), AIMessage("", tool_calls=[call])]
    asked = grounded(*looked, ToolMessage([text("two:"), block("a"), block("b")], tool_call_id="1"))
    assert question(asked) == ""
    assert texts(asked) == ("a", "b")
    assert [content for _, content in pairs(asked)] == [
        "Be brief.\n\nlook",
        "",
        'two:\n[document 1 above: "a"]\n[document 2 above: "b"]',
    ]
    last = read([*looked, ToolMessage([block("a")], tool_call_id="1")], " In JSON.")
    assert (question(last), last.is_grounded) == ("In JSON.", True)


def test_documents_that_a_tool_hands_over_are_chunks_where_they_stand_in_what_it_said() -> None:
    documents = [Document("The ship is in Kiel."), Document("other"), Document("It is\nred.")]
    found = ToolMessage(
        "Source 1: The ship is in Kiel.\n\nIt is\nred.", tool_call_id="1", artifact=documents
    )
    asked = grounded(HumanMessage("look"), found)
    assert texts(asked) == ("The ship is in Kiel.", "It is\nred.")
    assert earlier(asked)[-1]["content"] == (
        'Source 1: [document 1 above: "The ship is in Kiel."]\n\n[document 2 above: "It is red."]'
    )
    inside = ToolMessage("redder", tool_call_id="1", artifact=[Document("red")])
    assert conversation(HumanMessage("look"), inside).turns[-1]["content"] == "redder"


def test_roles_have_many_names_and_thoughts_are_not_repeated() -> None:
    content: list[Any] = [{"type": "reasoning", "reasoning": "hm"}, text("answer")]
    asked = conversation(
        *(ChatMessage("a", role="developer"), ChatMessage("b", role="user")),
        *(HumanMessage(["c", "d"]), AIMessage(content), HumanMessage("and?")),
    )
    turns = [("system", "a"), ("user", "b\n\nc\nd"), ("assistant", "answer"), ("user", "and?")]
    assert pairs(asked) == turns


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "there is no message with text"),
        ([HumanMessage(" ")], "there is no message with text"),
        (
            [HumanMessage("a"), HumanMessage([{"type": "image", "url": "http://x/y.png"}])],
            "message 1 has a block of type 'image'",
        ),
        (
            [HumanMessage([{"type": "audio", "base64": "", "mime_type": "audio/wav"}])],
            "message 0 has a block of type 'audio'",
        ),
        (
            [HumanMessage([{"type": "text-plain", "file_id": "7", "mime_type": "text/plain"}])],
            "message 0 has a block of type 'text-plain' without a text",
        ),
        ([HumanMessage([block("a")])], "the last message has no text"),
        ([HumanMessage([block("a"), text("?")]), AIMessage("b")], "must end with a human message"),
        ([ChatMessage("a", role="poet")], "message 0 has the role 'poet'"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_sentence(
    messages: list[BaseMessage], sentence: str
) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        read(messages)


@pytest.mark.parametrize(
    ("name", "scores", "counted"),
    [
        ("relevance_score", (1, 2, 3), (1.0, 2.0, 3.0)),
        ("relevance_score", (0.1, "0.2", 0.9), None),
        ("relevance_score", (0.1, True, 0.9), None),
        ("score", (0.1, 0.2, 0.9), None),  # which may be a distance
    ],
)
def test_scores_count_where_every_document_has_one(name: str, scores: Any, counted: Any) -> None:
    blocks: list[Any] = [
        document_block(Document(text, metadata={name: score}))
        for text, score in zip("abc", scores, strict=True)
    ]
    assert grounded(HumanMessage([*blocks, text("?")])).scores == counted


def test_of_equal_documents_the_highest_score_counts_and_empty_ones_have_none() -> None:
    given = (("a", 0.1), ("b", 0.2), (" ", 3.0), ("a", 0.5), ("b", 0.1))
    blocks: list[Any] = [
        document_block(Document(words, metadata={"relevance_score": score}))
        for words, score in given
    ]
    asked = grounded(HumanMessage([*blocks, block(" "), text("?")]))
    assert (texts(asked), asked.scores) == (("a", "b"), (0.5, 0.2))
