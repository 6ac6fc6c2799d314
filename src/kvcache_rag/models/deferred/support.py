"""Which models can attend to chunks where they lie, and what a chunk more costs them.

Both are measured, once per model: no model family is named.
"""

from __future__ import annotations

import math
import time
import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.kv.rotary import rotate_
from kvcache_rag.models.attention.support import attention_switched
from kvcache_rag.models.cache import buffer_cache
from kvcache_rag.models.deferred.attention import deferred_attention, is_fast
from kvcache_rag.models.deferred.cache import HeldSegments, awaited, deferred_cache
from kvcache_rag.models.deferred.segments import SegmentTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag.models.hf import TransformersModel


DEFERRED = "kvcache_rag_deferred"

# Largest error of a layer's output against that over copied keys, in standard deviations.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

_EXACT = (torch.float64, torch.float32)

_CHUNK, _QUERY = 5, 3

# Chunks of a timed call and its repeats, of which the shortest counts.
_CHUNKS, _TOKENS, _REPEATS = 8, 32, 20

_REFUSALS: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

_SECONDS: weakref.WeakKeyDictionary[torch.nn.Module, float] = weakref.WeakKeyDictionary()


@contextmanager
def deferred_rotation(model: TransformersModel) -> Iterator[None]:
    """Let every forward pass within attend to the segments of its cache (see `deferred_cache`).

    Passes over other caches, also those of other threads, stay what they are.

    Args:
        model: The model, whose lock is held.
    """
    awaited()  # a pass that failed may have left something behind
    AttentionInterface.register(DEFERRED, deferred_attention)
    AttentionMaskInterface.register(DEFERRED, sdpa_mask)
    with attention_switched(model.model, DEFERRED):
        yield


def deferral_refusal(model: TransformersModel) -> str:
    """Why a model cannot attend to chunks where they lie, as a sentence; "" if it can."""
    if model.model not in _REFUSALS:
        _REFUSALS[model.model] = _measured_refusal(model)
    return _REFUSALS[model.model]


def segment_seconds(model: TransformersModel) -> float:
    """Seconds that one chunk more costs a layer and token; infinite where nothing fast fits."""
    if model.model not in _SECONDS:
        with torch.inference_mode():
            _SECONDS[model.model] = _measured_seconds(model)
    return _SECONDS[model.model]


def _measured_refusal(model: TransformersModel) -> str:
    name = str(model.config.model_type)
    for group in model.measured.groups:
        if group.value_rotation.style != "none":
            layer = group.layout.layers[0]
            return f"{name}: layer {layer} keeps rotated columns in its V slot"
    own = str(getattr(model.config, "_attn_implementation", ""))
    if "flash" in own or "flex" in own:
        return (
            f"{name}: it was loaded for attention by {own}; load it with "
            'attn_implementation="sdpa" instead'
        )
    with torch.inference_mode():
        why = _Probe(model).refusal()
    return f"{name}: {why}" if why else ""


