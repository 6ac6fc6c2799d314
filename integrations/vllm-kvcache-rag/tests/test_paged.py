"""Laws of pages: what is read is what was written, in whatever order a backend keeps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvcache_rag.errors import UnsupportedModelError
from vllm_kvcache_rag.paged import PagedLayer

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK, HEADS, WIDTH, PAGES = 16, 3, 32, 9


def apart(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K behind V in each number's place: `(pages, tokens, heads, width)` views of each."""
    return cache[..., :WIDTH].transpose(1, 2), cache[..., WIDTH:].transpose(1, 2)


def halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All K of a head in a page, then all V."""
    whole = cache.view(PAGES if len(cache) > 1 else 1, HEADS, 2, BLOCK, WIDTH)
    return whole[:, :, 0].transpose(1, 2), whole[:, :, 1].transpose(1, 2)


def pairs(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K column by column, two columns of each token together, as products of bfloat16 want it."""
    whole = cache.view(len(cache), HEADS, 2, BLOCK * WIDTH)
    keys = whole[:, :, 0].view(-1, HEADS, WIDTH // 2, BLOCK, 2).permute(0, 3, 1, 2, 4)
    return keys, whole[:, :, 1].view(-1, HEADS, BLOCK, WIDTH).transpose(1, 2)


def layer_of(order: Callable[..., Any], dtype: torch.dtype) -> PagedLayer:
    def update(
        layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        assert layer.num_kv_heads == HEADS
        assert key.dtype == value.dtype == cache.dtype
        for part, given in zip(order(cache), (key, value), strict=True):
            shape = (HEADS, *part.shape[3:])
            for row, slot in zip(given, slots.tolist(), strict=True):
                part[slot // BLOCK, slot % BLOCK] = row.view(shape)

    cache = torch.randn(PAGES, HEADS, BLOCK, 2 * WIDTH).to(dtype)
    layer = SimpleNamespace(
        kv_cache=cache,
        num_kv_heads=HEADS,
        head_size=WIDTH,
        impl=SimpleNamespace(do_kv_cache_update=update),
    )
    return PagedLayer(layer, BLOCK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("order", [apart, halves, pairs], ids=lambda order: order.__name__)
def test_what_is_read_is_what_was_written(order: Any, dtype: torch.dtype) -> None:
    layer = layer_of(order, dtype)
    blocks = torch.tensor([4, 0, 7, 2])
    keys, values = torch.randn(2, 60, HEADS, WIDTH).to(dtype)
    layer.write(keys, values, layer.slots(blocks, 0, 60))
    kept = layer.cache.clone()
    for first, stop in ((0, 60), (0, 1), (15, 17), (16, 32), (33, 59)):
        found = layer.read(blocks, first, stop)
        assert torch.equal(found[0], keys[first:stop].transpose(0, 1))
        assert torch.equal(found[1], values[first:stop].transpose(0, 1))
    assert torch.equal(layer.cache, kept), "measuring writes into no page"


def test_a_backend_that_keeps_something_else_is_refused() -> None:
    def lossy(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, _ = apart(cache)
        return keys, keys.clone()

    layer = layer_of(lossy, torch.float32)
    with pytest.raises(UnsupportedModelError, match="does not keep K and V as they are written"):
        layer.read(torch.tensor([1]), 0, 4)
