"""What quantising codecs share: the walk over K and V slots, and rounding of their scales."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from kvcache_rag.codecs.base import Codec
from kvcache_rag.errors import CorruptChunkError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from kvcache_rag.chunk import ChunkKV, ChunkLayout
    from kvcache_rag.codecs.base import TensorSpec

# Along which axis of `[layers, heads, tokens, width]` the values of one scale lie (KIVI, arXiv
# 2402.02750): a key's columns differ in size far more than its tokens do, a value's do not.
AXES = {"k": -2, "v": -1}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Values worked on at once: on a processor what lies in between stays in its cache, a device wants
# few large pieces.
_BLOCK, _DEVICE_BLOCK = 1 << 19, 1 << 24


class QuantisedCodec(Codec):
    """A codec that stores each K and V slot, `[layers, heads, tokens, width]`, by itself.

    Scales have the dtype of the layout: in the 16-bit dtypes they cost half of what float32 would,
    which `Int8` needs for its ratio, their rounding is part of the error bound, and a file never
    passes for one of another dtype.
    """

    raw_keys: ClassVar[bool] = True

    def expected(self, layout: ChunkLayout, tokens: int) -> dict[str, TensorSpec]:
        """Dtype and shape of the parts of every slot.

        Raises:
            InvalidInputError: If the layout's dtype cannot be quantised.
        """
        if layout.dtype not in _DTYPES:
            raise InvalidInputError(
                f"the codec {self.name} stores bfloat16, float16 and float32, not {layout.dtype}; "
                "use Native()"
            )
        found: dict[str, TensorSpec] = {}
        for group, tail in zip(layout.groups, _tails(layout), strict=True):
            for slot, (heads, width) in (("k", group.key_shape), ("v", group.value_shape)):
                shape = (len(group.layers), heads, tokens, width)
                for part, spec in self.parts(shape, AXES[slot], layout.dtype).items():
                    found[f"{slot}{part}{tail}"] = spec
        return found

    def encode(self, chunk: ChunkKV) -> dict[str, Tensor]:
        """Quantise.

        Raises:
            CorruptChunkError: If a value is infinite, NaN, or above half of the dtype's range.
        """
        encoded = {
            name: torch.empty(shape, dtype=dtype, device=chunk.tensors[0][0].device)
            for name, (dtype, shape) in self.expected(chunk.layout, len(chunk)).items()
        }
        for slot, tail, values in _slots(chunk):
            parts = self._named_parts(encoded, slot, tail)
            for block in _blocks(values):
                self.quantise(
                    values[block], AXES[slot], {name: part[block] for name, part in parts.items()}
                )
        return encoded

    def decode(self, stored: dict[str, Tensor], out: ChunkKV) -> None:
        """Write the values straight into `out`, rounded once to its dtype."""
        for slot, tail, values in _slots(out):
            parts = {
                name: part.to(values.device)  # the small form travels
                for name, part in self._named_parts(stored, slot, tail).items()
            }
            for block in _blocks(values):
                self.restore(
                    {name: part[block] for name, part in parts.items()}, AXES[slot], values[block]
                )

    @staticmethod
    def _named_parts(tensors: dict[str, Tensor], slot: str, tail: str) -> dict[str, Tensor]:
        names = {f"{slot}{part}{tail}": part for part in ("q", "s", "z")}
        return {part: tensors[name] for name, part in names.items() if name in tensors}

    @abstractmethod
    def parts(
        self, shape: tuple[int, int, int, int], axis: int, dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """Dtype and shape of the parts `q`, `s` and perhaps `z` of a slot; layers come first."""

    @abstractmethod
    def quantise(self, values: Tensor, axis: int, parts: dict[str, Tensor]) -> None:
        """Write the parts of some layers of a slot."""

    @abstractmethod
    def restore(self, parts: dict[str, Tensor], axis: int, out: Tensor) -> None:
        """Write some layers of a slot, `out` possibly strided."""


def extremes(wide: Tensor, axis: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Smallest and largest of float32 values along an axis, which is kept with length 1.

    Raises:
        CorruptChunkError: If a value is infinite, NaN, or above half of the range of `dtype`, in
            which what is restored could overflow.
    """
    low, high = wide.amin(axis, True), wide.amax(axis, True)  # `aminmax` is ten times slower
    limit = torch.finfo(dtype).max / 2
    if not bool((low >= -limit).all() & (high <= limit).all()):  # a NaN compares as false
        raise CorruptChunkError(
            "the chunk holds values that are infinite, NaN or too large to be quantised; it is "
            "served uncached"
        )
    return low, high


def at_least(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest scales of a dtype that are not below float32 `wide` and `smallest_scale`."""
    near = wide.to(dtype)
    # The next number above a positive one is the next integer of its bits.
    bits = near.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    up: Tensor = (bits + (near.float() < wide)).view(dtype)
    return up.clamp_min(smallest_scale(dtype))


def smallest_scale(dtype: torch.dtype) -> float:
    """The smallest scale of a dtype; smaller ones would be flushed to 0 in float32 arithmetic."""
    information = torch.finfo(dtype)
    subnormal = information.smallest_normal * information.eps
    return max(subnormal, torch.finfo(torch.float32).smallest_normal)


def _tails(layout: ChunkLayout) -> list[str]:
    count = len(layout.groups)
    return [""] if count == 1 else [f".{index}" for index in range(count)]


def _slots(chunk: ChunkKV) -> Iterator[tuple[str, str, Tensor]]:
    for index, tail in enumerate(_tails(chunk.layout)):
        yield "k", tail, chunk.keys(index)
        yield "v", tail, chunk.values(index)


def _blocks(values: Tensor) -> Iterator[slice]:
    """Layers of a slot, some at a time; none of a slot without values."""
    if values.numel() == 0:
        return
    most = _BLOCK if values.device.type == "cpu" else _DEVICE_BLOCK
    step = max(1, most // values[0].numel())
    for first in range(0, values.shape[0], step):
        yield slice(first, first + step)
