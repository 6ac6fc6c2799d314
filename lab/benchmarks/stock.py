"""What a user of stock transformers runs: a full prefill, or one behind a cached instruction.

Every side is timed by the same clock: from the call of `generate()` to the moment its first token
is known to the host.
"""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from kvcache_rag.models.cache import CACHE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One run of one side.

    Attributes:
        ttft: Seconds to the first token.
        step: Seconds per token behind the first, 0 if there was none.
        token: The first token of the first row.
        parts: Seconds of the parts of `ttft`.
        cache: What transformers' `generate()` left behind, or None.
        tokens: All new ones of the first row.
    """

    ttft: float
    step: float
    token: int
    parts: Mapping[str, float] = field(default_factory=dict)
    cache: Any = None
    tokens: tuple[int, ...] = ()


class _Clock(StoppingCriteria):
    """Notes when each token is known."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        input_ids[0, -1].item()  # waits for the device
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def timed_generate(
    model: Any, ids: Tensor, new_tokens: int, cache: Any = None, started: float | None = None
) -> Sample:
    """Greedy `generate()` of transformers itself, timed.

    Args:
        model: On its device.
        ids: `(rows, tokens)` int64, full prompts without padding.
        new_tokens: At least 1.
        cache: Of all but the last tokens, or None.
        started: `time.perf_counter()` at the question, None for now.
    """
    clock = _Clock()
    if started is None and model.device.type == "cuda":
        torch.cuda.synchronize(model.device)  # what was prepared is not part of the answer
    began = time.perf_counter() if started is None else started
    with torch.inference_mode():
        output = model.generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),
            **{CACHE_NAME: cache},
            max_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
            return_dict_in_generate=True,
        )
    first, last = clock.times[0], clock.times[-1]
    step = (last - first) / (new_tokens - 1) if new_tokens > 1 else 0.0
    tokens = tuple(output.sequences[0, ids.shape[1] :].tolist())
    return Sample(first - began, step, tokens[0], cache=output[CACHE_NAME], tokens=tokens)


@contextmanager
def stock_attention(model: Any) -> Iterator[None]:
    """Let the model be plain transformers (sdpa) meanwhile."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def cache_copy(cache: Any, tokens: int) -> Any:
    """A stock cache with copies of the first tokens of another."""
    copy = DynamicCache()
    for index, layer in enumerate(cache.layers):
        copy.update(layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone(), index)
    return copy


def prefilled(model: Any, ids: Tensor) -> Any:
    """A stock cache of `(rows, tokens)` ids."""
    cache = DynamicCache()
    with torch.inference_mode():
        model.model(ids.to(model.device), **{CACHE_NAME: cache}, use_cache=True)
    return cache


class Stock:
    """Stock transformers on one batch of prompts.

    Attributes:
        context: Tokens in front of the query.
    """

    def __init__(self, model: Any, ids: Tensor, prefix: int, context: int) -> None:
        """Ask the `(rows, tokens)` prompts `ids`, whose first `prefix` tokens are the same."""
        self.model, self.ids, self.context = model, ids, context
        self._held: Any = None
        with stock_attention(model):
            self._prefix = prefilled(model, ids[:, :prefix])
        self._prefix_tokens = prefix

    def naive(self, new_tokens: int) -> Sample:
        """A full prefill."""
        with stock_attention(self.model):
            sample = timed_generate(self.model, self.ids, new_tokens)
        self._held = sample.cache
        return sample

    def prefix_cached(self, new_tokens: int) -> Sample:
        """A prefill of chunks and query over a copy of the instruction's cache."""
        with stock_attention(self.model):
            started = time.perf_counter()
            cache = cache_copy(self._prefix, self._prefix_tokens)
            return timed_generate(self.model, self.ids, new_tokens, cache, started)

    def over_context(self, new_tokens: int) -> Sample:
        """The query over a stock cache of the whole context, copied before the clock starts."""
        if self._held is None:
            self.naive(1)
        with stock_attention(self.model):
            cache = cache_copy(self._held, self.context)
            return timed_generate(self.model, self.ids, new_tokens, cache)


def median_parts(samples: list[Sample]) -> dict[str, float]:
    """Median seconds of each part."""
    names = samples[0].parts
    return {name: statistics.median(one.parts[name] for one in samples) for name in names}
