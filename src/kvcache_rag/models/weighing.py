"""Let a model weigh chunks against the rest for one call, if its attention can be replaced.

The function of `models.scaled_attention` stands in for the model's own.  Whether a model calls it,
and whether it is then what the model computes by itself, is measured once per model.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.models.cache import growing_cache
from kvcache_rag.models.scaled_attention import IN_FORCE, Weighting, own_code, scaled_attention
from kvcache_rag.models.switching import attention_switched, whole_mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcache_rag.models.hf import TransformersModel

SCALED = "kvcache_rag_scaled"
# Largest error of the first layer's output against the model's own attention, in standard
# deviations; dtypes differ in where they round.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_PROBE_TOKENS = 12
# Why a model's attention cannot be weighed, or ""; measured once.
_REFUSALS: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


@contextmanager
def weighed_chunks(
    model: TransformersModel, temperature: float, scale: float, columns: Sequence[tuple[int, int]]
) -> Iterator[None]:
    """Let every forward pass within attend with these weights; afterwards all is as before.

    Args:
        model: The model; no other thread may use it meanwhile.
        temperature: Divides the scores of the chunks.
        scale: Multiplies `temperature` times their log-sum-exp.
        columns: Per row of the batch, the columns of the cache that hold chunks, half-open.

    Raises:
        UnsupportedModelError: If the model's attention is code of its own.
    """
    ensure_weighable(model)
    with _switched(model.model, Weighting(temperature, scale, tuple(columns))):
        yield


def ensure_weighable(model: TransformersModel) -> None:
    """Raise `UnsupportedModelError` if the attention of a model cannot be replaced by this one."""
    if model.model not in _REFUSALS:
        _REFUSALS[model.model] = _measured_refusal(model)
    if _REFUSALS[model.model]:
        raise UnsupportedModelError(_REFUSALS[model.model])


@contextmanager
def _switched(module: torch.nn.Module, weighting: Weighting) -> Iterator[None]:
    AttentionInterface.register(SCALED, scaled_attention)
    AttentionMaskInterface.register(SCALED, whole_mask)
    token = IN_FORCE.set(weighting)
    try:
        with attention_switched(module, SCALED):
            yield
    finally:
        IN_FORCE.reset(token)


def _measured_refusal(model: TransformersModel) -> str:
    """Why this function cannot stand in for a model's attention, or ""."""
    kinds, name = model.measured.kinds, str(model.config.model_type)
    ids = torch.arange(_PROBE_TOKENS)[None] % max(1, min(int(model.config.vocab_size), 1000) - 5)
    callers: list[torch.nn.Module] = []
    plain = Weighting(1.0, 1.0, ((2, _PROBE_TOKENS // 2),), callers)

    def first_output(layer: torch.nn.Module | None) -> Tensor:
        kept: list[Tensor] = []

        def keep(_: Any, __: Any, output: Any) -> None:
            kept.append((output[0] if isinstance(output, tuple) else output).float())

        hook = None if layer is None else layer.register_forward_hook(keep)
        try:
            model.forward(ids + 5, growing_cache(kinds), torch.arange(_PROBE_TOKENS), keep=1)
        finally:
            if hook is not None:
                hook.remove()
        return kept[0] if kept else torch.empty(0)

    try:
        with _switched(model.model, plain):
            first_output(None)
            if len({id(layer) for layer in callers}) != len(kinds):
                return own_code(name, "does not go through transformers' attention interface")
            found = first_output(callers[0])
    except UnsupportedModelError as error:
        return str(error)
    expected = first_output(callers[0])
    off = float((found - expected).abs().max() / expected.std().clamp_min(1e-12))
    if not off <= _TOLERANCE.get(model.dtype, 1e-3):
        return own_code(name, f"differs from plain attention (by {off:.2g})")
    return ""
