"""What an answer reused, as an event of LlamaIndex's instrumentation."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.events.base import BaseEvent


class KVCacheReuseEvent(BaseEvent):
    """Fired once per answer of a `KVCacheSynthesizer`, when its metrics are known.

    Attributes:
        query_str: The question.
        metrics: What `response.metadata["kv_cache"]` holds: `kvcache_rag.Metrics` as plain values.
    """

    query_str: str
    metrics: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised events."""
        return "KVCacheReuseEvent"
