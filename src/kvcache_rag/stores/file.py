"""The file of one chunk: what it must hold, writing it, reading it into place, checking it.

A safetensors file whose header is known before it is opened, but for three values; the format is
specified in docs/format.md.  This module knows bytes, not folders: it reads through a function, so
that the bytes may come from anywhere.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

import torch
import xxhash

from kvcache_rag.codecs import EncodedChunk
from kvcache_rag.errors import CorruptChunkError, InvalidInputError, UntrustedChunkError
from kvcache_rag.kv.chunk import FORMAT_VERSION, ChunkKey, ChunkKV
from kvcache_rag.stores.device import Home, Staged
from kvcache_rag.stores.filesystem import READ, NotAFileError, opened
from kvcache_rag.stores.runs import (
    ReadV,
    positional,
    read_bytes,
    read_through,
    read_views,
    views,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from kvcache_rag.codecs import Codec, Room, TensorSpec
    from kvcache_rag.kv.chunk import ChunkLayout
    from kvcache_rag.stores.bytes import Buffer
    from kvcache_rag.stores.signing import Authenticator, Mac, SigningKey


FORMAT = f"kvcache-rag/{FORMAT_VERSION}"

ALIGNMENT = 4096

MAX_HEADER = 64 << 10

_IDS, _TENSOR = "tokens", "kv"

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


# ---------------------------------------------------------------------- what a file holds
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

    @property
    def least(self) -> int:
        """How many bytes the file has at least."""
        return self.payload + ALIGNMENT

    @property
    def most(self) -> int:
        """One byte more than the file may have: a larger one is never loaded as a whole."""
        return self.payload + MAX_HEADER + 9


def file_spec(key: ChunkKey, layout: ChunkLayout, codec: Codec) -> FileSpec:
    """What the file of `key` must hold.

    Raises:
        InvalidInputError: If a tensor has a dtype that the format does not know.
    """
    stored = {**codec.expected(layout, key.tokens), _IDS: (torch.int32, (key.tokens,))}
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


def file_bytes(layout: ChunkLayout, codec: Codec, tokens: int) -> int:
    """Bytes of the file of a chunk of `tokens` tokens.

    Raises:
        InvalidInputError: If the layout's dtype cannot be stored, or not by this codec.
    """
    spec = file_spec(ChunkKey("0" * 64, "0" * 64, "", tokens, 0), layout, codec)
    return len(_head(spec, "0" * 32, _provenance())) + spec.payload


def empty_chunk(key: ChunkKey, layout: ChunkLayout) -> ChunkKV:
    """Uninitialised memory for the chunk of `key`, usable in and out of inference mode."""
    with torch.inference_mode(mode=False):
        tokens = torch.empty(key.tokens, dtype=torch.int32)
        return ChunkKV(layout, tokens, key.start, Home().empty(layout, key.tokens))


# ---------------------------------------------------------------------- writing
def file_pieces(
    chunk: ChunkKV, spec: FileSpec, codec: Codec, key: SigningKey | None = None
) -> list[Buffer]:
    """The bytes of the file of a chunk, in order; they may be the chunk's own memory.

    Args:
        chunk: What is written.
        spec: What the file must hold.
        codec: The codec of the chunk's tensors.
        key: Signs it; None to leave it unsigned.

    Raises:
        CorruptChunkError: If the codec cannot store the chunk's values.
    """
    encoded = {**codec.encode(chunk), _IDS: chunk.tokens}
    tensors = [_packed(encoded[name]) for name in spec.tensors]
    payload = [_flat_view(tensor) for tensor in tensors if tensor.numel()]
    hasher = xxhash.xxh3_128()
    for view in payload:
        hasher.update(view)
    checksum = hasher.hexdigest()
    if key is None:
        return [_head(spec, checksum, _provenance()), *payload]
    # The MAC of what is in memory, not of what is in a file: others may have changed that by then.
    mac = key.new_mac()
    head = _head(spec, checksum, f"{_provenance()} {mac}")
    authenticator = key.authenticator(mac, head)
    for view in payload:
        authenticator.update_long(view)
    signed = str(authenticator.signed()).encode("ascii")
    return [head.replace(str(mac).encode("ascii"), signed), *payload]


def _flat_view(tensor: Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _packed(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _head(spec: FileSpec, checksum: str, provenance: str) -> bytes:
    """What stands before the payload, which begins at a whole page."""
    metadata = {**spec.metadata, "xxh3_128": checksum, "provenance": provenance, "pad": ""}
    header = json.dumps({**spec.header, "__metadata__": metadata}, separators=(",", ":")).encode(
        "ascii"
    )
    # Put in afterwards: thousands of blanks are slow to encode.
    blanks = b" " * (-(8 + len(header)) % ALIGNMENT)
    header = header.replace(b'"pad":""', b'"pad":"' + blanks + b'"')
    return struct.pack("<Q", len(header)) + header


@cache
def _provenance() -> str:
    try:
        return f"kvcache-rag {version('kvcache-rag')}"
    except PackageNotFoundError:
        return "kvcache-rag, not installed"


# ---------------------------------------------------------------------- headers
@dataclass(frozen=True)
class Header:
    """The header of a file as it is, in the form of this format; nothing else is known of it yet.

    Attributes:
        values: The parsed JSON.
        metadata: Its `__metadata__`.
        checksum: xxh3_128 of the payload.
        offset: Where the payload begins.
        head: All bytes before it.
    """

    values: dict[str, Any]
    metadata: dict[str, Any]
    checksum: str
    offset: int
    head: bytearray


def read_header(read: ReadV, size: int) -> Header:
    """Read a file's header; never more than its first page and `MAX_HEADER`, whatever it says.

    Args:
        read: Reads the file.
        size: Its size in bytes.

    Raises:
        CorruptChunkError: If it is none.
        OSError: If it cannot be read.
    """
    head = read_bytes(read, 0, min(size, ALIGNMENT))
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
    offset = 8 + length
    if not 0 < length <= MAX_HEADER or offset % ALIGNMENT or offset > size:
        raise CorruptChunkError(f"the file has {size} bytes and a header of {length}")
    if offset > len(head):
        head += read_bytes(read, len(head), offset - len(head))
    try:
        values = json.loads(head[8:].decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CorruptChunkError(f"the header is not JSON: {str(error)[:80]}") from None
    metadata = values.get("__metadata__") if isinstance(values, dict) else None
    if not isinstance(metadata, dict):
        raise CorruptChunkError("the header has no metadata")
    for name, form in _FREE.items():
        value = metadata.get(name)
        if not isinstance(value, str) or not form.fullmatch(value):
            raise CorruptChunkError(f"the header's {name} cannot be one")
    return Header(values, metadata, metadata["xxh3_128"], offset, head)


def named_mac(read: ReadV, size: int, key: SigningKey) -> Mac:
    """The MAC that a file's header says to be of the key; it is not verified.

    Raises:
        CorruptChunkError: If there is no header.
        UntrustedChunkError: If it does not name the key.
        OSError: If it cannot be read.
    """
    return key.mac_in(read_header(read, size).metadata["provenance"])


def check_header(read: ReadV, size: int, spec: FileSpec, key: SigningKey | None = None) -> Header:
    """Read a file's header and compare all of it with what it must be.

    Args:
        read: Reads the file.
        size: Its size in bytes.
        spec: What it must hold.
        key: What it must say to be signed by; None if that does not matter.

    Raises:
        CorruptChunkError: If the header or the size differs in anything.
        UntrustedChunkError: If it does not name the key, whatever else it says.
        OSError: If it cannot be read; `FileNotFoundError` if it is whole, and of another length.
    """
    header = read_header(read, size)
    if key is not None:
        key.mac_in(header.metadata["provenance"])
    free = {name: header.metadata[name] for name in _FREE}
    if header.offset + spec.payload != size:
        wrong = f"the file has {size} bytes and a header of {header.offset - 8}"
    elif header.values != {**spec.header, "__metadata__": {**spec.metadata, **free}}:
        wrong = "the header is not that of the chunk asked for"
    else:
        return header
    # Where a length was noted elsewhere, that may be what is wrong, and the file is right.
    facts, (asked,) = facts_of(read, size, spec.metadata["key"]), spec.tensors[_IDS][1]
    if facts.tokens != asked:
        raise FileNotFoundError(f"the chunk has {facts.tokens} tokens, not {asked}")
    raise CorruptChunkError(wrong)


# ---------------------------------------------------------------------- reading
def read_encoded(
    read: ReadV,
    size: int,
    key: ChunkKey,
    layout: ChunkLayout,
    codec: Codec,
    signing: SigningKey | None,
    room: Room | None = None,
) -> EncodedChunk:
    """Read a chunk's file as it is; raises what `read_file` does."""
    spec = file_spec(key, layout, codec)
    header = check_header(read, size, spec, signing)
    with torch.inference_mode(mode=False):
        tokens = torch.empty(key.tokens, dtype=torch.int32)
    chunk = EncodedChunk(codec, layout, tokens, key.start, codec.empty(layout, key.tokens, room))
    _read_payload(read, header, spec, _places(dict(chunk.stored), tokens) or {}, signing)
    return chunk


