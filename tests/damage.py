"""Damaged files for tests: what a store may do with them is refuse them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from kvcache_rag.errors import CorruptChunkError
from tests.contracts import key_of, make_chunk, same

if TYPE_CHECKING:
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV
    from kvcache_rag.stores import DiskStore

SMALL = make_chunk(tokens=4)


def filled(store: DiskStore, chunk: ChunkKV = SMALL) -> tuple[ChunkKey, bytes]:
    """Put a chunk; its key and its file's bytes."""
    key = key_of(chunk)
    assert store.put(key, chunk)
    return key, store.path(key).read_bytes()


def header_size(raw: bytes) -> int:
    """Where the payload begins."""
    return 8 + int(struct.unpack("<Q", raw[:8])[0])


def is_refused(store: DiskStore, key: ChunkKey, raw: bytes, chunk: ChunkKV = SMALL) -> bool:
    """Put bytes in place of a chunk; True when it is refused, False when it is still right."""
    store.path(key).write_bytes(raw)
    try:
        found = store.get(key, chunk.layout).chunk
    except CorruptChunkError:
        assert not store.path(key).exists(), "what is damaged is put aside"
        return True
    assert same(found, chunk), "a wrong tensor was served"
    return False
