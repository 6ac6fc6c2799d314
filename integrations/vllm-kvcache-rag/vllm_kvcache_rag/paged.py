"""Tokens of one layer in vLLM's paged cache, in whatever order its attention backend uses."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from kvcache_rag.errors import UnsupportedModelError

# Numbers that are kept as they are written.
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)

# Whole numbers up to this are exact in all of them.
_EXACT: Final = 256

# What a backend raises that takes other arguments, or another order of pages.
_UNFIT: Final = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class PagedLayer:
    """Writes by the backend's own function; where that puts each number is measured for reading.

    Attributes:
        layer: vLLM's attention layer.
        block: Tokens of a page.
        pages: Their number.
    """

    def __init__(self, layer: Any, block: int, pages: int) -> None:
        """Take a layer whose `kv_cache` was allocated, and that nothing computes with yet.

        Two pages are written, read and given back as they were.

        Args:
            layer: vLLM's, with `kv_cache`, `num_kv_heads`, `head_size` and `impl`.
            block: Tokens of a page.
            pages: Their number; a kernel may split each into equal parts, `kv_cache` has those.

        Raises:
            UnsupportedModelError: Naming the backend and what its pages are, if they are no K and V
                that are found again as they were written.
        """
        self.layer, self.block, self.pages = layer, block, pages
        wrong = self._wrong_shape()
        if wrong:
            raise self._refusal(wrong)
        # Page 0 is vLLM's for what nobody reads; these two are the last and one in the middle.
        lent = torch.tensor(sorted({pages - 1, pages // 2}, reverse=True))
        kept, beside = self._numbers(lent), self._numbers(self._beside(lent))
        try:
            self._places = self._measured(lent[0])
            self._prove(lent)
        except _UNFIT as error:
            raise self._refusal(str(error).partition("\n")[0]) from error
        finally:
            self._by_page[lent] = kept
        if not torch.equal(self._numbers(self._beside(lent)), beside):
            raise self._refusal("a token is written into pages of others, too")

    @property
    def cache(self) -> Tensor:
        """All pages, the first dimension their number, or that of a kernel's parts of them."""
        pages: Tensor = self.layer.kv_cache
        return pages

    @property
    def _by_page(self) -> Tensor:
        return torch.unflatten(self.cache, 0, (self.pages, -1))  # (pages, parts, ...)

    def _numbers(self, blocks: Tensor) -> Tensor:
        return self._by_page[blocks.to(self.cache.device)]

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
        self.layer.impl.do_kv_cache_update(self.layer, keys, values, self.cache, slots)

    def read(self, blocks: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens `first..stop`, `(kv_heads, tokens, width)` each."""
        low, high = first // self.block, -(-stop // self.block)
        pages = self._numbers(blocks[low:high]).flatten(1)
        begin, end = first - low * self.block, stop - low * self.block
        parts = []
        for place in self._places:
            whole = pages[:, place].transpose(0, 1).flatten(1, 2)  # (kv_heads, tokens, width)
            parts.append(whole[:, begin:end].contiguous())
        return parts[0], parts[1]

    # ------------------------------------------------------------------------------------ checking
    def _wrong_shape(self) -> str:
        """What of the pages cannot be K and V of this layer; "" if nothing is seen."""
        cache, layer = self.layer.kv_cache, self.layer
        if not isinstance(cache, Tensor):
            return f"there is a {type(cache).__name__} in place of a tensor"
        if cache.dtype not in _DTYPES:
            return f"they hold numbers of {cache.dtype}"
        if len(cache) % self.pages:
            return f"the first dimension has {len(cache)} pages, not {self.pages}"
        found = cache.numel() // self.pages
        wanted = 2 * self.block * layer.num_kv_heads * layer.head_size
        if found != wanted:
            return (
                f"a page has {found} numbers, and K and V of {self.block} tokens take {wanted} "
                f"({layer.num_kv_heads} heads, {layer.head_size} columns)"
            )
        if not hasattr(layer.impl, "do_kv_cache_update"):
            return "it has no do_kv_cache_update, by which tokens are written"
        return ""

    def _refusal(self, what: str) -> UnsupportedModelError:
        cache, backend = self.layer.kv_cache, type(self.layer.impl).__name__
        shape = ""
        if isinstance(cache, Tensor):
            shape = f" (its pages: {cache.dtype} {tuple(cache.shape)}, strides {cache.stride()})"
        return UnsupportedModelError(
            f"kvcache-rag does not stitch chunks into pages of {backend}{shape}: {what}; serve "
            "without the connector, or with another --attention-backend or --block-size"
        )

    def _beside(self, blocks: Tensor) -> Tensor:
        """The pages before and behind some."""
        near = {page + step for page in blocks.tolist() for step in (-1, 1)}
        return torch.tensor(sorted((near & {*range(self.pages)}) - {*blocks.tolist()}))

    def _measured(self, page: Tensor) -> Tensor:
        """Where in a page each number lies, `(2, kv_heads, block, width)`, of K and of V.

        Numbered tokens are written into `page`, digit by digit, and looked up.
        """
        layer, device = self.layer, self.cache.device
        shape = (2, self.block, layer.num_kv_heads, layer.head_size)
        slots = self.slots(page[None], 0, self.block).to(device)
        rest = torch.arange(2 * shape[1] * shape[2] * shape[3], device=device).view(shape)
        found, weight = torch.zeros(rest.numel(), dtype=torch.long, device=device), 1
        while weight <= rest.numel():
            # A digit is written as itself and one: zero is what nobody wrote.
            digit = (rest % (_EXACT - 1) + 1).to(self.cache.dtype)
            self._by_page[page] = 0
            self.write(digit[0], digit[1], slots)
            found += (self._numbers(page).flatten().round().long() - 1) * weight
            rest, weight = rest // (_EXACT - 1), weight * (_EXACT - 1)
        order = found.sort()
        if not torch.equal(order.values, torch.arange(rest.numel(), device=device)):
            raise ValueError("it does not keep K and V as they are written")
        return order.indices.view(shape).transpose(1, 2)

    def _prove(self, blocks: Tensor) -> None:
        """Write numbers into pages and read them back."""
        layer, tokens = self.layer, len(blocks) * self.block
        made = torch.Generator().manual_seed(0)  # the engine's own is left as it is
        shape = (2, tokens, layer.num_kv_heads, layer.head_size)
        given = torch.randn(shape, generator=made).to(self.cache.device, self.cache.dtype)
        self.write(given[0], given[1], self.slots(blocks, 0, tokens).to(given.device))
        found = torch.stack(self.read(blocks, 0, tokens))
        if not torch.equal(found, given.transpose(1, 2)):
            raise ValueError("it does not keep K and V as they are written")
