"""Recurrent states through the chunks of a prompt, from left to right.

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
        chunks: Prefix, if any, and chunks in prompt order; one or more.
        out: Per group `window` and `state`, `[layers, 1, ...]`, what there is of them.
    """
    for index, layout in enumerate(layouts):
        parts = [chunk.states[index] for chunk in chunks]
        if "window" in out[index]:
            _window(chunks, [part["window"] for part in parts], out[index]["window"][:, 0])
        if "state" in out[index]:
            _state(layout, chunks, parts, out[index]["state"][:, 0])


def _window(chunks: Sequence[Chunk], windows: Sequence[Tensor], out: Tensor) -> None:
    """The last inputs of the prompt; those of a short chunk reach into what stands before it."""
    width = out.shape[-1]
    held = torch.zeros_like(out)  # [layers, channels, width]: before the first token
    for chunk, window in zip(chunks, windows, strict=True):
        fresh = window[..., max(0, width - len(chunk)) :].to(held)
        held = torch.cat([held, fresh], -1)[..., -width:]
    out.copy_(held)


def _state(
    layout: StateLayout,
    chunks: Sequence[Chunk],
    parts: Sequence[Mapping[str, Tensor]],
    out: Tensor,
) -> None:
    wide = torch.promote_types(out.dtype, torch.float32)
    now: Tensor | None = None  # [layers, ...]; None at the beginning
    beginning: Tensor | None = None  # what chunks were computed behind; None for nothing
    for chunk, part in zip(chunks, parts, strict=True):
        final = part["state"].to(out.device, wide)
        if now is None and not chunk.start:
            now = final
            if len(chunks) > 1 and chunks[1].start:
                beginning = final  # this is the prefix
            continue
        if layout.form != "none" and now is not None:
            difference = now if beginning is None else now - beginning
            final = final + applied(layout.form, part["transition"].to(out.device), difference)
        now = final
    if now is not None:
        out.copy_(now)
