"""LlamaIndex over kvcache-rag: chunks are prefilled once, little more when a question comes.

Two lines of an app change: the LLM (`KVCacheLLM`) and the query engine (`KVCacheQueryEngine`, or
any engine with a `KVCacheSynthesizer`); `KVCacheVectorStore`, `KVCachePrefill` and
`KVCacheLLM.prefill` move prefilling to ingestion.  Names are imported when they are first used, so
that a command line that only prints its help does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_index.kvcache_rag.chat_engine import KVCacheChatEngine
    from llama_index.kvcache_rag.chat_response import KVCacheChatResponse
    from llama_index.kvcache_rag.embeddings import HashEmbedding
    from llama_index.kvcache_rag.events import KVCacheReuseEvent
    from llama_index.kvcache_rag.ingestion import KVCachePrefill
    from llama_index.kvcache_rag.llm import KVCacheLLM
    from llama_index.kvcache_rag.query_engine import KVCacheQueryEngine
    from llama_index.kvcache_rag.rerank import KVCacheRerank
    from llama_index.kvcache_rag.synthesizer import KVCacheSynthesizer
    from llama_index.kvcache_rag.vector_store import KVCacheVectorStore

__all__ = [
    "HashEmbedding",
    "KVCacheChatEngine",
    "KVCacheChatResponse",
    "KVCacheLLM",
    "KVCachePrefill",
    "KVCacheQueryEngine",
    "KVCacheRerank",
    "KVCacheReuseEvent",
    "KVCacheSynthesizer",
    "KVCacheVectorStore",
]

_HOMES = {
    "HashEmbedding": "embeddings",
    "KVCacheChatEngine": "chat_engine",
    "KVCacheChatResponse": "chat_response",
    "KVCacheLLM": "llm",
    "KVCachePrefill": "ingestion",
    "KVCacheQueryEngine": "query_engine",
    "KVCacheRerank": "rerank",
    "KVCacheReuseEvent": "events",
    "KVCacheSynthesizer": "synthesizer",
    "KVCacheVectorStore": "vector_store",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
