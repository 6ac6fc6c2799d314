"""The async twins of the engine's methods; none of them blocks the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from kvcache_rag.streaming import AnswerStream, AsyncAnswerStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.metrics import Answer
    from kvcache_rag.request import ChunkInput


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
        """`generate` in a thread."""
        return await asyncio.to_thread(self.generate, question, chunks, **options)

    def astream(
        self: _Answers, question: str, chunks: Sequence[ChunkInput] = (), **options: Any
    ) -> AsyncAnswerStream:
        """`stream` as an async iterator."""
        return AsyncAnswerStream(lambda: self.stream(question, chunks, **options))

    async def acomplete(self: _Answers, prompt: str, **options: Any) -> Answer:
        """`complete` in a thread."""
        return await asyncio.to_thread(self.complete, prompt, **options)

    def astream_complete(self: _Answers, prompt: str, **options: Any) -> AsyncAnswerStream:
        """`stream_complete` as an async iterator."""
        return AsyncAnswerStream(lambda: self.stream_complete(prompt, **options))
