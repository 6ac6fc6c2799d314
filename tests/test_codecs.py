"""Codecs turn chunks into named tensors and back."""

from __future__ import annotations

from kvcache_rag.codecs import Codec, Native
from tests.contracts import LAYOUTS, flat, make_chunk


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
