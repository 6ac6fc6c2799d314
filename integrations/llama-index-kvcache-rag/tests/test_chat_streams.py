"""Streams of KVCacheChatEngine: events, and what happens when a reader leaves or a model fails."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from chat_helpers import HISTORY, QUESTION, WAYS, ask, make_index, said
from llama_index.core.chat_engine import CondensePlusContextChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.memory import ChatMemoryBuffer
from llama_index_helpers import cost, failing_at_the_third_token, settled

from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag.chat_engine import KVCacheChatEngine

if TYPE_CHECKING:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.instrumentation.events.base import BaseEvent
    from llama_index_helpers import Recorder

    from llama_index.kvcache_rag import HashEmbedding, KVCacheLLM

STREAMS = ["stream_chat", "astream_chat"]
LONG = 3000


@pytest.fixture
def index(llm: KVCacheLLM, embedding: HashEmbedding) -> VectorStoreIndex:
    return make_index(llm, embedding)


@pytest.fixture
def chat(index: VectorStoreIndex, llm: KVCacheLLM) -> KVCacheChatEngine:
    return KVCacheChatEngine.from_index(index, llm, skip_condense=True)


@pytest.fixture
def talkative(index: VectorStoreIndex, llm: KVCacheLLM) -> KVCacheChatEngine:
    """Its answers take so long that only stopping them ends a test in time."""
    return KVCacheChatEngine.from_index(
        index,
        llm,
        skip_condense=True,
        generate_kwargs={"max_new_tokens": LONG, "min_new_tokens": LONG},
    )


async def check_stopped(
    chat: KVCacheChatEngine, forwards: list[int], seen: list[str], at_most: float = LONG / 2
) -> None:
    """The model has come to rest, and what was read is remembered."""
    assert await asyncio.to_thread(settled, forwards) <= at_most
    remembered = [("user", QUESTION), ("assistant", "".join(seen))] if seen else []
    assert said(chat.chat_history) == remembered


# ---------------------------------------------------------------------- events and metadata
def event_names(recorder: Recorder) -> list[str]:
    """Names without those of embeddings and pieces."""
    pieces = ("LLMCompletionInProgressEvent", "StreamChatDeltaReceivedEvent")
    ignored = ("EmbeddingStartEvent", "EmbeddingEndEvent", *pieces)
    return [name for name in recorder.names() if name not in ignored]


@pytest.mark.parametrize("way", WAYS)
async def test_events_are_those_of_a_stock_engine(
    index: VectorStoreIndex, llm: KVCacheLLM, recorder: Recorder, way: str
) -> None:
    retriever = index.as_retriever(similarity_top_k=2)
    memory = ChatMemoryBuffer.from_defaults(token_limit=9000)
    stock = CondensePlusContextChatEngine.from_defaults(retriever, llm=llm, memory=memory)
    seen = []
    for engine in (stock, KVCacheChatEngine.from_defaults(retriever, llm)):
        recorder.events.clear()
        await ask(engine, way, QUESTION, list(HISTORY))
        names = event_names(recorder)
        # A stock stream starts in another thread, so that its order is left to chance.
        seen.append(sorted(names) if "stream" in way else names)
    theirs, ours = seen
    assert ours.count("KVCacheReuseEvent") == 1
    assert [name for name in ours if name != "KVCacheReuseEvent"] == theirs


@pytest.mark.parametrize("way", STREAMS)
async def test_a_stream_tells_what_happens_in_order(
    chat: KVCacheChatEngine, recorder: Recorder, way: str
) -> None:
    answer, response = await ask(chat, way, QUESTION)
    names = [name for name in recorder.names() if name.startswith(("StreamChat", "KVCache"))]
    deltas = recorder.named("StreamChatDeltaReceivedEvent")
    assert names == [
        "StreamChatStartEvent",
        *["StreamChatDeltaReceivedEvent"] * len(deltas),
        "KVCacheReuseEvent",
        "StreamChatEndEvent",
    ]
    assert "".join(event.delta for event in deltas) == answer
    (reuse,) = recorder.named("KVCacheReuseEvent")
    assert reuse.metrics == response.metadata["kv_cache"]


async def test_metrics_of_a_stream_are_there_at_its_end(chat: KVCacheChatEngine) -> None:
    response = chat.stream_chat(QUESTION)
    reader = response.response_gen
    metadata = response.metadata or {}
    assert next(reader)
    assert (metadata["kv_cache"], response.is_done, chat.chat_history) == ({}, False, [])
    list(reader)
    assert metadata["kv_cache"]["generated_tokens"] == 6
    assert response.is_done
    assert {one.node_id for one in response.source_nodes} <= metadata.keys()
    # Who reads it again gets everything.
    assert str(response) == response.response == "".join(response.response_gen)
    awaited = await chat.astream_chat(QUESTION)
    pieces = [piece async for piece in awaited.async_response_gen()]
    assert len(pieces) > 1
    assert [piece async for piece in awaited.async_response_gen()] == ["".join(pieces)]
    assert len(chat.chat_history) == 4


async def test_reader_of_the_other_kind_is_told(chat: KVCacheChatEngine) -> None:
    with pytest.raises(InvalidInputError, match="async_response_gen"):
        _ = (await chat.astream_chat(QUESTION)).response_gen
    with pytest.raises(InvalidInputError, match="response_gen"):
        await anext(chat.stream_chat(QUESTION).async_response_gen())


# ---------------------------------------------------------------------- readers who leave
@pytest.mark.usefixtures("recorder")  # which keeps events, and with them the tracebacks
async def test_leaving_a_stream_stops_it(talkative: KVCacheChatEngine, forwards: list[int]) -> None:
    response = talkative.stream_chat(QUESTION)
    seen = []
    for piece in response.response_gen:
        seen.append(piece)
        if len(seen) == 3:
            break
    await check_stopped(talkative, forwards, seen, at_most=len(forwards))
    assert str(response) == "".join(seen)
    assert cost(response) == {}


# Some frameworks cancel again at every await.
@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("by", ["break", "aclose", "cancel", "cancel again", "another task"])
async def test_leaving_an_async_stream_stops_it(
    talkative: KVCacheChatEngine, forwards: list[int], by: str
) -> None:
    response, seen = await talkative.astream_chat(QUESTION), list[str]()

    async def read(count: int) -> None:
        reader = response.async_response_gen()
        async for piece in reader:
            seen[:] = [*seen, piece]
            if len(seen) == count:
                break
        if by == "aclose":
            await reader.aclose()

    if by in ("break", "aclose"):
        await read(2)
    else:
        task = asyncio.create_task(read(LONG))
        while len(seen) < 3:
            await asyncio.sleep(0)
        if by == "another task":
            await response.aclose()
            await asyncio.wait_for(task, 10)
        else:
            for _ in range(5 if by == "cancel again" else 1):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
    await check_stopped(talkative, forwards, seen)


async def test_cancelling_an_answer_stops_it(
    talkative: KVCacheChatEngine, forwards: list[int]
) -> None:
    task = asyncio.create_task(talkative.achat(QUESTION))
    while len(forwards) < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await check_stopped(talkative, forwards, [])


class Impatient(BaseEventHandler):
    """Closes a stream as soon as it says something."""

    response: Any

    def handle(self, event: BaseEvent, **_: Any) -> None:
        if event.class_name() == "StreamChatDeltaReceivedEvent":
            self.response.close()


@pytest.mark.parametrize("by", ["another thread", "an event handler"])
async def test_closing_a_stream_ends_its_reader(
    talkative: KVCacheChatEngine, forwards: list[int], by: str
) -> None:
    response, seen = talkative.stream_chat(QUESTION), list[str]()
    handler = Impatient(response=response)
    if by == "an event handler":
        get_dispatcher().add_event_handler(handler)
    reader = threading.Thread(target=lambda: seen.extend(response.response_gen), daemon=True)
    reader.start()
    if by == "an event handler":
        reader.join(10)
        get_dispatcher().event_handlers.remove(handler)
        assert len(seen) == 1
    else:
        while len(seen) < 3:
            time.sleep(0.001)
        response.close()
        reader.join(10)
    assert not reader.is_alive()
    assert (response.is_done, str(response)) == (True, "".join(seen))
    await check_stopped(talkative, forwards, seen)


async def test_streams_nobody_reads_are_closed(
    talkative: KVCacheChatEngine, forwards: list[int], recorder: Recorder
) -> None:
    response = talkative.stream_chat(QUESTION)
    response.close()
    await check_stopped(talkative, forwards, [])
    awaited = await talkative.astream_chat(QUESTION)
    await awaited.aclose()
    await check_stopped(talkative, forwards, [])
    assert str(response) == str(awaited) == ""
    assert len(recorder.named("StreamChatEndEvent")) == 2


# ---------------------------------------------------------------------- models that fail
@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", WAYS)
async def test_failure_reaches_the_caller(
    chat: KVCacheChatEngine, way: str, recorder: Recorder
) -> None:
    with failing_at_the_third_token(), pytest.raises(RuntimeError, match="out of memory"):
        await ask(chat, way, QUESTION)
    assert chat.chat_history == []
    assert len(recorder.named("StreamChatErrorEvent")) == ("stream" in way)
    if way == "stream_chat":
        with failing_at_the_third_token():
            response = chat.stream_chat(QUESTION)
            for _ in range(2):  # who reads it again is told, too
                with pytest.raises(RuntimeError, match="out of memory"):
                    list(response.response_gen)


# ---------------------------------------------------------------------- memories that fail or wait
class Forgetful(ChatMemoryBuffer):
    """Cannot be written."""

    def put_messages(self, messages: list[ChatMessage]) -> None:
        raise OSError("disk full")


@pytest.mark.parametrize("way", STREAMS)
async def test_stream_that_cannot_be_remembered_is_an_error(
    index: VectorStoreIndex, llm: KVCacheLLM, recorder: Recorder, way: str
) -> None:
    made = KVCacheChatEngine.from_index(index, llm, memory=Forgetful(token_limit=9))
    with pytest.raises(OSError, match="disk full"):
        await ask(made, way, QUESTION)
    ends = ("StreamChatErrorEvent", "StreamChatEndEvent")
    assert [name for name in recorder.names() if name in ends] == ["StreamChatErrorEvent"]


async def test_stream_that_cannot_be_remembered_ends_when_it_is_left(
    index: VectorStoreIndex, llm: KVCacheLLM
) -> None:
    made = KVCacheChatEngine.from_index(index, llm, memory=Forgetful(token_limit=9))
    response = made.stream_chat(QUESTION)
    reader = response.response_gen
    piece = next(reader)
    with pytest.raises(OSError, match="disk full"):
        reader.close()
    assert (response.is_done, str(response)) == (True, piece)
    awaited = await made.astream_chat(QUESTION)
    pieces = awaited.async_response_gen()
    piece = await anext(pieces)
    with pytest.raises(OSError, match="disk full"):
        await pieces.aclose()
    assert (awaited.is_done, str(awaited)) == (True, piece)


class Slow(ChatMemoryBuffer):
    """Waits between two messages, as a database does."""

    async def aput_messages(self, messages: list[ChatMessage]) -> None:
        for message in messages:
            self.put(message)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("way", ["achat", "astream_chat"])
async def test_turn_is_remembered_whole_or_not_at_all(
    index: VectorStoreIndex, llm: KVCacheLLM, way: str
) -> None:
    memory = Slow(token_limit=2000, tokenizer_fn=list)
    made = KVCacheChatEngine.from_index(index, llm, memory=memory)
    task = asyncio.create_task(ask(made, way, QUESTION))
    while not memory.get_all():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.1)
    assert [role for role, _ in said(memory.get_all())] == ["user", "assistant"]
