"""One chunk: its tensors (`ChunkKV`), their shapes (`ChunkLayout`), its address (`ChunkKey`).

This module knows nothing of models, files or frameworks.  Tensors are grouped by layers of one
shape and one rotation (`GroupLayout`), because models mix local and global layers; a group is one
tensor, so that a chunk is read with few system calls and moved with one multiplication.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcache_rag.errors import check_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


FORMAT_VERSION = 1


@dataclass(frozen=True)
class GroupLayout:
    """Shape of the layers that share one shape and one rotation.

    Attributes:
        layers: Indices of the model's layers, ascending.
        key_shape: `(heads, width)` of the K slot.
        value_shape: `(heads, width)` of the V slot; differs from `key_shape` in MLA models.
    """

    layers: tuple[int, ...]
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]

    @property
    def is_fused(self) -> bool:
        """Whether K and V have one shape, so `[layers, 2, heads, tokens, width]` holds both."""
        return self.key_shape == self.value_shape

    def shapes(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of one fused tensor, or of K and V as `[layers, heads, tokens, width]`."""
        count = len(self.layers)
        heads, width = self.key_shape
        if self.is_fused:
            return ((count, 2, heads, tokens, width),)
        return (
            (count, heads, tokens, width),
            (count, self.value_shape[0], tokens, self.value_shape[1]),
        )


@dataclass(frozen=True)
class ChunkLayout:
    """Shapes and dtype of every tensor of a chunk, up to its number of tokens.

    Attributes:
        groups: Layers by shape.
        dtype: Of keys and values.
    """

    groups: tuple[GroupLayout, ...]
    dtype: torch.dtype

    def shapes(self, tokens: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Shapes of the tensors of a chunk of `tokens` tokens, one tuple per group."""
        return tuple(map(methodcaller("shapes", tokens), self.groups))

    def names(self) -> tuple[tuple[str, ...], ...]:
        """Names per group: `kv`, or `k` and `v`; with `.index` when there are several."""
        tails = (
            [""] if len(self.groups) == 1 else [f".{index}" for index in range(len(self.groups))]
        )
        return tuple(
            (f"kv{tail}",) if group.is_fused else (f"k{tail}", f"v{tail}")
            for group, tail in zip(self.groups, tails, strict=True)
        )

    def empty(
        self, tokens: int, device: torch.device | str = "cpu"
    ) -> tuple[tuple[Tensor, ...], ...]:
        """Uninitialised tensors for a chunk of `tokens` tokens, one tuple per group."""
        return tuple(
            tuple(torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes)
            for shapes in self.shapes(tokens)
        )

    def nbytes(self, tokens: int) -> int:
        """Bytes of the K and V of a chunk of `tokens` tokens."""
        elements = sum(
            torch.Size(shape).numel() for group in self.groups for shape in group.shapes(tokens)
        )
        return elements * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """Keys and values of one chunk, with keys standing at their local positions.

    Attributes:
        layout: Shapes and dtype of the tensors.
        tokens: Token ids, `(tokens,)` int32 on the CPU.
        start: Position of the first token when the keys were computed (the length of the prefix).
        tensors: Per group one fused tensor `[layers, 2, heads, tokens, width]`, or K and V
            apart.  They may be strided views into a larger buffer; a stored chunk is never written
            to.
    """

    layout: ChunkLayout
    tokens: Tensor
    start: int
    tensors: tuple[tuple[Tensor, ...], ...]

    def __len__(self) -> int:
        """Number of tokens."""
        return self.tensors[0][0].shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V tensors."""
        return self.layout.nbytes(self.tokens.shape[0])

    def keys(self, group: int) -> Tensor:
        """K slot of a group, `[layers, heads, tokens, width]`, a view."""
        tensors = self.tensors[group]
        return tensors[0][:, 0] if len(tensors) == 1 else tensors[0]

    def values(self, group: int) -> Tensor:
        """V slot of a group, `[layers, heads, tokens, width]`, a view."""
        tensors = self.tensors[group]
        return tensors[0][:, 1] if len(tensors) == 1 else tensors[1]

    def copy_from(self, other: ChunkKV) -> None:
        """Copy the tensors of `other`, of the same layout and length, into this chunk's memory."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            for target, source in zip(mine, theirs, strict=True):
                target.copy_(source)


@dataclass(frozen=True)
class ChunkKey:
    """Content address of a chunk: equal exactly when tokens, spec, prefix and namespace are equal.

    Attributes:
        digest: SHA-256, 64 hexadecimal digits.
        spec: SHA-256 of everything about model and storage that the tensors depend on.
        namespace: Tenant; another namespace never finds the chunk.
        tokens: Number of tokens of the chunk.
        start: Position of its first token, the length of the prefix attended to.
    """

    digest: str
    spec: str
    namespace: str
    tokens: int
    start: int


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys and no spaces, in ASCII: the same bytes on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode(
        "ascii"
    )


def digest(tag: str, *fields: bytes) -> str:
    """SHA-256 of a tag and length-prefixed fields: no two lists collide by joining."""
    state = hashlib.sha256(tag.encode("ascii") + b"\0")
    for field in fields:
        state.update(struct.pack("<Q", len(field)))
        state.update(field)
    return state.hexdigest()


def spec_digest(spec: Mapping[str, Any]) -> str:
    """Digest of a spec: everything about model and storage that a chunk's tensors depend on."""
    return digest("kvcache-rag-spec", canonical_json(spec))


def chunk_key(
    token_ids: Sequence[int], *, prefix_ids: Sequence[int], spec: str, namespace: str
) -> ChunkKey:
    """Address of the chunk `token_ids` computed behind `prefix_ids`.

    Args:
        token_ids: Ids of the chunk.
        prefix_ids: Ids of everything the chunk attended to; empty for the prefix itself.
        spec: Digest from `spec_digest`.
        namespace: Tenant, "" for none.

    Raises:
        InvalidInputError: If the namespace is no text.
    """
    if not isinstance(namespace, str) or not namespace.isascii():
        check_name("namespace", namespace)
    fields = (
        bytes.fromhex(spec),
        namespace.encode(),
        packed_ids(prefix_ids),
        packed_ids(token_ids),
    )
    return ChunkKey(
        digest=digest("kvcache-rag-chunk", *fields),
        spec=spec,
        namespace=namespace,
        tokens=len(token_ids),
        start=len(prefix_ids),
    )


def packed_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return struct.pack(f"<{len(ids)}i", *ids)