def read_file(
    read: ReadV,
    size: int,
    spec: FileSpec,
    codec: Codec,
    memory: Callable[[], ChunkKV],
    key: SigningKey | None = None,
) -> ChunkKV:
    """Read a chunk's file, straight into the memory that it goes to where the codec allows it.

    Args:
        read: Reads the file.
        size: Its size in bytes.
        spec: What it must hold.
        codec: The codec it was written with.
        memory: Gives memory of the chunk's layout and length, once the header is right; its
            content is undefined after an error.
        key: What it must be signed by; None if that does not matter.

    Raises:
        CorruptChunkError: If header, size or checksum are wrong.
        UntrustedChunkError: If the key did not sign it, and it is not merely damaged.
        OSError: If it cannot be read.
    """
    header, out = check_header(read, size, spec, key), memory()
    tokens = torch.empty(out.tokens.shape[0], dtype=torch.int32)
    places = _places(codec.in_place(out), tokens)
    if places is not None:
        _read_payload(read, header, spec, places, key)
    else:
        staged = Staged.to(out, spec.tensors)
        _read_payload(read, header, spec, _places(staged.tensors, tokens) or {}, key)
        staged.decode(codec, out)
    out.tokens.copy_(tokens)
    return out


def _read_payload(
    read: ReadV,
    header: Header,
    spec: FileSpec,
    places: dict[str, list[memoryview]],
    key: SigningKey | None,
) -> None:
    targets = [view for name in spec.tensors for view in places[name]]
    if key is not None:
        authenticator = _authenticator(header, key)
        read_views(read, header.offset, targets, authenticator.update)
        check_mac(authenticator, read, header, spec.payload)
        return
    hasher = xxhash.xxh3_128()
    read_views(read, header.offset, targets, hasher.update)
    if hasher.hexdigest() != header.checksum:
        raise CorruptChunkError("the checksum is wrong: the bytes were changed")


