"""llama.cpp by its own calls, in a process without torch: one side of `benchmarks.llamacpp`.

Its prompt cache is what its one sequence holds of the last prompt: an equal beginning.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.jobs import answer_jobs
from kvcache_rag.models.llamacpp.binding import ContextOptions, LlamaCpp

if TYPE_CHECKING:
    from collections.abc import Sequence


class Llama:
    """A model in a context of one sequence."""

    def __init__(self, file: Path, window: int, threads: int) -> None:
        """Load the model with a context of `window` cells."""
        self._llama = LlamaCpp(file, ContextOptions(), gpu_layers=0, threads=lambda: threads)
        self._llama.ensure(window)
        self._held: list[int] = []

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Compute everything, or the query behind a context that it holds already."""
        context, query, llama = job["context"], job["query"], self._llama
        held = len(context) if job["kind"] == "beginning" else 0
        if held and self._held != context:
            llama.remove(0)
            self._pass(context, 0)
        llama.remove(0, held)
        self._held = context
        began = time.perf_counter()
        said = [self._pass([*context, *query][held:], held)]
        ttft = time.perf_counter() - began
        stop = len(context) + len(query)
        while len(said) < job["new"]:
            said.append(self._pass([said[-1]], stop + len(said) - 1))
        total = time.perf_counter() - began
        step = (total - ttft) / (len(said) - 1)
        return {"ttft": ttft, "total": total, "step": step, "tokens": said, "reused": held}

    def _pass(self, ids: Sequence[int], start: int) -> int:
        wanted = [False] * (len(ids) - 1) + [True]
        logits = self._llama.decode(ids, range(start, start + len(ids)), [0] * len(ids), wanted)
        return int(logits[-1].argmax())


def main() -> int:
    """Be that side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    answer_jobs(Llama(options.file, options.window, options.threads).ask)
    return 0


if __name__ == "__main__":
    sys.exit(main())
