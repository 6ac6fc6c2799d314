"""How costs grow: with the chunks of a store, the chunks of a prompt, the tokens of a context.

    make bench-growth                                  (10^3 to 10^5 chunks, about ten minutes)
    python -m benchmarks.growth --million              (10^6 as well: by hand, 9 GB of disk)

One `DiskStore` of tiny chunks (a header of one page and a token each) grows from size to size and
is measured at each; questions are asked of a small Llama with random weights and a window of 64k
tokens, whose chunks lie in memory, in files, or are prefilled anew.  Each curve gets an exponent:
the slope of the logarithms, by least squares.  A run that was stopped goes on where it was; what
lies in the work folder is removed at the end.  Writes a table, a plot, and
`lab/benchmarks/results/growth.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.growth_plot import plot
from benchmarks.growth_store import Grown, Point
from benchmarks.machine import described, load
from benchmarks.shapes import QUERY, SHAPES, build_tokenizer, words
from kvcache_rag import DiskStore, Engine, FullRecompute, MemoryStore, PromptTemplate, Reuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcache_rag.policies.base import ReusePolicy

ROOT: Final = Path(__file__).parents[2]
WORK: Final = Path(tempfile.gettempdir()) / "kvcache-rag-growth"
SIZES: Final = (1000, 10_000, 100_000)
CONTEXTS: Final = (1024, 2048, 4096, 8192, 16384, 32768)
CHUNK: Final = 512
COUNTS: Final = (1, 2, 4, 8, 16, 32, 64)
SPLIT: Final = 8192  # tokens of context that are cut into these many chunks
ANEW: Final = 8192  # the longest context that is prefilled anew: it takes seconds
ROUNDS: Final = 7
# What a curve may grow as: (name, what the sizes are, highest exponent).
BOUNDS: Final[dict[str, tuple[str, float]]] = {
    "hit": ("chunks in the store", 0.1),
    "contains": ("chunks in the store", 0.1),
    "contains, missing": ("chunks in the store", 0.1),
    "write of a chunk": ("chunks in the store", 0.1),
    "claim": ("chunks in the store", 0.1),
    "write to a full store, processor": ("chunks in the store", 0.1),
    "opening until the first hit": ("chunks in the store", 0.1),
    "sweep of all": ("chunks in the store", 1.1),
    "sweep that drops 200": ("chunks in the store", 1.1),
    "store du": ("chunks in the store", 1.1),
    "first token, memory": ("tokens of context", 1.1),
    "first token, files": ("tokens of context", 1.1),
    "first token of 8,192 tokens, memory": ("chunks of a prompt", 1.1),
    "first token of 8,192 tokens, files": ("chunks of a prompt", 1.1),
}


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Slope of log seconds over log size, by least squares; 0 where nothing grows."""
    xs = [math.log(size) for size, _ in points]
    ys = [math.log(seconds) for _, seconds in points]
    x, y = statistics.fmean(xs), statistics.fmean(ys)
    across = sum((one - x) ** 2 for one in xs)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / across if across else 0.0


