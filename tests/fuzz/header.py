"""The header of a chunk's file.

Law: whatever the bytes are, they are refused by `CorruptChunkError`, or the header is that of the
chunk asked for, its checksum that of the payload, and the payload what is read.  What the
safetensors library reads in such a file is the same, and `store check`, which knows of a file
nothing but its name, finds no more in it than there is.

That is not "the very chunk": atheris sees both sides of a comparison and writes the right checksum
into the file within minutes, as whoever means harm can.  With a signing key it is: no file is
accepted but the one that was signed, byte by byte.

An input that begins with "j" is the JSON of a header, before a payload that is right; one that
begins with "p" the first bytes of a payload, behind a header that is right; any other is a whole
file.
"""

from __future__ import annotations

import struct

import safetensors
import torch
import xxhash

from kvcache_rag.codecs import Native
from kvcache_rag.errors import CorruptChunkError, UntrustedChunkError
from kvcache_rag.stores import file, runs
from kvcache_rag.stores.signing import Mac, SigningKey
from tests.chunks import LAYOUT, bits, empty_chunk, flat, key_of, make_chunk, same


class _Key(SigningKey):
    """Signs the same file the same way each time, so that there is one that it signed."""

    def new_mac(self) -> Mac:
        return Mac(self.id, "0" * 24)


_CHUNK = make_chunk(tokens=2)
_KEY = key_of(_CHUNK)
_SPEC = file.file_spec(_KEY, LAYOUT, Native())
_OUT = empty_chunk(2)
_SECRET = _Key(b"a signing key of 32 bytes, or so")


def _written(secret: SigningKey | None) -> bytes:
    return b"".join(file.file_pieces(_CHUNK, _SPEC, Native(), secret))


_FILE, _SIGNED = _written(None), _written(_SECRET)
_PAYLOAD = _FILE[-_SPEC.payload :]


def seeds() -> list[bytes]:
    """The file of a chunk, the same signed, its header alone, and its payload alone."""
    return [_FILE, _SIGNED, b"j" + _FILE[8 : -_SPEC.payload].replace(b" ", b""), b"p" + _PAYLOAD]


def framed(data: bytes) -> bytes:
    """The file that an input stands for; a header is padded to whole pages."""
    mark, rest = data[:1], data[1:]
    if mark == b"j":
        header = rest + b" " * (-(len(rest) + 8) % file.ALIGNMENT)
        return struct.pack("<Q", len(header)) + header + _PAYLOAD
    if mark == b"p":
        return _FILE[: -_SPEC.payload] + rest + _PAYLOAD[len(rest) :]
    return data


def check(data: bytes) -> bool:
    """Whether the file is accepted."""
    raw = framed(data)
    read = runs.in_memory(raw)
    _check_facts(raw)
    assert _is_trusted(raw) is (raw == _SIGNED), "what nobody signed was accepted, or the reverse"
    try:
        file.read_file(read, len(raw), _SPEC, Native(), lambda: _OUT)
    except CorruptChunkError:
        return False
    header = file.read_header(read, len(raw))
    payload = raw[header.offset :]
    assert xxhash.xxh3_128(payload).hexdigest() == header.checksum
    assert payload == b"".join(map(bits, (_OUT.tokens, *flat(_OUT)))), "a wrong tensor was served"
    assert payload != _PAYLOAD or same(_OUT, _CHUNK)
    _check_library(raw, payload)
    return True


def _is_trusted(raw: bytes) -> bool:
    read = runs.in_memory(raw)
    try:
        file.verify_bytes(read, len(raw), _KEY.digest, _SECRET)
    except (CorruptChunkError, UntrustedChunkError):
        is_verified = False
    else:
        is_verified = True
    try:
        file.read_file(read, len(raw), _SPEC, Native(), lambda: _OUT, _SECRET)
    except (CorruptChunkError, UntrustedChunkError):
        return is_verified
    assert is_verified, "what is read is not verified"
    return True


def _check_facts(raw: bytes) -> None:
    try:
        header = file.read_header(runs.in_memory(raw), len(raw))
        header.check(len(raw), _KEY.digest)
    except CorruptChunkError:
        return
    assert header.offset + header.payload == len(raw)
    assert 0 <= header.tokens * 4 <= header.payload
    assert header.offset % file.ALIGNMENT == 0


def _check_library(raw: bytes, payload: bytes) -> None:
    try:
        tensors = dict(safetensors.deserialize(raw))
    except safetensors.SafetensorError:
        return
    assert tensors.keys() == _SPEC.tensors.keys()
    for name, (_, shape) in _SPEC.tensors.items():
        begin, end = _SPEC.header[name]["data_offsets"]
        assert bytes(tensors[name]["data"]) == payload[begin:end]
        assert torch.Size(tensors[name]["shape"]) == torch.Size(shape)
