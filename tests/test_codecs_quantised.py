"""The quantising codecs keep the error bounds of their docstrings, for every layout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_rag.codecs import Codec, Int4, Int8, Native
from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError, InvalidInputError
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout, GroupLayout
from kvcache_rag.stores import DiskStore
from tests.contracts import empty_chunk, flat, key_of
from tests.contracts_codecs import finite_chunk

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

QUANTISED = [Int8(), Int4()]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = {
    "fused": (GroupLayout((0, 1), (2, 64), (2, 64)),),
    "narrow": (GroupLayout((0, 1, 2), (1, 8), (1, 8)),),
    "odd": (GroupLayout((0,), (2, 67), (1, 1)),),
    "wide": (GroupLayout((0,), (1, 144), (1, 144)),),
    "apart": (GroupLayout((0, 1), (1, 40), (1, 6)),),  # MLA: K and V differ in shape
    "mixed": (
        GroupLayout((0, 2), (2, 8), (2, 8)),
        GroupLayout((1,), (4, 5), (2, 4)),
        GroupLayout((3, 4), (1, 16), (1, 16)),
    ),
}
QWEN = ChunkLayout((GroupLayout(tuple(range(24)), (2, 64), (2, 64)),), torch.bfloat16)


def grouped_extremes(values: Tensor, axis: int, size: int) -> tuple[Tensor, Tensor]:
    """Per value the extremes of its group, the plain way."""
    low, high = torch.empty_like(values), torch.empty_like(values)
    for first in range(0, values.shape[axis], size):
        count = min(size, values.shape[axis] - first)
        group = values.narrow(axis, first, count)
        low.narrow(axis, first, count).copy_(group.amin(axis, True).expand_as(group))
        high.narrow(axis, first, count).copy_(group.amax(axis, True).expand_as(group))
    return low, high


def bound(codec: Codec, values: Tensor, axis: int) -> Tensor:
    """The docstring's bound for every value of a slot, float64."""
    information = torch.finfo(values.dtype)
    eps = information.eps
    tiny = 2.0**-24 if values.dtype == torch.float16 else 2.0**-126
    wide = values.double()
    if isinstance(codec, Int8):
        low, high = grouped_extremes(wide, axis, max(1, wide.shape[axis]))
        scale = (1 + eps) * torch.maximum(-low, high) / 127 + tiny
        slack = wide.abs() * 2.0**-22
    else:
        low, high = grouped_extremes(wide, axis, 64)
        scale = (1 + eps) * (high - low) / 15 + tiny
        slack = torch.maximum(low.abs(), high.abs()) * 2.0**-21
    return scale / 2 + (wide.abs() + scale) * eps / 2 + slack + tiny


def within(codec: Codec, found: ChunkKV, expected: ChunkKV) -> bool:
    """Whether a restored chunk keeps the bound everywhere."""
    pairs = [
        (slot(found, index), slot(expected, index), axis)
        for index in range(len(expected.layout.groups))
        for slot, axis in ((ChunkKV.keys, -2), (ChunkKV.values, -1))
    ]
    return all(
        bool(((mine.double() - theirs.double()).abs() <= bound(codec, theirs, axis)).all())
        for mine, theirs, axis in pairs
    )


def restored(codec: Codec, chunk: ChunkKV) -> ChunkKV:
    """A chunk through a codec."""
    out = empty_chunk(len(chunk), chunk.layout)
    codec.decode(codec.encode(chunk), out)
    return out


def scaled(tensor: Tensor, generator: torch.Generator, spread: float, offset: float) -> None:
    """Random values whose rows and columns differ in size by powers of two up to the dtype's."""
    largest = math.log2(torch.finfo(tensor.dtype).max) - 3
    smallest = max(-largest, -140.0)

    def powers(shape: list[int]) -> Tensor:
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
        return smallest + (largest - smallest) * drawn

    rows = powers([*tensor.shape[:-1], 1]) * spread
    columns = powers([*tensor.shape[:-2], 1, tensor.shape[-1]]) * spread
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) + offset
    exponents = (rows + columns).clamp(smallest, largest)
    limit = torch.finfo(tensor.dtype).max / 2
    tensor.copy_((drawn * exponents.exp2()).clamp(-limit, limit))


