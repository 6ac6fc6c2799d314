"""Every codec keeps the contract of codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_rag.codecs import CODECS, Int4, Int8, Native
from tests.chunks import bits, flat, make_chunk
from tests.contracts_codecs import CodecContract, finite_chunk
from tests.test_codecs_quantised import within

if TYPE_CHECKING:
    from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout


class TestNative(CodecContract):
    """Bit for bit, whatever the bits are."""

    codec = Native()
    name = "native"

    def chunk(self, layout: ChunkLayout, tokens: int, seed: int = 0) -> ChunkKV:
        return make_chunk(seed, tokens=tokens, layout=layout)

    def is_restored(self, found: ChunkKV, chunk: ChunkKV) -> bool:
        return [bits(tensor) for tensor in flat(found)] == [bits(tensor) for tensor in flat(chunk)]

    def test_a_dense_chunk_is_not_copied(self) -> None:
        chunk = make_chunk()
        (encoded,) = self.codec.encode(chunk).values()
        assert encoded.data_ptr() == flat(chunk)[0].data_ptr()


class QuantisedContract(CodecContract):
    """Within the bound of the docstring, for numbers."""

    raw_keys = True

    def chunk(self, layout: ChunkLayout, tokens: int, seed: int = 0) -> ChunkKV:
        return finite_chunk(seed, tokens=tokens, layout=layout)

    def is_restored(self, found: ChunkKV, chunk: ChunkKV) -> bool:
        return within(self.codec, found, chunk)


class TestInt8(QuantisedContract):
    codec = Int8()
    name = "int8-kc-vt"


class TestInt4(QuantisedContract):
    codec = Int4()
    name = "int4-g64"


def test_every_codec_has_a_contract() -> None:
    assert {type(kept.codec) for kept in (TestNative, TestInt8, TestInt4)} == {*CODECS.values()}
