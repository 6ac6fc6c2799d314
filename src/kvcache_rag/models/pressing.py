"""Prefill chunks and keep the keys and values of the tokens that a press chooses.

Queries are in no cache, so a press that looks at them watches the model's own attention while it
computes the chunks; what the model computes stays the same.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.chunk import ChunkKV, with_pruned
from kvcache_rag.models.attention.support import attention_switched
from kvcache_rag.presses import LayerStates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcache_rag.models.hf import TransformersModel
    from kvcache_rag.presses import Press

OBSERVED = "kvcache_rag_observed"

_PROBE_TOKENS = 12


def pressed(
    model: TransformersModel, prefix: ChunkKV | None, chunks: Sequence[Sequence[int]], press: Press
) -> list[ChunkKV]:
    """`TransformersModel.prefill`, of each chunk only the tokens that the press keeps.

    Raises:
        UnsupportedModelError: If the press needs queries and the model does not show them.
    """
    computed, (places,) = scored(model, prefix, chunks, [press])
    return [pruned(chunk, kept, press.keep) for chunk, kept in zip(computed, places, strict=True)]


def scored(
    model: TransformersModel,
    prefix: ChunkKV | None,
    chunks: Sequence[Sequence[int]],
    presses: Sequence[Press],
) -> tuple[list[ChunkKV], list[list[Tensor]]]:
    """`TransformersModel.prefill`, and per press which tokens of each chunk it keeps.

    Returns:
        The whole chunks; per press and chunk the places that are kept, `(kept,)` int64.

    Raises:
        UnsupportedModelError: If a press needs queries and the model does not show them.
    """
    sizes = [len(chunk) for chunk in chunks]
    tallies = [[_Tally(torch.zeros(size)) for size in sizes] for _ in presses]
    ways = list(zip(presses, tallies, strict=True))
    watching = [(press, own) for press, own in ways if press.needs_queries]
    if watching:
        watch = _Watch(model, watching, sizes)
        with _observed(model, watch):
            computed = model.prefill(prefix, chunks, halts=False)
        watch.check()
    else:
        computed = model.prefill(prefix, chunks)
    for press, own in ways:
        if not press.needs_queries:
            for chunk, tally in zip(computed, own, strict=True):
                for keys, values in _layers(chunk):
                    tally.add(press.scores(LayerStates(keys, values, len(chunk))))
    return computed, [[press.kept(tally.scores) for tally in own] for press, own in ways]


def pruned(chunk: ChunkKV, places: Tensor, keep: float) -> ChunkKV:
    """A copy of a whole chunk with the keys and values of the tokens at `places` alone.

    Args:
        chunk: On the CPU.
        places: `(kept,)` int64, ascending; as many as `keep` says.
        keep: Share of the tokens.
    """
    return ChunkKV(
        replace(chunk.layout, keep=keep),
        with_pruned(chunk.tokens, places),
        chunk.start,
        tuple(tuple(part.index_select(-2, places) for part in group) for group in chunk.tensors),
    )


def press_refusal(model: TransformersModel, press: Press) -> str:
    """Why chunks of a model cannot be pruned, as a sentence; "" if they can."""
    name = str(model.config.model_type)
    if model.why_refused:
        return f"{model.why_refused}, and a pruned prompt moves every chunk"
    try:
        # Its tokens would come nearer to each other, and the question to all of them.
        model.ensure_takes_positions("a pruned chunk's tokens cannot keep their positions")
        pressed(model, None, [[3 + i % 2 for i in range(_PROBE_TOKENS)]], press)
    except UnsupportedModelError as error:
        return str(error) if str(error).startswith(f"{name}: ") else f"{name}: {error}"
    return ""


@dataclass
class _Tally:
    """The scores of a chunk's tokens, added up over heads and layers; `scores` `(tokens,)`."""

    scores: Tensor

    def add(self, scores: Tensor) -> None:
        """Add those of a layer's heads, `(kv_heads, tokens)`."""
        self.scores += scores.sum(0)


