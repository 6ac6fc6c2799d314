"""A KV connector for vLLM that stitches stored chunks into its paged cache at any position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kvcache_rag.connector import KVCacheRAGConnector

__all__ = ["KVCacheRAGConnector"]


def __getattr__(name: str) -> Any:
    # vLLM asks this module for the connector; what needs no vLLM is used without it.
    if name == "KVCacheRAGConnector":
        from vllm_kvcache_rag.connector import KVCacheRAGConnector

        return KVCacheRAGConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
