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
from llama_index_helpers import settled
from small import make_model

from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag.chat_engine import KVCacheChatEngine

if TYPE_CHECKING:
    from collections.abc import Callable

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


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the model fail at its third forward pass."""

    def start() -> None:
        forward, calls = make_model().forward, [0]

        def fail(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] > 2:
                raise RuntimeError("out of memory")
            return forward(*args, **options)

        monkeypatch.setattr(make_model(), "forward", fail)

    return start


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
        seen.append(event_names(recorder))
    ours = [name for name in seen[1] if name != "KVCacheReuseEvent"]
    # A stock stream starts in another thread, so that its order is left to chance.
    assert (ours if "stream" not in way else sorted(ours)) == (
        seen[0] if "stream" not in way else sorted(seen[0])
    )
    assert seen[1].count("KVCacheReuseEvent") == 1


@pytest.mark.parametrize("way", STREAMS)
async def test_a_stream_tells_what_happens_in_order(
    chat: KVCacheChatEngine, recorder: Recorder, way: str
) -> None:
    answer, response = await ask(chat, way, QUESTION)
    names = [name for name in recorder.names() if name.startswith(("StreamChat", "KVCache"))]
    deltas = recorder.of("StreamChatDeltaReceivedEvent")
    assert names == [
        "StreamChatStartEvent",
        *["StreamChatDeltaReceivedEvent"] * len(deltas),
        "KVCacheReuseEvent",
        "StreamChatEndEvent",
    ]
    assert "".join(event.delta for event in deltas) == answer
    (reuse,) = recorder.of("KVCacheReuseEvent")
    assert reuse.metrics == response.metadata["kv_cache"]


def test_metrics_of_a_stream_are_there_at_its_end(chat: KVCacheChatEngine) -> None:
    response = chat.stream_chat(QUESTION)
    reader = response.response_gen
    metadata = response.metadata or {}
    assert next(reader)
    assert (metadata["kv_cache"], response.is_done) == ({}, False)
    assert chat.chat_history == []
    list(reader)
    assert metadata["kv_cache"]["generated_tokens"] == 6
    assert response.is_done
    assert {one.node_id for one in response.source_nodes} <= metadata.keys()
    assert str(response) == response.response == "".join(response.response_gen)


async def test_second_reader_gets_everything(chat: KVCacheChatEngine) -> None:
    response = await chat.astream_chat(QUESTION)
    pieces = [piece async for piece in response.async_response_gen()]
    assert len(pieces) > 1
    assert [piece async for piece in response.async_response_gen()] == ["".join(pieces)]
    assert len(chat.chat_history) == 2


async def test_reader_of_the_other_kind_is_told(chat: KVCacheChatEngine) -> None:
    with pytest.raises(InvalidInputError, match="async_response_gen"):
        _ = (await chat.astream_chat(QUESTION)).response_gen
    with pytest.raises(InvalidInputError, match="response_gen"):
        await anext(chat.stream_chat(QUESTION).async_response_gen())


# ---------------------------------------------------------------------- readers who leave
@pytest.mark.usefixtures("recorder")  # which keeps events, and with them the tracebacks
def test_leaving_a_stream_stops_it(talkative: KVCacheChatEngine, forwards: list[int]) -> None:
    response = talkative.stream_chat(QUESTION)
    seen = []
    for piece in response.response_gen:
        seen.append(piece)
        if len(seen) == 3:
            break
    at_once = len(forwards)
    assert settled(forwards) == at_once < LONG / 2
    assert said(talkative.chat_history) == [("user", QUESTION), ("assistant", "".join(seen))]
    assert str(response) == "".join(seen)
    assert response.metadata is not None
    assert response.metadata["kv_cache"] == {}


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("by", ["aclose", "break"])
async def test_leaving_an_async_stream_stops_it(
    talkative: KVCacheChatEngine, forwards: list[int], by: str
) -> None:
    response = await talkative.astream_chat(QUESTION)
    seen = []
    if by == "aclose":
        reader = response.async_response_gen()
        seen += [await anext(reader), await anext(reader)]
        await reader.aclose()
    else:
        async for piece in response.async_response_gen():
            seen.append(piece)
            break
    assert await asyncio.to_thread(settled, forwards) < LONG / 2
    assert said(talkative.chat_history) == [("user", QUESTION), ("assistant", "".join(seen))]


@pytest.mark.parametrize("times", [1, 5])  # some frameworks cancel again at every await
async def test_cancelling_the_reader_stops_it(
    talkative: KVCacheChatEngine, forwards: list[int], times: int
) -> None:
    seen: list[str] = []

    async def read() -> None:
        response = await talkative.astream_chat(QUESTION)
        async for piece in response.async_response_gen():
            seen[:] = [*seen, piece]

    task = asyncio.create_task(read())
    while len(seen) < 3:
        await asyncio.sleep(0)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(settled, forwards) < LONG / 2
    assert said(talkative.chat_history) == [("user", QUESTION), ("assistant", "".join(seen))]


async def test_cancelling_an_answer_stops_it(
    talkative: KVCacheChatEngine, forwards: list[int]
) -> None:
    task = asyncio.create_task(talkative.achat(QUESTION))
    while len(forwards) < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(settled, forwards) < LONG / 2
    assert talkative.chat_history == []


def test_closing_from_another_thread_ends_the_reader(
    talkative: KVCacheChatEngine, forwards: list[int]
) -> None:
    response = talkative.stream_chat(QUESTION)
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(response.response_gen))
    reader.start()
    while len(seen) < 3:
        time.sleep(0.001)
    response.close()
    reader.join(10)
    assert not reader.is_alive()
    assert settled(forwards) < LONG / 2
    assert said(talkative.chat_history) == [("user", QUESTION), ("assistant", "".join(seen))]


async def test_closing_from_another_task_ends_the_reader(
    talkative: KVCacheChatEngine, forwards: list[int]
) -> None:
    response = await talkative.astream_chat(QUESTION)
    seen: list[str] = []

    async def read() -> None:
        async for piece in response.async_response_gen():
            seen[:] = [*seen, piece]

    reader = asyncio.create_task(read())
    while len(seen) < 3:
        await asyncio.sleep(0)
    await response.aclose()
    await asyncio.wait_for(reader, 10)
    assert await asyncio.to_thread(settled, forwards) < LONG / 2
    assert said(talkative.chat_history) == [("user", QUESTION), ("assistant", "".join(seen))]


class Impatient(BaseEventHandler):
    """Closes a stream as soon as it says something."""

    response: Any

    def handle(self, event: BaseEvent, **_: Any) -> None:
        if event.class_name() == "StreamChatDeltaReceivedEvent":
            self.response.close()


def test_closing_by_an_event_handler_ends_the_reader(
    talkative: KVCacheChatEngine, forwards: list[int]
) -> None:
    response = talkative.stream_chat(QUESTION)
    handler = Impatient(response=response)
    get_dispatcher().add_event_handler(handler)
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(response.response_gen), daemon=True)
    reader.start()
    reader.join(10)
    get_dispatcher().event_handlers.remove(handler)
    assert not reader.is_alive()
    assert len(seen) == 1
    assert settled(forwards) < LONG / 2
    assert (response.is_done, str(response)) == (True, seen[0])
    assert said(talkative.chat_history) == [("user", QUESTION), ("assistant", seen[0])]


async def test_streams_nobody_reads_are_closed(
    talkative: KVCacheChatEngine, forwards: list[int], recorder: Recorder
) -> None:
    response = talkative.stream_chat(QUESTION)
    response.close()
    assert settled(forwards) < LONG / 2
    awaited = await talkative.astream_chat(QUESTION)
    await awaited.aclose()
    assert await asyncio.to_thread(settled, forwards) < LONG / 2
    assert talkative.chat_history == []
    assert str(response) == str(awaited) == ""
    assert len(recorder.of("StreamChatEndEvent")) == 2


# ---------------------------------------------------------------------- models that fail
@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", WAYS)
async def test_failure_reaches_the_caller(
    chat: KVCacheChatEngine, failing: Callable[[], None], way: str, recorder: Recorder
) -> None:
    failing()
    with pytest.raises(RuntimeError, match="out of memory"):
        await ask(chat, way, QUESTION)
    assert chat.chat_history == []
    assert len(recorder.of("StreamChatErrorEvent")) == ("stream" in way)


@pytest.mark.timeout(60)
def test_second_reader_of_a_failed_stream_is_told_too(
    chat: KVCacheChatEngine, failing: Callable[[], None]
) -> None:
    failing()
    response = chat.stream_chat(QUESTION)
    for _ in range(2):
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
