"""Move rotary-embedded keys to other positions without recomputing them.

A rotation by position p followed by one by d is the rotation by p + d (Su et al. 2021,
https://arxiv.org/abs/2104.09864), so a cached key moves with one more rotation.  An attention
scaling (YaRN) is already inside the stored key and must not be applied again.  This module knows
tensors only: which slot of which layer rotates how is measured by `models.probe`.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


RotationStyle = Literal["none", "half", "interleaved"]

StoredPosition = Literal["local", "raw"]
"""`local`: keys stand where they were computed; `raw`: every key stands at position 0."""

# Numbers of scratch memory that a thread keeps (2 x 4 MiB at most).
_MOST_KEPT = 1 << 20


class _Kept:
    """What one thread keeps."""

    def __init__(self) -> None:
        self.memory = torch.empty(2, 0)


_KEPT_BY: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()


class _Scratch(threading.local):
    """Memory to work in, kept per thread: fresh memory costs more page faults than the work."""

    def __init__(self) -> None:
        self._own = _KEPT_BY[threading.get_ident()] = _Kept()

    def pair(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two float32 tensors of the shape and device of `like`, of any content."""
        count = like.numel()
        if like.device.type != "cpu" or count > _MOST_KEPT:
            wide = torch.empty(like.shape, dtype=torch.float32, device=like.device)
            return wide, torch.empty_like(wide)
        memory = self._own.memory
        if memory.shape[1] < count:
            # Outside inference mode, so that it can be used in and out of it.
            with torch.inference_mode(mode=False):
                self._own.memory = memory = torch.empty(2, count)
        first, second = memory[:, :count].unbind(0)
        return first.view(like.shape), second.view(like.shape)


_SCRATCH = _Scratch()


def forget_scratch() -> None:
    """Let all threads go of their scratch memory, in which keys of a deleted tenant may stand."""
    for reference in _KEPT_BY.valuerefs():
        kept = reference()
        if kept is not None:  # who works in it right now has it to the end of that
            kept.memory = torch.empty(2, 0)


@dataclass(frozen=True)
class Rotation:
    """How one cache slot (K or V) of a layer is rotated.

    Attributes:
        style: "half" pairs column i with i + dim/2, "interleaved" pairs neighbours, "none" does not
            rotate.
        start: First rotated column.
        dim: Number of rotated columns.
        frequency: Index of the model's frequency set, -1 for "none".
        reverse: Whether the model rotates the other way.
    """

    style: RotationStyle = "none"
    start: int = 0
    dim: int = 0
    frequency: int = -1
    reverse: bool = False

    def __str__(self) -> str:
        """Short form for reports, such as `half[0:64]`."""
        if self.style == "none":
            return "none"
        return f"{'-' if self.reverse else ''}{self.style}[{self.start}:{self.start + self.dim}]"


NO_ROTATION = Rotation()


