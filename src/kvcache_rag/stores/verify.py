"""Check the file of a chunk as far as that is possible without the model that made it.

A reader knows every value of the header beforehand and compares all of it; here nothing is known
but the file's name, so the header is checked against itself: the fields and limits of the format,
tensors that lie densely and fill the file, and the checksum of the payload.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import xxhash

from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.stores.chunkfile import ALIGNMENT, FORMAT, MAX_HEADER
from kvcache_rag.stores.directory import NOT_A_FILE, READ, opened
from kvcache_rag.stores.scatter import positional, read_views

if TYPE_CHECKING:
    from kvcache_rag.stores.scatter import ReadV

_BUFFER = 4 << 20
_FIELDS: Final = {
    "format": re.compile(re.escape(FORMAT)),
    "key": re.compile(r"[0-9a-f]{64}"),
    "codec": re.compile(r"[a-z0-9-]{1,64}"),
    "start": re.compile(r"0|[1-9][0-9]{0,9}"),
    "xxh3_128": re.compile(r"[0-9a-f]{32}"),
    "provenance": re.compile(r"[ -~]{1,200}"),
    "pad": re.compile(r" *"),
}
_WIDTHS: Final = {
    **dict.fromkeys(("I64", "F64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8"), 1),
}


@dataclass(frozen=True)
class FileFacts:
    """What the header of a chunk's file says.

    Attributes:
        codec: Name of the codec.
        tokens: Number of tokens.
        payload: Bytes behind the header.
        checksum: xxh3_128 of the payload.
        offset: Where the payload begins.
    """

    codec: str
    tokens: int
    payload: int
    checksum: str
    offset: int


def file_facts(path: str, digest: str) -> FileFacts:
    """Read and check the header of a chunk's file; the payload is not read.

    Args:
        path: The file; a link is not followed.
        digest: The chunk that it must be, 64 hexadecimal digits.

    Raises:
        CorruptChunkError: If it is not such a file.
        OSError: If it cannot be read, or is gone.
    """
    return _checked(path, digest, with_payload=False)


def verify_file(path: str, digest: str) -> FileFacts:
    """Check a chunk's file as a whole: header, size and checksum.

    Raises:
        CorruptChunkError: If something is wrong.
        OSError: If it cannot be read, or is gone.
    """
    return _checked(path, digest, with_payload=True)


def _checked(path: str, digest: str, *, with_payload: bool) -> FileFacts:
    try:
        with opened(path, READ) as descriptor:
            read, size = positional(descriptor), os.fstat(descriptor).st_size
            facts = _facts(read, size, digest)
            if with_payload and _checksum(read, facts) != facts.checksum:
                raise CorruptChunkError("the checksum is wrong: the bytes were changed")
            return facts
    except OSError as error:
        if error.errno not in NOT_A_FILE:
            raise
        raise CorruptChunkError(f"it is not a file: {error.strerror}") from None


def _facts(read: ReadV, size: int, digest: str) -> FileFacts:
    head = _bytes(read, 0, min(size, 8))
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if not 0 < length <= min(MAX_HEADER, size - 8) or (8 + length) % ALIGNMENT:
        raise CorruptChunkError(f"the file has {size} bytes and a header of {length}")
    try:
        header = json.loads(_bytes(read, 8, length).decode("ascii"))
    except (ValueError, RecursionError):
        raise CorruptChunkError("the header is not JSON") from None
    metadata = _metadata(header)
    if metadata["key"] != digest:
        raise CorruptChunkError(f"it is the file of another chunk, {metadata['key'][:12]}...")
    payload = _payload({name: one for name, one in header.items() if name != "__metadata__"})
    if 8 + length + payload != size:
        raise CorruptChunkError(
            f"the file has {size} bytes, its header says {8 + length + payload}"
        )
    tokens = header["tokens"]
    if tokens["dtype"] != "I32" or len(tokens["shape"]) != 1:
        raise CorruptChunkError("the token ids are not one row of int32")
    count = tokens["shape"][0]
    return FileFacts(metadata["codec"], count, payload, metadata["xxh3_128"], 8 + length)


def _metadata(header: Any) -> dict[str, str]:
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.keys() != _FIELDS.keys():
        raise CorruptChunkError("the header has not the metadata of this format")
    for name, form in _FIELDS.items():
        value = metadata[name]
        if not isinstance(value, str) or not form.fullmatch(value):
            raise CorruptChunkError(f"the header's {name} cannot be one")
    return metadata


def _payload(tensors: dict[str, Any]) -> int:
    """Bytes of all tensors, which must lie behind each other without gaps."""
    if "tokens" not in tensors or len(tensors) < 2:
        raise CorruptChunkError("the header lacks the token ids or every other tensor")
    end = 0
    for begin, stop, nbytes in sorted(_extent(name, one) for name, one in tensors.items()):
        if begin != end or stop - begin != nbytes:
            raise CorruptChunkError("the tensors overlap, leave gaps or have another size")
        end = stop
    return end


def _extent(name: str, tensor: Any) -> tuple[int, int, int]:
    fields = {"dtype", "shape", "data_offsets"}
    if isinstance(tensor, dict) and tensor.keys() == fields:
        shape, offsets = tensor["shape"], tensor["data_offsets"]
        width = _WIDTHS.get(tensor["dtype"]) if isinstance(tensor["dtype"], str) else None
        if width and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2:
            return offsets[0], offsets[1], math.prod(shape) * width
    raise CorruptChunkError(f"the header's tensor {name[:40]!r} cannot be one")


def _are_sizes(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= 8
        and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
    )


def _checksum(read: ReadV, facts: FileFacts) -> str:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_BUFFER, facts.payload)))
    done = 0
    while done < facts.payload:
        part = buffer[: min(len(buffer), facts.payload - done)]
        read_views(read, facts.offset + done, [part], hasher.update)
        done += len(part)
    return hasher.hexdigest()


def _bytes(read: ReadV, offset: int, count: int) -> bytes:
    buffer = bytearray(count)
    if count:
        read_views(read, offset, [memoryview(buffer)], lambda _: None)
    return bytes(buffer)
