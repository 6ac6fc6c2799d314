"""Measure where and how a model rotates its cached tensors.

The same few tokens are prefilled at several offsets; per layer and cache slot the one rotation that
maps the first cache onto the others is found, with frequencies that are read off the model's own
modules.  If none fits, keys of that model cannot be moved, and the reason names the layer.  Nothing
is assumed about a model family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvcache_rag.kv.chunk import GroupLayout, StateLayout
from kvcache_rag.kv.rotary import NO_ROTATION, Rotation, RotationStyle, angle_table, rotate_
from kvcache_rag.models.longrope import is_long, original_length
from kvcache_rag.models.rotation import FrequencySet, LayerGroup, LayerKind, ModelLayout

PROBE_TOKENS = 12

OFFSETS = (61, 977)

# Relative residual allowed at the first layer that keeps a cache; measured float32 errors are
# about 1e-6.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}

# In low precision deeper layers differ a little between two runs; the slot that is not rotated
# shows by how much.
NOISE_FACTOR = 4

# No other hypothesis may be nearly as good.
RIVAL_FACTOR = 2

LayerCache = tuple[Tensor, Tensor] | None
"""K and V of one layer, `(1, heads, tokens, width)`; None where the layer keeps none of its own."""

Capture = Callable[[Tensor, int], Sequence[LayerCache]]
"""Prefill ids `(1, tokens)` at a first position and give back each layer's cache."""

CaptureBehind = Callable[[Tensor, int], Sequence[LayerCache]]
"""The same for ids behind so many others that they do not see, with nothing said of positions."""


@dataclass(frozen=True)
class ProbeSubject:
    """A model as the probe sees it.

    Attributes:
        name: For messages.
        capture: Runs the model.
        behind: Runs it with tokens in the places before.
        kinds: Kind of each layer.
        frequencies: Candidate frequency sets.
        dtype: Dtype of the cache.
        vocabulary: Number of token ids.
        limit: Longest prompt that may be tried.
        takes_positions: Whether the model's forward pass accepts positions.
        states: What its recurrent layers keep.
    """

    name: str
    capture: Capture
    behind: CaptureBehind
    kinds: tuple[LayerKind, ...]
    frequencies: tuple[FrequencySet, ...]
    dtype: torch.dtype
    vocabulary: int
    limit: int
    takes_positions: bool
    states: tuple[StateLayout, ...] = ()


@dataclass(frozen=True)
class _Fit:
    error: float
    rotation: Rotation


