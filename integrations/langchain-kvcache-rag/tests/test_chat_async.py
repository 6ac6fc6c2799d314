"""The chat model on an event loop: nothing blocks it, and what is cancelled stops."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from chat_model_helpers import LONG, Recorder, Steps, details, over
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from kvcache_rag import InvalidInputError
from langchain_kvcache_rag.blocks import document_block

if TYPE_CHECKING:
    from langchain_kvcache_rag.chat_model import ChatKVCache

ENOUGH = 100
"""Steps of a long answer that was stopped in time has fewer."""


async def reached(steps: Steps, count: int) -> None:
    """Wait until the model has gone so many steps."""
    async with asyncio.timeout(20):
        while steps.count < count:
            await asyncio.sleep(0.001)


async def stands_still(llm: ChatKVCache, steps: Steps) -> bool:
    """Whether the model answers the next question, and the one before has come to its end."""
    assert (await llm.ainvoke(over("who?", "one"))).text
    stopped = steps.count
    await asyncio.sleep(0.05)
    return steps.count == stopped < ENOUGH


async def test_a_dropped_stream_frees_the_model(llm: ChatKVCache) -> None:
    steps = Steps()
    async for _ in llm.astream(over("what?", "one"), **LONG, logits_processor=[steps]):
        break
    assert await stands_still(llm, steps)


async def test_a_closed_stream_of_a_chain_frees_the_model(llm: ChatKVCache) -> None:
    steps = Steps()
    chain = llm.bind(**LONG, logits_processor=[steps]) | StrOutputParser()
    stream: Any = chain.astream(over("what?", "one"))
    await anext(stream)
    await anext(stream)
    await stream.aclose()
    assert await stands_still(llm, steps)


@pytest.mark.parametrize("call", ["ainvoke", "astream", "abatch", "astream_events"])
async def test_a_cancelled_task_frees_the_model(
    llm: ChatKVCache, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, question = Steps(), over("what?", "one")
    options, together = {**LONG, "logits_processor": [steps]}, llm.engine.generate_batch

    def slow(questions: Any, **options: Any) -> Any:
        return together(questions, **options, logits_processor=[steps])

    monkeypatch.setattr(llm.engine, "generate_batch", slow)

    async def work() -> None:
        if call == "ainvoke":
            await llm.ainvoke(question, **options)
        elif call == "abatch":  # in one padded generate, as nothing watches one row alone
            await llm.abatch([question, over("who?", "one")], **LONG)
        else:
            async for _ in getattr(llm, call)(question, **options):
                pass

    task = asyncio.create_task(work())
    await reached(steps, 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await stands_still(llm, steps)


async def test_fifty_at_once_are_answered_as_one_by_one(llm: ChatKVCache) -> None:
    questions = [over(f"what {index}?", f"document {index % 7}") for index in range(50)]
    answers = await asyncio.gather(*(llm.ainvoke(question) for question in questions))
    assert [one.text for one in answers] == [llm.invoke(one).text for one in questions]
    assert len({one.text for one in answers}) > 1


async def test_errors_reach_caller_and_callbacks(llm: ChatKVCache) -> None:
    recorder = Recorder()
    with pytest.raises(InvalidInputError, match="no option"):
        await llm.ainvoke("Hello", config={"callbacks": [recorder]}, max_token=3)
    with pytest.raises(InvalidInputError, match="no option"):
        async for _ in llm.astream("Hello", config={"callbacks": [recorder]}, max_token=3):
            pass
    assert [type(error) for error in recorder.errors] == [InvalidInputError] * 2


async def test_a_graph_carries_documents_from_turn_to_turn(llm: ChatKVCache) -> None:
    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    app = graph.compile(checkpointer=MemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    first = await app.ainvoke({"messages": over("what?", "one", "two")}, config)
    state = await app.ainvoke({"messages": [HumanMessage("and?")]}, config)
    said = first["messages"][-1].text
    history = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": said}]
    expected = llm.engine.generate("and?", ["one", "two"], history=history, max_new_tokens=6)
    last: AIMessage = state["messages"][-1]
    assert last.text == expected.text
    read = expected.metrics.reused_tokens
    read += last.response_metadata["kv_cache"]["continued_tokens"]
    assert details(last) == {"cache_read": read, "cache_creation": 0}
    assert state["messages"][0].content[0] == document_block(Document("one"))
