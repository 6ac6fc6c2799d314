"""The engine's answers as LlamaIndex responses, and its streams as true generators of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from llama_index.core.base.llms.types import (
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)

from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.generation import AsyncAnswerStream
from kvcache_rag.integration.question import SourcedQuestion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcache_rag import Answer, Engine
    from kvcache_rag.generation import AnswerStream

_Asked = TypeVar("_Asked")


Prompt: TypeAlias = SourcedQuestion
"""What `KVCacheLLM` answers: a text to be continued as it is, or a question over chunks."""


@dataclass(frozen=True)
class Packed(SourcedQuestion):
    """A question whose chunks were found in a prompt that LlamaIndex packed.

    Attributes:
        pasted: Writes the same as one text, for when the chunks do not fit; None to refuse it.
    """

    pasted: Callable[[], str] | None = None


@dataclass(frozen=True)
class Stream:
    """An answer that is being generated.

    Attributes:
        pieces: Of the engine.
        prompt: What is answered.
    """

    pieces: AnswerStream
    prompt: Prompt


def respond(engine: Engine, prompt: Prompt, options: Mapping[str, Any]) -> CompletionResponse:
    """Generate the whole response."""
    return _finished(*_fitting(prompt, lambda one: one.answer(engine, options)))


def open_stream(engine: Engine, prompt: Prompt, options: Mapping[str, Any]) -> Stream:
    """Check the prompt and start generating."""
    return Stream(*_fitting(prompt, lambda one: one.stream(engine, options)))


def _fitting(prompt: Prompt, ask: Callable[[Prompt], _Asked]) -> tuple[_Asked, Prompt]:
    """What an engine is asked, as it was written where its chunks do not fit."""
    try:
        return ask(prompt), prompt
    except ContextTooLongError:
        if not isinstance(prompt, Packed) or prompt.pasted is None:
            raise
    as_text = Prompt.text(prompt.pasted(), "pasted")
    return ask(as_text), as_text


def responses(
    stream: Stream, note: Callable[[CompletionResponse], object]
) -> CompletionResponseGen:
    """Pieces as they come, then an empty one with usage and metrics; closing stops generation.

    Args:
        stream: Of the engine.
        note: Called with the last response.
    """
    text = ""
    try:
        for piece in stream.pieces:
            text += piece
            yield CompletionResponse(text=text, delta=piece)
        last = _finished(stream.pieces.answer, stream.prompt, delta="")
        note(last)
        yield last
    finally:
        stream.pieces.close()


async def aresponses(
    stream: Stream, note: Callable[[CompletionResponse], object]
) -> CompletionResponseAsyncGen:
    """`responses` that does not block the event loop; closing it drops, so stops, the stream."""
    # Closing it awaits nothing: an event loop that ends closes all its generators at once, and what
    # another one is still closing cannot be closed.
    text, held, prompt = "", [stream.pieces], stream.prompt
    del stream
    pieces = AsyncAnswerStream(held.pop)
    try:
        async for piece in pieces:
            text += piece
            yield CompletionResponse(text=text, delta=piece)
        last = _finished(pieces.answer, prompt, delta="")
        note(last)
        yield last
    finally:
        # An event handler that keeps the exception of a cancelled reader keeps this frame.
        held.clear()


def _finished(answer: Answer, prompt: Prompt, delta: str | None = None) -> CompletionResponse:
    metrics = answer.metrics
    cached = metrics.reused_tokens + metrics.continued_tokens
    usage = {
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.generated_tokens,
        "total_tokens": metrics.prompt_tokens + metrics.generated_tokens,
        # As OpenAI writes it, and OpenInference's spans read it.
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return CompletionResponse(
        text=answer.text,
        delta=delta,
        raw={
            "usage": usage,
            "kv_cache": prompt.cost(metrics),
            "finish_reason": answer.finish_reason,
        },
    )
