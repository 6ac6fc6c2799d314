"""Our engine over llama.cpp beside llama.cpp itself, and beside our engine over transformers.

    python -m benchmarks.llamacpp --models smollm2 MODEL.gguf
    python -m benchmarks.render llamacpp

The same file, the same prompts (`peers_prompts.material`), the same llama.cpp (that of
llama-cpp-python, which has to be installed), keys and values in 16 bits, flash attention off.  Each
side is a process of its own and they take turns, prompt by prompt:

- `llama.cpp`: full prefill; `beginning`: the same chunks in the same order, asked before (its own
  prompt cache, an equal beginning)
- `ours`: `Reuse()` and the default policy over chunks from files, in a new order each time; full
  prefill
- `ours-int8`, `ours-int4`: the transformers backend, its weights dequantised and packed anew

What is full prefill takes long and is asked `--full` times; the rest `--rounds` times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.common import commit, described, load, processor_of, read, result_file, write
from benchmarks.peers_prompts import CHUNK, Material, material
from kvcache_rag.models.gguf import file_digest
from kvcache_rag.models.names import resolve
from kvcache_rag.models.pretrained import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIDES: Final = ("llama.cpp", "ours", "ours-int8", "ours-int4")
KINDS: Final = {
    "llama.cpp": ("full", "beginning"),
    "ours": ("full", "reuse", "default"),
    "ours-int8": ("reuse", "default"),
    "ours-int4": ("reuse", "default"),
}
NEW: Final = 48


class Side:
    """One side in its process."""

    def __init__(self, name: str, model: str, threads: int, window: int, system: str) -> None:
        """Start it."""
        self.name, self._place = name, tempfile.TemporaryDirectory()
        is_alone = name == "llama.cpp"
        program = "benchmarks.llamacpp_alone" if is_alone else "benchmarks.llamacpp_ours"
        command = [sys.executable, "-m", program, "--file", resolve(model)]
        command += ["--threads", str(threads), "--window", str(window)]
        if not is_alone:
            command += ["--side", name, "--system", system, "--folder", self._place.name]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"{self.name} ended; what it said is above")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Let it answer a prompt."""
        if self._process.stdin is None:
            raise RuntimeError("closed")
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._place.cleanup()


def measured(
    model: str, about: Material, threads: int, context: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row per side and kind."""
    longest = len(about.prefix) + context + max(map(len, about.queries)) + NEW
    window = -(-longest // 256) * 256
    records: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    with ExitStack() as stack:
        sides = {}
        for name in options.sides:
            sides[name] = Side(name, model, threads, window, about.system)
            stack.callback(sides[name].close)
        for number in range(options.rounds + 1):  # the first is not counted
            for name, side in sides.items():
                for kind in KINDS[name]:
                    if kind == "full" and not 0 < number <= options.full:
                        continue
                    order = 1 if kind == "beginning" else number  # what was computed last, or once
                    job = {**about.prompt(context, order, number), "kind": kind, "new": NEW}
                    found = side.ask(job)
                    if number:
                        records[name, kind].append(found)
                        said = f"{1000 * found['ttft']:.0f} ms"
                        print(context, threads, name, kind, said, file=sys.stderr, flush=True)
    for (name, kind), some in records.items():
        firsts = [1000 * one["ttft"] for one in some]
        yield {
            "side": name,
            "kind": kind,
            "threads": threads,
            "context": context,
            "first_ms": statistics.median(firsts),
            "lowest_ms": min(firsts),
            "step_ms": statistics.median(1000 * one["step"] for one in some),
            "samples": len(some),
            "peak_mib": max(one["peak_mib"] for one in some),
            "stored_bytes_per_token": some[-1].get("stored", 0.0),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for and add it to the report."""
    options = _options(arguments)
    for model in options.models:
        name = Path(model).stem
        about = material(load_tokenizer(model, {}), max(options.contexts))
        for threads in options.threads:
            for context in options.contexts:
                rows = list(measured(model, about, threads, context, options))
                _keep(options.json, name, model, threads, rows)
    return 0


def _keep(file: Path, name: str, model: str, threads: int, rows: Sequence[dict[str, Any]]) -> None:
    report = read(file)
    machine = processor_of(described("cpu", threads)["machine"])
    digest = file_digest(Path(resolve(model)))
    report["about"] = {
        "benchmark": "llamacpp",
        **described("cpu", threads),
        "machine": machine,
        "llama_cpp_python": version("llama-cpp-python"),
        "commit": commit(),
        "load": load(),
        "chunk_tokens": CHUNK,
        "files": {**report.get("about", {}).get("files", {}), name: digest},
    }
    place = {(row["side"], row["kind"], row["threads"], row["context"]) for row in rows}
    old = [
        row
        for row in report.get(name, [])
        if (row["side"], row["kind"], row["threads"], row["context"]) not in place
    ]
    report[name] = sorted(
        [*old, *rows], key=lambda row: (row["threads"], row["context"], SIDES.index(row["side"]))
    )
    write(file, report)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=["smollm2"], help="GGUF files, or names")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--full", type=int, default=1, help="rounds with what takes a full prefill")
    parser.add_argument("--json", type=Path, default=result_file("llamacpp"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
