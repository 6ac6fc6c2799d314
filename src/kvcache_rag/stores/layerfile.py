"""A chunk's file read layer by layer: the file is in that order, and a layer fits into the cache.

Where layers of several shapes are mixed, or K and V are apart (MLA), the file is not in the order
of the layers, and `chunkfile.read_file` reads it as a whole.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import xxhash

from kvcache_rag.codecs import Native
from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.stores.chunkfile import check_header
from kvcache_rag.stores.reader import ChunkReader
from kvcache_rag.stores.scatter import positional, read_views, views

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from kvcache_rag.chunk import ChunkKV, ChunkLayout
    from kvcache_rag.codecs import Codec
    from kvcache_rag.stores.chunkfile import FileSpec

_IDS, _TENSOR = "tokens", "kv"


def is_layered(layout: ChunkLayout, codec: Codec) -> bool:
    """Whether files of this layout and codec can be read layer by layer."""
    return isinstance(codec, Native) and layout.names() == ((_TENSOR,),)


class LayerFile(ChunkReader):
    """The file of a chunk, open; header and size are checked, the checksum is at the end."""

    def __init__(
        self,
        descriptor: int,
        size: int,
        spec: FileSpec,
        tier: str,
        guard: Callable[[], AbstractContextManager[None]],
        done: Callable[[float], None],
    ) -> None:
        """Check the header and read the token ids.

        Args:
            descriptor: Of the open file; closed by `close`, or when this raises.
            size: Its size in bytes.
            spec: What it must hold.
            tier: Name of the tier.
            guard: What failed readings run in: it knows what to do with a damaged file.
            done: Called once everything was read and is right, with the seconds spent here.

        Raises:
            CorruptChunkError: If header or size are wrong.
            OSError: If it cannot be read.
        """
        started = time.perf_counter()
        self.tier = tier
        self._descriptor: int | None = descriptor
        self._guard, self._done = guard, done
        self._read = positional(descriptor)
        self._targets: list[list[memoryview]] = []
        self._hasher = xxhash.xxh3_128()
        try:
            self._payload, self._checksum = check_header(self._read, size, spec)
            offsets = {name: spec.header[name]["data_offsets"] for name in (_IDS, _TENSOR)}
            self.nbytes = offsets[_TENSOR][1] - offsets[_TENSOR][0]
            self.tokens = torch.empty(spec.tensors[_IDS][1], dtype=torch.int32)
            self._ids = views(self.tokens) or []
            read_views(self._read, self._payload + offsets[_IDS][0], self._ids, lambda _: None)
        except BaseException:
            self.close()
            raise
        self._offset = self._payload + offsets[_TENSOR][0]
        # The checksum is over the tensors in their order.
        self._is_first = offsets[_IDS][0] < offsets[_TENSOR][0]
        if self._is_first:
            self._hash_ids()
        if hasattr(os, "posix_fadvise"):
            # From a disk, the system reads on while the layers before are worked on; if it can.
            with suppress(OSError):
                os.posix_fadvise(descriptor, self._offset, self.nbytes, os.POSIX_FADV_WILLNEED)
        self._seconds = time.perf_counter() - started

    def aim(self, out: ChunkKV) -> None:
        """Note the memory of `out`, layer by layer."""
        self._targets.clear()
        (fused,) = out.tensors[0]
        for layer in fused.unbind(0):
            runs = views(layer)
            if runs is None:
                raise ValueError("a file can be read only into rows of numbers in main memory")
            self._targets.append(runs)

    def layer(self, group: int, place: int) -> None:
        """Read a layer to its place, hashing what was read while it is in the cache."""
        started = time.perf_counter()
        target = self._targets[place]
        try:
            if self._descriptor is None:
                raise OSError("the file was closed")
            read_views(self._read, self._offset, target, self._hasher.update)
        except (CorruptChunkError, OSError):
            with self._guard():
                raise
        self._offset += sum(map(len, target))
        self._seconds += time.perf_counter() - started

    def finish(self) -> None:
        """Compare the checksum, and count the chunk as found."""
        started = time.perf_counter()
        with self._guard():
            if not self._is_first:
                self._hash_ids()
            if self._hasher.hexdigest() != self._checksum:
                raise CorruptChunkError("the checksum is wrong: the bytes were changed")
        self._done(self._seconds + time.perf_counter() - started)

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _hash_ids(self) -> None:
        for view in self._ids:
            self._hasher.update(view)
