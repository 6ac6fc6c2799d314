"""One preallocated buffer for the K and V of a whole prompt.

Chunks are read straight into their places and generated tokens are appended in place, so nothing is
ever concatenated.  A buffer may hold several rows (a batch).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout


@dataclass(frozen=True, eq=False)
class KVBuffer:
    """Memory for `rows` prompts of up to `capacity` tokens.

    Attributes:
        layout: Shapes and dtype per layer group.
        tensors: Per group one fused tensor `[layers, 2, rows, heads, capacity, width]`, or K and V
            apart as `[layers, rows, heads, capacity, width]`.
        rows: Number of prompts.
        capacity: Tokens per prompt.
        states: Per group of recurrent layers the `window` and `state` behind what a row holds,
            `[layers, rows, ...]`, what there is of them.
    """

    layout: ChunkLayout
    tensors: tuple[tuple[Tensor, ...], ...]
    rows: int
    capacity: int
    states: tuple[dict[str, Tensor], ...] = ()

    @classmethod
    def allocate(
        cls, layout: ChunkLayout, rows: int, capacity: int, device: torch.device | str
    ) -> KVBuffer:
        """A new zeroed buffer: padding must hold finite numbers, since a mask cannot hide a NaN."""
        groups, states = [], []
        # Outside inference mode, so that it can be used in and out of it.
        with torch.inference_mode(mode=False):
            for group in layout.groups:
                # [layers, (2,) heads, tokens, width] with the rows in front of the heads
                shapes = [(*shape[:-3], rows, *shape[-3:]) for shape in group.shapes(capacity)]
                groups.append(
                    tuple(torch.zeros(shape, dtype=layout.dtype, device=device) for shape in shapes)
                )
            for kept in layout.states:
                # In the model's own dtype, in which it goes on from there.
                dtypes = {"window": kept.window and kept.window[0], "state": kept.kept}
                states.append(
                    {
                        name: torch.zeros(
                            (shape[0], rows, *shape[1:]), dtype=dtypes[name], device=device
                        )
                        for name, (_, shape) in kept.parts.items()
                        if name in dtypes
                    }
                )
        return cls(layout, tuple(groups), rows, capacity, tuple(states))

    def narrowed(self, rows: int) -> KVBuffer:
        """The first `rows` rows, as views."""
        if rows == self.rows:
            return self
        tensors = tuple(
            tuple(part[..., :rows, :, :, :] for part in group) for group in self.tensors
        )
        return replace(self, tensors=tensors, rows=rows, states=self._states(slice(rows)))

    def single(self, row: int, start: int) -> KVBuffer:
        """The places of one row from `start` on, as views: a buffer of one prompt."""
        tensors = tuple(
            tuple(part[..., row : row + 1, :, start:, :] for part in group)  # one row is left
            for group in self.tensors
        )
        states = self._states(slice(row, row + 1))
        return KVBuffer(self.layout, tensors, 1, self.capacity - start, states)

    def repeated(self, rows: int) -> KVBuffer:
        """Its one row so many times, as views that nobody may write to."""
        tensors = tuple(
            tuple(part.expand(*part.shape[:-4], rows, *part.shape[-3:]) for part in group)
            for group in self.tensors
        )
        states = tuple(
            {name: one.expand(one.shape[0], rows, *one.shape[2:]) for name, one in group.items()}
            for group in self.states
        )
        return replace(self, tensors=tensors, rows=rows, states=states)

    def _states(self, rows: slice) -> tuple[dict[str, Tensor], ...]:
        return tuple(
            {name: tensor[:, rows] for name, tensor in group.items()} for group in self.states
        )

    def cloned(self, tokens: int) -> KVBuffer:
        """Copies of the first `tokens` places."""
        with torch.inference_mode(mode=False):
            tensors = tuple(
                tuple(part[..., :tokens, :].clone() for part in group) for group in self.tensors
            )
            states = tuple(
                {name: one.clone() for name, one in group.items()} for group in self.states
            )
        return replace(self, tensors=tensors, capacity=tokens, states=states)

    def copy_first(self, other: KVBuffer, tokens: int) -> None:
        """Take over the first `tokens` places of a buffer of as many rows."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            for target, source in zip(mine, theirs, strict=True):
                target[..., :tokens, :].copy_(source[..., :tokens, :])
        for own, other_states in zip(self.states, other.states, strict=True):
            for name, tensor in own.items():
                tensor.copy_(other_states[name])

    def slots(self) -> dict[int, tuple[Tensor, Tensor]]:
        """K and V of each layer, `(rows, heads, capacity, width)`, as views."""
        slots: dict[int, tuple[Tensor, Tensor]] = {}
        for group, tensors in zip(self.layout.groups, self.tensors, strict=True):
            for place, layer in enumerate(group.layers):
                slots[layer] = (
                    (tensors[0][place, 0], tensors[0][place, 1])  # of [layers, 2, rows, ...]
                    if group.is_fused
                    else (tensors[0][place], tensors[1][place])  # of [layers, rows, ...] each
                )
        return slots

    def layer_states(self) -> dict[int, tuple[Tensor | None, Tensor | None]]:
        """Window and state of each recurrent layer, `(rows, ...)`, as views."""
        return {
            layer: (
                group["window"][place] if "window" in group else None,
                group["state"][place] if "state" in group else None,
            )
            for kept, group in zip(self.layout.states, self.states, strict=True)
            for place, layer in enumerate(kept.layers)
        }

    def view(
        self,
        row: int,
        start: int,
        stop: int,
        *,
        local_start: int,
        tokens: Tensor,
    ) -> ChunkKV:
        """The places `start..stop` of a row, as a chunk that can be loaded into.

        Args:
            row: Which prompt.
            start: First place.
            stop: One behind the last place.
            local_start: Position at which the chunk's keys were computed.
            tokens: `(tokens,)` int32, where the ids go.
        """
        views = tuple(
            tuple(tensor[..., row, :, start:stop, :] for tensor in group) for group in self.tensors
        )
        # States have no place among those of tokens: memory of their own.
        device = tokens.device if not self.tensors else self.tensors[0][0].device
        states = self.layout.empty(0, device)[len(views) :]
        return ChunkKV(self.layout, tokens, local_start, (*views, *states))
