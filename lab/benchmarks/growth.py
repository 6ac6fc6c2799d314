"""How costs grow: with the chunks of a store, the chunks of a prompt, the tokens of a context.

    make bench-growth                                  (10^3 to 10^5 chunks, about ten minutes)
    python -m benchmarks.growth --million              (10^6 as well: by hand, 9 GB of disk)

One `DiskStore` of tiny chunks (a header of one page and a token each) grows from size to size and
is measured at each; questions are asked of a small Llama with random weights and a window of 64k
tokens, whose chunks lie in memory, in files, or are prefilled anew.  Each curve gets an exponent:
the slope of the logarithms, by least squares.  A run that was stopped goes on where it was; what
lies in the work folder is removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common import SPEC, chunk_of, described, load, result_file, seconds_of, write
from benchmarks.shapes import QUERY, SHAPES, build_tokenizer, words
from kvcache_rag import DiskStore, Engine, FullRecompute, MemoryStore, PromptTemplate, Reuse
from kvcache_rag.cli import main as command
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout, GroupLayout, chunk_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.policies.base import ReusePolicy


TINY: Final = ChunkLayout((GroupLayout((0,), (1, 8), (1, 8)),), torch.bfloat16)
_SAMPLE: Final = 500  # calls of which a median is taken
_WINDOW: Final = 200  # chunks written at a size, to see what one costs there
# A process of its own: from nothing to the first chunk.
_OPENING: Final = """
import json, sys, time
begun = time.perf_counter()
from benchmarks.growth import TINY, key_of
from kvcache_rag.stores import DiskStore
imported = time.perf_counter()
store = DiskStore(sys.argv[1], durable=False)
store.get(key_of(int(sys.argv[2])), TINY)
found = time.perf_counter()
print(json.dumps([imported - begun, found - imported]))
"""


@dataclass(frozen=True)
class Point:
    """One figure at one size.

    Attributes:
        curve: What was measured.
        size: Chunks in the store, or of a prompt, or tokens of context.
        seconds: Median, or of the whole where it is done once.
        samples: How many were measured.
    """

    curve: str
    size: int
    seconds: float
    samples: int


def key_of(seed: int) -> ChunkKey:
    """The address of a chunk of one token, another one for each seed."""
    return chunk_key([seed % 32000], prefix_ids=[seed], spec=SPEC, namespace="")


class Grown:
    """A store on disk that grows from size to size; what a killed run wrote is not written again.

    Attributes:
        store: The store, without a limit.
        count: Chunks in it: those of the seeds from 0.
    """

    def __init__(self, root: Path) -> None:
        """Open the folder and count what it holds."""
        self.store = DiskStore(root, durable=False)
        chunk = chunk_of(TINY, 1, 0)[1]
        self._tensors = chunk.tensors
        self._tokens = chunk.tokens
        self.count = 0
        while self.store.contains(key_of(self.count)):
            self.count += 1
        if self.count != sum(1 for _ in root.rglob("*.safetensors")):
            shutil.rmtree(root)  # a run was killed while it measured
            self.count = 0

    def put(self, seed: int, store: DiskStore | None = None) -> float:
        """Write one chunk; seconds."""
        key = key_of(seed)
        chunk = ChunkKV(TINY, self._tokens, key.start, self._tensors)
        begun = time.perf_counter()
        kept = (store or self.store).put(key, chunk)
        seconds = time.perf_counter() - begun
        if not kept:
            raise RuntimeError(f"not written: {(store or self.store).stats().last_failure}")
        return seconds

    def grow(self, size: int) -> None:
        """Write chunks until there are `size`."""
        for seed in range(self.count, size):
            self.put(seed)
        self.count = max(self.count, size)

    def measure(self) -> list[Point]:
        """All figures at the size of now; the store holds the same chunks afterwards."""
        size, chance = self.count, random.Random(0)
        picked = [chance.randrange(size) for _ in range(_SAMPLE)]
        beyond = range(2 * 10**9, 2 * 10**9 + _SAMPLE)
        fresh = [self.put(size + step) for step in range(_WINDOW)]
        parts = {
            "write of a chunk": fresh,
            "hit": _each(lambda seed: self.store.get(key_of(seed), TINY), picked),
            "contains": _each(lambda seed: self.store.contains(key_of(seed)), picked),
            "contains, missing": _each(lambda seed: self.store.contains(key_of(seed)), beyond),
        }
        for step in range(_WINDOW):
            self.store.delete(key_of(size + step))
        points = [_point(curve, size, seconds) for curve, seconds in parts.items()]
        used = [seconds_of(self._usage) for _ in range(3)]
        points.append(_point("store du", size, used))
        points += self._opened(size)
        points += self._full(size)
        return points

    def _usage(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            if command(["store", "du", "--json", str(self.store.root)]):
                raise RuntimeError(shown.getvalue())

    def _opened(self, size: int) -> list[Point]:
        command = [sys.executable, "-c", _OPENING, str(self.store.root)]
        runs = []
        for seed in range(5):
            done = subprocess.run(
                [*command, str(seed % size)], check=True, capture_output=True, text=True
            )
            runs.append(json.loads(done.stdout))
        names = ("imports of a process", "opening until the first hit")
        return [_point(name, size, [run[i] for run in runs]) for i, name in enumerate(names)]

    def _full(self, size: int) -> list[Point]:
        """Writing to a store that is full at this size: a fifth of it again, on average.

        The oldest go, and are written again afterwards.  Also in processor time, which a medium
        that is busy with others does not change.
        """
        limit = self.nbytes()
        full = DiskStore(self.store.root, max_bytes=limit, durable=False)
        count = size // 5
        begun, used = time.perf_counter(), time.process_time()
        for seed in range(10**9, 10**9 + count):
            self.put(seed, full)
        wall, processor = time.perf_counter() - begun, time.process_time() - used
        if full.stats().evictions < count // 2:
            raise RuntimeError("a full store dropped nothing")
        for seed in range(10**9, 10**9 + count):
            self.store.delete(key_of(seed))
        for seed in range(size):
            if not self.store.contains(key_of(seed)):
                self.put(seed)
        return [
            Point("write to a full store", size, wall / count, count),
            Point("write to a full store, processor", size, processor / count, count),
        ]

    def nbytes(self) -> int:
        """Bytes of its files."""
        return self.count * self.store.path(key_of(0)).stat().st_size


def _each(call: Callable[[int], Any], seeds: Iterable[int]) -> list[float]:
    return [seconds_of(partial(call, seed)) for seed in seeds]


def _point(curve: str, size: int, seconds: list[float]) -> Point:
    return Point(curve, size, statistics.median(seconds), len(seconds))


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
    "write to a full store, processor": ("chunks in the store", 0.1),
    "opening until the first hit": ("chunks in the store", 0.1),
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
            name: Engine(model, tokenizer, store=store, template=template, prompt_memory=0)
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
    """Measure what is missing; print a table, write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="chunks in the store")
    parser.add_argument("--million", action="store_true", help="10^6 chunks as well")
    parser.add_argument("--work", type=Path, default=WORK, help="removed at the end")
    parser.add_argument("--json", type=Path, default=result_file("growth"))
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    busy, run = load(), Run(arguments.work)
    run.store([*arguments.sizes, *([1_000_000] if arguments.million else [])])
    run.questions()
    rows = fitted(run.points)
    for row in rows:
        print(f"{row['curve']:<40}{row['exponent']:>6.2f}  {row['holds'] or ''}")
    about = {"benchmark": "growth", **described("cpu", 1), "load_before": busy}
    about |= {"load_after": load()}
    points = [{"curve": one.curve, "size": one.size, "seconds": one.seconds} for one in run.points]
    write(arguments.json, {"about": about, "exponents": rows, "points": points})
    shutil.rmtree(arguments.work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
