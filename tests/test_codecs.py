"""Codecs turn chunks into named tensors and back."""

from __future__ import annotations

import pytest
import torch

from kvcache_rag.codecs import Codec, Native
from tests.contracts import LAYOUTS, bits, empty_chunk, flat, make_chunk, same, window


@pytest.mark.parametrize("name", LAYOUTS)
class TestNative:
    def test_encodes_what_it_expects(self, name: str) -> None:
        chunk = window(make_chunk(1, tokens=9, layout=LAYOUTS[name]), 2, 5)
        encoded = Native().encode(chunk)
        expected = Native().expected(chunk.layout, 5)
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in encoded.items()}
        assert found == expected
        assert all(tensor.is_contiguous() for tensor in encoded.values())

    def test_decodes_bit_for_bit(self, name: str) -> None:
        chunk = make_chunk(2, tokens=5, layout=LAYOUTS[name])
        large = empty_chunk(9, chunk.layout)
        out = window(large, 3, 5)
        Native().decode(Native().encode(chunk), out)
        out.tokens.copy_(chunk.tokens)
        assert same(out, chunk)
        assert sum(int(tensor.narrow(-2, 0, 3).count_nonzero()) for tensor in flat(large)) == 0

    def test_may_be_filled_in_place(self, name: str) -> None:
        chunk = make_chunk(3, layout=LAYOUTS[name])
        places = Native().in_place(chunk)
        assert places is not None
        assert [bits(place) for place in places.values()] == [bits(t) for t in flat(chunk)]
        assert list(places) == list(Native().expected(chunk.layout, 16))


def test_names_say_which_group() -> None:
    names = {name: tuple(Native().expected(layout, 1)) for name, layout in LAYOUTS.items()}
    assert names["fused-bfloat16"] == ("kv",)
    assert names["apart-float32"] == ("k", "v")
    assert names["mixed-float16"] == ("kv.0", "k.1", "v.1", "kv.2")


def test_a_dense_chunk_is_not_copied() -> None:
    chunk = make_chunk()
    (encoded,) = Native().encode(chunk).values()
    assert encoded.data_ptr() == flat(chunk)[0].data_ptr()


def test_a_codec_decodes_unless_it_says_otherwise() -> None:
    class Doubled(Native):
        in_place = Codec.in_place

    assert Doubled().in_place(make_chunk()) is None


def test_codecs_of_equal_settings_are_equal() -> None:
    assert Native() == Native()
    assert repr(Native()) == "Native()"
    assert torch.bfloat16 in {
        dtype for dtype, _ in Native().expected(make_chunk().layout, 1).values()
    }
