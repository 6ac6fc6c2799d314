"""The way of a chunk's bytes from where they are kept to the memory in which they are used.

Bytes of a file are read into reusable host memory, pinned where a CUDA device reads from it.  Once
they are verified they cross as they are (int8 as int8) along the `Lane` to the device, and are
decoded there.  What is written is ready for whatever the current stream is told afterwards; the
caller goes on meanwhile, with the next chunk for example.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcache_rag.chunk import ChunkKV
from kvcache_rag.stores.arena import ALIGNMENT
from kvcache_rag.stores.lane import lane_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from kvcache_rag.codecs import Codec, TensorSpec
    from kvcache_rag.stores.arena import Loan
    from kvcache_rag.stores.lane import Lane


@dataclass(frozen=True, eq=False)
class Staged:
    """Stored tensors of one chunk on their way.

    Attributes:
        tensors: Host memory to read them into, dense, by name.
    """

    tensors: dict[str, Tensor]
    _specs: Mapping[str, TensorSpec]
    _loan: Loan
    _lane: Lane

    def decode(self, codec: Codec, out: ChunkKV) -> None:
        """Send what was read, and decode it where `out` lies; only for what was verified."""

        def work() -> None:
            # All parts in one copy: a call costs as much as some hundred KiB.
            codec.decode(_carved(self._lane.fetch(self._loan.memory), self._specs), out)

        event = self._lane.send(work, _flat(out))
        self._loan.keep_until(event)
        self._lane.follow(event)


@contextmanager
def staged(specs: Mapping[str, TensorSpec], out: ChunkKV) -> Iterator[Staged]:
    """Host memory for the stored tensors of a chunk that goes to the device of `out`.

    Args:
        specs: Dtype and shape by name.
        out: Where the chunk goes.
    """
    lane = lane_to(device_of(out))
    nbytes = sum(_room(spec) for spec in specs.values())
    with lane.arena.lend(nbytes) as loan:
        yield Staged(_carved(loan.memory, specs), specs, loan, lane)


def deliver(chunk: ChunkKV, out: ChunkKV) -> None:
    """Copy a chunk that is kept in memory, this machine's or a device's, into `out`.

    Args:
        chunk: Never written to; its tensors may be let go of at once.
        out: Of the same layout and length.
    """
    lane = lane_to(device_of(out))

    def work() -> None:
        for target, source in zip(_flat(out), _flat(chunk), strict=True):
            target.copy_(lane.fetch(source))

    lane.follow(lane.send(work, [*_flat(out), *_flat(chunk)]))
    out.tokens.copy_(chunk.tokens)


def moved(chunk: ChunkKV, device: torch.device) -> ChunkKV:
    """The chunk on a device: itself when it is there, else a copy, usable in and out of inference.

    Args:
        chunk: Never written to.
        device: Where it is needed.
    """
    if device_of(chunk) == device:
        return chunk
    with torch.inference_mode(mode=False), torch.no_grad():
        tensors = chunk.layout.empty(len(chunk), device)
        copy = ChunkKV(chunk.layout, torch.empty_like(chunk.tokens), chunk.start, tensors)
        deliver(chunk, copy)
    return copy


def device_of(chunk: ChunkKV) -> torch.device:
    """Where the keys and values of a chunk lie."""
    return chunk.tensors[0][0].device


def in_main_memory(chunk: ChunkKV) -> bool:
    """Whether bytes can be read straight into a chunk's memory."""
    return device_of(chunk).type == "cpu"


def _flat(chunk: ChunkKV) -> Sequence[Tensor]:
    return [tensor for group in chunk.tensors for tensor in group]


def _room(spec: TensorSpec) -> int:
    dtype, shape = spec
    return -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _carved(memory: Tensor, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Tensors side by side in uint8 memory, as views."""
    found, begin = {}, 0
    for name, (dtype, shape) in specs.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        found[name] = memory[begin : begin + nbytes].view(dtype).view(shape)
        begin += _room((dtype, shape))
    return found
