"""The engine's answers as LangChain messages, and its streams as chunks of them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from kvcache_rag import AsyncAnswerStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from kvcache_rag import Answer, AnswerStream

PROVIDER = "kvcache-rag"
"""Name of this integration in traces and in `response_metadata`."""

_STEP: Final = Runnable._transform_stream_with_config.__code__


def usage(answer: Answer) -> UsageMetadata:
    """Token counts in LangChain's form; `cache_read` is what came from the store."""
    metrics = answer.metrics
    return UsageMetadata(
        input_tokens=metrics.prompt_tokens,
        output_tokens=metrics.generated_tokens,
        total_tokens=metrics.prompt_tokens + metrics.generated_tokens,
        input_token_details=InputTokenDetails(
            cache_read=metrics.reused_tokens,
            # A policy that reuses nothing computes chunks and keeps nothing of them.
            cache_creation=metrics.prefilled_tokens if metrics.misses else 0,
        ),
    )


def metadata(answer: Answer, model_name: str) -> dict[str, Any]:
    """What `response_metadata` says: times in seconds, `kv_cache` all metrics."""
    return {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": answer.finish_reason,
        "ttft": answer.metrics.ttft,
        "kv_cache": answer.metrics.to_dict(),
    }


def result(answer: Answer, model_name: str) -> ChatResult:
    """A whole answer."""
    message = AIMessage(
        content=answer.text,
        usage_metadata=usage(answer),
        response_metadata=metadata(answer, model_name),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def chunks(stream: AnswerStream, model_name: str) -> Iterator[ChatGenerationChunk]:
    """Pieces as they come, then an empty one with usage and metrics.

    Closing stops generation, and so does closing the stream of a chain whose later steps would read
    on for their traces.
    """
    try:
        for piece in stream:
            yield _piece(piece)
            if _is_left_over():
                return
        yield _last(stream.answer, model_name)
    finally:
        stream.close()


class AsyncChunks(AsyncIterator[ChatGenerationChunk]):
    """`chunks` that does not block the event loop.

    No async generator: whoever drops one leaves its end to the event loop, and the model would go
    on until the loop finds time.  This one stops generation as soon as it is dropped.
    """

    def __init__(self, start: Callable[[], AnswerStream], model_name: str) -> None:
        """Take what starts the stream; it may load the model, so it runs in a thread."""
        self._pieces = AsyncAnswerStream(start)
        self._model_name = model_name
        self._ended = False

    def __aiter__(self) -> AsyncChunks:
        return self

    async def __anext__(self) -> ChatGenerationChunk:
        if self._ended:
            raise StopAsyncIteration
        try:
            return _piece(await anext(self._pieces))
        except StopAsyncIteration:
            self._ended = True
        return _last(self._pieces.answer, self._model_name)

    async def aclose(self) -> None:
        """Stop generating at the next token and wait until the model is free."""
        self._ended = True
        await self._pieces.aclose()


def _piece(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))


def _last(answer: Answer, model_name: str) -> ChatGenerationChunk:
    message = AIMessageChunk(
        content="",
        chunk_position="last",
        usage_metadata=usage(answer),
        response_metadata=metadata(answer, model_name),
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
