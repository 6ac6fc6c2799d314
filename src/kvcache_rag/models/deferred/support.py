"""Which models can attend to chunks in place: each is tried, no family is listed."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from kvcache_rag.codecs import EncodedChunk
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.models.attention.support import attention_switched
from kvcache_rag.models.cache import buffer_cache
from kvcache_rag.models.deferred.attention import deferred_attention
from kvcache_rag.models.deferred.cache import HeldSegments, awaited, deferred_cache
from kvcache_rag.models.deferred.int8 import Int8Segments
from kvcache_rag.models.deferred.segments import Segment, SegmentTable
from kvcache_rag.models.rotation import KeyRotation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers.cache_utils import Cache

    from kvcache_rag.kv.chunk import ChunkKV
    from kvcache_rag.models.language import LanguageModel
    from kvcache_rag.models.rotation import ModelLayout


DEFERRED = "kvcache_rag_deferred"

# Largest error of a layer's output against that over copied keys, in standard deviations.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

_EXACT = (torch.float64, torch.float32)

_CHUNK, _QUERY = 5, 3

_REFUSALS: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


@contextmanager
def deferred_rotation(model: LanguageModel) -> Iterator[None]:
    """Let every forward pass within attend to the segments of its cache (see `deferred_cache`).

    Passes over other caches, also those of other threads, stay what they are.

    Args:
        model: The model, whose lock is held.
    """
    awaited()  # a pass that failed may have left something behind
    with attention_switched(model.model, DEFERRED, deferred_attention, sdpa_mask):
        yield


def segments_cache(
    layout: ModelLayout,
    rows: Sequence[Sequence[Segment]],
    tail: int,
    keep: Sequence[int],
    buffer: KVBuffer,
    known: int = 0,
) -> Cache:
    """A transformers cache of segments, whatever they lie in, and of a buffer behind them.

    Args:
        layout: The model's.
        rows: Per row of a left-padded batch its segments, all in codes or none.
        tail: Column of the first token in the buffer.
        keep: Per row, first columns of the buffer that stand for what its segments hold.
        buffer: Memory for the tokens behind them; the cache writes into it.
        known: Tokens that it holds.

    Raises:
        UnsupportedModelError: If a chunk has to move and the model's keys cannot.
    """
    if any(isinstance(segment.chunk, EncodedChunk) for row in rows for segment in row):
        codes = Int8Segments.from_rows(layout, rows, tail, keep)
        return deferred_cache(codes, layout.kinds, buffer, known)
    table = SegmentTable.from_rows(layout, rows, tail, keep)
    return deferred_cache(HeldSegments.from_table(table), layout.kinds, buffer, known)


def deferral_refusal(model: LanguageModel) -> str:
    """Why a model cannot attend to chunks where they lie, as a sentence; "" if it can."""
    if model.model not in _REFUSALS:
        _REFUSALS[model.model] = _measured_refusal(model)
    return _REFUSALS[model.model]


def _measured_refusal(model: LanguageModel) -> str:
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

    def __init__(self, model: LanguageModel) -> None:
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
            if len(callers) != sum(kind.keeps != "state" for kind in self.layout.kinds):
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
        row = [Segment(first, 0, 0), Segment(second, _CHUNK, self.distance)]
        table = SegmentTable.from_rows(self.layout, [row], 2 * _CHUNK)
        segments = HeldSegments.from_table(table, self.callers)
        return deferred_cache(segments, self.layout.kinds, self._buffer(_QUERY + 1))

    def _copied(self) -> Any:
        buffer = self._buffer(2 * _CHUNK + _QUERY + 1)
        for number, chunk in enumerate(self.chunks):
            start = number * _CHUNK
            view = buffer.view(0, start, start + _CHUNK, local_start=0, tokens=chunk.tokens)
            view.copy_from(chunk)
            if not number or not self.distance:
                continue
            here = torch.arange(_CHUNK)
            KeyRotation.from_positions(
                self.layout, here, here + self.distance, self.model.device
            ).rotate(view)
        return buffer_cache(buffer, self.layout.kinds, 2 * _CHUNK)

    def _buffer(self, tokens: int) -> KVBuffer:
        return KVBuffer.allocate(self.layout.chunk_layout, 1, tokens, self.model.device)


def _moved(chunk: ChunkKV, device: torch.device) -> ChunkKV:
    tensors = tuple(tuple(part.to(device) for part in group) for group in chunk.tensors)
    return replace(chunk, tensors=tensors)
