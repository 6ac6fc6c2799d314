"""Agents: tools are called, and the nodes that they find are chunks."""

from __future__ import annotations

import pytest
from contracts_frameworks import ToolsContract
from llama_index.core.base.llms.types import ChatMessage, MessageRole, ToolCallBlock
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from llama_index_framework import ADD, Fixed, LlamaIndex
from scripted import THINKING, json_call, native_call

from kvcache_rag import InvalidInputError

# LlamaIndex's agents ask pydantic in a way of before.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince211"),
]


class TestTools(ToolsContract):
    framework = LlamaIndex()


make = TestTools().scripted


async def test_predict_and_call_runs_the_tool() -> None:
    answer = native_call(("add", {"a": 1, "b": 2}))
    llm, _ = make(answer, answer)
    assert llm.predict_and_call([ADD], "Add.").response == "3"
    assert (await llm.apredict_and_call([ADD], "Add.")).response == "3"


def test_a_call_that_is_required_is_held_to() -> None:
    llm, _ = make(json_call(("add", {"a": 1, "b": 2})), "Three.")
    search = FunctionTool.from_defaults(lambda query: query, name="search")
    response = llm.chat_with_tools([ADD, search], "Add.", tool_required=True)
    assert llm.get_tool_calls_from_response(response)[0].tool_name == "add"
    assert [type(block) for block in response.message.blocks] == [ToolCallBlock]
    plain = llm.chat_with_tools([ADD], "Add.")
    assert plain.message.content == "Three."
    with pytest.raises(InvalidInputError, match="calls no tool"):
        llm.get_tool_calls_from_response(plain)


def test_a_required_call_that_is_cut_is_told() -> None:
    llm, _ = make(json_call(("add", {"a": 1, "b": 2})))
    cut = llm.chat_with_tools([ADD], "Add.", tool_required=True, max_new_tokens=20)
    with pytest.raises(InvalidInputError, match=r"was cut before it called .*; raise max_new_to"):
        llm.get_tool_calls_from_response(cut)


def test_tools_in_a_form_of_ones_own_are_refused() -> None:
    llm, _ = make(messages_to_prompt=lambda messages: str(messages))
    with pytest.raises(InvalidInputError, match="leave messages_to_prompt out"):
        llm.chat_with_tools([ADD], "Add.")


def test_what_nobody_retrieved_stays_in_the_tools_message() -> None:
    llm, seen = make("So.")
    block = ToolCallBlock(tool_call_id="1", tool_name="search", tool_kwargs={"input": "x"})
    messages = [
        ChatMessage(role=MessageRole.USER, content="Look."),
        ChatMessage(role=MessageRole.ASSISTANT, blocks=[block]),
        ChatMessage(
            role=MessageRole.TOOL,
            content="A text that no retriever of this process has given to anybody.",
            additional_kwargs={"tool_call_id": "1"},
        ),
    ]
    assert llm.chat(messages).message.content == "So."
    assert "<tool>A text that no retriever" in seen[0]
    assert '<tool_call>{"name": "search", "arguments": {"input": "x"}}</tool_call>' in seen[0]


def test_a_reference_stands_where_the_node_was_found() -> None:
    """A quotation within a sentence, before the node, is none; its white space is not its own."""
    llm, seen = make("So.")
    fact = "The bridge was closed in 1987."
    Fixed([NodeWithScore(node=TextNode(text=f"{fact}\n"))]).retrieve("bridge")
    block = ToolCallBlock(tool_call_id="1", tool_name="search", tool_kwargs={})
    messages = [
        ChatMessage(role=MessageRole.USER, content="Look."),
        ChatMessage(role=MessageRole.ASSISTANT, blocks=[block]),
        ChatMessage(
            role=MessageRole.TOOL,
            content=f"Summary: {fact} (see below)\n{fact}\nThe end.",
            additional_kwargs={"tool_call_id": "1"},
        ),
    ]
    llm.chat(messages)
    reference = f'[document 1 above: "{fact}"]'
    assert f"<tool>Summary: {fact} (see below)\n{reference}\nThe end.</s>" in seen[-1]


async def test_a_stream_tells_thoughts_apart_from_words() -> None:
    on = {"enable_thinking": True}
    answer = "hm\n</think>\nYes."
    llm, _ = make(answer, native=False, template=THINKING, chat_template_kwargs=on)
    asked = [ChatMessage(role=MessageRole.USER, content="Well?")]
    pieces = [one async for one in await llm.astream_chat(asked)]
    assert "".join(one.delta or "" for one in pieces) == "Yes."
    assert "".join(one.additional_kwargs.get("thinking_delta", "") for one in pieces) == "hm"
