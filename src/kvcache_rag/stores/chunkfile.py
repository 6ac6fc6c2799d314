"""The file of one chunk: what its header must say, writing it, reading it into place.

A file is a safetensors file whose header is known before it is opened, but for three values; the
format is specified in docs/format.md.  This module knows bytes, not directories: it reads through
a function, so that the bytes may come from anywhere.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from safetensors.torch import save_file

from kvcache_rag.chunk import FORMAT_VERSION, ChunkKV, canonical_json
from kvcache_rag.errors import CorruptChunkError, InvalidInputError
from kvcache_rag.stores.copies import Home
from kvcache_rag.stores.scatter import ReadV, read_views, views
from kvcache_rag.stores.transfer import staged

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.chunk import ChunkKey, ChunkLayout
    from kvcache_rag.codecs import Codec, TensorSpec

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
