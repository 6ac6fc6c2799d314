"""One chunk: its tensors (`ChunkKV`), their shapes (`ChunkLayout`), its address (`ChunkKey`).

This module knows nothing of models, files or frameworks.  Tensors are grouped by layers of one
shape and one rotation (`GroupLayout`), because models mix local and global layers.  A group is one
tensor, so that a chunk is read with few system calls and moved with one multiplication.  Recurrent
layers keep no tensor per token; what they keep of a chunk (`StateLayout`) follows in further
groups.  Code that copies, stores or sends chunks treats all groups alike.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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


TransitionForm = Literal["none", "scale", "left", "right"]
"""How the state before a chunk enters the state after it: not at all, multiplied by numbers, or by
a matrix from the left or the right."""

TensorSpec = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class StateLayout:
    """What recurrent layers of one shape keep of a chunk of any length.

    A layer is affine in the state before the chunk; all else is computed from the chunk itself.
    The state after it is `final + A (before - beginning)`, where `beginning` is the state after the
    prefix and `A` the product of all tokens' transitions.

    Attributes:
        layers: Indices of the model's layers, ascending.
        window: Dtype and shape `(channels, width)` of the last inputs of a convolution, or None.
        state: Dtype and shape of a layer's final state as stored, or None.
        transition: Dtype and shape of `A` as stored, or None.
        form: How `A` is applied.
        kept: Dtype in which the model keeps a state; None without one.
        head: First tokens of a chunk that may be computed again in a prompt.  Unless 0, the state
            after them and the transition of the rest are kept too.
    """

    layers: tuple[int, ...]
    window: TensorSpec | None
    state: TensorSpec | None
    transition: TensorSpec | None
    form: TransitionForm
    kept: torch.dtype | None
    head: int = 0

    @property
    def parts(self) -> dict[str, TensorSpec]:
        """Dtype and shape `[layers, ...]` of each part, by name."""
        found = {"window": self.window, "state": self.state, "transition": self.transition}
        if self.head and self.form != "none":
            found |= {"head": self.state, "rest": self.transition}
        return {
            name: (spec[0], (len(self.layers), *spec[1]))
            for name, spec in found.items()
            if spec is not None
        }


@dataclass(frozen=True)
class ChunkLayout:
    """Shapes and dtypes of every tensor of a chunk, up to its number of tokens.

    Attributes:
        groups: Layers that keep keys and values, by shape.
        dtype: Dtype of keys and values.
        states: Recurrent layers, by shape.
    """

    groups: tuple[GroupLayout, ...]
    dtype: torch.dtype
    states: tuple[StateLayout, ...] = ()

    def specs(self, tokens: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """Dtypes and shapes of the tensors of a chunk of `tokens` tokens, one tuple per group."""
        of_tokens = tuple(
            tuple((self.dtype, shape) for shape in group.shapes(tokens)) for group in self.groups
        )
        return (*of_tokens, *(tuple(state.parts.values()) for state in self.states))

    def names(self) -> tuple[tuple[str, ...], ...]:
        """Names per group: `kv`, or `k` and `v`; with `.index` when there are several.

        For recurrent layers they are `window.index`, `state.index`, `transition.index`, and
        `head.index` and `rest.index` where chunks are cut.
        """
        tails = (
            [""] if len(self.groups) == 1 else [f".{index}" for index in range(len(self.groups))]
        )
        of_tokens = tuple(
            (f"kv{tail}",) if group.is_fused else (f"k{tail}", f"v{tail}")
            for group, tail in zip(self.groups, tails, strict=True)
        )
        return (
            *of_tokens,
            *(tuple(names) for names in map(self.state_names, range(len(self.states)))),
        )

    def state_names(self, index: int) -> dict[str, str]:
        """File names of the tensors of a group of recurrent layers, and what each is."""
        return {f"{part}.{index}": part for part in self.states[index].parts}

    def empty(
        self, tokens: int, device: torch.device | str = "cpu"
    ) -> tuple[tuple[Tensor, ...], ...]:
        """Uninitialised tensors for a chunk of `tokens` tokens, one tuple per group."""
        return tuple(
            tuple(torch.empty(shape, dtype=dtype, device=device) for dtype, shape in group)
            for group in self.specs(tokens)
        )

    def nbytes(self, tokens: int) -> int:
        """Bytes of the tensors of a chunk of `tokens` tokens."""
        return sum(
            torch.Size(shape).numel() * dtype.itemsize
            for group in self.specs(tokens)
            for dtype, shape in group
        )


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """What layers keep of one chunk: keys at their local positions, values, and states.

    Attributes:
        layout: Shapes and dtype of the tensors.
        tokens: Token ids, `(tokens,)` int32 on the CPU.
        start: Position of the first token when the keys were computed (the length of the prefix).
        tensors: Per group one fused tensor `[layers, 2, heads, tokens, width]`, or K and V apart.
            They may be strided views into a larger buffer; a stored chunk is never written to.
            Then, per group of recurrent layers, what `StateLayout.parts` lists.
    """

    layout: ChunkLayout
    tokens: Tensor
    start: int
    tensors: tuple[tuple[Tensor, ...], ...]

    def __len__(self) -> int:
        """Number of tokens."""
        return self.tokens.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.layout.nbytes(self.tokens.shape[0])

    def keys(self, group: int) -> Tensor:
        """K slot of a group, `[layers, heads, tokens, width]`, a view."""
        tensors = self.tensors[group]
        return tensors[0][:, 0] if len(tensors) == 1 else tensors[0]

    def values(self, group: int) -> Tensor:
        """V slot of a group, `[layers, heads, tokens, width]`, a view."""
        tensors = self.tensors[group]
        return tensors[0][:, 1] if len(tensors) == 1 else tensors[1]

    @property
    def states(self) -> tuple[Mapping[str, Tensor], ...]:
        """What each group of recurrent layers keeps, by the names of `StateLayout.parts`."""
        behind = self.tensors[len(self.layout.groups) :]
        return tuple(
            dict(zip(state.parts, tensors, strict=True))
            for state, tensors in zip(self.layout.states, behind, strict=True)
        )

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
    """Address of the chunk `token_ids` computed after `prefix_ids`.

    Args:
        token_ids: Ids of the chunk.
        prefix_ids: Ids of everything the chunk attended to; empty for the prefix itself.
        spec: Digest from `spec_digest`.
        namespace: Tenant, "" for none.

    Raises:
        InvalidInputError: If the namespace is not a text.
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