@pytest.mark.parametrize("codec", QUANTISED)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.sampled_from([1, 2, 63, 64, 65, 130]),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 0.02, 0.5]),
    offset=st.sampled_from([0.0, 3.0, -300.0]),
    special=st.lists(st.sampled_from(["zero row", "constant", "outlier", "negative zero"])),
)
def test_every_value_keeps_the_bound(
    codec: Codec,
    shape: str,
    dtype: torch.dtype,
    tokens: int,
    seed: int,
    spread: float,
    offset: float,
    special: list[str],
) -> None:
    generator = torch.Generator().manual_seed(seed)
    chunk = empty_chunk(tokens, ChunkLayout(SHAPES[shape], dtype))
    for tensor in flat(chunk):
        scaled(tensor, generator, spread, offset)
        for row, kind in enumerate(special):
            place = tensor[..., row % tokens, :]
            if kind == "outlier":
                place[..., 0] = torch.finfo(dtype).max / 2
            else:
                place.fill_({"zero row": 0.0, "constant": 1.75, "negative zero": -0.0}[kind])
    assert within(codec, restored(codec, chunk), chunk)


@pytest.mark.parametrize("codec", QUANTISED)
@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(-32752, 32752, width=16), min_size=1, max_size=200))
def test_any_float16_values_keep_the_bound(codec: Codec, values: list[float]) -> None:
    layout = ChunkLayout((GroupLayout((0,), (1, 3), (1, 2)),), torch.float16)
    chunk = empty_chunk(-(-len(values) // 5), layout)
    filled = torch.zeros(len(chunk) * 5, dtype=torch.float16)
    filled[: len(values)] = torch.tensor(values, dtype=torch.float16)
    chunk.keys(0).copy_(filled[: len(chunk) * 3].view(1, 1, -1, 3))
    chunk.values(0).copy_(filled[len(chunk) * 3 :].view(1, 1, -1, 2))
    assert within(codec, restored(codec, chunk), chunk)


@pytest.mark.parametrize(
    ("codec", "value"),
    [(Int8(), 0.0), (Int8(), -0.0)]
    + [(Int4(), value) for value in (0.0, -0.0, 1.75, -3e-5, 12345.0)],
)
@pytest.mark.parametrize("shape", ["mixed", "odd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_in_int4_constant_groups_are_exact(
    codec: Codec, value: float, shape: str, dtype: torch.dtype
) -> None:
    chunk = empty_chunk(70, ChunkLayout(SHAPES[shape], dtype))
    for tensor in flat(chunk):
        tensor.fill_(value)
    assert all(map(torch.equal, flat(restored(codec, chunk)), flat(chunk)))


def test_layers_worked_on_apart_or_together_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = finite_chunk(tokens=65, layout=ChunkLayout(SHAPES["mixed"], torch.bfloat16))
    for codec in QUANTISED:
        monkeypatch.undo()
        together = flat(restored(codec, chunk))
        monkeypatch.setattr("kvcache_rag.codecs.base._BLOCK", 1)
        assert all(map(torch.equal, together, flat(restored(codec, chunk))))


@pytest.mark.parametrize("codec", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, "0.51 max"])
def test_values_that_cannot_be_stored_are_a_counted_failure(
    codec: Codec, dtype: torch.dtype, bad: Any, tmp_path: Path
) -> None:
    value = 0.51 * torch.finfo(dtype).max if isinstance(bad, str) else bad
    for slot in (ChunkKV.keys, ChunkKV.values):
        chunk = finite_chunk(tokens=5, layout=ChunkLayout(SHAPES["apart"], dtype))
        slot(chunk, 0)[1, 0, 3, 2] = value
        with pytest.raises(CorruptChunkError, match="served uncached"):
            codec.encode(chunk)
        store = DiskStore(tmp_path / slot.__name__, durable=False, codec=codec)
        assert not store.put(key_of(chunk), chunk)
        assert store.stats().put_failures == 1
        assert "NaN" in store.stats().last_failure
        with pytest.raises(ChunkNotFoundError):
            store.get(key_of(chunk), chunk.layout)


@pytest.mark.parametrize("codec", QUANTISED)
def test_other_dtypes_are_refused(codec: Codec) -> None:
    with pytest.raises(InvalidInputError, match="Native"):
        codec.expected(ChunkLayout(SHAPES["fused"], torch.float64), 3)


@pytest.mark.parametrize(("codec", "ratio"), [(Int8(), 1.93), (Int4(), 3.5)])
def test_files_are_that_much_smaller(codec: Codec, ratio: float, tmp_path: Path) -> None:
    chunk = finite_chunk(tokens=512, layout=QWEN)
    sizes = []
    for one in (Native(), codec):
        store = DiskStore(tmp_path / one.name, durable=False, codec=one)
        assert store.put(key_of(chunk), chunk)
        sizes.append(store.path(key_of(chunk)).stat().st_size)
    assert sizes[0] / sizes[1] >= ratio
