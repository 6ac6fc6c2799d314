"""Chunks of random bits, and comparing them."""

from __future__ import annotations

import torch

from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout, GroupLayout, chunk_key, spec_digest

SPEC = spec_digest({"test": 1})
PREFIX = [1, 2, 3]

FUSED = (GroupLayout((0, 1, 2), (2, 8), (2, 8)),)
APART = (GroupLayout((0, 1), (1, 24), (1, 6)),)  # MLA: K and V differ in shape
MIXED = (
    GroupLayout((0, 2), (2, 8), (2, 8)),
    GroupLayout((1,), (4, 4), (2, 4)),
    GroupLayout((3, 4, 5), (1, 16), (1, 16)),
)
LAYOUTS = {
    f"{name}-{str(dtype)[6:]}": ChunkLayout(groups, dtype)
    for name, groups in (("fused", FUSED), ("apart", APART), ("mixed", MIXED))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
}
LAYOUT = LAYOUTS["fused-bfloat16"]


def make_chunk(
    seed: int = 0, *, tokens: int = 16, layout: ChunkLayout = LAYOUT, start: int = len(PREFIX)
) -> ChunkKV:
    """A chunk of random bits, NaN and infinities among them: a store moves bits, not numbers."""
    generator = torch.Generator().manual_seed(seed)
    chunk = empty_chunk(tokens, layout, start)
    chunk.tokens.copy_(torch.randint(0, 32000, (tokens,), generator=generator))
    for tensor in flat(chunk):
        bits = tensor.view(torch.uint8)
        bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=generator))
    return chunk


def empty_chunk(tokens: int, layout: ChunkLayout = LAYOUT, start: int = len(PREFIX)) -> ChunkKV:
    """A chunk of zeros."""
    tensors = layout.empty(tokens)
    for group in tensors:
        for tensor in group:
            tensor.zero_()
    return ChunkKV(layout, torch.zeros(tokens, dtype=torch.int32), start, tensors)


def window(large: ChunkKV, begin: int, tokens: int) -> ChunkKV:
    """The part of a larger buffer that one chunk goes to: strided views."""
    tensors = tuple(
        tuple(tensor.narrow(-2, begin, tokens) for tensor in group) for group in large.tensors
    )
    return ChunkKV(large.layout, large.tokens.narrow(0, begin, tokens), large.start, tensors)


def key_of(chunk: ChunkKV, *, namespace: str = "", spec: str = SPEC) -> ChunkKey:
    """The key of a chunk from `make_chunk`."""
    return chunk_key(
        chunk.tokens.tolist(), prefix_ids=range(chunk.start), spec=spec, namespace=namespace
    )


def flat(chunk: ChunkKV) -> list[torch.Tensor]:
    """All tensors of a chunk."""
    return [tensor for group in chunk.tensors for tensor in group]


def same(left: ChunkKV, right: ChunkKV) -> bool:
    """Whether two chunks are equal bit for bit."""
    pairs = zip(flat(left), flat(right), strict=True)
    return (
        left.layout == right.layout
        and left.start == right.start
        and torch.equal(left.tokens, right.tokens)
        and all(bits(a) == bits(b) for a, b in pairs)
    )


def bits(tensor: torch.Tensor) -> bytes:
    """The elements' bytes."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
