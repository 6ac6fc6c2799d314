"""The header of a chunk's file.

Law: whatever the bytes are, they are refused by `CorruptChunkError`, or they give the very chunk
that was asked for.  What the safetensors library reads in a file that is accepted is the same, and
`store verify`, which knows of a file nothing but its name, finds no more in it than there is.

An input that begins with "j" is the JSON of a header, before a payload that is right; one that
begins with "p" the first bytes of a payload, behind a header that is right; any other is a whole
file.
"""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import safetensors
import torch

from kvcache_rag.codecs import Native
from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.stores.disk import file
from tests import access
from tests.chunks import LAYOUT, empty_chunk, key_of, make_chunk, same

_CHUNK = make_chunk(tokens=2)
_KEY = key_of(_CHUNK)
_SPEC = file.file_spec(_KEY, LAYOUT, Native())
_OUT = empty_chunk(2)


def _written() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "chunk")
        file.write_file(str(path), _CHUNK, _SPEC, Native())
        return path.read_bytes()


_FILE = _written()
_PAYLOAD = _FILE[-_SPEC.payload :]


def seeds() -> list[bytes]:
    """The file of a chunk, its header alone, and its payload alone."""
    return [_FILE, b"j" + _FILE[8 : -_SPEC.payload].replace(b" ", b""), b"p" + _PAYLOAD]


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
    read = file.in_memory(raw)
    _check_facts(raw)
    try:
        file.read_file(read, len(raw), _SPEC, Native(), _OUT)
    except CorruptChunkError:
        return False
    header = file.read_header(read, len(raw))
    assert same(_OUT, _CHUNK), "a wrong tensor was served"
    assert header.offset + _SPEC.payload == len(raw)
    _check_library(raw)
    return True


def _check_facts(raw: bytes) -> None:
    try:
        facts = access.file_facts(file.in_memory(raw), len(raw), _KEY.digest)
    except CorruptChunkError:
        return
    assert facts.offset + facts.payload == len(raw)
    assert 0 <= facts.tokens * 4 <= facts.payload
    assert facts.offset % file.ALIGNMENT == 0


def _check_library(raw: bytes) -> None:
    try:
        tensors = dict(safetensors.deserialize(raw))
    except safetensors.SafetensorError:
        return
    assert tensors.keys() == _SPEC.tensors.keys()
    for name, (_, shape) in _SPEC.tensors.items():
        begin, end = _SPEC.header[name]["data_offsets"]
        assert bytes(tensors[name]["data"]) == _PAYLOAD[begin:end]
        assert torch.Size(tensors[name]["shape"]) == torch.Size(shape)