def angle_table(inv_freq: Tensor, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotations that take keys standing at `old` to `new`.

    transformers rounds `position * inv_freq` to float32.  Each end is rounded in the same way here
    and only the difference is exact, which is 300 times closer than one angle per distance.

    Args:
        inv_freq: Inverse frequencies in radians per position, `(dim / 2,)`.
        old: Positions at which the keys stand, `(tokens,)`.
        new: Positions at which they shall stand, `(tokens,)`.

    Returns:
        Two float32 tensors `(tokens, dim / 2)`.
    """
    frequencies = inv_freq.float()  # (dim / 2,)
    target = (new.float()[:, None] * frequencies).double()  # (tokens, dim / 2), rounded, then exact
    angles = target - (old.float()[:, None] * frequencies).double()
    return angles.cos().float(), angles.sin().float()


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """The rotation of some tokens by known angles, ready for any number of layers.

    Attributes:
        rotation: Which columns rotate, and in which layout.
        cos: What each rotated column is multiplied with, `(tokens, dim)` float32.
        sin: What its partner is multiplied with before it is added, sign included; the same shape.
    """

    rotation: Rotation
    cos: Tensor
    sin: Tensor

    @classmethod
    def from_angles(cls, rotation: Rotation, cos: Tensor, sin: Tensor) -> RotaryTable:
        """The rotation by the angles of an `angle_table`, `(tokens, dim / 2)`."""
        signed = -sin if rotation.reverse else sin  # (tokens, dim / 2)
        # Of a pair (a, b), a becomes a cos - b sin and b becomes b cos + a sin.
        if rotation.style == "half":  # pairs (i, i + dim / 2): [-s, s] over the two halves
            return cls(rotation, torch.cat([cos, cos], -1), torch.cat([-signed, signed], -1))
        wide = torch.stack([-signed, signed], -1).flatten(-2)  # pairs (2 i, 2 i + 1): -s s -s s ...
        return cls(rotation, cos.repeat_interleave(2, -1), wide)

    def narrow(self, start: int, stop: int) -> RotaryTable:
        """The rotation of the tokens `start..stop` alone."""
        return RotaryTable(self.rotation, self.cos[start:stop], self.sin[start:stop])

    @torch.no_grad()
    def rotate_into(self, out: Tensor, runs: Sequence[Tensor]) -> None:
        """Write keys, rotated, to `out`: a copy and a rotation in one pass over the memory.

        Args:
            out: `(..., tokens, width)`, any float dtype, possibly strided.
            runs: The keys, one behind another along the tokens, of `out`'s other sizes; `[out]` to
                rotate in place, else memory apart from it.

        The arithmetic is float32 with one rounding at the end; no gradient passes.
        """
        columns = slice(self.rotation.start, self.rotation.start + self.rotation.dim)
        if runs[0] is not out and self.rotation.dim < out.shape[-1]:
            for beside in (slice(0, columns.start), slice(columns.stop, out.shape[-1])):
                out[..., beside].copy_(torch.cat([run[..., beside] for run in runs], -2))
        rotated = out[..., columns]  # (..., tokens, dim)
        sources = [run[..., columns] for run in runs]  # (..., tokens of the run, dim) each
        # Layer by layer, in the same scratch memory: what is worked on stays in the processor's
        # cache.
        has_layers = rotated.dim() > 3
        layers = rotated.unbind(0) if has_layers else (rotated,)  # (heads, tokens, dim) each
        if not layers:
            return
        by_layer = zip(*(source.unbind(0) for source in sources), strict=True)
        wide, partner = _SCRATCH.pair(layers[0])  # float32 (heads, tokens, dim)
        swaps = self._swaps(wide, partner)
        ends = list(itertools.accumulate(run.shape[-2] for run in runs))
        # Where each run goes in the scratch memory: (heads, tokens of the run, dim).
        pieces = [wide[..., first:end, :] for first, end in zip([0, *ends], ends, strict=False)]
        for layer, own in zip(layers, by_layer if has_layers else [sources], strict=True):
            for piece, run in zip(pieces, own, strict=True):
                piece.copy_(run)  # to float32
            for target, source in swaps:
                target.copy_(source)
            layer.copy_(wide.mul_(self.cos).add_(partner.mul_(self.sin)))  # rounded here, once

    def rotated(self, keys: Tensor) -> Tensor:
        """A copy of keys `(..., tokens, width)`, rotated, through which gradients get."""
        start, stop = self.rotation.start, self.rotation.start + self.rotation.dim
        columns = keys[..., start:stop].float()
        if self.rotation.style == "half":
            partner = columns.roll(self.rotation.dim // 2, -1)
        else:
            partner = columns.reshape(*columns.shape[:-1], -1, 2).flip(-1).flatten(-2)
        turned = (columns * self.cos + partner * self.sin).to(keys.dtype)
        return torch.cat([keys[..., :start], turned, keys[..., stop:]], -1)

    def _swaps(self, columns: Tensor, out: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """What to copy so that each column changes places with the one it is rotated with."""
        if self.rotation.style == "half":
            half = self.rotation.dim // 2
            first, second = slice(0, half), slice(half, None)
        else:
            first, second = slice(0, None, 2), slice(1, None, 2)
        return (out[..., first], columns[..., second]), (out[..., second], columns[..., first])


def rotate_(keys: Tensor, rotation: Rotation, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `keys` in place and return them.

    Args:
        keys: `(..., tokens, width)`, any float dtype, possibly strided; only the rotation's columns
            are written.
        rotation: Which columns rotate, and in which layout.
        cos: Cosines from `angle_table`, `(tokens, dim / 2)`.
        sin: Sines, the same shape.

    The arithmetic is float32 with one rounding at the end.
    """
    if rotation.style != "none":
        RotaryTable.from_angles(rotation, cos, sin).rotate_into(keys, [keys])
    return keys


def rotate(keys: Tensor, rotation: Rotation, inv_freq: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Return a copy of `keys` moved from positions `old` to `new`; the plain form of `rotate_`.

    Args:
        keys: `(..., tokens, width)`.
        rotation: Layout of the rotation.
        inv_freq: `(dim / 2,)`, radians per position.
        old: `(tokens,)` positions now.
        new: `(tokens,)` positions wanted.

    Raises:
        ValueError: If `inv_freq` does not cover half of the rotated columns.
    """
    if rotation.style != "none" and inv_freq.shape != (rotation.dim // 2,):
        raise ValueError(
            f"inv_freq has shape {tuple(inv_freq.shape)}, the rotation needs ({rotation.dim // 2},)"
        )
    cos, sin = angle_table(inv_freq, old, new)
    return rotate_(keys.clone(memory_format=torch.contiguous_format), rotation, cos, sin)
