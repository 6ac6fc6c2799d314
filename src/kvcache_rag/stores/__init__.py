"""Where chunks are kept: in memory, on disk, on a remote, and one in front of the other."""

from kvcache_rag.stores.base import ChunkStore, Hit, StoreStats
from kvcache_rag.stores.disk.store import DiskStore
from kvcache_rag.stores.memory import MemoryStore
from kvcache_rag.stores.remote.store import RemoteStore
from kvcache_rag.stores.signing import SigningKey
from kvcache_rag.stores.tiered import TieredStore

__all__ = [
    "ChunkStore",
    "DiskStore",
    "Hit",
    "MemoryStore",
    "RemoteStore",
    "SigningKey",
    "StoreStats",
    "TieredStore",
]
