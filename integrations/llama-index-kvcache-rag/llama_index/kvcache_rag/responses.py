"""The engine's answers as LlamaIndex responses, and its streams as true generators of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from llama_index.core.base.llms.types import (
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)

from kvcache_rag import AsyncAnswerStream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcache_rag import Answer, AnswerStream, Engine, ReusePolicy, StoredChunk


@dataclass(frozen=True)
class Grounded:
    """A question with the chunks that are to answer it.

    Attributes:
        question: What stands behind the chunks.
        chunks: By reference or as text, best first.
        policy: What of them is reused, None for the LLM's policy.
        overflow: What to do when they do not fit the context window.
        prefix_mismatch: Whether the caller's prompt wanted other text before the chunks; goes into
            the metrics.
        scores: Of the chunks, where a postprocessor may have put them into another order.
        history: Earlier turns; they stand behind the chunks.
    """

    question: str
    chunks: tuple[StoredChunk | str, ...]
    policy: ReusePolicy | None = None
    overflow: str = "refine"
    prefix_mismatch: bool = False
    scores: tuple[float, ...] | None = None
    history: tuple[dict[str, str], ...] = ()

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `Engine.generate`."""
        return {
            "chunks": self.chunks,
            "policy": self.policy,
            "overflow": self.overflow,
            "prefix_mismatch": self.prefix_mismatch,
            "scores": self.scores,
            "history": self.history,
        }


Prompt: TypeAlias = "str | Grounded"
"""A text to be continued as it is, or a question over chunks."""


def answer(engine: Engine, prompt: Prompt, options: Mapping[str, Any]) -> CompletionResponse:
    """Generate the whole response."""
    if isinstance(prompt, str):
        return _finished(engine.complete(prompt, **options))
    return _finished(engine.generate(prompt.question, **prompt.options(), **options))


def open_stream(engine: Engine, prompt: Prompt, options: Mapping[str, Any]) -> AnswerStream:
    """Check the prompt and start generating."""
    if isinstance(prompt, str):
        return engine.stream_complete(prompt, **options)
    return engine.stream(prompt.question, **prompt.options(), **options)


def responses(stream: AnswerStream) -> CompletionResponseGen:
    """Pieces as they come, then an empty one with usage and metrics; closing stops generation."""
    text = ""
    try:
        for piece in stream:
            text += piece
            yield CompletionResponse(text=text, delta=piece)
        yield _finished(stream.answer, delta="")
    finally:
        stream.close()


async def aresponses(stream: AnswerStream) -> CompletionResponseAsyncGen:
    """`responses` that does not block the event loop; closing it drops, so stops, the stream."""
    # Closing it awaits nothing: an event loop that ends closes all its generators at once, and what
    # another one is still closing cannot be closed.
    text, held = "", [stream]
    del stream
    pieces = AsyncAnswerStream(held.pop)
    try:
        async for piece in pieces:
            text += piece
            yield CompletionResponse(text=text, delta=piece)
        yield _finished(pieces.answer, delta="")
    finally:
        # An event handler that keeps the exception of a cancelled reader keeps this frame.
        held.clear()


def _finished(answer: Answer, delta: str | None = None) -> CompletionResponse:
    metrics = answer.metrics
    usage = {
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.generated_tokens,
        "total_tokens": metrics.prompt_tokens + metrics.generated_tokens,
    }
    return CompletionResponse(
        text=answer.text,
        delta=delta,
        raw={
            "usage": usage,
            "kv_cache": metrics.to_dict(),
            "finish_reason": answer.finish_reason,
        },
    )
