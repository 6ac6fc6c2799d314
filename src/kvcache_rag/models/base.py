"""What the rest of the package knows about a model: layer groups, rotations and reach.

Nothing here names a model family or imports a model library.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvcache_rag.chunk import ChunkLayout, GroupLayout
from kvcache_rag.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from kvcache_rag.rotary import Rotation


@dataclass(frozen=True)
class LayerKind:
    """How a layer keeps its context.

    Attributes:
        window: Sliding window in tokens, None for a layer that sees everything.
        shared: Whether the layer reads another layer's keys and stores none.
    """

    window: int | None = None
    shared: bool = False


@dataclass(frozen=True, eq=False)
class FrequencySet:
    """One set of rotary frequencies of a model.

    Attributes:
        name: Where it was found.
        read: Gives the float32 frequencies `(dim / 2,)`, in radians per position, that the model
            uses when its highest position is one less than the argument.
        limit: Longest prompt for which these are the frequencies (dynamic NTK, longrope); None
            without a limit.
    """

    name: str
    read: Callable[[int], Tensor]
    limit: int | None = None

    def at_rest(self) -> Tensor:
        """The frequencies for short prompts; read once, as that may be a call of a module."""
        return self._at_rest

    @cached_property
    def _at_rest(self) -> Tensor:
        return self.read(1)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share shape, window and rotation.

    Attributes:
        layout: Their indices and shapes.
        window: Sliding window in tokens, or None.
        key_rotation: How their K slot turns.
        value_rotation: How their V slot turns (MLA keeps its rotary part there).
    """

    layout: GroupLayout
    window: int | None
    key_rotation: Rotation
    value_rotation: Rotation


@dataclass(frozen=True, eq=False)
class ModelLayout:
    """What was measured about a model.

    Attributes:
        groups: Layer groups, in order of their first layer.
        kinds: Kind of each layer.
        frequencies: The model's frequency sets.
        dtype: Dtype of the cache.
        residual: Largest relative error of the measured rotations at the first layer.
        immovable: Why keys cannot be moved, or "" when they can.
    """

    groups: tuple[LayerGroup, ...]
    kinds: tuple[LayerKind, ...]
    frequencies: tuple[FrequencySet, ...]
    dtype: torch.dtype
    residual: float
    immovable: str = ""

    @property
    def chunk_layout(self) -> ChunkLayout:
        """Shapes of the tensors of a chunk."""
        return ChunkLayout(tuple(group.layout for group in self.groups), self.dtype)

    @property
    def limit(self) -> int | None:
        """Longest prompt in tokens for which the frequencies hold, or None."""
        limits = [found.limit for found in self.frequencies if found.limit is not None]
        return min(limits) if limits else None

    def ensure_movable(self) -> None:
        """Raise `UnsupportedModelError` if keys cannot be moved to another position."""
        if self.immovable:
            raise UnsupportedModelError(
                f"{self.immovable}; use Combination(), which computes a prompt's chunks together"
            )
