"""What a user of stock transformers runs: a full prefill, or one behind a cached instruction.

Every side is timed by the same clock: from the call of `generate()` to the moment its first token
is known to the host.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, DynamicCache, DynamicLayer, StoppingCriteria, StoppingCriteriaList
from transformers.models.llama.modeling_llama import rotate_half

from kvcache_rag.models.cache import CACHE_NAME
from kvcache_rag.models.pretrained import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

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
        self._prefix = prefilled(model, ids[:, :prefix])
        self._prefix_tokens = prefix

    def naive(self, new_tokens: int) -> Sample:
        """A full prefill."""
        sample = timed_generate(self.model, self.ids, new_tokens)
        self._held = sample.cache
        return sample

    def prefix_cached(self, new_tokens: int) -> Sample:
        """A prefill of chunks and query over a copy of the instruction's cache."""
        started = time.perf_counter()
        cache = cache_copy(self._prefix, self._prefix_tokens)
        return timed_generate(self.model, self.ids, new_tokens, cache, started)

    def over_context(self, new_tokens: int) -> Sample:
        """The query over a stock cache of the whole context, copied before the clock starts."""
        if self._held is None:
            self.naive(1)
        cache = cache_copy(self._held, self.context)
        return timed_generate(self.model, self.ids, new_tokens, cache)


def checkpoint(name: str, folder: Path, dtype: torch.dtype) -> Path:
    """A model as transformers saves it, which vLLM reads."""
    if not (folder / "config.json").is_file():
        model, tokenizer, _ = load(
            name, dtype=dtype, device="cpu", options={}, weight_format="plain"
        )
        config = type(model.config).from_dict(model.config.to_dict())
        config.quantization_config = None
        plain = type(model)(config).to(dtype)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def median_parts(samples: list[Sample]) -> dict[str, float]:
    """Median seconds of each part."""
    names = samples[0].parts
    return {name: statistics.median(one.parts[name] for one in samples) for name in names}


