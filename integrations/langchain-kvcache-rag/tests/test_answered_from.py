"""Which documents an answer was computed from is told wherever it is told what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from contracts_frameworks import JSON_FORM, NOTES, QUESTION
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_framework import LangChain, said

from langchain_kvcache_rag import document_block

if TYPE_CHECKING:
    from langchain_kvcache_rag import ChatKVCache

CONTEXT = [LangChain().document(text, id_, score) for id_, (text, score) in NOTES.items()]
CONTEXT[-1].id = None


def told(message: Any) -> tuple[list[int], list[str | None], int]:
    cost = said(message).cost
    return cost["answered_from"], cost["answered_from_ids"], cost["unused_chunks"]


@JSON_FORM
def test_a_document_of_a_tool_need_not_have_an_id(llm: ChatKVCache) -> None:
    blocks, artifact = LangChain().behind_tools(llm.bind(policy="full"), QUESTION, [CONTEXT])
    assert artifact.cost["answered_from_ids"] == ["bakery", "keeper", None]
    assert blocks.cost["answered_from"] == [1, 3, 4]


def test_a_later_turn_counts_the_documents_of_earlier_ones(llm: ChatKVCache) -> None:
    blocks: list[Any] = [document_block(document) for document in CONTEXT]
    earlier = HumanMessage([*blocks[:2], {"type": "text", "text": "What is sold?"}])
    later = HumanMessage([*blocks[3:], {"type": "text", "text": QUESTION}])
    found = told(llm.invoke([earlier, AIMessage("Bread."), later], policy="bestfew:1"))
    assert found == ([2], ["keeper"], 2)


@JSON_FORM
@pytest.mark.filterwarnings("ignore:the system message is not the instruction")
def test_documents_are_chosen_by_the_question_alone(llm: ChatKVCache) -> None:
    """Neither by an instruction nor by what a tool said, in single answers as in batches."""
    system = SystemMessage("Sell bread of rye in a bakery every day, rye bread of the bakery.")
    texts = [NOTES[name][0] for name in ("bakery", "keeper", "harbour")]
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
