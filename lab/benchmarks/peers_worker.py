"""One side of the peers' benchmark in a process of its own: ours, stock transformers or KVBoost.

    python -m benchmarks.peers_worker ours-int8 --threads 1 --folder DIR --system TEXT

Reads one job per line (JSON, see `peers.Job`) and writes one result per line; the first line says
that the model is loaded, and facts about the side.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch

from benchmarks.peers_prompts import CHUNK, PREFIX, template_of
from benchmarks.stock import cache_copy, prefilled, timed_generate
from kvcache_rag import DiskStore, Engine, FullRecompute, Reuse
from kvcache_rag.models.pretrained import load

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL: Final = "smollm2"
# Tokens that KVBoost keeps together; its default.
BLOCK: Final = 128


class Handler(Protocol):
    """One side."""

    def facts(self) -> dict[str, Any]:
        """What is to be known about it, measured once."""

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Answer a prompt, in the state of the cache that its kind wants."""


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def result(ttft: float, total: float, tokens: Sequence[int], reused: int) -> dict[str, Any]:
    """What every side says about a job: seconds, tokens, and how many of the prompt were reused."""
    step = (total - ttft) / (len(tokens) - 1) if len(tokens) > 1 else 0.0
    return {
        "ttft": ttft,
        "total": total,
        "step": step,
        "tokens": [*map(int, tokens)],
        "reused": reused,
    }


class Ours:
    """This project, over files in the page cache."""

    def __init__(self, weight_format: str, folder: Path, system: str) -> None:
        """Load the model with its weights in a form."""
        self._folder = folder
        self.engine = Engine.from_pretrained(
            MODEL,
            adapter="none",
            store=DiskStore(folder),
            template=template_of(system),
            device="cpu",
            cost_aware=False,
            weight_format=cast("Any", weight_format),
        )
        # Answers have the length that was asked for, on every side.
        self.engine.model.generation_config.eos_token_id = None

    def facts(self) -> dict[str, Any]:
        """Bytes per token that a stored chunk takes, in its file and in memory."""
        # The store's own files come with a first chunk; what a second one adds is measured.
        texts = [" ".join(map(str, range(start, start + CHUNK // 2))) for start in (0, CHUNK)]
        first = self.engine.add(texts[:1])
        before = folder_bytes(self._folder)
        key = self.engine.add(texts[1:])[0]
        size = folder_bytes(self._folder) - before
        for one in (*first, key):
            self.engine.store.delete(one)
        return {
            "disk_bytes_per_token": size / key.tokens,
            "memory_bytes_per_token": self.engine.nbytes(key) / key.tokens,
        }

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The chunks are unknown (`cold`), not used (`full`), or known in whatever order."""
        engine, texts, question = self.engine, job["texts"], job["question"]
        ids = engine.tokenize(question, texts)
        if [*ids.context, *ids.query] != [*job["context"], *job["query"]]:
            raise RuntimeError("the prompt is not the one that the others are asked")
        if job["kind"] == "cold":
            for key in engine.keys(texts):
                engine.store.delete(key)
        elif job["kind"] != "full":
            engine.add(texts)
        policy = FullRecompute() if job["kind"] == "full" else Reuse()
        gc.collect()
        began = time.perf_counter()
        answer = engine.generate(question, texts, policy=policy, max_new_tokens=job["new"])
        total, cost = time.perf_counter() - began, answer.metrics
        if job["kind"] not in ("cold", "full") and cost.prefilled_tokens:
            raise RuntimeError("chunks were prefilled that should have been read")
        # The instruction's keys and values are in memory, unless everything is computed.
        reused = cost.reused_tokens + (cost.prefix_tokens if cost.rotation else 0)
        found = result(cost.ttft, total, answer.token_ids, reused)
        return {**found, "rotation": cost.rotation}


class Stock:
    """transformers by itself; what it reuses is its own cache of an equal beginning."""

    def __init__(self) -> None:
        """Load the model."""
        self.model = stock_model()
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
        if kind in ("prefix", "long") and self._context != context:
            self._held, self._context = prefilled(self.model, ids[:, : len(context)]), context
        if kind == "reorder" and self._held is None:
            self._held = prefilled(self.model, ids[:, :PREFIX])
        gc.collect()
        began = time.perf_counter()
        cache, reused = None, 0
        if kind == "reorder":
            cache, reused = cache_copy(self._held, PREFIX), PREFIX
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

    def __init__(self) -> None:
        """Load model and engine."""
        # In an environment of its own, which mypy does not see.
        import kvboost  # type: ignore[import-not-found,unused-ignore]

        self.model = stock_model()
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


def stock_model() -> Any:
    """The model as transformers has it, whose answers end at their length alone."""
    model, _, _ = load(MODEL, dtype="auto", device="cpu", options={}, weight_format="plain")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def handler(side: str, folder: Path, system: str) -> Handler:
    """A side by its name."""
    kind, _, form = side.partition("-")
    if kind == "ours":
        return Ours(form, folder, system)
    return Stock() if kind == "stock" else KVBoost()


def answered(side: Handler, job: dict[str, Any]) -> dict[str, Any]:
    """What a side says; a part that a peer cannot do is a finding, too."""
    try:
        return side.ask(job)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main(words: Sequence[str] | None = None) -> int:
    """Answer jobs until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("side")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--system", required=True)
    parsed = parser.parse_args(words)
    # Libraries may print; the lines of the answers have the output to themselves.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(parsed.threads)

    def say(line: dict[str, Any]) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    try:
        side = handler(parsed.side, parsed.folder, parsed.system)
        say({"facts": side.facts()})
    except Exception as error:  # a peer that does not run here is a finding
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    for line in sys.stdin:
        say(answered(side, json.loads(line)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
