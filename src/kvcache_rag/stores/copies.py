"""Copies of chunks that a store keeps in memory, this machine's or a device's."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
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
_OWN_PAGES = 1 << 20  # bytes of a tensor from which on it gets pages of its own


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
    """Memory for a kept tensor, whatever it holds."""
    nbytes = math.prod(shape) * dtype.itemsize
    is_plain = device.type == "cpu" and not pinned
    if is_plain and nbytes >= _OWN_PAGES and hasattr(mmap, "MAP_PRIVATE"):
        # Pages of its own, which the system has back as soon as the chunk is dropped.  From the
        # heap, chunks that come and go leave holes that no other one fits into.
        with suppress(OSError):  # too many mappings, for example
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(pages, dtype=dtype).view(shape)
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
