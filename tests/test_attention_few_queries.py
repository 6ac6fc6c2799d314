"""The compiled attention of few queries against float32, and torch's kernel where it is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcache_rag.codecs import Int8
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout, GroupLayout
from kvcache_rag.kv.rotary import Rotation, angle_table, rotate_
from kvcache_rag.models.attention import few_queries
from kvcache_rag.models.attention.few_queries import (
    ChunkContext,
    ChunkSlots,
    attend,
    attend_behind,
    attend_partially,
    takes,
)
from kvcache_rag.models.attention.packed import packed_attention

needs_kernel = pytest.mark.skipif(
    few_queries.library() is None, reason="no compiled kernel, or no CPU with AVX-512 for bfloat16"
)


def _inputs(
    rows: int, heads: int, groups: int, queries: int, tokens: int, width: int = 64, values: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seeded = torch.Generator().manual_seed(queries * 1000 + tokens)

    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=seeded) * 1.5).bfloat16()

    query = made(rows, queries, heads, width).transpose(1, 2)  # as models hand it over
    # Views of a larger buffer, as caches are.
    buffer = made(2, rows, groups, tokens + 7, max(width, values))
    return query, buffer[0, :, :, :tokens, :width], buffer[1, :, :, :tokens, :values]


def _causal(queries: int, tokens: int) -> torch.Tensor:
    allowed = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
    return allowed[None, None]  # (1, 1, queries, tokens)


def _errors(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], mask: torch.Tensor | None
) -> tuple[float, float]:
    """Mean error of the kernel and of torch's own, against float32."""
    query, key, value = inputs

    def by_torch(dtype: torch.dtype) -> torch.Tensor:
        given = (query.to(dtype), key.to(dtype), value.to(dtype), mask)
        return scaled_dot_product_attention(*given, enable_gqa=True).transpose(1, 2)

    exact, stock = by_torch(torch.float32), by_torch(torch.bfloat16)
    added = None
    if mask is not None:
        added = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf).bfloat16()
    found = attend(*inputs, added, None)
    assert found.shape == exact.shape
    return float((found - exact).abs().mean()), float((stock - exact).abs().mean())


@needs_kernel
@pytest.mark.parametrize("queries", [1, 2, 3, 5, 16, 33])
@pytest.mark.parametrize("tokens", [40, 64, 129, 700])
def test_it_is_as_exact_as_torch(queries: int, tokens: int) -> None:
    for heads, groups in ((6, 2), (4, 4), (7, 1)):
        inputs = _inputs(1, heads, groups, queries, tokens)
        for mask in (None, _causal(queries, tokens)):
            own, stock = _errors(inputs, mask)
            assert own <= 1.1 * stock + 1e-6


@needs_kernel
@pytest.mark.parametrize(("width", "values"), [(32, 32), (96, 96), (128, 64), (256, 256)])
def test_widths_of_heads(width: int, values: int) -> None:
    own, stock = _errors(_inputs(2, 4, 2, 3, 200, width, values), _causal(3, 200))
    assert own <= 1.5 * stock + 1e-6  # of unequal widths, torch rounds less


@needs_kernel
def test_rows_have_masks_of_their_own_and_what_sees_nothing_is_0() -> None:
    inputs = _inputs(2, 4, 2, 3, 150)
    mask = _causal(3, 150).repeat(2, 1, 1, 1)
    mask[1, :, :, :70] = False  # padding on the left
    own, stock = _errors(inputs, mask)
    assert own <= 1.1 * stock + 1e-6
    added = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    added[1, 0, 1] = -torch.inf
    found = attend(*inputs, added.bfloat16(), None)
    assert not found[1, 1].any()
    assert found.isfinite().all()


@needs_kernel
def test_masks_of_another_dtype_or_order_and_one_row_for_all_mean_the_same() -> None:
    inputs = _inputs(1, 4, 2, 3, 150)
    hidden = torch.zeros(1, 1, 1, 150).index_fill_(3, torch.arange(40), -torch.inf)
    expected = attend(*inputs, hidden.repeat(1, 1, 3, 1).bfloat16(), None)
    strided = hidden.repeat(1, 1, 3, 1).transpose(2, 3).contiguous().transpose(2, 3)
    for mask in (hidden, hidden.bfloat16(), strided, strided.bfloat16()):
        assert torch.equal(attend(*inputs, mask, None), expected)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_tokens(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(1, 3, 1, 2, 1500)
    alone = attend(*inputs, None, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    shared = attend(*inputs, None, None)
    assert (shared.float() - alone.float()).abs().max() <= 0.01


@needs_kernel
def test_models_attend_by_it_and_by_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]  # read by transformers
    for queries, mask in ((1, None), (3, _causal(3, 90))):
        inputs = _inputs(1, 6, 2, queries, 90)
        own, _ = packed_attention(module, *inputs, mask)
        with monkeypatch.context() as patch:
            patch.setattr(few_queries, "library", lambda: None)
            stock, _ = packed_attention(module, *inputs, mask)
        assert own.shape == stock.shape
        assert (own.float() - stock.float()).abs().max() < 0.02


def test_what_it_cannot_take_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_queries, "library", object)
    query, key, value = _inputs(1, 4, 2, 2, 50)
    assert takes(query, key, value, 0.0)
    assert not takes(query, key, value, 0.1)
    assert not takes(query.float(), key.float(), value.float(), 0.0)
    assert not takes(query[..., :40], key[..., :40], value, 0.0)
    assert not takes(query, key.transpose(2, 3).contiguous().transpose(2, 3), value, 0.0)
    monkeypatch.setattr(few_queries, "library", lambda: None)
    assert not takes(query, key, value, 0.0)