def measure_layout(subject: ProbeSubject) -> ModelLayout:
    """Find each layer's shape and rotation with three short forward passes."""
    generator = torch.Generator().manual_seed(0)
    upper = min(subject.vocabulary, 32000)
    ids = torch.randint(min(5, upper - 1), upper, (1, PROBE_TOKENS), generator=generator)
    base = subject.capture(ids, 0)  # per layer K and V, (1, heads, tokens, width)
    if not any(base):  # recurrent layers alone: nothing has a place
        groups: tuple[LayerGroup, ...] = ()
        kinds, states = subject.kinds, subject.states
        return ModelLayout(groups, kinds, subject.frequencies, subject.dtype, 0.0, states=states)
    reason, residual, moved = "", 0.0, {}
    rotations = {index: (NO_ROTATION, NO_ROTATION) for index, cache in enumerate(base) if cache}
    if subject.takes_positions:
        offsets = [offset for offset in OFFSETS if offset + PROBE_TOKENS <= subject.limit]
        offsets = offsets or [max(1, min(subject.limit // 2, subject.limit - PROBE_TOKENS))]
        moved = {offset: subject.capture(ids, offset) for offset in offsets}
        rotations, residual, reason = _fit_layers(subject, base, moved)
    else:
        reason = _learned_positions(subject, ids)
    # Then attention counts places (ALiBi), or nothing does, and a place does for a position.
    is_still = all(rotation == NO_ROTATION for pair in rotations.values() for rotation in pair)
    by_place = is_still and not reason
    if by_place:
        residual, reason = _moved_by_place(subject, ids, base)
    return ModelLayout(
        groups=_group(base, subject.kinds, rotations),
        kinds=subject.kinds,
        frequencies=subject.frequencies,
        dtype=subject.dtype,
        residual=residual,
        immovable=reason,
        by_place=by_place,
        states=subject.states,
    )


def _learned_positions(subject: ProbeSubject, ids: Tensor) -> str:
    # Positions come from the cache length then, so offsets cannot be tried.  A constant sequence
    # shows whether they reach the cache at all (learned positions) or the attention alone (ALiBi).
    constant = subject.capture(ids[:, :1].expand(1, PROBE_TOKENS).contiguous(), 0)
    tolerance = TOLERANCE[subject.dtype]
    for layer, cache in enumerate(constant):
        for tensor in cache or ():
            if _relative(tensor.float(), tensor[:, :, :1].float().expand_as(tensor)) > tolerance:
                return (
                    f"{subject.name}: layer {layer} mixes the position into its cache, and "
                    "the model takes no "
                    "position_ids (learned absolute positions), so its keys cannot be moved"
                )
    return ""


def _moved_by_place(
    subject: ProbeSubject, ids: Tensor, base: Sequence[LayerCache]
) -> tuple[float, str]:
    """How far the caches of tokens at other places are off, and why they cannot be moved or ""."""
    if any(kind.window for kind in subject.kinds):
        return 0.0, (
            f"{subject.name}: layer 0 counts places (ALiBi, or nothing), and some layers have a "
            "window, which would need a mask for each kind of layer"
        )
    offset = max(1, min(OFFSETS[0], subject.limit - PROBE_TOKENS))
    try:
        moved = subject.behind(ids, offset)
    except Exception as error:  # whatever a model's own code makes of a mask
        return 0.0, (
            f"{subject.name}: layer 0 counts places (ALiBi), and the model takes no mask "
            f"({type(error).__name__}), so it cannot be seen whether a chunk may stand elsewhere"
        )
    residual = 0.0
    # The second layer keeps what the first one's attention saw; deeper ones add rounding.
    for layer in [layer for layer, cache in enumerate(base) if cache][:2]:
        for slot in (0, 1):
            off = _relative(_slot(moved[layer], slot), _slot(base[layer], slot))
            residual = max(residual, off)
            if off > TOLERANCE[subject.dtype]:
                return residual, (
                    f"{subject.name}: layer {layer} counts places (ALiBi) in a way of its own: the "
                    f"same tokens behind others that they do not see have other keys (by {off:.2g})"
                )
    return residual, ""


def _fit_layers(
    subject: ProbeSubject, base: Sequence[LayerCache], moved: dict[int, Sequence[LayerCache]]
) -> tuple[dict[int, tuple[Rotation, Rotation]], float, str]:
    rotations: dict[int, tuple[Rotation, Rotation]] = {}
    residual, reason, is_first = 0.0, "", True
    for layer, cache in enumerate(base):
        if cache is None:
            continue
        fits = []
        for slot in (0, 1):
            targets = {offset: _slot(caches[layer], slot) for offset, caches in moved.items()}
            fits.append(_ranked(cache[slot].float(), targets, subject.frequencies))
        allowed = _allowed(subject.dtype, fits, is_first)
        if is_first:
            residual = max(ranking[0].error for ranking in fits)
            is_first = False
        reason = reason or _refusal(subject, layer, fits, allowed)
        rotations[layer] = (fits[0][0].rotation, fits[1][0].rotation)
    return rotations, residual, reason


def _slot(cache: LayerCache, slot: int) -> Tensor:
    if cache is None:
        raise RuntimeError("a layer kept a cache in one pass and none in another")
    return cache[slot].float()


def _allowed(dtype: torch.dtype, fits: list[list[_Fit]], is_first: bool) -> float:
    tolerance = TOLERANCE[dtype]
    if is_first:
        return tolerance
    still = [ranking[0].error for ranking in fits if ranking[0].rotation.style == "none"]
    return min(max(tolerance, NOISE_FACTOR * min(still, default=0.0)), 0.5)


def _refusal(subject: ProbeSubject, layer: int, fits: list[list[_Fit]], allowed: float) -> str:
    for name, ranked in zip(("keys", "values"), fits, strict=True):
        best = ranked[0]
        rival = next(
            (fit.error for fit in ranked[1:] if fit.error > 0 and not _alike(best, fit, subject)),
            float("inf"),
        )
        if best.error > allowed or (best.error > 0 and rival < RIVAL_FACTOR * best.error):
            return (
                f"{subject.name}: layer {layer} {name} fit no rotation when the same tokens "
                "stand elsewhere "
                f"(best residual {best.error:.2g} with {best.rotation}, allowed "
                f"{allowed:.2g}): learned absolute "
                "positions, a norm behind the rotation, or an unknown layout"
            )
    return ""


def _alike(best: _Fit, other: _Fit, subject: ProbeSubject) -> bool:
    """Two hypotheses that rotate everything alike (equal tables) are no rivals."""
    first, second = best.rotation, other.rotation
    if first.style == "none" or replace(first, frequency=second.frequency) != second:
        return first == second
    tables = [subject.frequencies[index].at_rest for index in (first.frequency, second.frequency)]
    return torch.equal(*tables)


def _ranked(
    origin: Tensor, targets: dict[int, Tensor], frequencies: tuple[FrequencySet, ...]
) -> list[_Fit]:
    still = max(_relative(origin, target) for target in targets.values())
    fits = [_Fit(still, NO_ROTATION)]
    positions = torch.arange(origin.shape[2], device="cpu")  # (tokens,)
    for rotation in _candidates(origin.shape[-1], frequencies):
        error = 0.0
        for offset, target in targets.items():
            # On the CPU: the angles need float64, which not every device has.
            inv_freq = frequencies[rotation.frequency].at_rest.cpu()
            cos, sin = angle_table(inv_freq, positions, positions + offset)
            cos, sin = cos.to(origin.device), sin.to(origin.device)  # (tokens, dim / 2)
            rotated = rotate_(origin.clone(), rotation, cos, sin)
            error = max(error, _relative(rotated, target))
        fits.append(_Fit(error, rotation))
    return sorted(fits, key=lambda fit: fit.error)


def _candidates(width: int, frequencies: tuple[FrequencySet, ...]) -> Iterator[Rotation]:
    for index, frequency in enumerate(frequencies):
        dim = 2 * frequency.at_rest.numel()
        if dim > width:
            continue
        # Two columns are one pair, whichever way pairs are made.
        styles: tuple[RotationStyle, ...] = ("half", "interleaved") if dim > 2 else ("half",)
        for start in sorted({0, width - dim}):  # the rotary columns stand first or (MLA) last
            for reverse in (False, True):
                for style in styles:
                    yield Rotation(style, start, dim, index, reverse)


def _relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-12))


def _group(
    base: Sequence[LayerCache],
    kinds: tuple[LayerKind, ...],
    rotations: dict[int, tuple[Rotation, Rotation]],
) -> tuple[LayerGroup, ...]:
    members: dict[tuple[object, ...], list[int]] = {}
    for layer, cache in enumerate(base):
        if cache is None:
            continue
        shapes = tuple((tensor.shape[1], tensor.shape[3]) for tensor in cache)
        members.setdefault((shapes, kinds[layer].window, rotations[layer]), []).append(layer)
    groups = []
    for layers in members.values():
        keys, values = base[layers[0]] or (torch.empty(0), torch.empty(0))
        layout = GroupLayout(
            layers=tuple(layers),
            key_shape=(keys.shape[1], keys.shape[3]),
            value_shape=(values.shape[1], values.shape[3]),
        )
        groups.append(LayerGroup(layout, kinds[layers[0]].window, *rotations[layers[0]]))
    return tuple(groups)


def frequency_sets(model: nn.Module, config: Any) -> tuple[FrequencySet, ...]:
    """Every distinct set of rotary frequencies that the model really uses.

    transformers keeps them as buffers whose names end in `inv_freq`, one per layer type in some
    models.  Families without such a buffer (tables only) get the classic frequencies from their
    config, which the probe then verifies.

    Args:
        model: The whole model.
        config: Its text config.
    """
    sets: list[FrequencySet] = []
    seen: list[Tensor] = []
    for name, module in _search_root(model).named_modules():
        for attribute in _frequency_attributes(module):
            values = getattr(module, attribute)
            if any(values.shape == other.shape and torch.equal(values, other) for other in seen):
                continue
            seen.append(values)
            layer_type = attribute.removesuffix("_inv_freq") if attribute != "inv_freq" else None
            sets.append(_of_module(f"{name}.{attribute}", module, attribute, layer_type))
    return tuple(sets) or _of_config(config)


def _search_root(model: nn.Module) -> nn.Module:
    # Multimodal models have further rotary modules; some models call their lm_head "decoder".
    getter: Any = getattr(model, "get_decoder", None)
    decoder = getter() if getter is not None else None
    if isinstance(decoder, nn.Module) and any(
        name.endswith("inv_freq") for name, _ in decoder.named_buffers()
    ):
        return decoder
    return model


def _frequency_attributes(module: nn.Module) -> list[str]:
    plain = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
    names = [name for name in (*module._buffers, *plain) if name.endswith("inv_freq")]
    skipped = ("original", "long_", "short_")
    return [
        name
        for name in names
        if not any(part in name for part in skipped) and getattr(module, name) is not None
    ]


def _of_module(
    name: str, module: nn.Module, attribute: str, layer_type: str | None
) -> FrequencySet:
    kind = getattr(module, "rope_type", "default")
    kind = str(kind.get(layer_type, "default") if isinstance(kind, dict) else kind)
    length_dependent = kind == "longrope" or "dynamic" in kind

    def read(total: int) -> Tensor:
        if length_dependent:
            device = getattr(module, attribute).device
            positions = torch.tensor([[total - 1]], device=device)
            arguments = (layer_type,) if layer_type else ()
            with torch.no_grad():
                module(torch.zeros(1, 1, 1, device=device), positions, *arguments)
        frequencies: Tensor = getattr(module, attribute)
        return frequencies.detach().float().clone()

    limit, beyond = _limit(module, kind, layer_type)
    return FrequencySet(name, read, limit, beyond)


def _limit(module: nn.Module, kind: str, layer_type: str | None) -> tuple[int | None, str]:
    """Longest prompt with the frequencies of short ones, and what comes behind it."""
    if kind == "longrope" and not is_long(module, layer_type):
        limit = original_length(module, layer_type)
        return limit, (
            f"beyond {limit} tokens longrope has other frequencies; give the engine a larger "
            "context_window to have these at every length"
        )
    config: Any = getattr(module, "config", None)
    if "dynamic" in kind:
        limit = int(getattr(module, "original_max_seq_len", config.max_position_embeddings))
        return limit, (
            f"beyond {limit} tokens frequencies change with every token (dynamic NTK), and no "
            "cached key with them"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("llama_4_scaling_beta"):
        limit = int(parameters["original_max_position_embeddings"])
        return limit, f"beyond {limit} tokens queries are scaled by position, in chunks, too"
    return None, ""


def _of_config(config: Any) -> tuple[FrequencySet, ...]:
    base = getattr(config, "rope_theta", None) or 10000.0
    width = getattr(config, "rotary_dim", None) or getattr(config, "head_dim", None)
    heads = getattr(config, "num_attention_heads", None)
    if not width and not heads:  # nothing attends
        return ()
    width = width or config.hidden_size // heads
    values = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float) / width))
    return (FrequencySet(f"config(base={base}, dim={width})", lambda _total: values),)
