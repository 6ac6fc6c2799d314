"""Stock transformers and KVBoost, as sides of the peers' benchmark."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.jobs import result
from benchmarks.peers_prompts import CHUNK
from benchmarks.stock import cache_copy, prefilled, timed_generate
from kvcache_rag.models.pretrained import load

if TYPE_CHECKING:
    from collections.abc import Sequence

# Tokens that KVBoost keeps together; its default.
BLOCK: Final = 128


class Stock:
    """transformers by itself; what it reuses is its own cache of an equal beginning."""

    def __init__(self, model: str) -> None:
        """Load the model."""
        self.model = stock_model(model)
        self._held: Any = None
        self._context: list[int] = []

    def facts(self) -> dict[str, Any]:
        """Bytes per token of a `DynamicCache`."""
        cache = prefilled(self.model, torch.arange(CHUNK)[None])
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return {"memory_bytes_per_token": size / CHUNK}

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Nothing is known (`cold`), the context (`prefix`), or the instruction (`reorder`)."""
        context, kind = job["context"], job["kind"]
        ids = torch.tensor([[*context, *job["query"]]])
        if kind == "prefix" and self._context != context:
            self._held, self._context = prefilled(self.model, ids[:, : len(context)]), context
        prefix = len(job["prefix"])
        if kind == "reorder" and self._held is None:
            self._held = prefilled(self.model, ids[:, :prefix])
        gc.collect()
        began = time.perf_counter()
        cache, reused = None, 0
        if kind == "reorder":
            cache, reused = cache_copy(self._held, prefix), prefix
        elif kind != "cold":
            _crop(self._held, len(context))
            cache, reused = self._held, len(context)
        sample = timed_generate(self.model, ids, job["new"], cache, began)
        total = sample.ttft + sample.step * (len(sample.tokens) - 1)
        self._held, self._context = sample.cache, context
        _crop(self._held, len(context))
        return result(sample.ttft, total, sample.tokens, reused)


class _Ids:
    """Stands for a tokenizer: prompts are ids written as text, and nothing ends an answer."""

    eos_token_id: Final = -1
    pad_token_id: Final = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        """The ids that a text spells; punctuation that KVBoost asks for is none of ours."""
        return [int(word) for word in text.split() if word.isdigit()]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The other way round."""
        return " ".join(map(str, ids))


class KVBoost:
    """KVBoost's engine as it is by default, around the model of stock transformers."""

    def __init__(self, model: str) -> None:
        """Load model and engine."""
        # In an environment of its own, which mypy does not see.
        import kvboost  # type: ignore[import-not-found,unused-ignore]

        self.model = stock_model(model)
        self.engine = kvboost.KVBoost(
            self.model, _Ids(), max_cache_bytes=2**30, chunk_size=BLOCK, device="cpu"
        )
        self._warm: list[int] = []

    def facts(self) -> dict[str, Any]:
        """Bytes per token that it keeps."""
        self.engine.warm(_Ids().decode(range(CHUNK)))
        manager = self.engine.cache_manager
        size = manager._bytes_used
        self.engine.reset_cache()
        return {"memory_bytes_per_token": size / CHUNK}

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Nothing is known (`cold`), the context, or the same chunks in their first order."""
        kind, context = job["kind"], job["context"]
        known = {"cold": [], "reorder": job["before"]}.get(kind, context)
        if kind == "cold" or self._warm != known:
            self.engine.reset_cache()
            if known:
                self.engine.warm(_Ids().decode(known))
        self._warm = []
        times: list[float] = []
        gc.collect()
        began = time.perf_counter()
        tokens: list[int] = []

        def on_token(token: int) -> None:
            times.append(time.perf_counter() - began)
            tokens.append(token)

        answer = self.engine.generate(
            _Ids().decode([*context, *job["query"]]),
            max_new_tokens=job["new"],
            cacheable_prefix_len=len(context),
            on_token=on_token,
        )
        returned = time.perf_counter() - began
        if kind != "reorder":
            self._warm = context
        # What it is timed to is the last token: it keeps the prompt's blocks only then.
        found = result(times[0], times[-1], tokens, answer.cached_tokens)
        return {**found, "kept": returned - times[-1]}


def _crop(cache: Any, tokens: int) -> None:
    """Keep the first tokens of a stock cache; a newer transformers counts what is taken away."""
    excess = cache.get_seq_length() - tokens
    if excess:
        cache.crop(-excess)


def stock_model(name: str) -> Any:
    """The model as transformers has it, whose answers end at their length alone."""
    model, _, _ = load(name, dtype="auto", device="cpu", options={}, weight_format="plain")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
