"""The engine's answers as LangChain messages, and its streams as chunks of them."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call_chunk
from langchain_core.messages.tool import tool_call as create_tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from kvcache_rag.generation import AsyncAnswerStream
from kvcache_rag.integration import Reasoning, ToolCall, UnreadableCall, read_whole
from langchain_kvcache_rag.settings import PROVIDER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from kvcache_rag import Answer
    from kvcache_rag.generation import AnswerStream
    from kvcache_rag.integration import AnswerPart
    from langchain_kvcache_rag.calls import EngineCall

# Where LangChain reads on; a LangChain without it is read to the end (a test tells).
_STEP: Final = getattr(getattr(Runnable, "_transform_stream_with_config", None), "__code__", None)


def usage(answer: Answer) -> UsageMetadata:
    """Token counts in LangChain's form; `cache_read` is what was not computed."""
    metrics = answer.metrics
    return UsageMetadata(
        input_tokens=metrics.prompt_tokens,
        output_tokens=metrics.generated_tokens,
        total_tokens=metrics.prompt_tokens + metrics.generated_tokens,
        input_token_details=InputTokenDetails(
            cache_read=metrics.reused_tokens + metrics.continued_tokens,
            # A policy that reuses nothing computes chunks and keeps nothing of them.
            cache_creation=metrics.prefilled_tokens if metrics.misses else 0,
        ),
    )


def metadata(answer: Answer, call: EngineCall) -> dict[str, Any]:
    """What `response_metadata` says: `kv_cache` metrics and more.

    LangChain adds messages up value by value: lists and texts are joined, whole numbers add up
    unless they are equal, and two different ones of anything else are a TypeError.  So what has to
    be true of a sum stands in a list.
    """
    tool_form = call.form.tool_form
    cost = call.asked.cost(answer.metrics)
    flat = {name: one for name, one in cost.items() if not isinstance(one, float)}
    flat |= {name: int(cost[name]) for name in ("prefix_mismatch", "says_none")}
    return {
        "model_name": call.model_name,
        "model_provider": PROVIDER,
        "finish_reason": answer.finish_reason,
        "kv_cache": {**flat, "answers": [cost]},
        **({"tool_form": tool_form} if tool_form else {}),
    }


def result(answer: Answer, call: EngineCall) -> ChatResult:
    """A whole answer."""
    parts = read_whole(call.reader(), answer.text)
    thoughts = "".join(part.text for part in parts if isinstance(part, Reasoning))
    message = AIMessage(
        content="".join(part for part in parts if isinstance(part, str)),
        additional_kwargs={"reasoning_content": thoughts} if thoughts else {},
        tool_calls=[
            create_tool_call(name=part.name, args=part.arguments, id=part.id)
            for part in parts
            if isinstance(part, ToolCall)
        ],
        invalid_tool_calls=[
            invalid_tool_call(name=None, args=part.text, id=part.id, error=part.error)
            for part in parts
            if isinstance(part, UnreadableCall)
        ],
        usage_metadata=usage(answer),
        response_metadata=metadata(answer, call),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def chunks(stream: AnswerStream, call: EngineCall) -> Iterator[ChatGenerationChunk]:
    """Pieces as they come, then an empty one with usage and metrics.

    Closing stops generation, and so does closing the stream of a chain whose later steps would read
    on for their traces.
    """
    pieces = _Pieces(call)
    try:
        for piece in stream:
            yield from pieces.feed(piece)
            if _is_left_over():
                return
        yield from pieces.rest()
        yield _last(stream.answer, call)
    finally:
        stream.close()


class _Pieces:
    """What a stream's pieces of text are as chunks."""

    def __init__(self, call: EngineCall) -> None:
        self._reader = call.reader()
        self._calls = 0

    def feed(self, text: str) -> list[ChatGenerationChunk]:
        return self._chunks(self._reader.feed(text))

    def rest(self) -> list[ChatGenerationChunk]:
        return self._chunks(self._reader.finish())

    def _chunks(self, parts: Sequence[AnswerPart]) -> list[ChatGenerationChunk]:
        return [ChatGenerationChunk(message=self._message(part)) for part in parts]

    def _message(self, part: AnswerPart) -> AIMessageChunk:
        if isinstance(part, str):
            return AIMessageChunk(content=part)
        if isinstance(part, Reasoning):
            return AIMessageChunk(content="", additional_kwargs={"reasoning_content": part.text})
        self._calls += 1
        # What is no call becomes a string in JSON: what was cut, LangChain mends to a call of "".
        name, given = (
            (part.name, part.arguments) if isinstance(part, ToolCall) else (None, part.text)
        )
        arguments = json.dumps(given, ensure_ascii=False)
        chunk = tool_call_chunk(name=name, args=arguments, id=part.id, index=self._calls - 1)
        return AIMessageChunk(content="", tool_call_chunks=[chunk])


class AsyncChunks(AsyncIterator[ChatGenerationChunk]):
    """`chunks` that does not block the event loop.

    No async generator: whoever drops one leaves its end to the event loop, and the model would go
    on until the loop finds time.  This one stops generation as soon as it is dropped.
    """

    def __init__(self, read: Callable[[], EngineCall]) -> None:
        """Take what reads the call; it may load the model, so it runs in a thread."""
        calls: list[EngineCall] = []
        self._calls = calls

        def start() -> AnswerStream:
            # No reference to the chunks themselves: they can be dropped, which stops the stream.
            calls.append(read())
            return calls[0].open()

        self._stream = AsyncAnswerStream(start)
        self._pieces: _Pieces | None = None
        self._ready: deque[ChatGenerationChunk] = deque()
        self._ended = False

    def __aiter__(self) -> AsyncChunks:
        return self

    async def __anext__(self) -> ChatGenerationChunk:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            try:
                piece: str | None = await anext(self._stream)
            except StopAsyncIteration:
                self._ended, piece = True, None
            if self._pieces is None:
                self._pieces = _Pieces(self._calls[0])
            if piece is not None:
                self._ready.extend(self._pieces.feed(piece))
                continue
            self._ready.extend(self._pieces.rest())
            self._ready.append(_last(self._stream.answer, self._calls[0]))
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Stop generating at the next token and wait until the model is free."""
        self._ended = True
        self._ready.clear()
        await self._stream.aclose()


def _last(answer: Answer, call: EngineCall) -> ChatGenerationChunk:
    message = AIMessageChunk(
        content="",
        chunk_position="last",
        usage_metadata=usage(answer),
        response_metadata=metadata(answer, call),
    )
    return ChatGenerationChunk(message=message)


def _is_left_over() -> bool:
    """Whether nobody reads the stream any more, except a step of a chain for its trace.

    When a chain's stream is closed, each step reads what is left of its input to the end (LangChain
    1.x, without asyncio), and a model would go on to the last token of an answer that nobody gets.
    While a step works, its input is read by its transformer, `iterator`; what it reads past that
    one is for the trace.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        above = frame.f_back
        if above is not None and above.f_code is _STEP:
            own = getattr(above.f_locals.get("iterator"), "gi_frame", None)
            if own is not None and own is not frame:
                return True
        frame = above
    return False
