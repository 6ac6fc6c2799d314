"""Every store keeps the contract; what is particular to memory and to tiers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import access
import pytest
import torch

from kvcache_rag.codecs import Int8
from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError, InvalidInputError
from kvcache_rag.kv.chunk import ChunkLayout, GroupLayout
from kvcache_rag.stores import ChunkStore, DiskStore, MemoryStore, TieredStore
from tests.contracts import LAYOUT, StoreContract, empty_chunk, flat, key_of, make_chunk, same

if TYPE_CHECKING:
    from pathlib import Path


class TestMemoryStore(StoreContract):
    def open(self, path: Path, *, max_bytes: int | None = None) -> MemoryStore:
        del path
        return MemoryStore(1 << 30 if max_bytes is None else max_bytes)

    def held(self, store: ChunkStore) -> set[str]:
        return {key.digest for key in access.chunks(store)}


class TestDiskStore(StoreContract):
    def open(self, path: Path, *, max_bytes: int | None = None) -> DiskStore:
        return DiskStore(path, max_bytes=max_bytes, durable=False)

    def age(self, store: ChunkStore, seconds: float) -> None:
        for path in store.root.rglob("*"):
            status = path.stat()
            os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))

    def held(self, store: ChunkStore) -> set[str]:
        return {path.stem for path in store.root.rglob("*.safetensors")}


class TestTieredStore(StoreContract):
    def open(self, path: Path, *, max_bytes: int | None = None) -> TieredStore:
        memory = TestMemoryStore().open(path, max_bytes=max_bytes)
        return TieredStore(memory, TestDiskStore().open(path, max_bytes=max_bytes))

    def age(self, store: ChunkStore, seconds: float) -> None:
        TestDiskStore().age(store.tiers[1], seconds)

    def held(self, store: ChunkStore) -> set[str]:
        return TestMemoryStore().held(store.tiers[0]) | TestDiskStore().held(store.tiers[1])


# Memory.


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


# Tiers.


@pytest.fixture
def tiers(tmp_path: Path) -> tuple[MemoryStore, DiskStore, TieredStore]:
    memory, disk = MemoryStore(), DiskStore(tmp_path, durable=False)
    return memory, disk, TieredStore(memory, disk)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_hit_below_is_promoted(
    tiers: tuple[MemoryStore, DiskStore, TieredStore], in_place: bool
) -> None:
    memory, disk, both = tiers
    chunk = make_chunk()
    key = key_of(chunk)
    disk.put(key, chunk)
    out = empty_chunk(16) if in_place else None
    assert both.get(key, LAYOUT, out).tier == "disk"
    for tensor in flat(out) if out else []:
        tensor.zero_()  # the promoted copy is not the caller's memory
    hit = both.get(key, LAYOUT)
    assert hit.tier == "memory"
    assert same(hit.chunk, chunk)
    assert both.stats().hits == {"memory": 1, "disk": 1}
    assert (memory.stats().puts, both.stats().puts) == (1, 0)


def test_a_hit_above_counts_as_use_below(
    tiers: tuple[MemoryStore, DiskStore, TieredStore],
) -> None:
    _, disk, both = tiers
    chunk = make_chunk()
    both.put(key_of(chunk), chunk)
    os.utime(disk.path(key_of(chunk)), (1, 1))
    assert both.get(key_of(chunk), LAYOUT).tier == "memory"
    assert disk.path(key_of(chunk)).stat().st_mtime > 1
    os.utime(disk.path(key_of(chunk)), (1, 1))
    both.touch(key_of(chunk))
    assert disk.path(key_of(chunk)).stat().st_mtime > 1


def test_put_writes_to_every_tier(tiers: tuple[MemoryStore, DiskStore, TieredStore]) -> None:
    memory, disk, both = tiers
    chunk = make_chunk()
    assert both.put(key_of(chunk), chunk)
    assert memory.contains(key_of(chunk))
    assert disk.contains(key_of(chunk))
    assert both.delete(key_of(chunk))
    assert not memory.contains(key_of(chunk))
    assert not disk.contains(key_of(chunk))


def test_a_chunk_that_only_one_tier_keeps_is_kept(tmp_path: Path) -> None:
    chunk = make_chunk()
    small_memory = TieredStore(MemoryStore(0), DiskStore(tmp_path / "a", durable=False))
    assert small_memory.put(key_of(chunk), chunk)
    assert small_memory.get(key_of(chunk), LAYOUT).tier == "disk"
    assert small_memory.stats().put_failures == 0
    small_disk = TieredStore(MemoryStore(), DiskStore(tmp_path / "b", durable=False, max_bytes=1))
    assert small_disk.put(key_of(chunk), chunk)
    assert small_disk.get(key_of(chunk), LAYOUT).tier == "memory"
    assert small_disk.stats().put_failures == 1
    assert "max_bytes=1" in small_disk.stats().last_failure


def test_damage_below_is_told_from_absence(
    tiers: tuple[MemoryStore, DiskStore, TieredStore],
) -> None:
    _, disk, both = tiers
    chunk = make_chunk()
    disk.put(key_of(chunk), chunk)
    disk.path(key_of(chunk)).write_bytes(b"x")
    with pytest.raises(CorruptChunkError):
        both.get(key_of(chunk), LAYOUT)
    with pytest.raises(ChunkNotFoundError) as caught:
        both.get(key_of(chunk), LAYOUT)
    assert type(caught.value) is ChunkNotFoundError
    assert (both.stats().corrupt, both.stats().misses) == (1, 2)


def test_tiers_nest(tmp_path: Path) -> None:
    slow = TieredStore(MemoryStore(tier="ram"), DiskStore(tmp_path, durable=False))
    store = TieredStore(MemoryStore(tier="hbm"), slow)
    chunk = make_chunk()
    slow.put(key_of(chunk), chunk)
    assert [store.get(key_of(chunk), LAYOUT).tier for _ in range(2)] == ["ram", "hbm"]
    assert store.stats().hits == {"hbm": 1, "ram": 1}
    assert store.codec.name == "native"


def test_tiers_of_different_codecs_are_refused(tmp_path: Path) -> None:
    other = DiskStore(tmp_path / "b", codec=Int8())
    with pytest.raises(InvalidInputError, match="one codec, not int8-kc-vt, native"):
        TieredStore(MemoryStore(), DiskStore(tmp_path / "a"), other)
    assert TieredStore(MemoryStore(), other).codec == Int8()


def test_a_tier_is_needed() -> None:
    with pytest.raises(InvalidInputError):
        TieredStore()


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
