"""What a caller may hand to a store; the rest is refused before memory or a path is touched."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from kvcache_rag.chunk import ChunkKey, ChunkKV, ChunkLayout

_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_key(key: ChunkKey) -> ChunkKey:
    """Return the key.

    Raises:
        InvalidInputError: If its digest or spec is not 64 lower-case hexadecimal digits.
    """
    for field, value in (("digest", key.digest), ("spec", key.spec)):
        if not _DIGEST.fullmatch(value):
            raise InvalidInputError(
                f"the {field} of a ChunkKey is 64 hexadecimal digits, not {value[:80]!r}; "
                "make keys with chunk_key()"
            )
    return key


def check_chunk(key: ChunkKey, chunk: ChunkKV) -> None:
    """Refuse a chunk that is not what its key and its own layout say.

    Raises:
        InvalidInputError: If length, start, shapes or dtypes differ.
    """
    said = (key.tokens, key.start)
    if (len(chunk), chunk.start) != said:
        raise InvalidInputError(
            f"the chunk has {len(chunk)} tokens from position {chunk.start}, its key says "
            f"{key.tokens} from {key.start}; compute the key from the chunk's own ids"
        )
    if chunk.tokens.dtype != torch.int32 or chunk.tokens.dim() != 1:
        raise InvalidInputError("the token ids of a chunk are one row of int32")
    layout = chunk.layout
    shapes = tuple(tuple(tuple(tensor.shape) for tensor in group) for group in chunk.tensors)
    expected = tuple(group.shapes(key.tokens) for group in layout.groups)
    dtypes = {tensor.dtype for group in chunk.tensors for tensor in group}
    if shapes != expected or dtypes - {layout.dtype}:
        raise InvalidInputError(
            f"the chunk's tensors are {shapes} {sorted(map(str, dtypes))}, its layout says "
            f"{expected} {layout.dtype}"
        )


def check_out(key: ChunkKey, layout: ChunkLayout, out: ChunkKV) -> None:
    """Refuse memory that the chunk of `key` does not fit.

    Raises:
        InvalidInputError: If the layout, length, start, shapes or dtypes differ.
    """
    if out.layout != layout:
        raise InvalidInputError("`out` has another layout than the chunk asked for")
    check_chunk(key, out)
