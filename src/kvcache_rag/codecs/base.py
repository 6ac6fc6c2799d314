"""The base class of codecs, the plain codec, and what quantising codecs share.

They share the walk over K and V slots and the rounding of scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch

from kvcache_rag.errors import CorruptChunkError, InvalidInputError
from kvcache_rag.kv.chunk import ChunkKV, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from kvcache_rag.kv.chunk import ChunkLayout


Room: TypeAlias = "Callable[[int], Tensor]"
"""Returns the given number of bytes of main memory, `(nbytes,)` uint8, aligned for any dtype."""


class Codec(ABC):
    """How chunks are written; `name` is in the spec, so codecs never read each other's files.

    A codec holds no state of a chunk and may be used from any thread.  The names `tokens` and
    `__metadata__` belong to the file; a codec's tensors must not use them.

    Attributes:
        name: Its name in files and specs.
        raw_keys: Whether it needs keys as if every token were at position 0, where a key's columns
            keep their size from token to token.  The code that puts and gets chunks rotates them.
        is_attended: Whether attention can read the stored form directly.
    """

    name: ClassVar[str]
    raw_keys: ClassVar[bool] = False
    is_attended: ClassVar[bool] = False

    @abstractmethod
    def expected(self, layout: ChunkLayout, tokens: int) -> dict[str, TensorSpec]:
        """Dtype and shape of every tensor of a stored chunk of `tokens` tokens."""

    @abstractmethod
    def encode(self, chunk: ChunkKV) -> dict[str, Tensor]:
        """Named contiguous tensors, as `expected` says; may share memory with the chunk.

        Raises:
            CorruptChunkError: If the chunk holds values that this codec cannot store.
        """

    @abstractmethod
    def decode(self, stored: dict[str, Tensor], out: ChunkKV) -> None:
        """Write the tensors of a stored chunk into `out`, which may be strided or on a device."""

    def in_place(self, out: ChunkKV) -> dict[str, Tensor] | None:
        """Memory that stored bytes may fill directly, or None if they need decoding."""
        del out
        return None

    def nbytes(self, layout: ChunkLayout, tokens: int) -> int:
        """Bytes of the tensors of a stored chunk of `tokens` tokens."""
        specs = self.expected(layout, tokens).values()
        return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in specs)

    def empty(
        self, layout: ChunkLayout, tokens: int, room: Room | None = None
    ) -> dict[str, Tensor]:
        """Uninitialised main memory for a stored chunk, usable in and out of inference mode.

        Args:
            layout: Layout of the chunk.
            tokens: Its number of tokens.
            room: Gives the memory; None for new memory.
        """
        with torch.inference_mode(mode=False):
            return {
                name: torch.empty(shape, dtype=dtype)
                if room is None
                else room(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)
                for name, (dtype, shape) in self.expected(layout, tokens).items()
            }


@dataclass(frozen=True, eq=False)
class EncodedChunk:
    """A chunk in main memory, as its codec stores it; shared and never written to.

    Attributes:
        codec: The codec that encoded it.
        layout: Shapes and dtype of the decoded tensors.
        tokens: Token ids, `(tokens,)` int32, as in `ChunkKV`.
        start: Position of the first token when the keys were computed.
        stored: The codec's tensors.
    """

    codec: Codec
    layout: ChunkLayout
    tokens: Tensor
    start: int
    stored: Mapping[str, Tensor]

    @classmethod
    def of(cls, codec: Codec, chunk: ChunkKV) -> EncodedChunk:
        """Encode a chunk into new memory, usable in and out of inference mode.

        Raises:
            CorruptChunkError: If the chunk holds values that the codec cannot store.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            stored = {name: tensor.cpu() for name, tensor in codec.encode(chunk).items()}
            return cls(codec, chunk.layout, chunk.tokens.cpu().clone(), chunk.start, stored)

    def __len__(self) -> int:
        """Number of tokens."""
        return self.tokens.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(tensor.nbytes for tensor in self.stored.values())

    @property
    def states(self) -> tuple[Mapping[str, Tensor], ...]:
        """What recurrent layers keep, as in `ChunkKV.states`; every codec stores it as it is."""
        return tuple(
            {part: self.stored[name] for name, part in self.layout.state_names(index).items()}
            for index in range(len(self.layout.states))
        )

    def decode(self, out: ChunkKV) -> None:
        """Write the decoded tensors into a chunk of the same layout and length."""
        self.codec.decode(dict(self.stored), out)
        out.tokens.copy_(self.tokens)

    def decoded(self) -> ChunkKV:
        """The decoded chunk in new memory, usable in and out of inference mode."""
        with torch.inference_mode(mode=False), torch.no_grad():
            tensors = self.layout.empty(self.tokens.shape[0])
            out = ChunkKV(self.layout, torch.empty_like(self.tokens), self.start, tensors)
            self.decode(out)
        return out


@dataclass(frozen=True)
class Native(Codec):
    """Tensors as the model computed them: bit for bit what was put (error bound 0)."""

    name: ClassVar[str] = "native"

    def expected(self, layout: ChunkLayout, tokens: int) -> dict[str, TensorSpec]:
        """The layout's dtype and shapes."""
        return {
            name: spec
            for names, specs in zip(layout.names(), layout.specs(tokens), strict=True)
            for name, spec in zip(names, specs, strict=True)
        }

    def encode(self, chunk: ChunkKV) -> dict[str, Tensor]:
        """The tensors, made contiguous if strided."""
        # What is contiguous already is not copied: it goes into the file from where it lies.
        return {name: tensor.contiguous() for name, tensor in _named(chunk).items()}

    def decode(self, stored: dict[str, Tensor], out: ChunkKV) -> None:
        for name, tensor in _named(out).items():
            tensor.copy_(stored[name])  # the shapes are equal, strides and device may not be

    def in_place(self, out: ChunkKV) -> dict[str, Tensor] | None:
        """The tensors of `out` themselves."""
        return _named(out)


