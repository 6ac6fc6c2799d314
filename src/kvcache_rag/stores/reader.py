"""Chunks that are read layer by layer, each layer straight to its place in a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.chunk import ChunkKV


class ChunkReader(ABC):
    """A chunk that a store holds, opened for one reading.

    Used by one thread at a time.  Nothing it gave counts before `finish` has returned.

    Attributes:
        tier: Name of the tier that holds the chunk.
        tokens: Token ids, `(tokens,)` int32.
        nbytes: Bytes of its keys and values.
    """

    tier: str
    tokens: Tensor
    nbytes: int

    @abstractmethod
    def aim(self, out: ChunkKV) -> None:
        """Say where the chunk goes, before its first layer; `out` has its layout and length."""

    @abstractmethod
    def layer(self, group: int, place: int) -> tuple[Tensor, Tensor] | None:
        """Read K and V of one layer.

        Args:
            group: Index of the layer group.
            place: Which of its layers; every layer once, ascending.

        Returns:
            None when they were read to where they go; else K and V, `(heads, tokens, width)`, in
            memory apart from that, which must not be written to.

        Raises:
            CorruptChunkError: If it is damaged; it was put aside.
            ChunkNotFoundError: If it cannot be read.
        """

    def read(self, out: ChunkKV) -> None:
        """Read all layers to `out`; raises what `layer` does."""
        self.aim(out)
        for group, layers in enumerate(out.layout.groups):
            for place in range(len(layers.layers)):
                found = self.layer(group, place)
                if found is not None:
                    out.keys(group)[place].copy_(found[0])
                    out.values(group)[place].copy_(found[1])

    @abstractmethod
    def finish(self) -> None:
        """Verify what was read, and count it.

        Raises:
            CorruptChunkError: If it is damaged; it was put aside.
            ChunkNotFoundError: If it cannot be read.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Let go of what is open; also without `finish`."""


class ResidentChunk(ChunkReader):
    """A chunk whose tensors are in memory, verified and counted.

    Attributes:
        chunk: The chunk, shared with others and never written to.
    """

    def __init__(self, chunk: ChunkKV, tier: str) -> None:
        """Give out the tensors of `chunk`, which came from `tier`."""
        self.chunk, self.tier = chunk, tier
        self.tokens, self.nbytes = chunk.tokens, chunk.nbytes
        self._layers = [
            (chunk.keys(group).unbind(0), chunk.values(group).unbind(0))
            for group in range(len(chunk.tensors))
        ]

    def read(self, out: ChunkKV) -> None:
        """Copy all of it."""
        out.copy_from(self.chunk)

    def aim(self, out: ChunkKV) -> None:
        """Nothing: its tensors stay where they are."""

    def layer(self, group: int, place: int) -> tuple[Tensor, Tensor]:
        """Its own tensors."""
        keys, values = self._layers[group]
        return keys[place], values[place]

    def finish(self) -> None:
        """Nothing: it was counted when it was found."""
