"""Our attention function against stock sdpa, on masks of every kind that reaches it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcache_rag.models.attention import packed
from kvcache_rag.models.attention.packed import BLOCK, mask_blocks, packed_attention

TOKENS, QUERIES, WIDTH = 700, 3 * BLOCK + 17, 16


def places() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randperm(TOKENS, generator=generator)[:QUERIES].sort().values


def seen(kind: str) -> Tensor:
    """`(rows, 1, queries, tokens)` bool."""
    rows, columns = places()[:, None], torch.arange(TOKENS)[None]
    allowed = columns <= rows
    if kind == "window":
        allowed = allowed & (rows - columns < 48)
    if kind == "unordered":
        allowed = allowed[torch.randperm(QUERIES, generator=torch.Generator().manual_seed(4))]
    if kind == "padded batch":
        return torch.stack([allowed, allowed & (columns >= 90)])[:, None]
    return allowed[None, None]


def tensors(rows: int, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(rows, heads, QUERIES, WIDTH, generator=generator)
    held = torch.randn(2, rows, groups, TOKENS + 60, WIDTH, generator=generator)
    return query, held[0][:, :, :TOKENS], held[1][:, :, :TOKENS]


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("additive", [True, False])
@pytest.mark.parametrize("kind", ["causal", "window", "unordered", "padded batch"])
def test_blocks_give_what_stock_sdpa_gives(
    kind: str, additive: bool, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = seen(kind)
    if kind == "padded batch":  # what stands in front of the first token sees everything
        mask = mask | ~mask.any(-1, keepdim=True)
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    module: Any = SimpleNamespace(num_key_value_groups=heads[0] // heads[1], training=False)
    inputs = tensors(mask.shape[0], *heads)
    expected, _ = sdpa_attention_forward(module, *inputs, mask, scaling=0.3)
    plain = lambda *_, **__: pytest.fail("the stock path was taken")  # noqa: E731  # used once
    monkeypatch.setattr(packed, "sdpa_attention_forward", plain)
    found, _ = packed_attention(module, *inputs, mask, scaling=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_block_that_sees_nothing_has_every_column() -> None:
    mask = torch.zeros(1, 1, 2 * BLOCK, 9, dtype=torch.bool)
    mask[:, :, BLOCK:, 2:4] = True
    assert mask_blocks(mask) == [(0, BLOCK, 0, 9), (BLOCK, 2 * BLOCK, 2, 4)]


def test_a_mask_is_looked_through_once_and_not_kept() -> None:
    mask = seen("causal")
    assert mask_blocks(mask) is mask_blocks(mask)
    held = len(packed._BLOCKS)
    del mask
    assert len(packed._BLOCKS) == held - 1


@pytest.mark.parametrize("queries", [BLOCK // 2, QUERIES], ids=["packed", "blocked"])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4)])
@pytest.mark.parametrize("additive", [True, False])
def test_a_mask_shared_by_all_rows_is_stocks(
    queries: int, heads: tuple[int, int], additive: bool
) -> None:
    mask = seen("causal")[:, :, :queries].expand(3, -1, -1, -1)
    if additive:
        mask = torch.zeros(mask.shape[1:]).masked_fill(~mask[0], -torch.inf).expand_as(mask)
    query, keys, values = tensors(3, *heads)
    module: Any = SimpleNamespace(num_key_value_groups=heads[0] // heads[1], training=False)
    inputs = (module, query[:, :, :queries], keys, values, mask)
    expected, _ = sdpa_attention_forward(*inputs, scaling=0.3)
    for _ in range(2):  # made, then found
        found, _ = packed_attention(*inputs, scaling=0.3)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_mask_is_made_addable_once_per_dtype_and_group_and_not_kept() -> None:
    mask = seen("padded batch")
    made = packed.added_mask(mask, torch.bfloat16, 2)
    assert (made.dtype, made.shape) == (torch.bfloat16, (2, 1, 2 * QUERIES, TOKENS))
    assert packed.added_mask(mask, torch.bfloat16, 2) is made
    assert packed.added_mask(mask, torch.float32, 2).dtype == torch.float32
    held = len(packed._ADDED)
    del mask
    assert len(packed._ADDED) == held - 1
