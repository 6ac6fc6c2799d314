"""Forms in which a chunk's tensors are stored.

A codec turns the tensors of a `ChunkKV` into named tensors of a file and back.  It knows the
layout, not the file.
"""

from kvcache_rag.codecs.base import Codec, EncodedChunk, Native, Room
from kvcache_rag.codecs.codec_registry import CODECS, by_name
from kvcache_rag.codecs.int4 import Int4
from kvcache_rag.codecs.int8 import Int8
from kvcache_rag.kv.chunk import TensorSpec

__all__ = [
    "CODECS",
    "Codec",
    "EncodedChunk",
    "Int4",
    "Int8",
    "Native",
    "Room",
    "TensorSpec",
    "by_name",
]
