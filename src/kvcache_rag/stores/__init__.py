"""Where chunks are kept: in memory, on disk, on a remote, and one in front of the other."""

from kvcache_rag.stores.base import ChunkStore, Hit, StoreStats
from kvcache_rag.stores.bytes import ByteStore, Entry, MemoryBytes
from kvcache_rag.stores.disk import DiskStore
from kvcache_rag.stores.memory import MemoryStore
from kvcache_rag.stores.remote import RemoteStore
from kvcache_rag.stores.signing import SigningKey
from kvcache_rag.stores.stored import StoredChunks
from kvcache_rag.stores.tiered import TieredStore

__all__ = [
    "ByteStore",
    "ChunkStore",
    "DiskStore",
    "Entry",
    "Hit",
    "MemoryBytes",
    "MemoryStore",
    "RemoteStore",
    "SigningKey",
    "StoreStats",
    "StoredChunks",
    "TieredStore",
]
