"""What the rest of the package knows about a model: layer groups, rotations and reach.

Nothing here names a model family or imports a model library.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout, GroupLayout, StateLayout
from kvcache_rag.kv.rotary import RotaryTable, angle_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.kv.rotary import Rotation


@dataclass(frozen=True)
class LayerKind:
    """How a layer keeps its context.

    Attributes:
        window: Sliding window in tokens, None for a layer that sees everything.
        keeps: Keys and values of every token, a recurrent `state`, `both`, or `nothing`, as it
            reads another layer's keys and values.
        limit: Longest prompt in which it is such a layer, because it attends in stretches of so
            many tokens that do not see each other (llama 4); None without a limit.
    """

    window: int | None = None
    keeps: Literal["kv", "state", "both", "nothing"] = "kv"
    limit: int | None = None

    @property
    def has_kv(self) -> bool:
        """Whether it keeps keys and values."""
        return self.keeps in ("kv", "both")

    @property
    def has_state(self) -> bool:
        """Whether it keeps a recurrent state."""
        return self.keeps in ("state", "both")

    @property
    def beyond(self) -> str:
        """What comes behind the limit, half a sentence."""
        return f"beyond {self.limit} tokens layers attend in stretches that do not see each other"


@dataclass(frozen=True, eq=False)
class FrequencySet:
    """One set of rotary frequencies of a model.

    Attributes:
        name: Where it was found.
        read: Gives the float32 frequencies `(dim / 2,)`, in radians per position, that the model
            uses when its highest position is one less than the argument.
        limit: Longest prompt for which these are the frequencies (dynamic NTK, longrope); None
            without a limit.
        beyond: What comes behind the limit, half a sentence.
    """

    name: str
    read: Callable[[int], Tensor]
    limit: int | None = None
    beyond: str = ""

    @cached_property
    def at_rest(self) -> Tensor:
        """The frequencies for short prompts; read once, as that may be a call of a module."""
        return self.read(1)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share shape, window and rotation.

    Attributes:
        layout: Their indices and shapes.
        window: Sliding window in tokens, or None.
        key_rotation: How their K slot is rotated.
        value_rotation: How their V slot is rotated (MLA keeps its rotary part there).
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
        by_place: Whether attention counts the places of keys that know none (ALiBi, arXiv
            2108.12409): a chunk may stand at any place, and its position is its place.
        states: Recurrent layers, by what they keep.
    """

    groups: tuple[LayerGroup, ...]
    kinds: tuple[LayerKind, ...]
    frequencies: tuple[FrequencySet, ...]
    dtype: torch.dtype
    residual: float
    immovable: str = ""
    by_place: bool = False
    states: tuple[StateLayout, ...] = ()

    @property
    def chunk_layout(self) -> ChunkLayout:
        """Shapes of the tensors of a chunk."""
        return ChunkLayout(tuple(group.layout for group in self.groups), self.dtype, self.states)

    @property
    def limit(self) -> int | None:
        """Longest prompt in tokens for which frequencies and layers are what they are, or None."""
        return min(self._limits, default=(None, ""))[0]

    @property
    def beyond(self) -> str:
        """What comes behind the limit, half a sentence; "" without one."""
        return min(self._limits, default=(None, ""))[1]

    @property
    def _limits(self) -> list[tuple[int, str]]:
        parts: tuple[FrequencySet | LayerKind, ...] = (*self.frequencies, *self.kinds)
        return [(part.limit, part.beyond) for part in parts if part.limit is not None]

    def spec(self) -> dict[str, Any]:
        """What of it the tensors of a chunk depend on, as plain values."""
        return {
            "stored_dtype": str(self.dtype),
            "groups": [
                {
                    "layers": list(group.layout.layers),
                    "key_shape": list(group.layout.key_shape),
                    "value_shape": list(group.layout.value_shape),
                    "window": group.window,
                    "key_rotation": f"{group.key_rotation}@{group.key_rotation.frequency}",
                    "value_rotation": f"{group.value_rotation}@{group.value_rotation.frequency}",
                }
                for group in self.groups
            ],
            "inv_freq": [
                frequency.at_rest.cpu().numpy().tobytes().hex() for frequency in self.frequencies
            ],
        }

    def unrotated_slot(self, layer: int) -> int:
        """The slot of a layer that no rotation touches: 1, V; or 0, K, where V is rotated (MLA)."""
        for group in self.groups:
            if layer in group.layout.layers and group.value_rotation.style != "none":
                return 0
        return 1

    def ensure_movable(self) -> None:
        """Raise `UnsupportedModelError` if keys cannot be moved to another position."""
        if self.immovable:
            raise UnsupportedModelError(self.immovable)


