"""Carry recurrent states through the chunks of a prompt, from left to right.

Each chunk was computed behind the prefix alone, so its final state says what it makes of the
prefix's; `A` of its tokens says what it makes of any other (`kv/chunk.StateLayout`):

    state  <- final + A (state - state behind the prefix)      exactly `final` for the first chunk
    window <- the last inputs of (window, the chunk's own inputs)

The rule is that of block attention for keys and values: what a layer computes for a chunk's tokens
it computes as behind the prefix, and the question sees the whole context, through the state too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcache_rag.models.states import applied

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from kvcache_rag.kv.chunk import StateLayout
    from kvcache_rag.stitching.stitch import Chunk


def compose(
    layouts: Sequence[StateLayout], chunks: Sequence[Chunk], out: Sequence[Mapping[str, Tensor]]
) -> None:
    """Write what stands behind the chunks of one prompt.

    Args:
        layouts: Groups of recurrent layers.
        chunks: Prefix, if any, and chunks in prompt order.
        out: Per group `window` and `state`, `[layers, 1, ...]`, what there is of them.
    """
    walk = StateWalk(layouts, chunks[0] if chunks and not chunks[0].start else None, out)
    for chunk in chunks:
        walk.through(chunk)


class StateWalk:
    """The states of one prompt on their way through its chunks.

    Attributes:
        out: Per group where they are, `[layers, 1, ...]`.
    """

    def __init__(
        self,
        layouts: Sequence[StateLayout],
        prefix: Chunk | None,
        out: Sequence[Mapping[str, Tensor]],
    ) -> None:
        """Begin at nothing.

        Args:
            layouts: Groups of recurrent layers.
            prefix: What chunks were computed behind; None for nothing.  A first chunk that was
                computed behind nothing will do, as no other chunk then is behind anything.
            out: Per group `window` and `state`, `[layers, 1, ...]`; written to.
        """
        self.out = out
        self._layouts, self._prefix = layouts, prefix
        # Whether the states are those from which the next chunk was computed.
        self._is_at_nothing, self._is_at_prefix = True, False
        for group in out:
            for tensor in group.values():
                tensor.zero_()

    def through(self, chunk: Chunk, *, head: int = 0) -> None:
        """Go through a chunk, or through what is behind its head.

        Args:
            chunk: In the form in which it is stored.
            head: First tokens that were gone through by computing them (`at`).
        """
        is_own = not head and (self._is_at_prefix if chunk.start else self._is_at_nothing)
        for index, layout in enumerate(self._layouts):
            parts, out = chunk.states[index], self.out[index]
            if "window" in out:
                _shift(out["window"][:, 0], parts["window"], len(chunk) - head)
            if "state" in out:
                beginning = parts.get("head") if head else self._beginning(index, chunk)
                through = parts.get("rest" if head else "transition")
                now = None if is_own else out["state"][:, 0]
                out["state"][:, 0].copy_(_behind(layout, parts["state"], now, beginning, through))
        self._is_at_prefix = chunk is self._prefix and self._is_at_nothing
        self._is_at_nothing = False

    def at(self) -> None:
        """The states were written to by whoever computed tokens."""
        self._is_at_nothing = self._is_at_prefix = False

    def _beginning(self, index: int, chunk: Chunk) -> Tensor | None:
        if not chunk.start or self._prefix is None:
            return None
        return self._prefix.states[index]["state"]


def _shift(window: Tensor, own: Tensor, tokens: int) -> None:
    """The last inputs of the prompt; those of few tokens reach into what stands before them."""
    width = window.shape[-1]
    fresh = own[..., max(0, width - tokens) :].to(window)
    window.copy_(torch.cat([window, fresh], -1)[..., -width:])


def _behind(
    layout: StateLayout,
    final: Tensor,
    now: Tensor | None,
    beginning: Tensor | None,
    through: Tensor | None,
) -> Tensor:
    """The state behind tokens; `now` is None where it is the one that they were computed from."""
    if now is None or through is None:
        return final
    wide = torch.promote_types(now.dtype, torch.float32)
    # A tensor of its own: what is now is written over, and gradients need it as it was.
    begun = 0 if beginning is None else beginning.to(now.device, wide)
    difference = now.to(wide) - begun
    carried = applied(layout.form, through.to(now.device), difference)
    return final.to(now.device, wide) + carried
