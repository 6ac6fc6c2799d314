"""The engine's answers as LlamaIndex responses, and its streams as true generators of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from llama_index.core.base.llms.types import (
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)

from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.generation import AsyncAnswerStream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcache_rag import Answer, Engine, Metrics
    from kvcache_rag.generation import AnswerStream, StoredChunk
    from kvcache_rag.policies import ReusePolicy


@dataclass(frozen=True)
class Grounded:
    """A question with the chunks that are to answer it.

    Attributes:
        question: What stands behind the chunks.
        chunks: By reference or as text, best first unless there are scores.
        policy: What of them is reused, None for the LLM's policy.
        overflow: What to do when they do not fit the context window.
        prefix_mismatch: Whether the caller's prompt wanted other text before the chunks; goes into
            the metrics.
        scores: Of the chunks, if all have one: a postprocessor may have put them into another
            order.
        history: Earlier turns; they stand behind the chunks.
        nodes: Ids of the nodes that the chunks are of, "" of one that is not known; none at all
            where there are only texts.
        asked: What is asked, where the question has more in it; "" for the question.
        pasted: Writes the same as one text, for when the chunks do not fit; None to refuse it.
    """

    question: str
    chunks: tuple[StoredChunk | str, ...]
    policy: ReusePolicy | None = None
    overflow: str = "refine"
    prefix_mismatch: bool = False
    scores: tuple[float, ...] | None = None
    history: tuple[dict[str, str], ...] = ()
    nodes: tuple[str, ...] = ()
    asked: str = ""
    pasted: Callable[[], str] | None = None

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `Engine.generate`."""
        return {
            "chunks": self.chunks,
            "policy": self.policy,
            "overflow": self.overflow,
            "prefix_mismatch": self.prefix_mismatch,
            "scores": self.scores,
            "history": self.history,
            "asked": self.asked,
        }


@dataclass(frozen=True)
class Pasted:
    """A text to be continued as it is, although it has a context that chunks might have been.

    Attributes:
        text: The whole prompt.
    """

    text: str


Prompt: TypeAlias = "str | Grounded | Pasted"
"""A text to be continued as it is, or a question over chunks."""


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
    """Generate the whole response.

    `raw["kv_cache"]["prompt"]` says what became of the caller's prompt: "reused" if its chunks were
    answered from where they stood, "rearranged" if something stood before or between them that
    stands behind them now, "pasted" if nothing of its context could be a chunk, "plain" if it has
    none.  Beside the chunks' numbers, `["answered_from_ids"]` has the ids of their nodes.
    """
    if isinstance(prompt, Grounded):
        try:
            found = engine.generate(prompt.question, **prompt.options(), **options)
        except ContextTooLongError:
            if prompt.pasted is None:
                raise
            prompt = Pasted(prompt.pasted())
        else:
            return _finished(found, prompt)
    return _finished(engine.complete(_text(prompt), **options), prompt)


def open_stream(engine: Engine, prompt: Prompt, options: Mapping[str, Any]) -> Stream:
    """Check the prompt and start generating."""
    if isinstance(prompt, Grounded):
        try:
            pieces = engine.stream(prompt.question, **prompt.options(), **options)
        except ContextTooLongError:
            if prompt.pasted is None:
                raise
            prompt = Pasted(prompt.pasted())
        else:
            return Stream(pieces, prompt)
    return Stream(engine.stream_complete(_text(prompt), **options), prompt)


def _text(prompt: str | Pasted) -> str:
    return prompt.text if isinstance(prompt, Pasted) else prompt


def _form(prompt: Prompt) -> str:
    if isinstance(prompt, Grounded):
        return "rearranged" if prompt.prefix_mismatch else "reused"
    return "pasted" if isinstance(prompt, Pasted) else "plain"


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
            "kv_cache": _cost(metrics, prompt),
            "finish_reason": answer.finish_reason,
        },
    )


def _cost(metrics: Metrics, prompt: Prompt) -> dict[str, Any]:
    nodes = prompt.nodes if isinstance(prompt, Grounded) else ()
    ids = [(nodes[at] or None) if nodes else None for at in metrics.answered_from]
    return {**metrics.to_dict(), "answered_from_ids": ids, "prompt": _form(prompt)}
