"""The rotary frequencies that a GGUF file may mean; the probe finds the right ones."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from kvcache_rag.models.rotation import FrequencySet

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from kvcache_rag_llamacpp.binding import LlamaCpp

_BASE: Final = 10000.0
# As llama.cpp has it, whatever a file says.
_LLAMA4: Final = 8192
# Of YaRN (arXiv 2309.00071): turns within the original context window.
_FAST, _SLOW = 32.0, 1.0


def frequency_sets(
    model: LlamaCpp, head: int, factors: Mapping[str, Tensor], *, is_long: bool
) -> tuple[FrequencySet, ...]:
    """Every set of frequencies that the metadata of a file allows.

    Args:
        model: Says the metadata.
        head: Width of a head.
        factors: What the file has of `rope_freqs`, `rope_factors_long` and `rope_factors_short`:
            `(dim / 2,)` float32 each, by which frequencies are divided.
        is_long: Whether contexts are long ones (longrope).
    """
    found: dict[bytes, FrequencySet] = {}
    scaled = _scaled_from(model)
    for name, values, limit in _candidates(model, head, factors, is_long=is_long):
        beyond = ""
        if limit is not None:
            beyond = (
                f"beyond {limit} tokens longrope has other frequencies; give the engine a larger "
                "context_window to have these at every length"
            )
        if scaled is not None and (limit is None or scaled < limit):
            limit = scaled
            beyond = f"beyond {limit} tokens queries are scaled by position, in chunks, too"
        known = values.numpy().tobytes()
        found.setdefault(known, FrequencySet(name, partial(_same, values), limit, beyond))
    return tuple(found.values())


def _scaled_from(model: LlamaCpp) -> int | None:
    """From which position on queries are scaled, and chunks are not what they are elsewhere."""
    if model.architecture == "llama4":
        return _LLAMA4  # where its layers also begin anew to attend
    if not model.number("attention.temperature_scale"):
        return None
    return int(
        model.number("attention.temperature_length")
        or model.number("rope.scaling.original_context_length")
        or model.trained_length
    )


def _same(values: Tensor, _total: int) -> Tensor:
    """They do not follow the length of a prompt."""
    return values


def _candidates(
    model: LlamaCpp, head: int, factors: Mapping[str, Tensor], *, is_long: bool
) -> Iterator[tuple[str, Tensor, int | None]]:
    number = model.number
    bases = [number("rope.freq_base"), number("rope.freq_base_swa"), _BASE]
    dims = [number("rope.dimension_count"), number("rope.dimension_count_swa"), head]
    scale = number("rope.scaling.factor") or number("rope.scale_linear") or 1.0
    original = int(number("rope.scaling.original_context_length") or model.trained_length)
    for base in dict.fromkeys(base for base in bases if base):
        for dim in dict.fromkeys(int(dim) for dim in dims if dim):
            plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # (dim / 2,)
            name = f"base {base:g}, {dim} columns"
            yield name, plain.float(), None
            if scale != 1:
                yield f"{name}, / {scale:g}", (plain / scale).float(), None
                for turns in dict.fromkeys([(_FAST, _SLOW), _own_turns(model)]):
                    yarn = _yarn(plain, base, dim, scale, original, turns)
                    yield f"{name}, YaRN {scale:g} {turns}", yarn.float(), None
            for own, values in factors.items():
                if len(values) != len(plain) or own == _OTHER[is_long]:
                    continue
                limit = original if own == _OTHER[True] else None
                yield f"{name}, {own}", (plain / values.double()).float(), limit


_OTHER: Final = {True: "rope_factors_short", False: "rope_factors_long"}


def _own_turns(model: LlamaCpp) -> tuple[float, float]:
    """Those of a file, which llama.cpp reads for some architectures alone."""
    number = model.number
    return (
        number("rope.scaling.yarn_beta_fast") or _FAST,
        number("rope.scaling.yarn_beta_slow") or _SLOW,
    )


def _yarn(
    plain: Tensor,
    base: float,
    dim: int,
    scale: float,
    original: int,
    turns: tuple[float, float],
) -> Tensor:
    """Frequencies of YaRN, as ggml has them: high ones stay, low ones are divided by `scale`."""

    def corner(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = (corner(one) for one in turns)
    low, high = max(0.0, math.floor(low)), min(dim - 1.0, math.ceil(high))
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(0.001, high - low)
    stays = 1 - ramp.clamp(0, 1)  # (dim / 2,)
    return plain / scale * (1 - stays) + plain * stays
