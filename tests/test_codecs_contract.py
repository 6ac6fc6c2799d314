"""Every codec keeps the contract of codecs, and every law of the contract can be broken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from kvcache_rag.codecs import CODECS, Codec, Int4, Int8, Native
from tests.chunks import LAYOUTS, bits, flat, make_chunk
from tests.contracts_codecs import CodecContract
from tests.test_codecs_quantised import normal, within

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout


class TestNative(CodecContract):
    """Bit for bit, whatever the bits are."""

    codec = Native()
    name = "native"

    def chunk(self, layout: ChunkLayout, tokens: int, seed: int = 0) -> ChunkKV:
        return make_chunk(seed, tokens=tokens, layout=layout)

    def is_restored(self, found: ChunkKV, chunk: ChunkKV) -> bool:
        return [bits(tensor) for tensor in flat(found)] == [bits(tensor) for tensor in flat(chunk)]


class QuantisedContract(CodecContract):
    """Within the bound of the docstring, for numbers."""

    raw_keys = True

    def chunk(self, layout: ChunkLayout, tokens: int, seed: int = 0) -> ChunkKV:
        return normal(layout, tokens, seed)

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


# ---------------------------------------------------------------------- every law can be broken
class Coarse(Native):
    """Loses the last bit."""

    def decode(self, stored: dict[str, Tensor], out: ChunkKV) -> None:
        super().decode({name: tensor * 0.99 for name, tensor in stored.items()}, out)


class Spilling(Native):
    """Writes beside its place."""

    def decode(self, stored: dict[str, Tensor], out: ChunkKV) -> None:
        super().decode(stored, out)
        for tensor in flat(out):
            torch.as_strided(tensor, (1,), (1,), 0).zero_()


class Consuming(Native):
    """Uses up what is stored."""

    def decode(self, stored: dict[str, Tensor], out: ChunkKV) -> None:
        super().decode(stored, out)
        for tensor in stored.values():
            tensor.zero_()


class Greedy(Native):
    """Changes the chunk."""

    def encode(self, chunk: ChunkKV) -> dict[str, Tensor]:
        encoded = {name: tensor.clone() for name, tensor in super().encode(chunk).items()}
        for tensor in flat(chunk):
            tensor.zero_()
        return encoded


@dataclass(frozen=True)
class Remembering(Native):
    """Mixes chunks."""

    seen: list[int] = field(default_factory=list)

    def encode(self, chunk: ChunkKV) -> dict[str, Tensor]:
        self.seen.append(1)
        return {name: tensor + len(self.seen) for name, tensor in super().encode(chunk).items()}


class Flat(Native):
    """Writes other shapes than it says."""

    def encode(self, chunk: ChunkKV) -> dict[str, Tensor]:
        return {name: tensor.flatten() for name, tensor in super().encode(chunk).items()}


class Boastful(Native):
    """Says that it writes a token more."""

    def expected(self, layout: ChunkLayout, tokens: int) -> dict[str, Any]:
        return super().expected(layout, tokens + 1)


class Elsewhere(Native):
    """Names memory that is not the chunk's."""

    def in_place(self, out: ChunkKV) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in super().encode(out).items()}


class Shy(Native):
    """Wants keys at position 0 and takes them as they are."""

    raw_keys: ClassVar[bool] = True


class Imitating(Native):
    """Has the name of another."""

    name: ClassVar[str] = "int8-kc-vt"


class Anonymous(Native):
    """Says nothing of itself."""

    def __repr__(self) -> str:
        return "Native"


LAYOUT = LAYOUTS["apart-float32"]
BROKEN: dict[str, tuple[type[Codec], dict[str, Any]]] = {
    "test_restores_within_its_bound": (Coarse, {"layout": LAYOUT, "tokens": 65}),
    "test_decodes_the_same_again": (Consuming, {"layout": LAYOUT}),
    "test_takes_strided_tensors_and_leaves_them": (Greedy, {"layout": LAYOUT}),
    "test_remembers_no_chunk": (Remembering, {"layout": LAYOUT}),
    "test_writes_what_it_expects": (Flat, {"layout": LAYOUT, "tokens": 65}),
    "test_a_file_has_the_bytes_that_were_said": (Boastful, {"layout": LAYOUT, "tokens": 65}),
    "test_filling_in_place_is_decoding": (Elsewhere, {"layout": LAYOUT}),
    "test_raw_keys_are_given_to_who_wants_them": (Shy, {"immovable": None}),
    "test_its_name_is_its_own_and_stays": (Imitating, {}),
    "test_its_repr_makes_it_again": (Anonymous, {}),
}


class NormalNative(TestNative):
    """Of numbers, which can be compared with themselves after arithmetic."""

    __test__ = False

    def chunk(self, layout: ChunkLayout, tokens: int, seed: int = 0) -> ChunkKV:
        return normal(layout, tokens, seed)


@pytest.mark.parametrize("law", [name for name in dir(CodecContract) if name.startswith("test_")])
def test_every_law_can_be_broken(law: str, tmp_path: Path) -> None:
    broken, arguments = BROKEN[law]
    if law == "test_a_file_has_the_bytes_that_were_said":
        arguments = {**arguments, "tmp_path": tmp_path}
    kept = NormalNative()
    getattr(kept, law)(**arguments)
    kept.codec = broken()  # type: ignore[assignment]  # one that keeps no contract
    with pytest.raises(AssertionError):
        getattr(kept, law)(**arguments)


def test_what_is_written_beside_its_place_is_seen() -> None:
    kept = NormalNative()
    kept.codec = Spilling()
    with pytest.raises(AssertionError):
        kept.test_restores_within_its_bound(LAYOUT, 5)
