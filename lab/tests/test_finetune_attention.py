"""Attention in tiles against stock sdpa: values and gradients, under masks of packed batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from zoo import build

from kvcache_rag_lab.finetune import attention
from kvcache_rag_lab.finetune.attention import tiled_attention, tiles, use_tiled_attention
from kvcache_rag_lab.finetune.packing import lay_out
from kvcache_rag_lab.finetune.sources import Encoded, TargetSpan

WIDTH = 16
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE", 8)


def seen(kind: str) -> Tensor:
    """`(rows, 1, tokens, tokens)` bool."""
    spans = tuple(TargetSpan((1,) * (3 + index), (2,) * 4) for index in range(5))
    chunks = tuple((3,) * length for length in (11, 30, 1, 17))
    row = lay_out(Encoded((4,) * 5, chunks, spans), "reordered")
    allowed = row.allowed
    if kind == "full":
        allowed = lay_out(Encoded((4,) * 5 + sum(chunks, ()), (), spans), "reordered").allowed
    if kind == "window":
        allowed = allowed & (row.indices[:, None] - row.indices[None] < 20)
    if kind == "padded batch":
        padding = torch.eye(len(allowed), dtype=torch.bool)
        padding[30:, 30:] = allowed[:-30, :-30]
        return torch.stack([allowed, padding])[:, None]
    return allowed[None, None]


def added(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, LOWEST)


def gradients(function: Any, mask: Tensor, heads: tuple[int, int]) -> list[Tensor]:
    """The output of an attention function, and the gradients of what it was given."""
    generator = torch.Generator().manual_seed(5)
    rows, tokens = mask.shape[0], mask.shape[-1]
    inputs = [
        torch.randn(rows, count, tokens, WIDTH, generator=generator, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    ]
    module: Any = SimpleNamespace(num_key_value_groups=heads[0] // heads[1], training=True)
    output, _ = function(module, *inputs, mask, scaling=0.3)
    torch.autograd.backward(output, torch.randn(output.shape, generator=generator))
    grads = [tensor.grad for tensor in inputs]
    return [output.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("kind", ["block", "full", "window", "padded batch"])
def test_tiles_give_what_sdpa_gives_and_its_gradients(
    kind: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = added(seen(kind))
    expected = gradients(sdpa_attention_forward, mask, heads)
    plain = lambda *_, **__: pytest.fail("the stock path was taken")  # noqa: E731  # used once
    monkeypatch.setattr(attention, "sdpa_attention_forward", plain)
    found = gradients(tiled_attention, mask, heads)
    assert len(found) == len(expected) == 4
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_columns_that_no_row_of_a_tile_sees_are_left_out() -> None:
    mask = seen("block")
    pairs = 0
    for tile in tiles(added(mask)):
        start, stop = tile.rows
        pairs += (stop - start) * sum(last - first for first, last in tile.runs)
    assert mask.sum() <= pairs < 0.7 * mask.numel()


def test_rows_that_see_nothing_stay_finite() -> None:
    mask = added(torch.zeros(1, 1, 12, 12, dtype=torch.bool))
    assert all(part.isfinite().all() for part in gradients(tiled_attention, mask, (2, 2)))


@pytest.mark.parametrize("why", ["no mask", "bool mask", "mask per head", "dropout"])
def test_what_it_is_not_made_for_is_sdpas(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *_, **__: taken.append(why))
    query = torch.randn(1, 2, 12, WIDTH)
    allowed = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    masks = {"no mask": None, "bool mask": allowed, "dropout": added(allowed)}
    mask = masks.get(why, added(allowed.repeat(1, 2, 1, 1)))
    module: Any = SimpleNamespace(num_key_value_groups=1, training=True)
    tiled_attention(module, query, query, query, mask, dropout=0.1 if why == "dropout" else 0.0)
    assert taken == [why]


def test_only_sdpa_on_a_cpu_is_exchanged() -> None:
    model = build("llama")
    assert use_tiled_attention(model)
    assert not use_tiled_attention(model), "it is there already"
    model.set_attn_implementation("eager")
    assert not use_tiled_attention(model)
