"""Whatever happened to a file, the store serves the right tensors or none."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
import struct
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError
from kvcache_rag.kv.chunk import spec_digest
from kvcache_rag.stores import DiskStore, MemoryStore, TieredStore, folder, runs
from kvcache_rag.stores import file as chunkfile
from kvcache_rag.stores.listing import namespaces
from tests.contracts import LAYOUT, empty_chunk, key_of, make_chunk, same
from tests.damage import SMALL, filled, header_size, is_refused, passes_a_check, rewritten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", durable=False)


def is_found(store: DiskStore, key: ChunkKey, raw: bytes, chunk: ChunkKV = SMALL) -> bool:
    """Whether a check without a model refuses it, and a reader."""
    return not passes_a_check(store, key, raw) and is_refused(store, key, raw, chunk)


def flipped(raw: bytes, place: int, bit: int) -> bytes:
    damaged = bytearray(raw)
    damaged[place] ^= 1 << bit
    return bytes(damaged)


# Bytes.


def test_a_shortened_or_lengthened_file_is_refused(store: DiskStore) -> None:
    key, raw = filled(store)
    lengths = [*range(16), *range(16, 4096, 97), *range(4090, len(raw), 13), len(raw) - 1]
    for length in lengths:
        assert is_found(store, key, raw[:length]), length
    for tail in (b"\0", b"\0" * 4096, raw):
        assert is_found(store, key, raw + tail)
    assert store.stats().corrupt == len(lengths) + 3
    assert store.stats().misses == 0


def test_no_flipped_header_byte_serves_a_wrong_tensor(store: DiskStore) -> None:
    key, raw = filled(store)
    used = raw.index(b"  ")
    refused, unseen = 0, set()
    for place in range(header_size(raw)):
        damaged = flipped(raw, place, place % 8)
        if place < used and passes_a_check(store, key, damaged):
            unseen.add(place)
        refused += is_refused(store, key, damaged)
    text = json.loads(raw[8:4096])["__metadata__"]
    # Only the name of the writer may change unseen.
    assert refused >= 4096 - len(text["provenance"])
    # Without the model nobody can tell codec, start and who wrote it, nor names, dtypes of one
    # width and shapes of one size.
    names = (b'"native"', b'"start":"', b"kvcache-rag 0", b'"kv"', b'"BF16"', b"shape")
    starts = [(raw.index(name), len(name) + 24) for name in names]
    assert unseen <= {place for start, length in starts for place in range(start, start + length)}


def test_every_flipped_payload_bit_is_refused(store: DiskStore) -> None:
    key, raw = filled(store)
    chance = random.Random(1)
    for _ in range(600):
        place = chance.randrange(header_size(raw), len(raw))
        assert is_found(store, key, flipped(raw, place, chance.randrange(8)))


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
    assert is_found(store, keys[0], right, one)
    assert is_found(store, keys[1], left, other)


# Headers.


@pytest.mark.parametrize(
    "lie",
    [
        lambda h: h["kv"].update(shape=[3, 2, 2, 8, 4]),
        lambda h: h["kv"].update(dtype="F16"),
        lambda h: h["kv"].update(data_offsets=[0, 768]),
        lambda h: h["tokens"].update(shape=[2, 2]),
        lambda h: h.update(extra={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        lambda h: h.pop("tokens"),
        lambda h: h.pop("__metadata__"),
        lambda h: h.update(__metadata__=[]),
        lambda h: h["__metadata__"].update(start="4"),
        lambda h: h["__metadata__"].update(format="kvcache-rag/2"),
        lambda h: h["__metadata__"].update(codec="int8-kc-vt"),
        lambda h: h["__metadata__"].update(xxh3_128=None),
        lambda h: h["__metadata__"].update(xxh3_128="0" * 32),
        lambda h: h["__metadata__"].update(provenance="x" * 300),
        lambda h: h["__metadata__"].update(pad="x"),
        lambda h: h["__metadata__"].update(more=""),
        lambda h: h["__metadata__"].pop("pad"),
    ],
)
def test_a_header_that_lies_is_refused(store: DiskStore, lie: Callable[[Any], Any]) -> None:
    key, raw = filled(store)

    def lying(header: dict[str, Any]) -> None:
        header["__metadata__"]["pad"] = ""
        lie(header)

    assert is_refused(store, key, rewritten(raw, lying))
    assert not is_refused(store, key, rewritten(raw, lambda h: h["__metadata__"].update(pad="")))


def with_pad(header: dict[str, Any]) -> bytes:
    header["__metadata__"]["pad"] = " " * 99_000_000
    return json.dumps(header).encode()


def with_tensors(header: dict[str, Any]) -> bytes:
    empty = b'":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    names = (b',"t%d' % index + empty for index in range(800_000))
    return json.dumps(header).encode()[:-1] + b"".join(names) + b"}"


def with_shape(header: dict[str, Any], *shape: int) -> bytes:
    header["kv"].update(shape=shape, data_offsets=[0, math.prod(shape)])
    return json.dumps(header).encode()


@pytest.mark.parametrize(
    "make",
    [
        with_pad,
        with_tensors,
        lambda header: with_shape(header, 0, 1 << 62),
        lambda header: with_shape(header, 1 << 62, 2, 2, 4, 8),
        lambda _: b"[" * 60000,
        lambda _: b'{"a":' * 12000,
        lambda _: b'{"__metadata__":{"a":"' + b"x" * 60000 + b'"}}',
        lambda _: b'{"a":1,"a":1}',
        lambda _: b'{"a":' + b"9" * 60000 + b"}",
        lambda _: b'{"a":1e999999}',
        lambda _: b"\xff\xfe" * 1000,
        lambda _: b"null",
        lambda _: b"",
    ],
    ids=[
        *("pad", "tensors", "shape", "product", "lists", "objects", "metadata", "twice", "digits"),
        *("power", "no-text", "null", "nothing"),
    ],
)
def test_a_header_bomb_is_refused_at_once_and_in_little_memory(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, make: Callable[[dict[str, Any]], bytes]
) -> None:
    key, raw = filled(store)
    header = json.loads(raw[8:4096])
    header["__metadata__"]["pad"] = ""
    text = make(header)
    size = -(-(8 + len(text)) // chunkfile.ALIGNMENT) * chunkfile.ALIGNMENT
    bomb = struct.pack("<Q", size - 8) + text.ljust(size - 8) + raw[4096:]
    assert not passes_a_check(store, key, bomb)
    read = 0
    preadv = os.preadv

    def counted(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal read
        read += sum(map(len, buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    out = empty_chunk(4)
    begun = time.perf_counter()
    tracemalloc.start()
    try:
        with pytest.raises(CorruptChunkError):
            store.get(key, LAYOUT, out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - begun < 1
    assert 0 < read <= chunkfile.MAX_HEADER + 8
    assert peak < 1 << 20
    assert not store.contains(key)


@pytest.mark.parametrize("length", [0, 1 << 16, 1 << 20, 1 << 62, (1 << 64) - 1, (1 << 64) - 8])
def test_a_header_length_out_of_bounds_is_refused(store: DiskStore, length: int) -> None:
    key, raw = filled(store)
    assert is_refused(store, key, struct.pack("<Q", length) + raw[8:])


# What is done about it.


def test_the_quarantine_is_bounded(store: DiskStore) -> None:
    for seed in range(10):
        chunk = make_chunk(seed)
        key, raw = filled(store, chunk)
        assert is_refused(store, key, raw[:-1], chunk)
    left = sorted(store.root.rglob("quarantine/*"))
    (namespace,) = namespaces(store.root)
    assert sorted(one.path for one in namespace.quarantined()) == [*map(str, left)]
    assert len(left) == folder.MAX_QUARANTINED
    assert left[-1].name.endswith(key.digest), "the newest stay"
    store.sweep()
    assert sorted(store.root.rglob("quarantine/*")) == left


@pytest.mark.parametrize("wrong", [-1, 1, 10**12])
def test_a_length_that_was_noted_wrongly_is_a_miss_and_no_damage(
    store: DiskStore, wrong: int
) -> None:
    key, _ = filled(store)
    other = dataclasses.replace(key, tokens=key.tokens + wrong)
    with pytest.raises(ChunkNotFoundError) as caught:
        store.get(other, LAYOUT)
    assert not isinstance(caught.value, CorruptChunkError)
    assert f"has {key.tokens} tokens, not {other.tokens}" in str(caught.value)
    assert (store.stats().misses, store.stats().corrupt) == (1, 0)
    assert same(store.get(key, LAYOUT).chunk, SMALL)


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = filled(store)

    def read(descriptor: int, buffers: Any, offset: int) -> int:
        count = os.preadv(descriptor, buffers, offset)
        os.truncate(store.path(key), 4100)
        return count

    monkeypatch.setattr(
        runs, "positional", lambda fd: lambda buffers, offset: read(fd, buffers, offset)
    )
    with pytest.raises(CorruptChunkError):
        store.get(key, LAYOUT)


def test_a_medium_that_cannot_be_read_is_a_miss(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = filled(store)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(ChunkNotFoundError) as caught:
            store.get(key, LAYOUT)
    assert not isinstance(caught.value, CorruptChunkError)
    assert store.contains(key)
    assert store.stats().misses == 1


def test_damage_behind_memory_is_mended_by_the_next_put(store: DiskStore) -> None:
    tiers = TieredStore(MemoryStore(), store)
    key = key_of(SMALL)
    assert tiers.put(key, SMALL)
    store.path(key).write_bytes(b"")
    assert tiers.get(key, LAYOUT).tier == "memory"
    with pytest.raises(CorruptChunkError):
        store.get(key, LAYOUT)
    assert tiers.put(key, SMALL)
    assert same(store.get(key, LAYOUT).chunk, SMALL)
