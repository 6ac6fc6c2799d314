"""Move rotary-embedded keys to other positions without recomputing them.

A rotation by position p followed by one by d is the rotation by p + d (Su et al. 2021,
https://arxiv.org/abs/2104.09864), so a cached key moves with one more rotation.  An attention
scaling (YaRN) is already inside the stored key and must not be applied again.  This module knows
tensors only: which slot of which layer turns how is measured by `models.probe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RotationStyle = Literal["none", "half", "interleaved"]


@dataclass(frozen=True)
class Rotation:
    """How one cache slot (K or V) of a layer is rotated.

    Attributes:
        style: "half" pairs column i with i + dim/2, "interleaved" pairs neighbours, "none" does not
            rotate.
        start: First rotated column.
        dim: Number of rotated columns.
        frequency: Index of the model's frequency set, -1 for "none".
        reverse: Whether the model turns the other way.
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
    frequencies = inv_freq.float()
    target = (new.float()[:, None] * frequencies).double()
    angles = target - (old.float()[:, None] * frequencies).double()
    return angles.cos().float(), angles.sin().float()


def rotate_(keys: Tensor, rotation: Rotation, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `keys` in place and return them.

    Args:
        keys: `(..., tokens, width)`, any float dtype, possibly strided; only the rotation's columns
            are written.
        rotation: Which columns turn, and in which layout.
        cos: Cosines from `angle_table`, `(tokens, dim / 2)`.
        sin: Sines, the same shape.

    The arithmetic is float32 with one rounding at the end.
    """
    if rotation.style == "none":
        return keys
    signed = -sin if rotation.reverse else sin
    turned = keys[..., rotation.start : rotation.start + rotation.dim]
    if rotation.style == "half":
        wide_cos, wide_sin = torch.cat([cos, cos], -1), torch.cat([-signed, signed], -1)
    else:
        wide_cos = cos.repeat_interleave(2, -1)
        wide_sin = torch.stack([-signed, signed], -1).flatten(-2)
    # Layer by layer, whole rows at a time: what is worked on stays in the processor's cache.
    for layer in turned.unbind(0) if turned.dim() > 3 else (turned,):
        wide = layer.float()
        # Made before `wide` is written: in float32 that is the layer itself.
        partner = _partners(wide, rotation)
        layer.copy_(wide.mul_(wide_cos).add_(partner.mul_(wide_sin)))
    return keys


def _partners(columns: Tensor, rotation: Rotation) -> Tensor:
    """A copy in which each column has changed places with the one it is turned with."""
    if rotation.style == "half":
        return columns.roll(rotation.dim // 2, -1)
    return torch.unflatten(columns, -1, (-1, 2)).flip(-1).flatten(-2)


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