class KeysAndValues(Protocol):
    """Memory for a chunk, whatever lies between its numbers."""

    def keys(self, group: int) -> Tensor:
        """K slot of a group, `[layers, heads, tokens, width]`, a view."""

    def values(self, group: int) -> Tensor:
        """V slot of a group, `[layers, heads, tokens, width]`, a view."""


@dataclass(frozen=True, eq=False)
class KeyRotation:
    """How keys (and in MLA models, values) of a run of tokens get from where they stand to a place.

    Attributes:
        slots: Per layer group the rotation of its K slot and its V slot; None for one that stays.
    """

    slots: tuple[tuple[RotaryTable | None, RotaryTable | None], ...]

    @classmethod
    def from_positions(
        cls, layout: ModelLayout, old: Tensor, new: Tensor, device: torch.device
    ) -> KeyRotation:
        """The move of tokens standing at positions `old`, `(tokens,)`, to positions `new`.

        Raises:
            UnsupportedModelError: If the model's keys cannot be moved.
        """
        layout.ensure_movable()
        rotary_tables: dict[Rotation, RotaryTable] = {}  # groups of one rotation share a table
        old, new = old.to(device), new.to(device)
        tables = [
            angle_table(frequency.at_rest.to(device), old, new) for frequency in layout.frequencies
        ]

        def rotary_table(rotation: Rotation) -> RotaryTable | None:
            if rotation.style == "none":
                return None
            if rotation not in rotary_tables:
                rotary_tables[rotation] = RotaryTable.from_angles(
                    rotation, *tables[rotation.frequency]
                )
            return rotary_tables[rotation]

        groups = layout.groups
        return cls(
            tuple(
                (rotary_table(group.key_rotation), rotary_table(group.value_rotation))
                for group in groups
            )
        )

    def narrow(self, start: int, stop: int) -> KeyRotation:
        """The move of the tokens `start..stop` alone."""
        return KeyRotation(
            tuple(
                (key and key.narrow(start, stop), value and value.narrow(start, stop))
                for key, value in self.slots
            )
        )

    def rotate(self, part: ChunkKV, layers: Sequence[slice] | None = None) -> None:
        """Rotate the keys of a part in place: the plain path.

        Args:
            part: As many tokens as the move is for.
            layers: Which layers of each group; None for all.
        """
        for index, slots in enumerate(self.slots):
            chosen = slice(None) if layers is None else layers[index]
            for table, slot in zip(slots, (part.keys(index), part.values(index)), strict=True):
                if table is not None:
                    rotated = slot[chosen]  # (layers, heads, tokens, width)
                    table.rotate_into(rotated, [rotated])

    def copy_rotated(self, part: KeysAndValues, source: KeysAndValues) -> None:
        """Copy `source` to `part` and rotate its keys, in one pass over the memory."""
        for index, slots in enumerate(self.slots):
            targets = (part.keys(index), part.values(index))
            sources = (source.keys(index), source.values(index))
            for table, out, stored in zip(slots, targets, sources, strict=True):
                if table is None:
                    out.copy_(stored)
                else:
                    table.rotate_into(out, [stored])


def unrotated(layout: ModelLayout, chunk: ChunkKV) -> ChunkKV:
    """A copy of a chunk whose keys stand at their local positions, with every key at position 0.

    Args:
        layout: How the model rotates its caches.
        chunk: In any float dtype; the arithmetic is float32 with one rounding at the end.

    Raises:
        UnsupportedModelError: If the model's keys cannot be moved.
    """
    tensors = tuple(tuple(tensor.clone() for tensor in group) for group in chunk.tensors)
    copy = ChunkKV(chunk.layout, chunk.tokens, chunk.start, tensors)
    steps = torch.arange(len(copy))
    device = tensors[0][0].device
    KeyRotation.from_positions(layout, copy.start + steps, torch.zeros_like(steps), device).rotate(
        copy
    )
    return copy
