"""One side of the peers' benchmark in a process of its own: ours, stock transformers or KVBoost.

    python -m benchmarks.peers_worker ours-int8 --model smollm2 --threads 1 --folder DIR --system S

Reads one job per line (JSON, see `peers.Job`) and writes one result per line; the first line says
that the model is loaded, and facts about the side.  What ours imports is what an app imports.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from benchmarks.jobs import folder_bytes, result
from kvcache_rag import BestFew, DiskStore, Engine, FullRecompute, Reuse
from kvcache_rag.engine import like
from kvcache_rag.prompt.template import PromptTemplate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.policies import ReusePolicy

WINDOW: Final = 5120
PROMPTS: Final = 1 << 30  # bytes for prompts that the next ones begin like
# Tokens of the chunks that the facts of our side are measured with.
_MEASURED: Final = 256


class Handler(Protocol):
    """One side."""

    def facts(self) -> dict[str, Any]:
        """What is to be known about it, measured once."""

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Answer a prompt, in the state of the cache that its kind wants."""


class Ours:
    """This project, over files in the page cache."""

    def __init__(self, form: str, model: str, folder: Path, system: str) -> None:
        """Load the model with its weights in a form, or in llama.cpp."""
        self._folder = folder
        runs: dict[str, Any] = {"weight_format": form, "device": "cpu"}
        if form == "llama":
            runs = {"backend": "llama.cpp", "context_window": WINDOW}
        self.engine = Engine.from_pretrained(
            model,
            adapter="none",
            store=DiskStore(folder),
            template=PromptTemplate(system=system),
            prompt_memory=0,  # an order is new as often as it is asked
            **runs,
        )
        # As the pages of the others, which hold several prompts.
        self._keeping = like(self.engine, prompt_memory=PROMPTS)
        # Answers have the length that was asked for, on every side.
        self.engine.model.generation_config.eos_token_id = None

    def facts(self) -> dict[str, Any]:
        """Bytes per token that a stored chunk takes, in its file and in memory."""
        # The store's own files come with a first chunk; what a second one adds is measured.
        texts = [
            " ".join(map(str, range(start, start + _MEASURED // 2))) for start in (0, _MEASURED)
        ]
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
        texts, question = job["texts"], job["question"]
        policy, state = asked_as(job["kind"])
        engine = self._keeping if state == "prefix" else self.engine
        ids = engine.tokenize(question, texts)
        if [*ids.context, *ids.query] != [*job["context"], *job["query"]]:
            raise RuntimeError("the prompt is not the one that the others are asked")
        if state == "cold":
            for key in engine.keys(texts):
                engine.store.delete(key)
        elif state != "full":
            engine.add(texts)
        gc.collect()
        began = time.perf_counter()
        answer = engine.generate(
            question, texts, policy=policy, scores=job["scores"], max_new_tokens=job["new"]
        )
        total, cost = time.perf_counter() - began, answer.metrics
        if state not in ("cold", "full") and cost.prefilled_tokens:
            raise RuntimeError("chunks were prefilled that should have been read")
        # The instruction's keys and values are in memory, unless everything is computed.
        reused = cost.reused_tokens + (cost.prefix_tokens if cost.rotation else 0)
        found = result(cost.ttft, total, answer.token_ids, reused)
        return {**found, "rotation": cost.rotation, "read": len(cost.answered_from)}


def asked_as(kind: str) -> tuple[ReusePolicy, str]:
    """The policy of a kind of job of ours, and the state of the cache that it wants."""
    if kind == "full":
        return FullRecompute(), kind
    if kind.startswith("few-"):
        return BestFew(), kind.removeprefix("few-")
    return Reuse(), kind


def handler(side: str, model: str, folder: Path, system: str) -> Handler:
    """A side by its name."""
    kind, _, form = side.partition("-")
    if kind == "ours":
        return Ours(form, model, folder, system)
    from benchmarks.peers_stock import KVBoost, Stock  # not among what ours imports

    return Stock(model) if kind == "stock" else KVBoost(model)


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
    parser.add_argument("--model", required=True)
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
        side = handler(parsed.side, parsed.model, parsed.folder, parsed.system)
        say({"facts": side.facts()})
    except Exception as error:  # a peer that does not run here is a finding
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    for line in sys.stdin:
        say(answered(side, json.loads(line)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
