"""Which documents an answer was computed from is told wherever it is told what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from kvcache_rag import Metrics
from langchain_kvcache_rag import document_block

if TYPE_CHECKING:
    from langchain_kvcache_rag import ChatKVCache

QUESTION = "Who keeps the lighthouse?"
BAKERY = "The bakery sells bread made of rye flour every day."
KEEPER = "Marlow keeps the lighthouse, and he lives there."
HARBOUR = "The harbour was built in 1911, and rebuilt in 1934."
# The first says nothing, the third what the second says, and the last has no id.
CONTEXT = [
    Document(" ", id="none", metadata={"relevance_score": 0.2}),
    Document(BAKERY, id="bakery", metadata={"relevance_score": 0.8}),
    Document(BAKERY, id="again", metadata={"relevance_score": 0.8}),
    Document(KEEPER, id="keeper", metadata={"relevance_score": 0.9}),
    Document(HARBOUR, metadata={"relevance_score": 0.1}),
]


def told(message: Any) -> tuple[list[int], list[str | None], int]:
    cost = message.response_metadata["kv_cache"]
    (one,) = cost["answers"]
    names = ("answered_from", "answered_from_ids", "unused_chunks")
    assert [cost[name] for name in names] == [one[name] for name in names]
    assert Metrics.from_dict(cost).answered_from == tuple(one["answered_from"])
    assert {miss["chunk"] for miss in one["missed"]} <= {*one["answered_from"]}
    return cost["answered_from"], cost["answered_from_ids"], cost["unused_chunks"]


@pytest.mark.filterwarnings("ignore:chat template or tokenizer")  # the reader writes JSON
def test_documents_of_tools_have_their_ids(llm: ChatKVCache) -> None:
    call: Any = {"name": "search", "args": {}, "id": "0"}
    content = "\n\n".join(document.page_content for document in CONTEXT)
    found = ToolMessage(content, tool_call_id="0", artifact=CONTEXT)
    messages = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), found]
    places, ids, _ = told(llm.invoke(messages, policy="full"))
    assert (len(places), ids) == (3, ["bakery", "keeper", None])
    blocks: list[Any] = [document_block(document) for document in CONTEXT]
    beside = ToolMessage(blocks, tool_call_id="0")
    assert told(llm.invoke([*messages[:2], beside], policy="full"))[0] == [1, 3, 4]


def test_a_later_turn_counts_the_documents_of_earlier_ones(llm: ChatKVCache) -> None:
    blocks: list[Any] = [document_block(document) for document in CONTEXT]
    earlier = HumanMessage([*blocks[:2], {"type": "text", "text": "What is sold?"}])
    later = HumanMessage([*blocks[3:], {"type": "text", "text": QUESTION}])
    found = told(llm.invoke([earlier, AIMessage("Bread."), later], policy="bestfew:1"))
    assert found == ([2], ["keeper"], 2)


@pytest.mark.filterwarnings("ignore:chat template or tokenizer")  # the reader writes JSON
@pytest.mark.filterwarnings("ignore:the system message is not the instruction")
def test_documents_are_chosen_by_the_question_alone(llm: ChatKVCache) -> None:
    """Neither by an instruction nor by what a tool said, in single answers as in batches."""
    system = SystemMessage("Sell bread of rye in a bakery every day, rye bread of the bakery.")
    texts = [BAKERY, KEEPER, HARBOUR]
    blocks: list[Any] = [document_block(Document(text)) for text in texts]
    asks = HumanMessage([*blocks, {"type": "text", "text": QUESTION}])
    call: Any = {"name": "search", "args": {}, "id": "0"}
    found = ToolMessage("\n\n".join(texts), tool_call_id="0", artifact=[*map(Document, texts)])
    agent = [system, HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), found]
    for messages in ([system, asks], agent):
        assert told(llm.invoke(messages, policy="bestfew:1"))[0] == [1]
    other = HumanMessage([*blocks, {"type": "text", "text": "When was the harbour built?"}])
    answers = llm.batch([[system, asks], [system, other]], policy="bestfew:1")
    assert [told(one)[0] for one in answers] == [[1], [2]]
