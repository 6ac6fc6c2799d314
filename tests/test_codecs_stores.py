"""A store that quantises keeps the contract of every store, with the bound in place of equality."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from zoo import build, byte_tokenizer

import tests.contracts as contracts
from kvcache_rag import Engine
from kvcache_rag.codecs import CODECS, Codec, Int4, Int8
from kvcache_rag.errors import ChunkNotFoundError, InvalidInputError
from kvcache_rag.stores import ChunkStore, DiskStore, MemoryStore, RemoteStore, TieredStore
from tests.contracts import LAYOUTS, StoreContract, empty_chunk, flat, key_of
from tests.contracts_codecs import finite_chunk
from tests.test_codecs_quantised import within
from tests.test_stores import TestDiskStore, TestMemoryStore, TestTieredStore

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKV


class QuantisedContract(StoreContract):
    """The contract, on finite chunks, "the same" meaning: within the codec's bound."""

    codec: Codec

    @pytest.fixture(autouse=True)
    def _within_the_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def same(found: ChunkKV, put: ChunkKV) -> bool:
            return (
                found.layout == put.layout
                and found.start == put.start
                and torch.equal(found.tokens, put.tokens)
                and within(self.codec, found, put)
            )

        monkeypatch.setattr(contracts, "make_chunk", finite_chunk)
        monkeypatch.setattr(contracts, "same", same)

    def stored(self, chunk: ChunkKV) -> int:
        """Bytes of what the codec makes of a chunk."""
        return self.codec.nbytes(chunk.layout, len(chunk)) + chunk.tokens.nbytes

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_gives_what_its_codec_made_of_a_chunk(self, store: ChunkStore, name: str) -> None:
        chunk = finite_chunk(1, layout=LAYOUTS[name])
        key = key_of(chunk)
        with pytest.raises(ChunkNotFoundError):
            store.encoded(key, chunk.layout)
        assert store.put(key, chunk)
        hits = sum(store.stats().hits.values())
        hit = store.encoded(key, chunk.layout)
        made = store.codec.encode(chunk)
        assert hit.chunk.stored.keys() == made.keys()
        assert all(torch.equal(hit.chunk.stored[part], made[part]) for part in made)
        assert torch.equal(hit.chunk.tokens, chunk.tokens)
        assert (hit.chunk.start, len(hit.chunk)) == (chunk.start, len(chunk))
        assert contracts.same(hit.chunk.decoded(), store.get(key, chunk.layout).chunk)
        assert sum(store.stats().hits.values()) == hits + 2


class TestInt8DiskStore(QuantisedContract, TestDiskStore):
    codec = Int8()

    def open(self, path: Path, *, max_bytes: int | None = None) -> DiskStore:
        return DiskStore(path, max_bytes=max_bytes, durable=False, codec=self.codec)


class TestInt8MemoryStore(QuantisedContract, TestMemoryStore):
    codec = Int8()

    def open(self, path: Path, *, max_bytes: int | None = None) -> MemoryStore:
        del path
        return MemoryStore(1 << 30 if max_bytes is None else max_bytes, codec=self.codec)


class TestInt8TieredStore(QuantisedContract, TestTieredStore):
    codec = Int8()

    def open(self, path: Path, *, max_bytes: int | None = None) -> TieredStore:
        tiers = (TestInt8MemoryStore(), TestInt8DiskStore())
        return TieredStore(*(tier.open(path, max_bytes=max_bytes) for tier in tiers))

    def test_promoting_rounds_nothing_again(self, tmp_path: Path) -> None:
        """Times that a chunk goes up a tier, by whichever way, leave its bytes alone."""
        chunk = finite_chunk(3)
        key = key_of(chunk)
        disk = DiskStore(tmp_path, durable=False, codec=self.codec)
        assert disk.put(key, chunk)
        expected = disk.get(key, chunk.layout).chunk
        for asks in ("get", "encoded", "into"):
            store = TieredStore(MemoryStore(codec=self.codec), disk)
            if asks == "get":
                assert contracts.same(store.get(key, chunk.layout).chunk, chunk)
            elif asks == "into":
                store.get(key, chunk.layout, empty_chunk(len(chunk), chunk.layout, chunk.start))
            else:
                store.encoded(key, chunk.layout)
            found = store.tiers[0].get(key, chunk.layout).chunk
            assert all(map(torch.equal, flat(found), flat(expected)))


def test_memory_that_keeps_no_such_form_says_so() -> None:
    for options in ({"codec": Int4()}, {"codec": Int8(), "pinned": False, "device": "meta"}):
        with pytest.raises(InvalidInputError):
            MemoryStore(**options)


def test_chunks_of_every_codec_have_keys_of_their_own() -> None:
    specs = set()
    for codec in CODECS:
        store = RemoteStore("memory://bucket/kv", codec=codec)
        specs.add(Engine(build("qwen2"), byte_tokenizer(), store=store).spec)
    assert len(specs) == len(CODECS)


def test_a_codec_by_name(tmp_path: Path) -> None:
    assert DiskStore(tmp_path, codec="int4").codec.name == Int4.name
    assert MemoryStore(codec="int8").codec.name == Int8.name
    assert RemoteStore("memory://bucket/kv", codec="int8").codec.name == Int8.name
    for codec in ("int7", Int8, 8):
        with pytest.raises(InvalidInputError, match="codec"):
            DiskStore(tmp_path, codec=codec)
