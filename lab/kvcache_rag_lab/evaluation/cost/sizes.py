"""How many bytes chunks take, by place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_rag.codecs import CODECS, by_name
from kvcache_rag.stores.file import file_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.kv.chunk import ChunkLayout


def file_sizes(layout: ChunkLayout, lengths: Sequence[int]) -> dict[str, list[int]]:
    """Bytes of the file of every chunk, by codec.

    Args:
        layout: Of the model.
        lengths: Tokens of the chunks.
    """
    return {
        name: [file_bytes(layout, by_name(name), count) for count in lengths] for name in CODECS
    }
