"""Tokens of one layer in vLLM's paged cache, in whatever order its attention backend uses."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from kvcache_rag.errors import UnsupportedModelError

# Whole numbers up to this are exact in bfloat16.
_EXACT: Final = 256


class PagedLayer:
    """Writes by the backend's own function; where that puts each number is measured for reading.

    Attributes:
        layer: vLLM's attention layer.
        block: Tokens of a page.
    """

    def __init__(self, layer: Any, block: int) -> None:
        """Take a layer whose `kv_cache` was allocated."""
        self.layer, self.block = layer, block

    @property
    def cache(self) -> Tensor:
        """All pages, the first dimension their number."""
        pages: Tensor = self.layer.kv_cache
        return pages

    def slots(self, blocks: Tensor, first: int, stop: int) -> Tensor:
        """Where tokens `first..stop` of a request lie, given its pages."""
        places = torch.arange(first, stop)
        return blocks[places // self.block] * self.block + places % self.block

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Put tokens into pages.

        Args:
            keys: `(tokens, kv_heads, width)` of the cache's dtype, on its device.
            values: The same.
            slots: `(tokens,)` as `slots` gives them, on its device.
        """
        self._write(keys, values, self.cache, slots)

    def _write(self, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        self.layer.impl.do_kv_cache_update(self.layer, keys, values, cache, slots)

    def read(self, blocks: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens `first..stop`, `(kv_heads, tokens, width)` each."""
        low, high = first // self.block, -(-stop // self.block)
        pages = self.cache[blocks[low:high].to(self.cache.device)].flatten(1)
        begin, end = first - low * self.block, stop - low * self.block
        parts = []
        for place in self._places:
            whole = pages[:, place].transpose(0, 1).flatten(1, 2)  # (kv_heads, tokens, width)
            parts.append(whole[:, begin:end].contiguous())
        return parts[0], parts[1]

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Where in a page each number of K and of V lies, `(kv_heads, block, width)`.

        Numbered tokens are written into a page of their own, digit by digit, and looked up.
        """
        heads, width = self.layer.num_kv_heads, self.layer.head_size
        scratch, device = torch.empty_like(self.cache[:1]), self.cache.device
        slots = torch.arange(self.block, device=device)
        shape = (self.block, heads, width)
        numbers = torch.arange(self.block * heads * width, device=device).view(shape)
        return self._looked_up(numbers, scratch, slots, 0), self._looked_up(
            numbers, scratch, slots, 1
        )

    def _looked_up(self, numbers: Tensor, scratch: Tensor, slots: Tensor, slot: int) -> Tensor:
        found = torch.zeros(scratch.numel(), dtype=torch.long, device=scratch.device)
        rest, weight = numbers, 1
        while weight <= numbers.numel():
            # A digit is written as itself and one: zero is what nobody wrote.
            digit = (rest % (_EXACT - 1) + 1).to(scratch.dtype)
            nothing = torch.zeros_like(digit)
            scratch.zero_()
            pair = (nothing, digit) if slot else (digit, nothing)
            self._write(pair[0], pair[1], scratch, slots)
            digits = scratch.flatten().float().round().long()
            written = digits > 0
            found += torch.where(written, (digits - 1) * weight, 0)
            rest, weight = rest // (_EXACT - 1), weight * (_EXACT - 1)
        places = torch.full((numbers.numel(),), -1, dtype=torch.long, device=scratch.device)
        places[found[written]] = written.nonzero()[:, 0]
        if int(written.sum()) != numbers.numel() or bool((places < 0).any()):
            backend = type(self.layer.impl).__name__
            raise UnsupportedModelError(f"{backend} does not keep K and V as they are written")
        return places.view(numbers.shape).transpose(0, 1)
