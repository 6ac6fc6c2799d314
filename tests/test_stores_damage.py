"""Whatever happened to a file, the store serves the right tensors or none."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError
from kvcache_rag.stores import DiskStore, folder, runs
from tests.contracts import LAYOUT, make_chunk, same
from tests.damage import SMALL, filled, header_size, is_refused

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", durable=False)


def rewritten(raw: bytes, change: Any) -> bytes:
    """The file with another header of the same length, its payload untouched."""
    size = header_size(raw)
    header = json.loads(raw[8:size])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", size - 8) + text.ljust(size - 8)[: size - 8] + raw[size:]


def test_a_shortened_or_lengthened_file_is_refused(store: DiskStore) -> None:
    key, raw = filled(store)
    lengths = [*range(16), *range(16, 4096, 97), *range(4090, len(raw), 13), len(raw) - 1]
    for length in lengths:
        assert is_refused(store, key, raw[:length]), length
    for tail in (b"\0", b"\0" * 4096, raw):
        assert is_refused(store, key, raw + tail)
    assert store.stats().corrupt == len(lengths) + 3
    assert store.stats().misses == 0


def test_no_flipped_header_byte_serves_a_wrong_tensor(store: DiskStore) -> None:
    key, raw = filled(store)
    chance = random.Random(0)
    refused = 0
    for index in range(header_size(raw)):
        damaged = bytearray(raw)
        damaged[index] ^= 1 << chance.randrange(8)
        refused += is_refused(store, key, bytes(damaged))
    text = json.loads(raw[8:4096])["__metadata__"]
    # Only the name of the writer may change unseen.
    assert refused >= 4096 - len(text["provenance"])


def test_every_flipped_payload_bit_is_refused(store: DiskStore) -> None:
    key, raw = filled(store)
    chance = random.Random(1)
    for _ in range(600):
        damaged = bytearray(raw)
        damaged[chance.randrange(header_size(raw), len(raw))] ^= 1 << chance.randrange(8)
        assert is_refused(store, key, bytes(damaged))


def test_a_header_that_lies_is_refused(store: DiskStore) -> None:
    key, raw = filled(store)
    lies = [
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
    ]

    def shorten(header: dict[str, Any], lie: Any) -> None:
        header["__metadata__"]["pad"] = ""
        lie(header)

    for lie in lies:
        assert is_refused(store, key, rewritten(raw, lambda h, lie=lie: shorten(h, lie)))
    assert not is_refused(store, key, rewritten(raw, lambda h: h["__metadata__"].update(pad="")))


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 60000,
        b'{"a":' * 12000,
        b'{"__metadata__":{"a":"' + b"x" * 60000 + b'"}}',
        b'{"a":1,"a":1}',
        b'{"a":' + b"9" * 60000 + b"}",
        b'{"a":1e999999}',
        b"\xff\xfe" * 1000,
        b"null",
        b"",
    ],
    ids=lambda header: repr(header[:12]),
)
def test_a_header_bomb_is_refused_at_once(store: DiskStore, header: bytes) -> None:
    key, raw = filled(store)
    size = -(-(8 + len(header)) // 4096) * 4096
    begun = time.perf_counter()
    bomb = struct.pack("<Q", size - 8) + header.ljust(size - 8) + raw[4096:]
    assert is_refused(store, key, bomb)
    assert time.perf_counter() - begun < 1


@pytest.mark.parametrize("length", [0, 1 << 16, 1 << 20, 1 << 62, (1 << 64) - 1, (1 << 64) - 8])
def test_a_header_length_out_of_bounds_is_refused(store: DiskStore, length: int) -> None:
    key, raw = filled(store)
    assert is_refused(store, key, struct.pack("<Q", length) + raw[8:])


def test_the_quarantine_is_bounded(store: DiskStore) -> None:
    for seed in range(10):
        chunk = make_chunk(seed)
        key, raw = filled(store, chunk)
        assert is_refused(store, key, raw[:-1], chunk)
    left = sorted(store.root.rglob("quarantine/*"))
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
