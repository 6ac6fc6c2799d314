"""How an engine rotates keys, measured on its own pages.

In a prompt of one token, repeated, every layer sees the same hidden state at every position: sums
over equal values are that value, whatever the weights.  So a layer's keys differ by their rotation
alone, and the rotation that takes each to the next is that of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.rotary import NO_ROTATION, RotaryTable, Rotation, angle_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Largest difference of a moved key from the engine's own, by the size of its keys.  Engines round
# cosines and sines to the dtype of the model.
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}

# Frequencies that are not the same for prompts of all lengths.
_LENGTH_DEPENDENT: Final = ("dynamic", "longrope")

# Parts of the prompt: the first is moved to where each of the others stands.
PARTS: Final = 3


@dataclass(frozen=True, eq=False)
class EngineRotation:
    """How the keys of each layer move.

    Attributes:
        layers: The rotation of each.
        inv_freq: Frequencies in radians per position, `(dim / 2,)` float32.
    """

    layers: tuple[Rotation, ...]
    inv_freq: Tensor

    def tables(self, old: int, new: int, tokens: int) -> dict[Rotation, RotaryTable]:
        """What takes keys that stand at `old` and behind to `new` and behind."""
        steps = torch.arange(tokens)
        angles = angle_table(self.inv_freq, steps + old, steps + new)
        kinds = {rotation for rotation in self.layers if rotation.style != "none"}
        return {rotation: RotaryTable.from_angles(rotation, *angles) for rotation in kinds}

    def move(self, keys: Tensor, old: int, new: int) -> None:
        """Rotate keys in place, `(layers, kv_heads, tokens, width)`, that stand at `old`."""
        if old == new:
            return
        tables = self.tables(old, new, keys.shape[2])
        for layer, rotation in zip(keys, self.layers, strict=True):
            if rotation.style != "none":
                tables[rotation].rotate_into(layer, [layer])


def frequencies(config: Any, width: int) -> Tensor:
    """Rotary frequencies of a model, `(dim / 2,)`, as its config says.

    Args:
        config: Of transformers, the text part.
        width: Columns of a key.

    Raises:
        UnsupportedModelError: If they depend on the length of the prompt.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config, "rope_parameters", None) or {}
    if rope and all(isinstance(part, dict) for part in rope.values()):
        raise UnsupportedModelError(
            f"{config.model_type} rotates layers by frequencies of several kinds, which the "
            "connector does not know; serve it with: kvcache-rag serve"
        )
    kind = str(rope.get("rope_type", "default"))
    if kind in _LENGTH_DEPENDENT:
        raise UnsupportedModelError(
            f"{config.model_type} has frequencies that depend on the prompt's length ({kind}): "
            "its stored keys cannot be moved"
        )
    if kind != "default":
        values, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        return values.float()
    base = float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
    part = float(rope.get("partial_rotary_factor") or 1.0)
    dim = int(width * part)
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def measured(keys: Tensor, values: Tensor, inv_freq: Tensor, name: str) -> EngineRotation:
    """The rotation of an engine, of its pages for a prompt of one token, repeated.

    Args:
        keys: `(layers, kv_heads, tokens, width)` from position 0 on.
        values: The same.
        inv_freq: What the keys may be rotated by, `(dim / 2,)`.
        name: Of the model, for messages.

    Raises:
        UnsupportedModelError: If no rotation takes the first part of the keys to where the others
            stand, or values depend on their position.
    """
    allowed = _TOLERANCE[keys.dtype]
    layers: list[Rotation] = []
    for number, (key, value) in enumerate(zip(keys.float(), values.float(), strict=True)):
        if _difference(value, value[:, :1].expand_as(value)) > allowed:
            raise UnsupportedModelError(
                f"{name}: values of layer {number} depend on their position"
            )
        errors = {
            rotation: _error(key, rotation, inv_freq)
            for rotation in _candidates(key.shape[2], 2 * len(inv_freq), layers)
        }
        best = min(errors, key=errors.__getitem__)
        if not errors[best] <= allowed:
            raise UnsupportedModelError(
                f"{name}: keys of layer {number} are {errors[best]:.2g} off when they are moved as "
                f"{best} (allowed: {allowed}); serve it with: kvcache-rag serve"
            )
        layers.append(best)
    return EngineRotation(tuple(layers), inv_freq)


def _candidates(width: int, dim: int, known: Sequence[Rotation]) -> Iterator[Rotation]:
    yield from dict.fromkeys(known)
    yield NO_ROTATION
    for start in dict.fromkeys((0, width - dim)):
        yield Rotation("half", start, dim, 0)
        yield Rotation("interleaved", start, dim, 0)


def _error(key: Tensor, rotation: Rotation, inv_freq: Tensor) -> float:
    """How far the first part of a layer's keys, moved, is from each of the others."""
    tokens = key.shape[1] // PARTS
    error = 0.0
    for part in range(1, PARTS):
        moved = key[None, :, :tokens].clone()
        EngineRotation((rotation,), inv_freq).move(moved, 0, part * tokens)
        error = max(error, _difference(moved[0], key[:, part * tokens : (part + 1) * tokens]))
    return error


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-12))
