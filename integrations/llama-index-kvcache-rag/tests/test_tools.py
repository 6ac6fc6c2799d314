"""Agents: tools are called, and the nodes that they find are chunks."""

from __future__ import annotations

from typing import Any

import pytest
from contracts_frameworks import ToolsContract
from llama_index.core.base.llms.types import (
    ChatMessage,
    MessageRole,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import FunctionTool, RetrieverTool, ToolMetadata
from llama_index_framework import LlamaIndex
from scripted import NATIVE, THINKING, json_call, native_call, scripted_engine

from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag import KVCacheLLM

# LlamaIndex's agents ask pydantic in a way of before.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince211"),
]


class TestTools(ToolsContract):
    framework = LlamaIndex()


FACTS = {
    "Mora": "The ship Mora was built in Kiel by the brothers Tesk in the year 1911.",
    "Vug": "Captain Vug has sailed the ship Mora for eleven years without a day of rest.",
}


class Facts(BaseRetriever):
    """Finds the facts that a query names."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=TextNode(text=text), score=1.0)
            for name, text in FACTS.items()
            if name in query_bundle.query_str
        ]


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


ADD = FunctionTool.from_defaults(add)
SEARCH = RetrieverTool(Facts(), ToolMetadata(name="search", description="Finds facts."))


def make(
    *answers: str, native: bool = True, template: str = NATIVE, **options: Any
) -> tuple[KVCacheLLM, list[str]]:
    """An LLM that gives these answers, one after the other, and what it was asked."""
    engine, seen = scripted_engine(*answers, native=native, template=template)
    return KVCacheLLM(engine=engine, max_new_tokens=400, **options), seen


async def test_predict_and_call_runs_the_tool() -> None:
    answer = native_call(("add", {"a": 1, "b": 2}))
    llm, _ = make(answer, answer)
    assert llm.predict_and_call([ADD], "Add.").response == "3"
    assert (await llm.apredict_and_call([ADD], "Add.")).response == "3"


def test_a_call_that_is_required_is_held_to() -> None:
    llm, _ = make(json_call(("add", {"a": 1, "b": 2})), "Three.")
    response = llm.chat_with_tools([ADD, SEARCH], "Add.", tool_required=True)
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


async def test_thoughts_are_a_block_of_their_own() -> None:
    answers = ["hm\n</think>\nYes."] * 4
    on = {"enable_thinking": True}
    llm, seen = make(*answers, native=False, template=THINKING, chat_template_kwargs=on)
    asked = [ChatMessage(role=MessageRole.USER, content="Well?")]
    responses = [llm.chat(asked), await llm.achat(asked), *list(llm.stream_chat(asked))[-1:]]
    pieces = [one async for one in await llm.astream_chat(asked)]
    responses.append(pieces[-1])
    for response in responses:
        assert response.message.content == "Yes."
        (thought,) = [one for one in response.message.blocks if isinstance(one, ThinkingBlock)]
        assert thought.content == "hm"
    assert "".join(one.delta or "" for one in pieces) == "Yes."
    assert "".join(one.additional_kwargs.get("thinking_delta", "") for one in pieces) == "hm"
    assert all(prompt.endswith("<assistant><think>\n") for prompt in seen)


def test_a_call_says_what_the_chat_template_is_given() -> None:
    llm, seen = make("Yes.", "hm</think>Yes.", native=False, template=THINKING)
    asked = [ChatMessage(role=MessageRole.USER, content="Well?")]
    assert llm.chat(asked).message.content == "Yes."
    on = llm.chat(asked, chat_template_kwargs={"enable_thinking": True})
    assert on.message.content == "Yes."
    assert [prompt.endswith("<think>\n") for prompt in seen] == [False, True]