SIZES = [(64,), (5, 70, 1, 130), (300, 300)]


def _chunks(sizes: tuple[int, ...], groups: int, width: int) -> list[ChunkKV]:
    layout = ChunkLayout((GroupLayout((0, 1), (groups, width), (groups, width)),), torch.bfloat16)
    seeded = torch.Generator().manual_seed(7)
    made = [torch.randn(2, 2, groups, n, width, generator=seeded).bfloat16() for n in sizes]
    return [
        ChunkKV(layout, torch.zeros(tokens, dtype=torch.int32), 0, ((one,),))
        for tokens, one in zip(sizes, made, strict=True)
    ]


def _turned(keys: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns keys in place; gives the angles."""
    width = keys.shape[-1]
    inv_freq = 10_000.0 ** -(torch.arange(width // 2) * 2.0 / width)
    angles = angle_table(inv_freq, torch.zeros_like(places), places)
    rotate_(keys, Rotation("half", 0, width, 0), *angles)
    return angles


def _encoded(
    sizes: tuple[int, ...], groups: int, width: int
) -> tuple[list[ChunkSlots], torch.Tensor, torch.Tensor]:
    """Chunks in 8 bits, and what a buffer holds of their second layer: `(1, heads, n, width)`."""
    slots, keys, values, first = [], [], [], 3
    for chunk in _chunks(sizes, groups, width):
        stored = Int8().encode(chunk)
        copy = ChunkKV(chunk.layout, chunk.tokens, 0, chunk.layout.empty(len(chunk)))
        Int8().decode(stored, copy)
        keys.append(copy.keys(0)[1])
        values.append(copy.values(0)[1])
        angles = _turned(keys[-1], torch.arange(first, first + len(chunk)))
        slots.append(ChunkSlots(stored["kq"], stored["vq"], (stored["ks"], stored["vs"]), angles))
        first += len(chunk)
    return slots, torch.cat(keys, 1)[None], torch.cat(values, 1)[None]


def _hold_to_copies(slots: list[ChunkSlots], keys: torch.Tensor, values: torch.Tensor) -> None:
    width, context = keys.shape[-1], ChunkContext(slots)
    assert context.tokens == keys.shape[2]
    for queries in (1, 4, 9):
        query, key, value = _inputs(1, 6, 2, queries, 21, width, width)
        whole = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        columns = whole[0].shape[2]
        hidden = torch.zeros(1, 1, queries, columns + 3)
        hidden.masked_fill_(~torch.ones(queries, columns + 3).tril(columns - queries).bool(), -1e9)
        for mask in (None, hidden.bfloat16()):
            found = attend_behind(context, 1, query, key, value, mask, width**-0.5)
            expected = attend_partially(query, *whole, mask, width**-0.5)
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])


@needs_kernel
@pytest.mark.parametrize("width", [32, 64, 96, 128])
@pytest.mark.parametrize("sizes", SIZES)
def test_chunks_in_8_bits_give_the_bits_of_their_copy(sizes: tuple[int, ...], width: int) -> None:
    _hold_to_copies(*_encoded(sizes, 2, width))


@needs_kernel
@pytest.mark.parametrize("width", [32, 64, 96, 128])
@pytest.mark.parametrize("sizes", SIZES)
def test_native_chunks_give_the_bits_of_rotated_copies(sizes: tuple[int, ...], width: int) -> None:
    """Moved by one angle each, or, every second one, standing at its place."""
    slots, keys, values = [], [], []
    for place, chunk in enumerate(_chunks(sizes, 2, width)):
        keys.append(chunk.keys(0)[1].clone())
        values.append(chunk.values(0)[1])
        angles = None if place % 2 else _turned(keys[-1], torch.tensor([40 * (place + 1)]))
        slots.append(ChunkSlots(chunk.keys(0), chunk.values(0), None, angles))
    _hold_to_copies(slots, torch.cat(keys, 1)[None], torch.cat(values, 1)[None])


@needs_kernel
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_share_the_tokens_of_chunks(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, keys, values = _encoded((700, 40, 600), 1, 64)
    query, key, value = _inputs(1, 3, 1, 2, 200)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found, _ = attend_behind(ChunkContext(slots), 1, query, key, value, None, 0.125)
    whole = torch.cat([keys, key], 2), torch.cat([values, value], 2)
    assert torch.equal(found, attend_partially(query, *whole, None, 0.125)[0])


@needs_kernel
def test_chunks_in_8_bits_whose_keys_do_not_rotate() -> None:
    slots, _, _ = _encoded((90,), 2, 64)
    still = replace(slots[0], angles=None)
    query, key, value = _inputs(1, 4, 2, 2, 30)
    found, _ = attend_behind(ChunkContext([still]), 1, query, key, value, None, 0.125)
    assert still.scales is not None
    keys = (still.key.bfloat16() * still.scales[0])[1:]
    values = (still.value.bfloat16() * still.scales[1])[1:]
    whole = torch.cat([keys, key], 2), torch.cat([values, value], 2)
    assert torch.equal(found, attend_partially(query, *whole, None, 0.125)[0])
