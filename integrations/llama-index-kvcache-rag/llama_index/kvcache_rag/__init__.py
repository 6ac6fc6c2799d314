"""LlamaIndex over kvcache-rag: chunks are prefilled once, and a question needs little more.

Two lines of an app change: the LLM (`KVCacheLLM`) and the query engine (`KVCacheQueryEngine`, or
any engine with a `KVCacheSynthesizer`); `KVCacheVectorStore`, `KVCachePrefill` and
`KVCacheLLM.prefill` move prefilling to ingestion.  Names are imported on first use, so that a
command line that only prints its help does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_index.kvcache_rag.chat_engine import KVCacheChatEngine as KVCacheChatEngine
    from llama_index.kvcache_rag.chat_response import KVCacheChatResponse as KVCacheChatResponse
    from llama_index.kvcache_rag.embeddings import HashEmbedding as HashEmbedding
    from llama_index.kvcache_rag.events import KVCacheReuseEvent as KVCacheReuseEvent
    from llama_index.kvcache_rag.ingestion import KVCachePrefill as KVCachePrefill
    from llama_index.kvcache_rag.llm import KVCacheLLM as KVCacheLLM
    from llama_index.kvcache_rag.query_engine import KVCacheQueryEngine as KVCacheQueryEngine
    from llama_index.kvcache_rag.rerank import KVCacheRerank as KVCacheRerank
    from llama_index.kvcache_rag.synthesizer import KVCacheSynthesizer as KVCacheSynthesizer
    from llama_index.kvcache_rag.vector_store import KVCacheVectorStore as KVCacheVectorStore
else:
    from kvcache_rag.exports import lazy_names

    __getattr__, __dir__ = lazy_names(__name__)
