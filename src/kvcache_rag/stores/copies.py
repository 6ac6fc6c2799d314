"""Copies of chunks that a store keeps in memory, this machine's or a device's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcache_rag.chunk import ChunkKV
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.stores.lane import lane_to

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.chunk import ChunkLayout

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Home:
    """Memory of one kind.

    Attributes:
        device: Whose memory.
        pinned: Whether a CUDA device can read it by itself, beside what the processor does.
    """

    device: torch.device = _CPU
    pinned: bool = False

    @classmethod
    def checked(cls, device: torch.device | str, *, pinned: bool = False) -> Home:
        """Memory that is there.

        Raises:
            InvalidInputError: If this machine does not have it.
        """
        try:
            found = allocate((1,), torch.uint8, torch.device(device), pinned=pinned).device
        except (RuntimeError, AssertionError) as error:  # the latter from a PyTorch without CUDA
            what = "pinned memory" if pinned else f"memory of the device {str(device)!r}"
            reason = str(error).partition("\n")[0][:120]
            raise InvalidInputError(
                f"there is no {what} here ({reason}); use MemoryStore() without "
                f"{'pinned' if pinned else 'device'}"
            ) from None
        return cls(found, pinned)

    def empty(self, layout: ChunkLayout, tokens: int) -> tuple[tuple[Tensor, ...], ...]:
        """Uninitialised tensors for a chunk, one tuple per group."""
        return tuple(
            tuple(
                allocate(shape, layout.dtype, self.device, pinned=self.pinned)
                for shape in group.shapes(tokens)
            )
            for group in layout.groups
        )


def allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, pinned: bool
) -> Tensor:
    """Uninitialised memory."""
    return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)


def private_copy(chunk: ChunkKV, home: Home | None = None) -> ChunkKV:
    """A finished copy that shares nothing, in main memory by default, in and out of inference mode.

    Args:
        chunk: On any device.
        home: Where the copy is to lie.
    """
    home = home or Home()
    with torch.inference_mode(mode=False), torch.no_grad():
        tensors = home.empty(chunk.layout, len(chunk))
        copy = ChunkKV(chunk.layout, chunk.tokens.cpu().clone(), chunk.start, tensors)
        lane = lane_to(home.device)
        touched = [tensor for one in (copy, chunk) for group in one.tensors for tensor in group]
        done = lane.send(lambda: copy.copy_from(chunk), touched)
        # Threads that use other streams see all of it, and so does who changes the chunk next.
        done.synchronize()
    return copy


def size_in_memory(chunk: ChunkKV) -> int:
    """Bytes of the keys, the values and the token ids."""
    return chunk.nbytes + chunk.tokens.nbytes