@dataclass(eq=False)
class _Watch:
    """Scores the tokens of a batch of chunks while the model attends, layer by layer.

    Attributes:
        model: The model.
        presses: What scores, and per chunk where its scores go.
        sizes: Tokens of each chunk, a row of the batch each.
        own: Name of the model's own attention.
        calls: Layers that have attended.
    """

    model: TransformersModel
    presses: Sequence[tuple[Press, Sequence[_Tally]]]
    sizes: Sequence[int]
    own: str = field(init=False)
    calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.own = str(self.model.model.config._attn_implementation)

    def see(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> None:
        """Look at what the next layer attends with, `(rows, heads, tokens, width)` each."""
        layer, self.calls = self.calls, self.calls + 1
        layout = self.model.measured
        if layer >= len(layout.kinds) or layout.kinds[layer].shared:
            return  # who attends to another's keys adds nothing to be kept
        group = next(one for one in layout.groups if layer in one.layout.layers)
        rotation, inv_freq = None, None
        if group.value_rotation.style == "none":  # else the cache holds another form of the keys
            rotation = group.key_rotation
            if rotation.style != "none":
                inv_freq = layout.frequencies[rotation.frequency].at_rest().to(key.device)
        start = key.shape[2] - query.shape[2]
        for row, size in enumerate(self.sizes):
            states = LayerStates(
                keys=key[row, :, : start + size],
                values=value[row, :, : start + size],
                tokens=size,
                queries=query[row, :, :size],
                factor=query.shape[-1] ** -0.5 if scaling is None else scaling,
                rotation=rotation,
                inv_freq=inv_freq,
            )
            for press, tallies in self.presses:
                tallies[row].add(press.scores(states))

    def check(self) -> None:
        """Raise `UnsupportedModelError` unless every layer was seen."""
        if self.calls != len(self.model.measured.kinds):
            press = self.presses[0][0]
            raise UnsupportedModelError(
                "its attention does not go through transformers' attention interface, so "
                f"{press!r} sees no queries; use Knorm({press.keep})"
            )


# A context variable, so that engines in other threads have theirs.
_IN_FORCE: ContextVar[_Watch | None] = ContextVar("kvcache_rag_press", default=None)


@contextmanager
def _observed(model: TransformersModel, watch: _Watch) -> Iterator[None]:
    """Let a watch see what every forward pass within attends with."""
    if "flash" in watch.own or "flex" in watch.own:
        raise UnsupportedModelError(
            f"it was loaded for attention by {watch.own}; load it with "
            'attn_implementation="sdpa" instead'
        )
    AttentionInterface.register(OBSERVED, _observed_attention)
    AttentionMaskInterface.register(OBSERVED, _own_mask)
    token = _IN_FORCE.set(watch)
    try:
        with attention_switched(model.model, OBSERVED):
            yield
    finally:
        _IN_FORCE.reset(token)


def _observed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The model's own attention, seen by the watch in force."""
    watch = _IN_FORCE.get()
    if watch is None:
        raise UnsupportedModelError("its attention was called outside of a press")
    watch.see(query, key, value, kwargs.get("scaling"))
    modelling = sys.modules[type(module).__module__]
    eager = getattr(modelling, "eager_attention_forward", None)
    # Some models have an interface with functions of their own.
    interface = getattr(modelling, "ALL_ATTENTION_FUNCTIONS", AttentionInterface())
    attend = eager if watch.own == "eager" else interface[watch.own]
    if attend is None:
        raise UnsupportedModelError("its eager attention cannot be seen")
    return attend(module, query, key, value, *args, **kwargs)


def _own_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask of the model's own attention."""
    watch = _IN_FORCE.get()
    own = "sdpa" if watch is None else watch.own
    return AttentionMaskInterface()[own](*args, **kwargs)


def _layers(chunk: ChunkKV) -> Iterator[tuple[Tensor, Tensor]]:
    """K and V of every layer, `(kv_heads, tokens, width)` each, as views."""
    for group in range(len(chunk.tensors)):
        yield from zip(chunk.keys(group).unbind(0), chunk.values(group).unbind(0), strict=True)