class Questions:
    """Asks a small model about contexts of any length, from caches and without."""

    def __init__(self, folder: Path) -> None:
        """Build the model and its engines.

        Args:
            folder: Where files of chunks go.
        """
        config = LlamaConfig(**SHAPES["tiny"], max_position_embeddings=65536, pad_token_id=0)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        tokenizer = build_tokenizer()
        template = PromptTemplate(system=words(32, 1) + " ", chunk_start="", chunk_end="")
        stores = {"memory": MemoryStore(8 << 30), "files": DiskStore(folder, durable=False)}
        self._engines = {
            name: Engine(model, tokenizer, store=store, template=template)
            for name, store in stores.items()
        }
        self._question = words(QUERY, 2)

    def measure(self, context: int, count: int) -> dict[str, list[float]]:
        """Seconds to the first token from caches, and anew for a short context, in turns.

        Args:
            context: Tokens of context.
            count: Chunks that it is cut into.
        """
        texts = [words(context // count, 1000 * count + one) for one in range(count)]
        sides: dict[str, Callable[[], None]] = {}
        for name, engine in self._engines.items():
            engine.add(texts)
            sides[name] = self._asking(engine, texts, Reuse())
        if context <= ANEW:
            sides["anew"] = self._asking(self._engines["memory"], texts, FullRecompute())
        found: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(ROUNDS + 1):
            for name, ask in sides.items():
                begun = time.perf_counter()
                ask()
                if number:
                    found[name].append(time.perf_counter() - begun)
        for engine in self._engines.values():
            for key in engine.keys(texts):
                engine.store.delete(key)
        return found

    def _asking(
        self, engine: Engine, texts: Sequence[str], policy: ReusePolicy
    ) -> Callable[[], None]:
        def ask() -> None:
            options: dict[str, Any] = {"max_new_tokens": 1, "policy": policy}
            metrics = engine.generate(self._question, texts, **options).metrics
            if metrics.misses:
                raise RuntimeError("a chunk was not cached")

        return ask


class Run:
    """The points of a run, kept after each so that a later call goes on."""

    def __init__(self, work: Path) -> None:
        """Read what an earlier run left."""
        work.mkdir(parents=True, exist_ok=True)
        self.work = work
        self._file = work / "points.json"
        kept = json.loads(self._file.read_text("utf-8")) if self._file.is_file() else []
        self.points = [Point(**one) for one in kept]

    def has(self, curve: str, size: int) -> bool:
        """Whether it is measured."""
        return any((one.curve, one.size) == (curve, size) for one in self.points)

    def take(self, points: Sequence[Point]) -> None:
        """Keep and print points."""
        self.points += points
        for one in points:
            print(f"{one.curve:<36}{one.size:>9,}{1e3 * one.seconds:>12.3f} ms", flush=True)
        self._file.write_text(json.dumps([asdict(one) for one in self.points]), "utf-8")

    def store(self, sizes: Sequence[int]) -> None:
        """Grow a store and measure it at each size."""
        if all(self.has("hit", size) for size in sizes):
            return
        grown = Grown(self.work / "store")
        for size in sorted(sizes):
            if not self.has("hit", size):
                grown.grow(size)
                self.take(grown.measure())

    def questions(self) -> None:
        """Ask about growing contexts, and about one context in ever more chunks."""
        asked = Questions(self.work / "chunks")
        for context in CONTEXTS:
            if not self.has("first token, files", context):
                found = asked.measure(context, context // CHUNK)
                self.take([*_points("first token", context, found)])
        for count in COUNTS:
            curve = f"first token of {SPLIT:,} tokens"
            if not self.has(f"{curve}, files", count):
                found = asked.measure(SPLIT, count)
                found.pop("anew")  # a full prefill knows no chunks
                self.take([*_points(curve, count, found)])


def _points(curve: str, size: int, found: dict[str, list[float]]) -> Iterator[Point]:
    for side, seconds in found.items():
        yield Point(f"{curve}, {side}", size, statistics.median(seconds), len(seconds))


def fitted(points: Sequence[Point]) -> list[dict[str, Any]]:
    """One row per curve: its exponent, that of its last step, and what it may be."""
    rows = []
    for curve in dict.fromkeys(one.curve for one in points):
        found = sorted((one.size, one.seconds) for one in points if one.curve == curve)
        if len(found) < 2 or not all(seconds > 0 for _, seconds in found):
            continue
        of, bound = BOUNDS.get(curve, ("", None))
        slope = exponent(found)
        rows.append(
            {
                "curve": curve,
                "of": of,
                "from": found[0][0],
                "to": found[-1][0],
                "ms at first": 1e3 * found[0][1],
                "ms at last": 1e3 * found[-1][1],
                "exponent": slope,
                "of its last step": exponent(found[-2:]),
                "at most": bound,
                "holds": None if bound is None else "yes" if slope <= bound else "no",
            }
        )
    return rows


def main(given: Sequence[str] | None = None) -> int:
    """Measure what is missing; print a table, write JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="chunks in the store")
    parser.add_argument("--million", action="store_true", help="10^6 chunks as well")
    parser.add_argument("--work", type=Path, default=WORK, help="removed at the end")
    parser.add_argument("--json", type=Path, default=ROOT / "lab/benchmarks/results/growth.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/growth.svg")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    busy, run = load(), Run(arguments.work)
    run.store([*arguments.sizes, *([1_000_000] if arguments.million else [])])
    run.questions()
    rows = fitted(run.points)
    for row in rows:
        print(f"{row['curve']:<40}{row['exponent']:>6.2f}  {row['holds'] or ''}")
    report = {
        "command": "python -m benchmarks.growth --million"
        if arguments.million
        else "make bench-growth",
        **described("cpu", 1),
        "load_before": busy,
        "load_after": load(),
        "exponents": rows,
        # Lists: of figures that are rows of a table on the page there are enough.
        "points": [[one.curve, one.size, one.seconds] for one in run.points],
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(report, arguments.plot)
    shutil.rmtree(arguments.work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
