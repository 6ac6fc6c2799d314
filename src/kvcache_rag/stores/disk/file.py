"""How large the file of a chunk will be, before there is one."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from safetensors.torch import save_file

from kvcache_rag.codecs import Native
from kvcache_rag.errors import CorruptChunkError, InvalidInputError
from kvcache_rag.kv.chunk import FORMAT_VERSION, ChunkKey, ChunkKV, canonical_json
from kvcache_rag.stores.base import ChunkReader
from kvcache_rag.stores.device import staged
from kvcache_rag.stores.memory import Home

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from kvcache_rag.codecs import Codec, TensorSpec
    from kvcache_rag.kv.chunk import ChunkLayout


_PROVENANCE = "kvcache-rag 0.1.0"


def file_bytes(layout: ChunkLayout, codec: Codec, tokens: int) -> int:
    """Bytes of the file of a chunk of `tokens` tokens: the payload behind a header of whole pages.

    Raises:
        InvalidInputError: If the layout's dtype cannot be stored, or not by this codec.
    """
    key = ChunkKey("0" * 64, "0" * 64, "", tokens, 0)
    spec = file_spec(key, layout, codec)
    return header_bytes(spec) + spec.payload


def header_bytes(spec: FileSpec) -> int:
    """Bytes before the payload, the length field included."""
    free = {"xxh3_128": "0" * 32, "provenance": _PROVENANCE, "pad": ""}
    bare = 8 + len(canonical_json({**spec.header, "__metadata__": {**spec.metadata, **free}}))
    return -(-bare // ALIGNMENT) * ALIGNMENT


# Reading bytes straight into the memory of strided tensors.
#
# A chunk's place in a larger buffer is many runs of bytes with gaps between them; one `preadv`
# fills many runs. This module knows memory, not formats.


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


def in_memory(data: bytes) -> ReadV:
    """Read bytes that are here already."""

    def read(buffers: Sequence[memoryview], offset: int) -> int:
        begin = offset
        for buffer in buffers:
            piece = data[begin : begin + len(buffer)]
            buffer[: len(piece)] = piece
            begin += len(piece)
        return begin - offset

    return read


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


# The file of one chunk: what its header must say, writing it, reading it into place.
#
# A file is a safetensors file whose header is known before it is opened, but for three values; the
# format is specified in docs/format.md. This module knows bytes, not directories: it reads through
# a function, so that the bytes may come from anywhere.


FORMAT = f"kvcache-rag/{FORMAT_VERSION}"

ALIGNMENT = 4096

MAX_HEADER = 64 << 10

# safetensors' names, in the order in which it lays tensors out.
_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
}

_RANK = {dtype: rank for rank, dtype in enumerate(_DTYPES)}

# The values that the reader cannot know.
_FREE = {
    "pad": re.compile(r" *"),
    "provenance": re.compile(r"[ -!#-\[\]-~]{1,200}"),
    "xxh3_128": re.compile(r"[0-9a-f]{32}"),
}


@dataclass(frozen=True)
class FileSpec:
    """What the file of one chunk must hold.

    Attributes:
        tensors: Dtype and shape per tensor, in file order.
        metadata: The metadata that is known beforehand.
        header: The header as parsed JSON, with `metadata` only.
        payload: Bytes behind the header.
    """

    tensors: dict[str, TensorSpec]
    metadata: dict[str, str]
    header: dict[str, Any]
    payload: int


def file_spec(key: ChunkKey, layout: ChunkLayout, codec: Codec) -> FileSpec:
    """What the file of `key` must hold.

    Raises:
        InvalidInputError: If a tensor has a dtype that the format does not know.
    """
    stored = {**codec.expected(layout, key.tokens), "tokens": (torch.int32, (key.tokens,))}
    unknown = {dtype for dtype, _ in stored.values()} - _RANK.keys()
    if unknown:
        raise InvalidInputError(f"chunks of {unknown} cannot be stored; use bfloat16 or float32")
    order = sorted(stored, key=lambda name: (_RANK[stored[name][0]], name))
    metadata = {
        "format": FORMAT,
        "key": key.digest,
        "codec": codec.name,
        "start": str(key.start),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in order:
        dtype, shape = stored[name]
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    return FileSpec({name: stored[name] for name in order}, metadata, header, end)


def empty_chunk(key: ChunkKey, layout: ChunkLayout) -> ChunkKV:
    """Uninitialised memory for the chunk of `key`, usable in and out of inference mode."""
    with torch.inference_mode(mode=False):
        tokens = torch.empty(key.tokens, dtype=torch.int32)
        return ChunkKV(layout, tokens, key.start, Home().empty(layout, key.tokens))


def write_file(path: str, chunk: ChunkKV, spec: FileSpec, codec: Codec) -> None:
    """Write the file of a chunk; syncing and publishing it are the caller's part.

    Raises:
        SafetensorError: If it cannot be written, as on a full disk; for some causes an `OSError`.
    """
    encoded = {**codec.encode(chunk), "tokens": chunk.tokens}
    tensors = {name: _packed(encoded[name]) for name in spec.tensors}
    hasher = xxhash.xxh3_128()
    for tensor in tensors.values():
        for view in views(tensor) or []:
            hasher.update(view)
    save_file(tensors, path, metadata=_complete(spec, hasher.hexdigest()))


def check_header(read: ReadV, size: int, spec: FileSpec) -> tuple[int, str]:
    """Compare a file's header with what it must be.

    Args:
        read: Reads the file.
        size: Its size in bytes.
        spec: What it must hold.

    Returns:
        Offset of the payload and its checksum.

    Raises:
        CorruptChunkError: If the header or the size differs in anything.
    """
    head = bytearray(min(size, ALIGNMENT))
    _fill(read, head, 0)
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
    offset = 8 + length
    if not 0 < length <= MAX_HEADER or offset % ALIGNMENT or offset + spec.payload != size:
        raise CorruptChunkError(f"the file has {size} bytes and a header of {length}")
    if offset > len(head):
        rest = bytearray(offset - len(head))
        _fill(read, rest, len(head))
        head += rest
    try:
        found = json.loads(head[8:].decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CorruptChunkError(f"the header is not JSON: {str(error)[:80]}") from None
    metadata = found.get("__metadata__") if isinstance(found, dict) else None
    if not isinstance(metadata, dict):
        raise CorruptChunkError("the header has no metadata")
    free = {name: metadata.get(name) for name in _FREE}
    for name, value in free.items():
        if not isinstance(value, str) or not _FREE[name].fullmatch(value):
            raise CorruptChunkError(f"the header's {name} cannot be one")
    if found != {**spec.header, "__metadata__": {**spec.metadata, **free}}:
        raise CorruptChunkError("the header is not that of the chunk asked for")
    return offset, metadata["xxh3_128"]


def read_file(read: ReadV, size: int, spec: FileSpec, codec: Codec, out: ChunkKV) -> None:
    """Read a chunk's file into `out`, straight into its memory where the codec allows it.

    Args:
        read: Reads the file.
        size: Its size in bytes.
        spec: What it must hold.
        codec: The codec it was written with.
        out: Memory of the chunk's layout and length; undefined after an error.

    Raises:
        CorruptChunkError: If header, size or checksum are wrong.
        OSError: If it cannot be read.
    """
    offset, checksum = check_header(read, size, spec)
    tokens = torch.empty(len(out), dtype=torch.int32)
    places = _places(codec.in_place(out), tokens)
    if places is not None:
        _read_payload(read, offset, spec, places, checksum)
    else:
        with staged(spec.tensors, out) as staging:
            places = _places(staging.tensors, tokens) or {}
            _read_payload(read, offset, spec, places, checksum)
            staging.decode(codec, out)
    out.tokens.copy_(tokens)


def _read_payload(
    read: ReadV, offset: int, spec: FileSpec, places: dict[str, list[memoryview]], checksum: str
) -> None:
    hasher = xxhash.xxh3_128()
    read_views(
        read, offset, [view for name in spec.tensors for view in places[name]], hasher.update
    )
    if hasher.hexdigest() != checksum:
        raise CorruptChunkError("the checksum is wrong: the bytes were changed")


def _places(
    tensors: dict[str, Tensor] | None, tokens: Tensor
) -> dict[str, list[memoryview]] | None:
    places: dict[str, list[memoryview]] = {}
    for name, tensor in {**(tensors or {}), "tokens": tokens}.items():
        found = views(tensor)
        if found is None or tensors is None:
            return None
        places[name] = found
    return places


def _packed(tensor: Tensor) -> Tensor:
    # safetensors refuses tensors that share their memory with others.
    tensor = tensor.detach().cpu()
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _complete(spec: FileSpec, checksum: str) -> dict[str, str]:
    """All metadata, padded so that the payload begins at a whole page."""
    metadata = {**spec.metadata, "xxh3_128": checksum, "provenance": _provenance(), "pad": ""}
    bare = 8 + len(canonical_json({**spec.header, "__metadata__": metadata}))
    metadata["pad"] = " " * (-bare % ALIGNMENT)
    return metadata


@cache
def _provenance() -> str:
    try:
        return f"kvcache-rag {version('kvcache-rag')}"
    except PackageNotFoundError:
        return "kvcache-rag, not installed"


def _fill(read: ReadV, buffer: bytearray, offset: int) -> None:
    if buffer:
        read_views(read, offset, [memoryview(buffer)], lambda _: None)


# A chunk's file read layer by layer: the file is in that order, and a layer fits into the cache.
#
# Where layers of several shapes are mixed, or K and V are apart (MLA), the file is not in the order
# of the layers, and `chunkfile.read_file` reads it as a whole.


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