class RawKeys:
    """Keys as the layers project them, before RoPE.

    Attributes:
        latest: Per layer `(rows, kv_heads, tokens, width)` of the last forward pass.
    """

    def __init__(self, model: Any) -> None:
        """Watch a model whose layers have a `k_proj` and no norm behind it (Llama, Qwen2)."""
        self.latest: dict[int, Tensor] = {}
        self._layers = model.model.layers
        self._width = model.model.layers[0].self_attn.head_dim

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the keys of forward passes meanwhile."""
        hooks = [
            layer.self_attn.k_proj.register_forward_hook(self._noting(index))
            for index, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _noting(self, index: int) -> Any:
        def note(module: Any, inputs: Any, output: Tensor) -> None:
            rows, tokens, _ = output.shape
            self.latest[index] = output.view(rows, tokens, -1, self._width).transpose(1, 2)

        return note


class RotatingCache(Cache):
    """Holds keys before RoPE and hands out all of them rotated, anew in every step."""

    def __init__(self, model: Any, raw: RawKeys, held: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin with raw keys and values per layer, `(rows, kv_heads, tokens, width)`."""
        super().__init__(layers=[_layer(keys, values) for keys, values in held])
        self._rotary, self._raw = model.model.rotary_emb, raw
        self._table: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the raw keys of this step, not the rotated ones that are handed in."""
        keys, values = super().update(self._raw.latest[layer_idx], value_states, layer_idx)
        tokens = keys.shape[-2]
        if self._table is None or self._table[0].shape[-2] != tokens:
            places = torch.arange(tokens, device=keys.device)[None]
            cos, sin = self._rotary(values, places)
            self._table = cos.unsqueeze(1), sin.unsqueeze(1)
        cos, sin = self._table
        return keys * cos + rotate_half(keys) * sin, values


def _layer(keys: Tensor, values: Tensor) -> DynamicLayer:
    """A stock layer that holds these tensors themselves: filling one by `update` copies them."""
    layer = DynamicLayer()
    layer.keys, layer.values = keys, values
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.is_initialized = True
    return layer


class TurboRag:
    """Files of chunks, and answers from them."""

    def __init__(self, model: Any, folder: Path, prefix_ids: Sequence[int]) -> None:
        """Keep files in `folder`; the instruction's cache stays in memory, as in the script."""
        self.model, self.folder = model, folder
        self._raw = RawKeys(model)
        folder.mkdir(parents=True, exist_ok=True)
        with self._raw.watched():
            self._prefix_cache = prefilled(model, torch.tensor([list(prefix_ids)]))
        self._prefix = [
            (self._raw.latest[index].clone(), layer.values)
            for index, layer in enumerate(self._prefix_cache.layers)
        ]

    def path(self, ids: Sequence[int]) -> Path:
        """Where the chunk with these ids lies."""
        return self.folder / f"{hashlib.sha256(repr([*ids]).encode()).hexdigest()[:16]}.pt"

    def add(self, ids: Sequence[int]) -> None:
        """Compute a chunk behind the instruction and write its raw keys and its values."""
        if self.path(ids).exists():
            return
        behind = self._prefix[0][0].shape[2]
        cache = cache_copy(self._prefix_cache, behind)
        with self._raw.watched(), torch.inference_mode():
            chunk = torch.tensor([list(ids)], device=self.model.device)
            self.model.model(chunk, **{CACHE_NAME: cache}, use_cache=True)
        tensors = [
            (self._raw.latest[index].contiguous().cpu(), layer.values[:, :, behind:].cpu().clone())
            for index, layer in enumerate(cache.layers)
        ]
        torch.save(tensors, self.path(ids))

    def generate(
        self, ids: Tensor, chunks: Sequence[Sequence[Sequence[int]]], new_tokens: int
    ) -> Sample:
        """Load, concatenate, generate.

        Args:
            ids: `(rows, tokens)` int64, full prompts of equal length.
            chunks: Ids of the chunks of each row.
            new_tokens: At least 1.
        """
        paths = [[self.path(chunk) for chunk in row] for row in chunks]  # not their way to find it
        with self._raw.watched(), torch.inference_mode():
            started = time.perf_counter()
            cache, loaded = self._stitched(paths)
            stitched = time.perf_counter()
            sample = timed_generate(self.model, ids, new_tokens, cache, started)
        parts = {
            "load": loaded - started,
            "stitch": stitched - loaded,
            "prefill": sample.ttft - (stitched - started),
        }
        return Sample(sample.ttft, sample.step, sample.token, parts)

    def logits(self, ids: Tensor, chunks: Sequence[Sequence[int]], query: int) -> Tensor:
        """Logits of the last `query` tokens of one prompt, `(query, vocabulary)` float32."""
        with self._raw.watched(), torch.inference_mode():
            cache, _ = self._stitched([[self.path(chunk) for chunk in chunks]])
            context = ids.shape[1] - query
            places = torch.arange(context, ids.shape[1], device=self.model.device)[None]
            output = self.model(
                ids[:, context:].to(self.model.device),
                position_ids=places,
                **{CACHE_NAME: cache},
                use_cache=True,
            )
        logits: Tensor = output.logits[0].float().cpu()
        return logits

    def _stitched(self, paths: Sequence[Sequence[Path]]) -> tuple[RotatingCache, float]:
        device = self.model.device
        rows = [
            [
                self._prefix,
                *(torch.load(path, weights_only=True, map_location=device) for path in row),
            ]
            for row in paths
        ]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        loaded = time.perf_counter()
        held = []
        for layer in range(len(self._prefix)):
            slots = []
            for slot in (0, 1):
                single = [torch.cat([part[layer][slot] for part in row], 2) for row in rows]
                slots.append(single[0] if len(single) == 1 else torch.cat(single, 0))
            held.append((slots[0], slots[1]))
        return RotatingCache(self.model, self._raw, held), loaded
