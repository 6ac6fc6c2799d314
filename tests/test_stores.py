"""Every store keeps the contract; what is particular to memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import access
import pytest
import torch

from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.kv.chunk import ChunkLayout, GroupLayout
from kvcache_rag.stores import ChunkStore, DiskStore, MemoryStore, TieredStore
from tests.contracts import LAYOUT, StoreContract, flat, key_of, make_chunk

if TYPE_CHECKING:
    from pathlib import Path


class TestMemoryStore(StoreContract):
    def open(self, path: Path, *, max_bytes: int | None = None) -> MemoryStore:
        del path
        return MemoryStore(1 << 30 if max_bytes is None else max_bytes)

    def held(self, store: ChunkStore) -> set[str]:
        return {key.digest for key in access.chunks(store)}


class FolderContract(StoreContract):
    """What a store in a folder adds: its files have times, and can be looked for."""

    def root(self, store: ChunkStore) -> Path:
        assert isinstance(store, DiskStore)
        return store.root

    def age(self, store: ChunkStore, seconds: float) -> None:
        for path in self.root(store).rglob("*"):
            status = path.stat()
            os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))

    def held(self, store: ChunkStore) -> set[str]:
        return {path.stem for path in self.root(store).rglob("*.safetensors")}


class TestDiskStore(FolderContract):
    def open(self, path: Path, *, max_bytes: int | None = None) -> DiskStore:
        return DiskStore(path, max_bytes=max_bytes, durable=False)


class TestTieredStore(StoreContract):
    def open(self, path: Path, *, max_bytes: int | None = None) -> TieredStore:
        memory = TestMemoryStore().open(path, max_bytes=max_bytes)
        return TieredStore(memory, TestDiskStore().open(path, max_bytes=max_bytes))

    def age(self, store: ChunkStore, seconds: float) -> None:
        TestDiskStore().age(store.tiers[1], seconds)

    def held(self, store: ChunkStore) -> set[str]:
        return TestMemoryStore().held(store.tiers[0]) | TestDiskStore().held(store.tiers[1])


def test_memory_gives_the_kept_chunk_itself() -> None:
    store, chunk = MemoryStore(), make_chunk()
    store.put(key_of(chunk), chunk)
    first, second = (store.get(key_of(chunk), LAYOUT).chunk for _ in range(2))
    assert first is second
    assert all(tensor.is_contiguous() for tensor in flat(first))


def test_memory_drops_a_chunk_of_another_layout() -> None:
    store, chunk = MemoryStore(), make_chunk()
    store.put(key_of(chunk), chunk)
    other = make_chunk(tokens=1, layout=type(LAYOUT)(LAYOUT.groups * 2, LAYOUT.dtype)).layout
    with pytest.raises(CorruptChunkError):
        store.get(key_of(chunk), other)
    assert not store.contains(key_of(chunk))
    assert store.stats().corrupt == 1


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_the_system_has_the_memory_of_dropped_chunks_back() -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    group = GroupLayout(tuple(range(24)), (2, 64), (2, 64))
    layout = ChunkLayout((group,), torch.bfloat16)
    store, keys = MemoryStore(1 << 30), []
    for number in range(16):
        chunk = make_chunk(number, tokens=256, layout=layout)
        keys.append(key_of(chunk))
        store.put(keys[-1], chunk)
    held = resident()
    for key in keys[::2]:  # what stays lies between
        store.delete(key)
    assert held - resident() > 0.9 * layout.nbytes(256) * len(keys[::2])
