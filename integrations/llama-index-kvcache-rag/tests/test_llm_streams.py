"""Streams of KVCacheLLM whose readers leave."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index_helpers import settled

from llama_index.kvcache_rag import KVCacheLLM
from llama_index.kvcache_rag.responses import Grounded

if TYPE_CHECKING:
    from llama_index_helpers import Recorder

    from kvcache_rag import Engine

LONG = 3000
HELLO = [ChatMessage(role=MessageRole.USER, content="hello")]
ASKED = ("prompt", Grounded("q?", ("text",)))
CALLS = [
    ("stream_complete", ("a",)),
    ("stream_chat", (HELLO,)),
    ("stream_answer", ASKED),
]


@pytest.fixture
def talkative(engine: Engine, recorder: Recorder) -> KVCacheLLM:
    """Answers for so long that only stopping it ends a test in time.

    Its events are kept, and with them the tracebacks, which hold streams longer than nobody does.
    """
    options = {"min_new_tokens": LONG}
    return KVCacheLLM(engine=engine, max_new_tokens=LONG, generate_kwargs=options)


@pytest.mark.parametrize(("name", "asked"), CALLS)
def test_leaving_a_stream_stops_it(
    talkative: KVCacheLLM, forwards: list[int], name: str, asked: Any
) -> None:
    for _ in getattr(talkative, name)(*asked):
        break
    at_once = len(forwards)
    assert settled(forwards) == at_once < LONG / 2
    assert len(talkative.complete("a", max_new_tokens=2, min_new_tokens=2).text) == 2


@pytest.mark.parametrize("by", ["aclose", "break"])
@pytest.mark.parametrize(("name", "asked"), CALLS)
async def test_leaving_an_async_stream_stops_it(
    talkative: KVCacheLLM, forwards: list[int], name: str, asked: Any, by: str
) -> None:
    stream = await getattr(talkative, f"a{name}")(*asked)
    if by == "aclose":
        await anext(stream)
        await stream.aclose()
    else:
        async for _ in stream:
            break
        del stream
    assert await asyncio.to_thread(settled, forwards) < LONG / 2


@pytest.mark.parametrize(("name", "asked"), CALLS)
async def test_cancelling_before_the_first_piece_stops_it(
    talkative: KVCacheLLM, forwards: list[int], name: str, asked: Any
) -> None:
    opened = asyncio.Event()

    async def read() -> None:
        stream = await getattr(talkative, f"a{name}")(*asked)
        opened.set()
        await anext(stream)

    task = asyncio.create_task(read())
    await opened.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(settled, forwards) < LONG / 2


@pytest.mark.parametrize(("name", "asked"), CALLS)
def test_event_loop_that_ends_stops_its_streams(
    talkative: KVCacheLLM, forwards: list[int], name: str, asked: Any
) -> None:
    held, complaints = list[Any](), list[Any]()

    async def begin() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
        held.append(await getattr(talkative, f"a{name}")(*asked))
        await anext(held[0])

    asyncio.run(begin())
    assert settled(forwards) < LONG / 2
    assert complaints == []
