"""Faults put into a store on disk: it serves the right tensors or none, and stays usable."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.kv.chunk import ChunkKV, GroupLayout, spec_digest
from kvcache_rag.stores import DiskStore, MemoryStore, TieredStore, filesystem
from kvcache_rag.stores import file as chunkfile
from tests.contracts import LAYOUT, empty_chunk, key_of, make_chunk, same
from tests.damage import SMALL, filled, is_refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKey

HOUR = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", durable=False)


# Bytes.


@pytest.mark.parametrize("size", [512, 4096])
def test_zeroed_sectors_and_pages_are_refused(store: DiskStore, size: int) -> None:
    chunk = make_chunk(tokens=64)
    key, raw = filled(store, chunk)
    zeros = bytes(size)
    refused = 0
    for begin in range(0, len(raw) - size + 1, size):
        damaged = raw[:begin] + zeros + raw[begin + size :]
        refused += is_refused(store, key, damaged, chunk)
    assert refused == len(raw) // size
    for begin in range(0, len(raw), size):  # all that was not written yet when the power went
        assert is_refused(store, key, raw[:begin] + bytes(len(raw) - begin), chunk)


@pytest.mark.parametrize("field", ["namespace", "spec", "start", "tokens"])
def test_files_swapped_between_keys_of_equal_size_are_refused(store: DiskStore, field: str) -> None:
    one = make_chunk(1)
    other = {
        "namespace": one,
        "spec": one,
        "start": dataclasses.replace(one, start=one.start + 1),
        "tokens": dataclasses.replace(one, tokens=one.tokens.flip(0)),
    }[field]
    keys = [
        key_of(one),
        key_of(
            other,
            namespace="tenant" if field == "namespace" else "",
            spec=spec_digest({"test": 2 if field == "spec" else 1}),
        ),
    ]
    for key, chunk in zip(keys, (one, other), strict=True):
        assert store.put(key, chunk)
    paths = [store.path(key) for key in keys]
    left, right = (path.read_bytes() for path in paths)
    assert len(left) == len(right)
    assert left != right
    assert is_refused(store, keys[0], right, one)
    assert is_refused(store, keys[1], left, other)


# Headers.


def bomb(store: DiskStore, key: ChunkKey, header: bytes, payload: bytes) -> None:
    size = -(-(8 + len(header)) // chunkfile.ALIGNMENT) * chunkfile.ALIGNMENT
    with store.path(key).open("wb") as file:
        file.write(struct.pack("<Q", size - 8))
        file.write(header.ljust(size - 8))
        file.write(payload)


def huge_metadata(header: dict[str, Any]) -> bytes:
    header["__metadata__"]["pad"] = " " * 99_000_000
    return json.dumps(header).encode()


def many_tensors(header: dict[str, Any]) -> bytes:
    empty = b'":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    names = (b',"t%d' % index + empty for index in range(800_000))
    return json.dumps(header).encode()[:-1] + b"".join(names) + b"}"


def huge_shape(header: dict[str, Any]) -> bytes:
    header["kv"]["shape"] = [0, 1 << 62]
    return json.dumps(header).encode()


def huge_product(header: dict[str, Any]) -> bytes:
    header["kv"]["shape"] = [1 << 62, 2, 2, 4, 8]
    header["kv"]["data_offsets"] = [0, 1 << 62]
    return json.dumps(header).encode()


@pytest.mark.parametrize("make", [huge_metadata, many_tensors, huge_shape, huge_product])
def test_a_header_bomb_is_refused_before_it_is_read(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, make: Callable[[dict[str, Any]], bytes]
) -> None:
    key, raw = filled(store)
    header = json.loads(raw[8:4096])
    header["__metadata__"]["pad"] = ""
    bomb(store, key, make(header), raw[4096:])
    read = 0
    preadv = os.preadv

    def counted(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal read
        read += sum(map(len, buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    out = empty_chunk(4)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptChunkError):
            store.get(key, LAYOUT, out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < read <= chunkfile.MAX_HEADER + 8
    assert peak < 1 << 20
    assert not store.contains(key)


# Names that are no digests.


@pytest.mark.parametrize("namespace", ["../..", "/", "..\\..", "a/../../b", "\0", "é" * 300, "~"])
def test_a_namespace_never_leaves_the_root(store: DiskStore, namespace: str) -> None:
    key = key_of(SMALL, namespace=namespace)
    assert store.put(key, SMALL)
    with store.locked([key]):
        assert same(store.get(key, LAYOUT).chunk, SMALL)
    assert [path.name for path in store.root.parent.iterdir()] == [store.root.name]


# Clocks.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of day as seconds from now; files keep their own, as after a clock was set."""
    shift = [0.0]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])
    return shift


@pytest.mark.parametrize("shift", [-1e9, -HOUR, HOUR, 1e9])
def test_a_clock_that_was_set_changes_no_tensor(
    store: DiskStore, clock: list[float], shift: float
) -> None:
    key, _ = filled(store)
    clock[0] = shift
    assert same(store.get(key, LAYOUT).chunk, SMALL)
    store.touch(key)
    assert store.sweep() == 0
    assert store.contains(key)
    assert store.put(key, SMALL)


def test_the_limit_is_kept_among_files_of_the_future(store: DiskStore) -> None:
    chunks = [make_chunk(seed) for seed in range(10)]
    for chunk in chunks:
        assert store.put(key_of(chunk), chunk)
        later = time.time() + 1e8 + chunk.tokens[0].item()
        os.utime(store.path(key_of(chunk)), (later, later))
    size = store.path(key_of(chunks[0])).stat().st_size
    limited = DiskStore(store.root, durable=False, max_bytes=3 * size)
    assert limited.sweep() == 7
    new = make_chunk(10)
    for _ in range(3):
        assert limited.put(key_of(new), new)
    limited.sweep()
    assert len(list(store.root.rglob("*.safetensors"))) <= 3


def test_a_clock_that_jumps_ahead_costs_a_writer_its_write_and_no_more(
    store: DiskStore, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = filesystem.write_all

    def swept_meanwhile(*arguments: Any) -> None:
        write(*arguments)
        clock[0] = 1e9
        DiskStore(store.root).sweep()
        clock[0] = 0.0

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "write_all", swept_meanwhile)
        assert not store.put(key_of(SMALL), SMALL)
    assert store.stats().put_failures == 1
    assert store.put(key_of(SMALL), SMALL)


# A faster tier in front of a damaged one.


def test_damage_on_disk_is_mended_by_the_next_put(store: DiskStore) -> None:
    tiers = TieredStore(MemoryStore(), store)
    wide = type(LAYOUT)((GroupLayout((0,), (1, 8), (1, 8)),), LAYOUT.dtype)
    chunk: ChunkKV = make_chunk(tokens=4, layout=wide)
    key = key_of(chunk)
    assert tiers.put(key, chunk)
    store.path(key).write_bytes(b"")
    assert tiers.get(key, wide).tier == "memory"
    with pytest.raises(CorruptChunkError):
        store.get(key, wide)
    assert tiers.put(key, chunk)
    assert same(store.get(key, wide).chunk, chunk)
