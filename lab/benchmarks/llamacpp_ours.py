"""This project in a process of its own that imports what an app imports: a side of `llamacpp`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.jobs import answer_jobs, folder_bytes, result
from kvcache_rag import BestLast, DiskStore, Engine, FullRecompute, Reuse
from kvcache_rag.prompt.template import PromptTemplate

_POLICIES: Final = {"full": FullRecompute(), "reuse": Reuse(), "default": BestLast()}


class Ours:
    """This project, over files in the page cache."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Load the model."""
        is_own = options.side == "ours"
        self._folder = options.folder
        self.engine = Engine.from_pretrained(
            str(options.file),
            adapter="none",
            backend="llama.cpp" if is_own else "transformers",
            weight_format="auto" if is_own else options.side.removeprefix("ours-"),
            store=DiskStore(options.folder),
            template=PromptTemplate(system=options.system),
            context_window=options.window,
        )
        self.engine.model.generation_config.eos_token_id = None

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Answer over chunks that are known."""
        engine, texts = self.engine, job["texts"]
        policy = _POLICIES[job["kind"]]
        keys = engine.add(texts)
        began = time.perf_counter()
        answer = engine.generate(job["question"], texts, policy=policy, max_new_tokens=job["new"])
        total, cost = time.perf_counter() - began, answer.metrics
        found = result(cost.ttft, total, answer.token_ids, cost.reused_tokens)
        tokens = sum(key.tokens for key in dict.fromkeys(keys))
        return {**found, "stored": folder_bytes(self._folder) / tokens}


def main() -> int:
    """Be that side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--system", required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    answer_jobs(Ours(options).ask)
    return 0


if __name__ == "__main__":
    sys.exit(main())
