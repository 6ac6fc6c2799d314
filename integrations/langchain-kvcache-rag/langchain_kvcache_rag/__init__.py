"""LangChain over kvcache-rag: chunks are prefilled once, little more when a question comes.

Two lines of an app change: the chat model (`ChatKVCache`) and the step that puts documents into the
prompt (`KVCacheRAG`); `KVCacheChroma` and `ChatKVCache.prefill` move prefilling
to ingestion.  Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_kvcache_rag.blocks import document_block
    from langchain_kvcache_rag.chain import create_kvcache_rag_chain
    from langchain_kvcache_rag.chat_model import ChatKVCache
    from langchain_kvcache_rag.embeddings import HashEmbeddings
    from langchain_kvcache_rag.rag import KVCacheRAG
    from langchain_kvcache_rag.rerank import KVCacheRerank
    from langchain_kvcache_rag.vector_store import KVCacheChroma

__all__ = [
    "ChatKVCache",
    "HashEmbeddings",
    "KVCacheChroma",
    "KVCacheRAG",
    "KVCacheRerank",
    "create_kvcache_rag_chain",
    "document_block",
]

_HOMES = {
    "ChatKVCache": "chat_model",
    "HashEmbeddings": "embeddings",
    "KVCacheChroma": "vector_store",
    "KVCacheRAG": "rag",
    "KVCacheRerank": "rerank",
    "create_kvcache_rag_chain": "chain",
    "document_block": "blocks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
