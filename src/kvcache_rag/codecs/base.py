"""What every codec is, and the plain one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.chunk import ChunkKV, ChunkLayout

TensorSpec = tuple[torch.dtype, tuple[int, ...]]


class Codec(ABC):
    """How chunks are written; `name` is in the spec, so two codecs never read each other's files.

    A codec holds no state of a chunk and may be used from any thread.  The names `tokens` and
    `__metadata__` belong to the file and are not for a codec's tensors.

    Attributes:
        name: Its name in files and specs.
        raw_keys: Whether it wants keys as if every token stood at position 0, where a key's columns
            keep their size from token to token; whoever puts and gets chunks turns them.
    """

    name: ClassVar[str]
    raw_keys: ClassVar[bool] = False

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
        """Memory that may be filled with stored bytes directly, or None when they need decoding."""
        del out
        return None


@dataclass(frozen=True)
class Native(Codec):
    """Tensors as the model computed them; bit for bit what was put (error bound 0)."""

    name: ClassVar[str] = "native"

    def expected(self, layout: ChunkLayout, tokens: int) -> dict[str, TensorSpec]:
        """The layout's own dtype and shapes."""
        return {
            name: (layout.dtype, shape)
            for names, group in zip(layout.names(), layout.groups, strict=True)
            for name, shape in zip(names, group.shapes(tokens), strict=True)
        }

    def encode(self, chunk: ChunkKV) -> dict[str, Tensor]:
        """The tensors, packed when they are strided."""
        return {name: tensor.contiguous() for name, tensor in self._named(chunk).items()}

    def decode(self, stored: dict[str, Tensor], out: ChunkKV) -> None:
        """Copy."""
        for name, tensor in self._named(out).items():
            tensor.copy_(stored[name])

    def in_place(self, out: ChunkKV) -> dict[str, Tensor] | None:
        """The tensors of `out` themselves."""
        return self._named(out)

    @staticmethod
    def _named(chunk: ChunkKV) -> dict[str, Tensor]:
        return {
            name: tensor
            for names, tensors in zip(chunk.layout.names(), chunk.tensors, strict=True)
            for name, tensor in zip(names, tensors, strict=True)
        }
