"""Where chunks are kept: in memory, on disk, on a remote, or in tiers of these.

Names are loaded on first use, so listing a folder needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_rag.stores.base import ChunkStore as ChunkStore
    from kvcache_rag.stores.base import Hit as Hit
    from kvcache_rag.stores.base import StoreStats as StoreStats
    from kvcache_rag.stores.bytes import ByteStore as ByteStore
    from kvcache_rag.stores.bytes import Entry as Entry
    from kvcache_rag.stores.bytes import MemoryBytes as MemoryBytes
    from kvcache_rag.stores.disk import DiskStore as DiskStore
    from kvcache_rag.stores.memory import MemoryStore as MemoryStore
    from kvcache_rag.stores.remote import RemoteStore as RemoteStore
    from kvcache_rag.stores.signing import SigningKey as SigningKey
    from kvcache_rag.stores.stored import StoredChunks as StoredChunks
    from kvcache_rag.stores.tiered import TieredStore as TieredStore
else:
    from kvcache_rag.exports import lazy_names

    __getattr__, __dir__ = lazy_names(__name__)
