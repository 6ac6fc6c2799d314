"""How large the file of a chunk will be, before there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_rag.chunk import ChunkKey, canonical_json
from kvcache_rag.stores.chunkfile import ALIGNMENT, FileSpec, file_spec

if TYPE_CHECKING:
    from kvcache_rag.chunk import ChunkLayout
    from kvcache_rag.codecs import Codec

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