def _authenticator(header: Header, key: SigningKey) -> Authenticator:
    return key.authenticator(key.mac_in(header.metadata["provenance"]), header.head)


def check_mac(authenticator: Authenticator, read: ReadV, header: Header, payload: int) -> None:
    """Refuse a file whose payload was taken in and whose MAC is wrong.

    What is right needs no checksum; of what is wrong it tells damage, which a medium does, from
    bytes that somebody wrote.

    Raises:
        CorruptChunkError: If the checksum is wrong, too.
        UntrustedChunkError: If it is right.
        OSError: If it cannot be read again.
    """
    if authenticator.is_right():
        return
    if _payload_checksum(read, header.offset, payload) != header.checksum:
        raise CorruptChunkError("the checksum is wrong: the bytes were changed")
    raise UntrustedChunkError("its MAC is wrong: somebody without the key changed it")


def _places(
    tensors: dict[str, Tensor] | None, tokens: Tensor
) -> dict[str, list[memoryview]] | None:
    places: dict[str, list[memoryview]] = {}
    for name, tensor in {**(tensors or {}), _IDS: tokens}.items():
        pieces = views(tensor)
        if pieces is None or tensors is None:
            return None
        places[name] = pieces
    return places


# ---------------------------------------------------------------------- checking without a model
# A reader knows every value of the header beforehand and compares all of it; here nothing is known
# but the file's name, so the header is checked against itself: the fields and limits of the format,
# tensors that lie densely and fill the file, and the checksum of the payload.

_KNOWN: Final = {
    "format": re.compile(re.escape(FORMAT)),
    "key": re.compile(r"[0-9a-f]{64}"),
    "codec": re.compile(r"[a-z0-9-]{1,64}"),
    "start": re.compile(r"0|[1-9][0-9]{0,9}"),
}

