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
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

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
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from kvcache_rag.codecs import Codec, Room, TensorSpec
    from kvcache_rag.kv.chunk import ChunkLayout
    from kvcache_rag.stores.bytes import Buffer
    from kvcache_rag.stores.signing import SigningKey


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

_WIDTHS = {name: dtype.itemsize for dtype, name in _DTYPES.items()}

# The metadata that a reader knows, and what it cannot know.
_KNOWN = {
    "format": re.compile(re.escape(FORMAT)),
    "key": re.compile(r"[0-9a-f]{64}"),
    "codec": re.compile(r"[a-z0-9-]{1,64}"),
    "start": re.compile(r"0|[1-9][0-9]{0,9}"),
}

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
# A reader knows all of a header but three values, and compares it.  Who knows nothing but the
# file's name checks it against itself: the fields and limits of the format, and tensors that lie
# densely and fill the file.
@dataclass(frozen=True)
class Header:
    """The header of a file, in the form of this format.

    Attributes:
        values: The parsed JSON.
        offset: Where the payload begins.
        head: All bytes before it.
    """

    values: dict[str, Any]
    offset: int
    head: bytearray

    @property
    def metadata(self) -> dict[str, Any]:
        """What is not of a tensor."""
        metadata: dict[str, Any] = self.values["__metadata__"]
        return metadata

    @property
    def checksum(self) -> str:
        """xxh3_128 of the payload."""
        return str(self.metadata["xxh3_128"])

    # Only of a header that was checked:
    @property
    def codec(self) -> str:
        """Name of the codec."""
        return str(self.metadata["codec"])

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.values[_IDS]["shape"][0])

    @property
    def payload(self) -> int:
        """Bytes behind the header."""
        return max(int(one["data_offsets"][1]) for one in self._tensors.values())

    @property
    def _tensors(self) -> dict[str, Any]:
        return {name: one for name, one in self.values.items() if name != "__metadata__"}

    def check(self, size: int, digest: str) -> None:
        """Check it against itself, the size of its file and the digest of the chunk.

        Raises:
            CorruptChunkError: If it is not that of a whole file of the chunk.
        """
        if self.metadata.keys() != _KNOWN.keys() | _FREE.keys():
            raise CorruptChunkError("the header has not the metadata of this format")
        _check_forms(self.metadata, _KNOWN)
        if self.metadata["key"] != digest:
            raise CorruptChunkError(
                f"it is the file of another chunk, {self.metadata['key'][:12]}..."
            )
        end = self.offset + _extent(self._tensors)
        if end != size:
            raise CorruptChunkError(f"the file has {size} bytes, its header says {end}")
        ids = self.values[_IDS]
        if ids["dtype"] != "I32" or len(ids["shape"]) != 1:
            raise CorruptChunkError("the token ids are not one row of int32")


def read_header(read: ReadV, size: int, key: SigningKey | None = None) -> Header:
    """Read a file's header; never more than its first page and `MAX_HEADER`, whatever it says.

    Nothing is known of it yet but its form, and that of the values that no reader knows.

    Args:
        read: Reads the file.
        size: Its size in bytes.
        key: What it must say to be signed by, which is not verified; None if that does not matter.

    Raises:
        CorruptChunkError: If it is none.
        UntrustedChunkError: If it does not name the key, whatever else it says.
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
    if not isinstance(values, dict) or not isinstance(values.get("__metadata__"), dict):
        raise CorruptChunkError("the header has no metadata")
    header = Header(values, offset, head)
    _check_forms(header.metadata, _FREE)
    if key is not None:
        key.mac_in(header.metadata["provenance"])
    return header


def check_header(read: ReadV, size: int, spec: FileSpec, key: SigningKey | None = None) -> Header:
    """Read a file's header and compare all of it with what it must be; raises as `read_header`.

    Raises:
        CorruptChunkError: If the header or the size differs in anything.
        FileNotFoundError: If it is that of a whole file, of another length.
    """
    header = read_header(read, size, key)
    free = {name: header.metadata[name] for name in _FREE}
    is_same = header.values == {**spec.header, "__metadata__": {**spec.metadata, **free}}
    if is_same and header.offset + spec.payload == size:
        return header
    # Where a length was noted elsewhere, that may be what is wrong, and the file is right.
    header.check(size, spec.metadata["key"])
    (asked,) = spec.tensors[_IDS][1]
    if header.tokens != asked:
        raise FileNotFoundError(f"the chunk has {header.tokens} tokens, not {asked}")
    raise CorruptChunkError("the header is not that of the chunk asked for")


def _check_forms(metadata: dict[str, Any], forms: Mapping[str, re.Pattern[str]]) -> None:
    for name, form in forms.items():
        value = metadata.get(name)
        if not isinstance(value, str) or not form.fullmatch(value):
            raise CorruptChunkError(f"the header's {name} cannot be one")


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
        try:
            _read_payload(read, header, spec, _places(staged.tensors, tokens) or {}, key)
        except BaseException:
            staged.forget()
            raise
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
    _check_payload(read, header, key, lambda seen: read_views(read, header.offset, targets, seen))


def _check_payload(
    read: ReadV,
    header: Header,
    key: SigningKey | None,
    go_through: Callable[[Callable[[memoryview], object]], None],
) -> None:
    """Refuse a payload that is not what checksum or MAC say.

    What has the right MAC needs no checksum; of what has a wrong one it tells damage, which a
    medium does, from bytes that somebody wrote.

    Args:
        read: Reads the file.
        header: Its header, which was checked.
        key: What it must be signed by; None if that does not matter.
        go_through: Reads the payload, and shows all of it, in order, to what it is given.

    Raises:
        CorruptChunkError: If the checksum is wrong, and the MAC if there is a key.
        UntrustedChunkError: If the MAC alone is.
        OSError: If it cannot be read.
    """
    if key is not None:
        authenticator = key.authenticator(key.mac_in(header.metadata["provenance"]), header.head)
        go_through(authenticator.update)
        if authenticator.is_right():
            return
        go_through = partial(read_through, read, header.offset, header.payload)
    hasher = xxhash.xxh3_128()
    go_through(hasher.update)
    if hasher.hexdigest() != header.checksum:
        raise CorruptChunkError("the checksum is wrong: the bytes were changed")
    if key is not None:
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
def file_header(path: str, digest: str, key: SigningKey | None = None) -> Header:
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
    with _regular(path) as (read, size):
        header = read_header(read, size, key)
        header.check(size, digest)
        return header


def verify_file(path: str, digest: str, key: SigningKey | None = None) -> None:
    """Check all of a chunk's file, the checksum too, and the MAC if there is a key."""
    with _regular(path) as (read, size):
        verify_bytes(read, size, digest, key)


def verify_bytes(read: ReadV, size: int, digest: str, key: SigningKey | None) -> None:
    """The same, of what `read` reads."""
    header = read_header(read, size, key)
    header.check(size, digest)
    _check_payload(read, header, key, partial(read_through, read, header.offset, header.payload))


@contextmanager
def _regular(path: str) -> Iterator[tuple[ReadV, int]]:
    try:
        with opened(path, READ) as descriptor:
            yield positional(descriptor), os.fstat(descriptor).st_size
    except NotAFileError as error:
        raise CorruptChunkError(f"it is not a file: {error.strerror}") from None
