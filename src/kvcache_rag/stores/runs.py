"""Runs of bytes: read a file, or bytes in memory, straight to their destination.

A chunk's place in a larger buffer is many runs of bytes with gaps between them; one `preadv` fills
many runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch

from kvcache_rag.errors import CorruptChunkError

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.stores.bytes import Blob, Buffer


# Fill the buffers, in order, with the bytes from an offset on; return how many were read, which may
# be fewer than asked for and is 0 at the end.
ReadV = Callable[[Sequence[memoryview], int], int]

_MAX_BUFFERS = 1024  # IOV_MAX: the kernel takes no more per call

_MAX_BYTES = 256 << 10  # what was just read is hashed while it is in the processor's cache


def views(tensor: Tensor) -> list[memoryview] | None:
    """The tensor's memory as runs of bytes in the order of its elements.

    Returns:
        Writable views, none for a tensor without elements; None when the memory cannot be addressed
        (another device, or single elements with gaps between them).
    """
    if tensor.numel() == 0:
        return []
    if tensor.device.type != "cpu" or tensor.dim() == 0 or tensor.stride(-1) != 1:
        return None
    array = tensor.detach().view(torch.uint8).numpy()
    run, axis = 1, array.ndim
    while axis and (array.shape[axis - 1] == 1 or array.strides[axis - 1] == run):
        axis -= 1
        run *= array.shape[axis]
    places = product(*map(range, array.shape[:axis]))
    return [memoryview(array[place]).cast("B") for place in places]


def read_views(
    read: ReadV, offset: int, targets: Sequence[memoryview], seen: Callable[[memoryview], object]
) -> None:
    """Fill `targets` with the bytes from `offset` on.

    Args:
        read: Reads the source.
        offset: Where to begin, in bytes.
        targets: Memory to fill, in order.
        seen: Called with every piece, in order, right after it was read.

    Raises:
        CorruptChunkError: If the source ends before.
        OSError: If it cannot be read.
    """
    for batch in _batches(targets):
        pending = batch
        while pending:
            count = read(pending, offset)
            if count <= 0:
                raise CorruptChunkError("the file is shorter than its header says")
            offset += count
            pending = _advanced(pending, count)
        for view in batch:
            seen(view)


def positional(descriptor: int) -> ReadV:
    """Read an open file, with one system call for many buffers where the system has `preadv`."""
    if not hasattr(os, "preadv"):
        return sequential(descriptor)
    return lambda buffers, offset: os.preadv(descriptor, buffers, offset)


def sequential(descriptor: int) -> ReadV:
    """Read an open file buffer by buffer: the plain path, for systems without `preadv`."""

    def read(buffers: Sequence[memoryview], offset: int) -> int:
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(buffers[0]))
        buffers[0][: len(data)] = data
        return len(data)

    return read


def in_memory(data: Buffer) -> ReadV:
    """Read bytes that are here already."""
    view = memoryview(data)  # whose pieces are no copies

    def read(buffers: Sequence[memoryview], offset: int) -> int:
        begin = offset
        for buffer in buffers:
            piece = view[begin : begin + len(buffer)]
            buffer[: len(piece)] = piece
            begin += len(piece)
        return begin - offset

    return read


def is_open_file(blob: Blob) -> bool:
    """Whether it is read from where it is needed, not in memory already."""
    return hasattr(blob, "fileno")


def source(blob: Blob) -> tuple[ReadV, int]:
    """How to read what a place gave, and how many bytes it has."""
    if hasattr(blob, "fileno"):
        descriptor = blob.fileno()
        return positional(descriptor), os.fstat(descriptor).st_size
    return in_memory(blob), len(blob)


def close(blob: Blob) -> None:
    """Close what is open."""
    if hasattr(blob, "close"):
        blob.close()


def _batches(targets: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    batch: list[memoryview] = []
    size = 0
    for target in targets:
        for begin in range(0, len(target), _MAX_BYTES):
            piece = target[begin : begin + _MAX_BYTES]
            if len(batch) == _MAX_BUFFERS or size + len(piece) > _MAX_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += len(piece)
    if batch:
        yield batch


def _advanced(pending: list[memoryview], count: int) -> list[memoryview]:
    done = 0
    while done < len(pending) and count >= len(pending[done]):
        count -= len(pending[done])
        done += 1
    rest = pending[done:]
    if count:
        rest[0] = rest[0][count:]
    return rest


_BUFFER = 4 << 20


def read_bytes(read: ReadV, offset: int, count: int) -> bytearray:
    """Exactly so many bytes from an offset on.

    Raises:
        CorruptChunkError: If there are fewer.
    """
    buffer = bytearray(count)
    read_views(read, offset, [memoryview(buffer)], bool)
    return buffer


def read_through(
    read: ReadV, offset: int, count: int, seen: Callable[[memoryview], object]
) -> None:
    """Read `count` bytes from `offset` on, a piece at a time."""
    buffer = memoryview(bytearray(min(_BUFFER, count)))
    done = 0
    while done < count:
        part = buffer[: min(len(buffer), count - done)]
        read_views(read, offset + done, [part], seen)
        done += len(part)