def _named(chunk: ChunkKV) -> dict[str, Tensor]:
    """The tensors of a chunk by their names in its file."""
    # [layers, 2, heads, tokens, width], or K and V apart, [layers, heads, tokens, width]
    return {
        name: tensor
        for names, tensors in zip(chunk.layout.names(), chunk.tensors, strict=True)
        for name, tensor in zip(names, tensors, strict=True)
    }


# Along which axis of `[layers, heads, tokens, width]` the values of one scale lie (KIVI, arXiv
# 2402.02750): a key's columns differ in size far more than its tokens do, a value's do not.
AXES = {"k": -2, "v": -1}

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Values worked on at once: on a processor what lies in between stays in its cache, a device wants
# few large pieces.
_BLOCK, _DEVICE_BLOCK = 1 << 19, 1 << 24


class QuantisedCodec(Codec):
    """A codec that stores each K and V slot, `[layers, heads, tokens, width]`, separately.

    Scales have the dtype of the layout.  In 16-bit dtypes they cost half of what float32 would,
    which `Int8` needs for its ratio.  Their rounding is part of the error bound, and a file never
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
        specs: dict[str, TensorSpec] = {}
        for group, tail in zip(layout.groups, _tails(layout), strict=True):
            for slot, (heads, width) in (("k", group.key_shape), ("v", group.value_shape)):
                shape = (len(group.layers), heads, tokens, width)
                for part, spec in self.parts(shape, AXES[slot], layout.dtype).items():
                    # "kq", or "vs.1" in the second of several groups
                    specs[f"{slot}{part}{tail}"] = spec
        return specs | _states_expected(layout)

    def encode(self, chunk: ChunkKV) -> dict[str, Tensor]:
        """Quantise.

        Raises:
            CorruptChunkError: If a value is infinite, NaN, or above half of the dtype's range.
        """
        states = _named_states(chunk)
        encoded = {
            name: torch.empty(shape, dtype=dtype, device=chunk.tensors[0][0].device)
            for name, (dtype, shape) in self.expected(chunk.layout, chunk.tokens.shape[0]).items()
            if name not in states
        }
        for slot, tail, values in _slots(chunk):
            parts = self._named_parts(encoded, slot, tail)
            for block in _blocks(values):
                # [some layers, heads, tokens, width]; parts are views, so this writes to `encoded`.
                self.quantise(
                    values[block], AXES[slot], {name: part[block] for name, part in parts.items()}
                )
        return encoded | {name: tensor.contiguous() for name, tensor in states.items()}

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
        for name, tensor in _named_states(out).items():
            tensor.copy_(stored[name])

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
    # `&`, not `and`: a device is waited for once.
    if not bool((low >= -limit).all() & (high <= limit).all()):  # a NaN compares as false
        raise CorruptChunkError(
            "the chunk holds values that are infinite, NaN or too large to be quantised; it is "
            "served uncached"
        )
    return low, high


def at_least(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest scales of a dtype that are not below float32 `wide` and `smallest_scale`."""
    near = wide.to(dtype)  # to the nearest, so some are too small now
    # The next number above a positive one is the next integer of its bits.
    bits = near.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    # Plus 1 where it is too small, else plus 0.
    up: Tensor = (bits + (near.float() < wide)).view(dtype)
    return up.clamp_min(smallest_scale(dtype))


def smallest_scale(dtype: torch.dtype) -> float:
    """The smallest scale of a dtype; smaller ones would be flushed to 0 in float32 arithmetic."""
    information = torch.finfo(dtype)
    subnormal = information.smallest_normal * information.eps  # the smallest number of the dtype
    return max(subnormal, torch.finfo(torch.float32).smallest_normal)


def _named_states(chunk: ChunkKV) -> dict[str, Tensor]:
    """What recurrent layers keep, by names in the file: no codec rounds it further.

    In 8 bits the states of Mamba2 cost up to half a standard deviation of the logits, and what
    they take hardly grows with a chunk.
    """
    layout = chunk.layout
    return {
        name: tensors[part]
        for index, tensors in enumerate(chunk.states)
        for name, part in layout.state_names(index).items()
    }


def _states_expected(layout: ChunkLayout) -> dict[str, TensorSpec]:
    return {
        name: group.parts[part]
        for index, group in enumerate(layout.states)
        for name, part in layout.state_names(index).items()
    }


def _tails(layout: ChunkLayout) -> list[str]:
    count = len(layout.groups)
    return [""] if count == 1 else [f".{index}" for index in range(count)]


def _slots(chunk: ChunkKV) -> Iterator[tuple[str, str, Tensor]]:
    for index, tail in enumerate(_tails(chunk.layout)):
        # views, [layers, heads, tokens, width] each
        yield "k", tail, chunk.keys(index)
        yield "v", tail, chunk.values(index)


def _blocks(values: Tensor) -> Iterator[slice]:
    """Layers of a slot, some at a time; none of a slot without values."""
    if values.numel() == 0:
        return
    most = _BLOCK if values.device.type == "cpu" else _DEVICE_BLOCK
    step = max(1, most // values[0].numel())  # by the values of one layer
    for first in range(0, values.shape[0], step):
        yield slice(first, first + step)