class _Probe:
    """Answers a question of three tokens and one more over two chunks, in both ways."""

    def __init__(self, model: TransformersModel) -> None:
        self.model, self.layout = model, model.measured
        top = max(2, min(int(model.config.vocab_size), 1000))
        self.ids = torch.arange(3, 3 + 2 * _CHUNK + _QUERY + 1) % top
        halves = self.ids[: 2 * _CHUNK].view(2, _CHUNK).tolist()
        self.chunks = [_moved(chunk, model.device) for chunk in model.prefill(None, halves)]
        # The second one moves, if it can.
        self.distance = 0 if self.layout.immovable else _CHUNK
        self.callers: list[torch.nn.Module] = []

    def refusal(self) -> str:
        """What is different, or ""."""
        with deferred_rotation(self.model):
            try:
                self._outputs(self._deferred(), [])
            except UnsupportedModelError as error:
                return str(error)
            except Exception:  # whatever a model's own attention makes of so few keys
                self.callers.clear()
            callers = list({id(caller): caller for caller in self.callers}.values())
            if len(callers) != len(self.layout.kinds):
                return "its attention does not go through transformers' attention interface"
            # In low precision the layers behind the first one differ by more than rounding.
            watched = callers if self.model.dtype in _EXACT else callers[:1]
            outputs = self._outputs(self._deferred(), watched)
        expected = self._outputs(self._copied(), watched)
        for mine, theirs in zip(outputs, expected, strict=True):
            off = float((mine - theirs).abs().max() / theirs.std().clamp_min(1e-12))
            if not off <= _TOLERANCE.get(self.model.dtype, 1e-3):
                return f"its attention differs where keys are not rotated (by {off:.2g})"
        return ""

    def _outputs(self, cache: Any, layers: list[torch.nn.Module]) -> list[Tensor]:
        """What layers give for the question and for one token more."""
        kept: list[Tensor] = []

        def keep(_: Any, __: Any, output: Any) -> None:
            kept.append((output[0] if isinstance(output, tuple) else output).float())

        hooks = [layer.register_forward_hook(keep) for layer in layers]
        try:
            context = 2 * _CHUNK
            for first, last in ((context, context + _QUERY), (context + _QUERY, len(self.ids))):
                places = torch.arange(first, last)
                self.model.forward(self.ids[None, first:last], cache, places, keep=1)
        finally:
            for hook in hooks:
                hook.remove()
        return kept

    def _deferred(self) -> Any:
        first, second = self.chunks
        row = [(first, 0, 0), (second, _CHUNK, self.distance)]
        table = SegmentTable.of(self.layout, [row], 2 * _CHUNK)
        segments = HeldSegments.of(table, self.callers)
        return deferred_cache(segments, self.layout.kinds, self._buffer(_QUERY + 1))

    def _copied(self) -> Any:
        buffer = self._buffer(2 * _CHUNK + _QUERY + 1)
        for number, chunk in enumerate(self.chunks):
            start = number * _CHUNK
            view = buffer.view(0, start, start + _CHUNK, local_start=0, tokens=chunk.tokens)
            view.copy_from(chunk)
            if not number or not self.distance:
                continue
            row = [(chunk, 0, self.distance)]
            angles = SegmentTable.of(self.layout, [row], _CHUNK).angles
            for index, group in enumerate(self.layout.groups):
                rotation = group.key_rotation
                if rotation.style != "none":
                    cos, sin = (factors[1:] for factors in angles[rotation.frequency])
                    rotate_(view.keys(index), rotation, cos, sin)
        return buffer_cache(buffer, self.layout.kinds, 2 * _CHUNK)

    def _buffer(self, tokens: int) -> KVBuffer:
        return KVBuffer.allocate(self.layout.chunk_layout, 1, tokens, self.model.device)


def _moved(chunk: ChunkKV, device: torch.device) -> ChunkKV:
    tensors = tuple(tuple(part.to(device) for part in group) for group in chunk.tensors)
    return replace(chunk, tensors=tensors)


def _measured_seconds(model: TransformersModel) -> float:
    group = model.measured.groups[0]
    heads, (kv_heads, width) = int(model.config.num_attention_heads), group.layout.key_shape
    if not is_fast(model.dtype, width, group.layout.value_shape[1], heads, kv_heads, model.device):
        return math.inf
    query = torch.zeros(1, heads, 1, width, dtype=model.dtype, device=model.device)
    tail = torch.zeros(1, kv_heads, 1, width, dtype=model.dtype, device=model.device)

    def seconds(chunks: int) -> float:
        tokens = _CHUNKS * _TOKENS // chunks
        layout = model.measured.chunk_layout
        row = []
        for number in range(chunks):
            tensors = layout.empty(tokens, model.device)
            for part in (part for group_tensors in tensors for part in group_tensors):
                part.zero_()
            ids = torch.zeros(tokens, dtype=torch.int32)
            row.append((ChunkKV(layout, ids, 0, tensors), number * tokens, 0))
        segments = HeldSegments.of(SegmentTable.of(model.measured, [row], _CHUNKS * _TOKENS))
        cache = deferred_cache(
            segments, model.measured.kinds, KVBuffer.allocate(layout, 1, 1, model.device)
        )
        key, value = cache.update(tail, tail, group.layout.layers[0])
        taken = []
        for _ in range(_REPEATS):
            model.wait()
            started = time.perf_counter()
            deferred_attention(model.model, query, key, value, None)
            model.wait()
            taken.append(time.perf_counter() - started)
        return min(taken)

    return max(seconds(_CHUNKS) - seconds(1), 0.0) / (_CHUNKS - 1)