_WIDTHS: Final = {name: dtype.itemsize for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class FileFacts:
    """What the header of a chunk's file says.

    Attributes:
        codec: Name of the codec.
        tokens: Number of tokens.
        payload: Bytes behind the header.
        header: All of it.
    """

    codec: str
    tokens: int
    payload: int
    header: Header


def file_facts(path: str, digest: str, key: SigningKey | None = None) -> FileFacts:
    """Read and check the header of a chunk's file; the payload is not read.

    Args:
        path: The file; a link is not followed.
        digest: The chunk that it must be, 64 hexadecimal digits.
        key: What it must say to be signed by; None if that does not matter.

    Raises:
        CorruptChunkError: If it is not such a file.
        UntrustedChunkError: If it does not name the key.
        OSError: If it cannot be read, or is gone.
    """
    with _regular(path) as descriptor:
        return facts_of(positional(descriptor), os.fstat(descriptor).st_size, digest, key)


def verify_file(path: str, digest: str, key: SigningKey | None = None) -> FileFacts:
    """Check all of a chunk's file, the checksum too, and the MAC if there is a key."""
    with _regular(path) as descriptor:
        return verify_bytes(positional(descriptor), os.fstat(descriptor).st_size, digest, key)


def verify_bytes(read: ReadV, size: int, digest: str, key: SigningKey | None) -> FileFacts:
    """The same, of what `read` reads."""
    facts = facts_of(read, size, digest, key)
    header = facts.header
    if key is not None:
        authenticator = _authenticator(header, key)
        read_through(read, header.offset, facts.payload, authenticator.update)
        check_mac(authenticator, read, header, facts.payload)
    elif _payload_checksum(read, header.offset, facts.payload) != header.checksum:
        raise CorruptChunkError("the checksum is wrong: the bytes were changed")
    return facts


@contextmanager
def _regular(path: str) -> Iterator[int]:
    try:
        with opened(path, READ) as descriptor:
            yield descriptor
    except NotAFileError as error:
        raise CorruptChunkError(f"it is not a file: {error.strerror}") from None


def facts_of(read: ReadV, size: int, digest: str, key: SigningKey | None = None) -> FileFacts:
    """The same as `file_facts`, of what `read` reads."""
    header = read_header(read, size)
    metadata = header.metadata
    if key is not None:
        key.mac_in(metadata["provenance"])
    if metadata.keys() != _KNOWN.keys() | _FREE.keys():
        raise CorruptChunkError("the header has not the metadata of this format")
    for name, form in _KNOWN.items():
        if not isinstance(metadata[name], str) or not form.fullmatch(metadata[name]):
            raise CorruptChunkError(f"the header's {name} cannot be one")
    if metadata["key"] != digest:
        raise CorruptChunkError(f"it is the file of another chunk, {metadata['key'][:12]}...")
    payload = _extent({name: one for name, one in header.values.items() if name != "__metadata__"})
    if header.offset + payload != size:
        raise CorruptChunkError(
            f"the file has {size} bytes, its header says {header.offset + payload}"
        )
    tokens = header.values[_IDS]
    if tokens["dtype"] != "I32" or len(tokens["shape"]) != 1:
        raise CorruptChunkError("the token ids are not one row of int32")
    return FileFacts(metadata["codec"], tokens["shape"][0], payload, header)


def _extent(tensors: dict[str, Any]) -> int:
    """Bytes of all tensors, which must lie behind each other without gaps."""
    if _IDS not in tensors or len(tensors) < 2:
        raise CorruptChunkError("the header lacks the token ids or every other tensor")
    end = 0
    for begin, stop, nbytes in sorted(_place(name, value) for name, value in tensors.items()):
        if begin != end or stop - begin != nbytes:
            raise CorruptChunkError("the tensors overlap, leave gaps or have another size")
        end = stop
    return end


def _place(name: str, tensor: Any) -> tuple[int, int, int]:
    """Where a tensor begins and stops, and how many bytes its shape and dtype make."""
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


def _payload_checksum(read: ReadV, offset: int, payload: int) -> str:
    hasher = xxhash.xxh3_128()
    read_through(read, offset, payload, hasher.update)
    return hasher.hexdigest()
