"""Copies of chunks that a store keeps in main memory."""

from __future__ import annotations

import torch

from kvcache_rag.chunk import ChunkKV


def private_copy(chunk: ChunkKV) -> ChunkKV:
    """A copy in main memory that shares nothing, usable in and out of inference mode."""
    with torch.inference_mode(mode=False), torch.no_grad():
        tensors = chunk.layout.empty(len(chunk))
        copy = ChunkKV(chunk.layout, chunk.tokens.cpu().clone(), chunk.start, tensors)
        copy.copy_from(chunk)
    return copy


def size_in_memory(chunk: ChunkKV) -> int:
    """Bytes of the keys, the values and the token ids."""
    return chunk.nbytes + chunk.tokens.nbytes
