"""Laws of pages: what is read is what was written, in whatever order a backend keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvcache_rag.errors import UnsupportedModelError
from vllm_kvcache_rag.paged import PagedLayer

if TYPE_CHECKING:
    from collections.abc import Callable

    Views = tuple[torch.Tensor, torch.Tensor]

BLOCK, HEADS, WIDTH, PAGES = 16, 2, 32, 9


def packed(cache: torch.Tensor) -> Views:
    """K before V in the columns of `(pages, heads, tokens, columns)`, as FlashAttention does."""
    return cache[..., :WIDTH].transpose(1, 2), cache[..., WIDTH : 2 * WIDTH].transpose(1, 2)


def halves(cache: torch.Tensor) -> Views:
    """All K of a head in a page, then all V."""
    whole = cache.view(len(cache), HEADS, 2, -1, WIDTH)
    return whole[:, :, 0].transpose(1, 2), whole[:, :, 1].transpose(1, 2)


def pairs(cache: torch.Tensor) -> Views:
    """K column by column, two columns of each token together, as products of bfloat16 want it."""
    whole = cache.view(len(cache), HEADS, 2, BLOCK * WIDTH)
    keys = whole[:, :, 0].view(-1, HEADS, WIDTH // 2, BLOCK, 2).permute(0, 3, 1, 2, 4)
    return keys, whole[:, :, 1].view(-1, HEADS, BLOCK, WIDTH).transpose(1, 2)


def second(cache: torch.Tensor) -> Views:
    """K and V side by side behind the number of the page, `(pages, 2, tokens, heads, width)`."""
    return cache[:, 0], cache[:, 1]


def outermost(cache: torch.Tensor) -> Views:
    """All K of all pages, then all V: `(2, pages, tokens, heads, width)`."""
    return cache[0], cache[1]


def scattered(place: Callable[[torch.Tensor], Views]) -> Callable[..., None]:
    """A backend that puts each token of its slot where `place` says."""

    def update(
        layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        assert layer.num_kv_heads == HEADS
        for part, given in zip(place(cache), (key, value), strict=True):
            tokens = part.shape[1]
            for row, slot in zip(given, slots.tolist(), strict=True):
                to = part[slot // tokens, slot % tokens]
                to.copy_(row.view(to.shape).to(to.dtype))

    return update


@dataclass(frozen=True)
class Kept:
    """How a backend keeps pages.

    Attributes:
        memory: What is allocated, in the order in which it lies there.
        view: Of that, what the layer computes with.
        place: Where each number of K and V lies in the view.
    """

    memory: tuple[int, ...]
    view: Callable[[torch.Tensor], torch.Tensor] = lambda memory: memory
    place: Callable[[torch.Tensor], Views] = packed

    def layer(self, dtype: torch.dtype = torch.float32, **changes: Any) -> SimpleNamespace:
        """What vLLM has of a layer, as far as it is looked at."""
        impl = SimpleNamespace(do_kv_cache_update=scattered(self.place))
        told = {
            "kv_cache": self.view(torch.zeros(self.memory, dtype=dtype)),
            "num_kv_heads": HEADS,
            "head_size": WIDTH,
            "impl": impl,
        }
        return SimpleNamespace(**{**told, **changes})


WHOLE = 2 * WIDTH
# Names are those of vLLM's KVCacheLayout: L layers, B pages, H heads, N tokens, C columns.
TAKEN = {
    "LBHNC": Kept((PAGES, HEADS, BLOCK, WHOLE)),
    "LBNHC": Kept((PAGES, BLOCK, HEADS, WHOLE), lambda memory: memory.transpose(1, 2)),
    "LHBNC": Kept((HEADS, PAGES, BLOCK, WHOLE), lambda memory: memory.transpose(0, 1)),
    "BLHNC": Kept((PAGES, 3, HEADS, BLOCK, WHOLE), lambda memory: memory[:, 1]),
    "BLNHC": Kept((PAGES, 3, BLOCK, HEADS, WHOLE), lambda memory: memory[:, 1].transpose(1, 2)),
    "BHLNC": Kept((PAGES, HEADS, 3, BLOCK, WHOLE), lambda memory: memory[:, :, 1]),
    "pages with room behind": Kept(
        (PAGES, HEADS * BLOCK * WHOLE + 64),
        lambda memory: memory[:, :-64].unflatten(1, (HEADS, BLOCK, WHOLE)),
    ),
    "pages of two blocks of the kernel": Kept((2 * PAGES, HEADS, BLOCK // 2, WHOLE)),
    "the same, by tokens": Kept(
        (2 * PAGES, BLOCK // 2, HEADS, WHOLE), lambda memory: memory.transpose(1, 2)
    ),
    "halves": Kept((PAGES, HEADS, BLOCK, WHOLE), place=halves),
    "pairs": Kept((PAGES, HEADS, BLOCK, WHOLE), place=pairs),
    "K beside V": Kept((PAGES, 2, BLOCK, HEADS, WIDTH), place=second),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kept", TAKEN.values(), ids=TAKEN)
def test_what_is_read_is_what_stands_there(kept: Kept, dtype: torch.dtype) -> None:
    layer = kept.layer(dtype)
    paged = PagedLayer(layer, BLOCK, PAGES)
    assert not paged.cache.any(), "measuring leaves nothing behind"
    blocks = torch.tensor([4, 0, 7, 2])
    keys, values = torch.randn(2, 60, HEADS, WIDTH).to(dtype)
    paged.write(keys, values, paged.slots(blocks, 0, 60))
    # By plain indexing: page after page, token after token.
    for part, given in zip(kept.place(paged.cache), (keys, values), strict=True):
        tokens = part.shape[1]
        for token in range(60):
            slot = int(blocks[token // BLOCK]) * BLOCK + token % BLOCK
            assert torch.equal(
                part[slot // tokens, slot % tokens].flatten(), given[token].flatten()
            )
    for first, stop in ((0, 60), (0, 1), (15, 17), (16, 32), (33, 59)):
        found = paged.read(blocks, first, stop)
        assert torch.equal(found[0], keys[first:stop].transpose(0, 1))
        assert torch.equal(found[1], values[first:stop].transpose(0, 1))


def rounded(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
    """Keeps eight bits of each number."""
    eight = (part.to(torch.float8_e5m2).to(part.dtype) for part in (key, value))
    scattered(packed)(layer, *eight, cache, slots)


def failing(*given: Any) -> None:
    raise ValueError("too many values to unpack (expected 2)")


def backwards(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
    """Counts pages from behind."""
    page = len(cache) - 1 - slots // BLOCK
    scattered(packed)(layer, key, value, cache, page * BLOCK + slots % BLOCK)


def greedy(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
    """Writes into the page behind, too."""
    scattered(packed)(layer, key, value, cache, slots)
    if len(cache) > 1:
        scattered(packed)(layer, key, value, cache, (slots + BLOCK) % (len(cache) * BLOCK))


def writes(update: Any) -> dict[str, Any]:
    return {"impl": SimpleNamespace(do_kv_cache_update=update)}


PLAIN = TAKEN["LBHNC"]
REFUSED = {
    "K of all pages before V": (
        Kept((2, PAGES, BLOCK, HEADS, WIDTH), place=outermost), {}, {}, "has 2 pages, not 9"
    ),
    "pages of fewer tokens": (
        Kept((PAGES, HEADS, BLOCK // 2, WHOLE)), {}, {}, "1024 numbers.*take 2048"
    ),
    "V is narrower than K": (
        Kept((PAGES, HEADS, BLOCK, WIDTH + 16)), {}, {}, "1536 numbers.*take 2048"
    ),
    "scales beside the numbers": (
        Kept((PAGES, HEADS, BLOCK, WHOLE + 4)), {}, {}, "2176 numbers.*take 2048"
    ),
    "heads of another rank": (
        Kept((PAGES, 2 * HEADS, BLOCK, WHOLE)), {}, {}, "4096 numbers.*take 2048"
    ),
    "bytes": (PLAIN, {"dtype": torch.uint8}, {}, "numbers of torch.uint8"),
    "8-bit floats": (PLAIN, {"dtype": torch.float8_e4m3fn}, {}, "numbers of torch.float8_e4m3fn"),
    "no pages": (PLAIN, {}, {"kv_cache": []}, "a list in place of a tensor"),
    "written by the forward pass": (
        PLAIN, {}, {"impl": SimpleNamespace()}, "no do_kv_cache_update"
    ),
    "a function that takes something else": (
        PLAIN, {}, writes(failing), "too many values to unpack"
    ),
    "K twice": (
        Kept(PLAIN.memory, place=lambda cache: (packed(cache)[0],) * 2), {}, {},
        "does not keep K and V as they are written",
    ),
    "numbers that are rounded": (
        PLAIN, {}, writes(rounded), "does not keep K and V as they are written"
    ),
    "pages in another order": (
        PLAIN, {}, writes(backwards), "does not keep K and V as they are written"
    ),
    "pages of others": (
        PLAIN, {}, writes(greedy), "written into pages of others, too"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_another_layout_is_refused_by_what_was_found(name: str) -> None:
    kept, given, changes, words = REFUSED[name]
    layer = kept.layer(**given, **changes)
    with pytest.raises(UnsupportedModelError, match=words) as refused:
        PagedLayer(layer, BLOCK, PAGES)
    said = str(refused.value)
    assert "\n" not in said
    assert "SimpleNamespace" in said, "which backend"
    assert "--attention-backend" in said, "what to do"


def test_numbers_of_others_are_as_before() -> None:
    """Pages that hold something, and the generator of random numbers."""
    layer = PLAIN.layer()
    layer.kv_cache.copy_(torch.randn(PLAIN.memory))
    kept, state = layer.kv_cache.clone(), torch.get_rng_state()
    PagedLayer(layer, BLOCK, PAGES)
    assert torch.equal(layer.kv_cache, kept)
    assert torch.equal(torch.get_rng_state(), state)
