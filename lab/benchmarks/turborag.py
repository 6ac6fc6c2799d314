"""TurboRAG's way to answer from cached chunks, done again from its description and its script.

The computation of arXiv 2410.07590 (section 3.2, appendix B) and of its published code, written
anew: one `.pt` file per chunk holds keys as they are before RoPE; a question loads the files with
`torch.load`, concatenates them per layer with `torch.cat`, and hands the result to `generate()`;
in every step, the first and each decoded one, every layer appends the new keys with `torch.cat`
and rotates **all** keys by `arange`, in the model's dtype.

What differs from the script, all of it in favour of that side or needed to compare: attention is
stock sdpa, not spelt-out matrix products; the table of cosines and sines is built once per step for
all layers; `generate()` of today computes the last token's logits only; ids are given, the prompt
is not tokenised; chunks were computed behind the shared instruction, as ours are, so that both
sides have equal logits (in the script a chunk stands alone).
"""

from __future__ import annotations

import hashlib
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, DynamicLayer
from transformers.models.llama.modeling_llama import rotate_half

from benchmarks.stock import Sample, cache_copy, prefilled, stock_attention, timed_generate
from kvcache_rag.models.cache import CACHE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor


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
        with stock_attention(model), self._raw.watched():
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
        with stock_attention(self.model), self._raw.watched(), torch.inference_mode():
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
        with stock_attention(self.model), self._raw.watched(), torch.inference_mode():
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
        with stock_attention(self.model), self._raw.watched(), torch.inference_mode():
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
