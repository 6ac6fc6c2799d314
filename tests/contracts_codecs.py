"""Laws that every codec keeps; a test class names its codec and inherits them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

from kvcache_rag import codecs
from kvcache_rag.codecs import CODECS, by_name
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.prefill import _position
from kvcache_rag.stores import DiskStore
from kvcache_rag.stores.file import file_bytes, file_header, verify_file
from tests.chunks import LAYOUT, LAYOUTS, bits, empty_chunk, flat, key_of, window

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from kvcache_rag.codecs import Codec
    from kvcache_rag.kv.chunk import ChunkLayout

# No token, one, and more than one group of every codec that has groups of tokens.
LENGTHS = [0, 1, 65]


def finite_chunk(
    seed: int = 0, *, tokens: int = 16, layout: ChunkLayout = LAYOUT, start: int = 3
) -> ChunkKV:
    """`make_chunk` without infinities and NaN, which quantising codecs refuse."""
    generator = torch.Generator().manual_seed(seed)
    chunk = empty_chunk(tokens, layout, start)
    chunk.tokens.copy_(torch.randint(0, 32000, (tokens,), generator=generator))
    for tensor in flat(chunk):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 3 + 1)
    return chunk


class CodecContract:
    """What every `Codec` guarantees, for every layout (K and V fused, apart, of several shapes)."""

    codec: Codec
    name: str
    """Its name in files and specs: part of the format, so written here once more."""
    raw_keys: bool = False
    """Whether its keys stand at position 0: part of the specs, so written here, too."""

    def chunk(self, layout: ChunkLayout, tokens: int, seed: int = 0) -> ChunkKV:
        """A chunk of values that the codec must be able to store."""
        raise NotImplementedError

    def is_restored(self, found: ChunkKV, chunk: ChunkKV) -> bool:
        """Whether every value keeps the bound that the codec states."""
        raise NotImplementedError

    @pytest.fixture(params=LAYOUTS)
    def layout(self, request: pytest.FixtureRequest) -> ChunkLayout:
        return LAYOUTS[request.param]

    # Law: decoding what was encoded keeps the stated bound, and writes nothing else.

    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_restores_within_its_bound(self, layout: ChunkLayout, tokens: int) -> None:
        chunk = self.chunk(layout, tokens)
        large = empty_chunk(tokens + 5, layout)
        for tensor in flat(large):
            tensor.fill_(7)
        out = window(large, 3, tokens)
        self.codec.decode(self.codec.encode(chunk), out)
        assert self.is_restored(out, chunk)
        for tensor in flat(large):
            assert bool((tensor.narrow(-2, 0, 3) == 7).all())
            assert bool((tensor.narrow(-2, tokens + 3, 2) == 7).all())

    def test_decodes_the_same_again(self, layout: ChunkLayout) -> None:
        stored = self.codec.encode(self.chunk(layout, 5))
        first, second = empty_chunk(5, layout), empty_chunk(5, layout)
        self.codec.decode(stored, first)
        self.codec.decode(stored, second)
        assert [bits(t) for t in flat(first)] == [bits(t) for t in flat(second)]

    # Law: what is encoded depends on the chunk's values alone, and does not change them.

    def test_takes_strided_tensors_and_leaves_them(self, layout: ChunkLayout) -> None:
        large = self.chunk(layout, 12)
        before = [bits(tensor) for tensor in flat(large)]
        chunk = window(large, 2, 5)
        dense = ChunkKV(
            layout,
            chunk.tokens.clone(),
            chunk.start,
            tuple(tuple(t.contiguous().clone() for t in group) for group in chunk.tensors),
        )
        assert stored_bits(self.codec.encode(chunk)) == stored_bits(self.codec.encode(dense))
        assert [bits(tensor) for tensor in flat(large)] == before

    def test_remembers_no_chunk(self, layout: ChunkLayout) -> None:
        chunk = self.chunk(layout, 5)
        first = stored_bits(self.codec.encode(chunk))
        self.codec.encode(self.chunk(layout, 9, seed=1))
        assert stored_bits(self.codec.encode(chunk)) == first

    # Law: it writes what it said beforehand, from which readers know the file.

    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_writes_what_it_expects(self, layout: ChunkLayout, tokens: int) -> None:
        encoded = self.codec.encode(self.chunk(layout, tokens))
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in encoded.items()}
        assert found == self.codec.expected(layout, tokens)
        assert all(tensor.is_contiguous() for tensor in encoded.values())
        assert not {"tokens", "__metadata__"} & found.keys(), "these names belong to the file"

    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_a_file_has_the_bytes_that_were_said(
        self, tmp_path: Path, layout: ChunkLayout, tokens: int
    ) -> None:
        chunk = self.chunk(layout, tokens)
        store = DiskStore(tmp_path, durable=False, codec=self.codec)
        assert store.put(key_of(chunk), chunk)
        size = store.path(key_of(chunk)).stat().st_size
        assert size == file_bytes(layout, self.codec, tokens)
        encoded = self.codec.encode(chunk)
        payload = sum(tensor.nbytes for tensor in encoded.values()) + chunk.tokens.nbytes
        assert size % 4096 == payload % 4096
        path, digest = str(store.path(key_of(chunk))), key_of(chunk).digest
        verify_file(path, digest)
        header = file_header(path, digest)
        assert (header.codec, header.tokens) == (self.name, tokens)
        assert self.is_restored(store.get(key_of(chunk), layout).chunk, chunk)

    # Law: memory that may be filled directly is that of the chunk, and filling it is decoding.

    def test_filling_in_place_is_decoding(self, layout: ChunkLayout) -> None:
        chunk = self.chunk(layout, 5)
        stored = self.codec.encode(chunk)
        decoded, filled = empty_chunk(5, layout), empty_chunk(5, layout)
        places = self.codec.in_place(filled)
        if places is None:
            return
        self.codec.decode(stored, decoded)
        assert [*places] == [*self.codec.expected(layout, 5)]
        for name, place in places.items():
            place.copy_(stored[name])
        assert [bits(t) for t in flat(filled)] == [bits(t) for t in flat(decoded)]

    # Law: it gets keys at position 0 if and only if it asks for them, and they can be moved.

    @pytest.mark.parametrize("immovable", [None, "they cannot be"])
    def test_raw_keys_are_given_to_who_wants_them(self, immovable: str | None) -> None:
        position = _position(Model(immovable), Kept(self.codec))  # type: ignore[arg-type]  # stand-ins
        assert position == ("raw" if self.raw_keys and not immovable else "local")

    # Law: it can be named: in files, on command lines, in code.

    def test_its_name_is_its_own_and_stays(self) -> None:
        assert self.codec.name == self.name
        assert re.fullmatch(r"[a-z0-9-]{1,64}", self.codec.name)
        assert type(self.codec)(**vars(self.codec)).name == self.name
        assert [codec.name for codec in CODECS.values()].count(self.name) == 1
        assert by_name(self.name) == self.codec

    def test_its_repr_makes_it_again(self) -> None:
        again = eval(repr(self.codec), vars(codecs))
        assert again == self.codec
        assert hash(again) == hash(self.codec)
        assert type(again) is type(self.codec)


class Model:
    """A model whose keys can be moved, or not."""

    def __init__(self, immovable: str | None) -> None:
        self.measured = self
        self.immovable = immovable


class Kept:
    """A store of a codec."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec


def stored_bits(stored: dict[str, Tensor]) -> dict[str, bytes]:
    """The bytes that would be written, by name."""
    return {name: bits(tensor) for name, tensor in stored.items()}
