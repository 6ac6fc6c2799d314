"""LangChain over kvcache-rag: chunks are prefilled once, and a question needs little more.

Two lines of an app change: the chat model (`ChatKVCache`) and the step that puts documents into the
prompt (`KVCacheRAG`); `KVCacheChroma` and `ChatKVCache.prefill` move prefilling to ingestion.
Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from langchain_kvcache_rag.blocks import document_block as document_block
    from langchain_kvcache_rag.chain import create_kvcache_rag_chain as create_kvcache_rag_chain
    from langchain_kvcache_rag.chat_model import ChatKVCache as ChatKVCache
    from langchain_kvcache_rag.embeddings import HashEmbeddings as HashEmbeddings
    from langchain_kvcache_rag.rag import KVCacheRAG as KVCacheRAG
    from langchain_kvcache_rag.rerank import KVCacheRerank as KVCacheRerank
    from langchain_kvcache_rag.vector_store import KVCacheChroma as KVCacheChroma
else:
    from kvcache_rag.exports import lazy_names

    __getattr__, __dir__ = lazy_names(__name__)
