"""From a question to its answer: check, fill, generate, stream, explain."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_rag.generation.explain import Explained as Explained
    from kvcache_rag.generation.options import AnswerOptions as AnswerOptions
    from kvcache_rag.generation.options import CompletionOptions as CompletionOptions
    from kvcache_rag.generation.question import StoredChunk as StoredChunk
    from kvcache_rag.generation.stream import AnswerStream as AnswerStream
    from kvcache_rag.generation.stream import AsyncAnswerStream as AsyncAnswerStream
    from kvcache_rag.generation.stream import cancellable as cancellable
    from kvcache_rag.generation.stream import in_thread as in_thread
else:
    from kvcache_rag.exports import lazy_names

    __getattr__, __dir__ = lazy_names(__name__)
