"""The async twins of the engine's methods; none of them blocks the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvcache_rag.streaming import AnswerStream, AsyncAnswerStream, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.metrics import Answer
    from kvcache_rag.request import ChunkInput

_Got = TypeVar("_Got")


class _Answers(Protocol):
    def generate(
        self, question: str, chunks: Sequence[ChunkInput] = (), **options: Any
    ) -> Answer: ...
    def stream(
        self, question: str, chunks: Sequence[ChunkInput] = (), **options: Any
    ) -> AnswerStream: ...
    def complete(self, prompt: str, **options: Any) -> Answer: ...
    def stream_complete(self, prompt: str, **options: Any) -> AnswerStream: ...


class AsyncMethods:
    """Async forms of the four ways to get an answer, with the same arguments."""

    async def agenerate(
        self: _Answers, question: str, chunks: Sequence[ChunkInput] = (), **options: Any
    ) -> Answer:
        """`generate` in a thread; cancelling it stops generation at the next token."""
        return await cancellable(self.generate, question, chunks, **options)

    def astream(
        self: _Answers, question: str, chunks: Sequence[ChunkInput] = (), **options: Any
    ) -> AsyncAnswerStream:
        """`stream` as an async iterator."""
        return AsyncAnswerStream(lambda: self.stream(question, chunks, **options))

    async def acomplete(self: _Answers, prompt: str, **options: Any) -> Answer:
        """`complete` in a thread; cancelling it stops generation at the next token."""
        return await cancellable(self.complete, prompt, **options)

    def astream_complete(self: _Answers, prompt: str, **options: Any) -> AsyncAnswerStream:
        """`stream_complete` as an async iterator."""
        return AsyncAnswerStream(lambda: self.stream_complete(prompt, **options))


async def cancellable(run: Callable[..., _Got], *arguments: Any, **options: Any) -> _Got:
    """`run` in a thread, with an event `cancelled`; cancelling the caller sets the event.

    Args:
        run: Takes `cancelled=`, and gives up at its next token once that is set.
        arguments: Of `run`.
        options: Of `run`.
    """
    cancelled = threading.Event()
    try:
        return await in_thread(run, *arguments, cancelled=cancelled, **options)
    except asyncio.CancelledError:
        cancelled.set()
        raise
