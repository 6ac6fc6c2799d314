"""Keys and values of chunks: their addresses, a prompt's buffer, rotation, block mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_rag.kv.chunk import ChunkKey as ChunkKey
    from kvcache_rag.kv.chunk import ChunkKV as ChunkKV
else:
    from kvcache_rag.exports import lazy_names

    __getattr__, __dir__ = lazy_names(__name__)
