"""Damaged files, which a store may only refuse, and what happens in the middle of a call."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.stores.file import verify_file
from tests.contracts import key_of, make_chunk, same

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

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


def rewritten(raw: bytes, change: Callable[[Any], object]) -> bytes:
    """The file with another header of the same length, its payload untouched."""
    size = header_size(raw)
    header = json.loads(raw[8:size])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", size - 8) + text.ljust(size - 8)[: size - 8] + raw[size:]


def passes_a_check(store: DiskStore, key: ChunkKey, raw: bytes) -> bool:
    """Put bytes in place of a chunk; whether they are right for who does not know the model."""
    path = store.path(key)
    path.write_bytes(raw)
    try:
        verify_file(str(path), key.digest)
    except CorruptChunkError:
        return False
    return True


def is_refused(store: DiskStore, key: ChunkKey, raw: bytes, chunk: ChunkKV = SMALL) -> bool:
    """Put bytes in place of a chunk; True when it is refused, False when it is still right."""
    is_checked = passes_a_check(store, key, raw)
    try:
        found = store.get(key, chunk.layout).chunk
    except CorruptChunkError:
        assert not store.path(key).exists(), "what is damaged is put aside"
        return True
    assert same(found, chunk), "a wrong tensor was served"
    assert is_checked, "what a check without a model refuses, a reader refuses"
    return False


def before_next(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, act: Callable[[], object]
) -> None:
    """Let something happen right before the next call of a function, and of no other."""
    call = getattr(where, name)

    def first(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(where, name, call)
        act()
        return call(*args, **options)

    monkeypatch.setattr(where, name, first)
