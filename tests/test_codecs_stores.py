"""A store that quantises keeps the contract of every store, with the bound in place of equality."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

import tests.contracts as contracts
from kvcache_rag.codecs import Codec, Int4, Int8
from kvcache_rag.stores import ChunkStore, DiskStore
from tests.contracts import StoreContract, empty_chunk, flat
from tests.test_codecs_quantised import within

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout

GRACE = 100.0


def finite_chunk(
    seed: int = 0, *, tokens: int = 16, layout: ChunkLayout = contracts.LAYOUT, start: int = 3
) -> ChunkKV:
    """`make_chunk` without infinities and NaN, which quantising codecs refuse."""
    generator = torch.Generator().manual_seed(seed)
    chunk = empty_chunk(tokens, layout, start)
    chunk.tokens.copy_(torch.randint(0, 32000, (tokens,), generator=generator))
    for tensor in flat(chunk):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 3 + 1)
    return chunk


class QuantisedDiskContract(StoreContract):
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

    def open(self, path: Path, *, max_bytes: int | None = None) -> DiskStore:
        return DiskStore(
            path, max_bytes=max_bytes, durable=False, release_grace=GRACE, codec=self.codec
        )

    def age(self, store: ChunkStore, seconds: float) -> None:
        for path in store.root.rglob("*"):
            status = path.stat()
            os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))

    def held(self, store: ChunkStore) -> set[str]:
        return {path.stem for path in store.root.rglob("*.safetensors")}

    def size(self, chunk: ChunkKV) -> int:
        specs = self.codec.expected(chunk.layout, len(chunk)).values()
        payload = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in specs)
        return 4096 + payload + chunk.tokens.nbytes


class TestInt8DiskStore(QuantisedDiskContract):
    codec = Int8()


class TestInt4DiskStore(QuantisedDiskContract):
    codec = Int4()
