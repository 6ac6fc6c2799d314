"""What a `DiskStore` costs at one number of chunks."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from benchmarks.lookups import TINY
from benchmarks.timing import SPEC, chunk_of
from kvcache_rag.cli import main as command
from kvcache_rag.kv.chunk import ChunkKV, chunk_key
from kvcache_rag.stores import DiskStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKey

OWNER: Final = "growth"
_SAMPLE: Final = 500  # calls of which a median is taken
_WINDOW: Final = 200  # chunks written at a size, to see what one costs there

# A process of its own: from nothing to the first chunk.
_OPENING: Final = """
import json, sys, time
begun = time.perf_counter()
from benchmarks.growth_store import key_of
from benchmarks.lookups import TINY
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
        # What is released has no end: only the sweep that is timed drops it.
        self.store = DiskStore(root, durable=False, release_grace=math.inf)
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
        parts["claim"] = _each(
            lambda step: self.store.claim(key_of(size + step), OWNER), range(_WINDOW)
        )
        points = [_point(curve, size, seconds) for curve, seconds in parts.items()]
        _wait_for_sweeps()
        points.append(_point("sweep of all", size, [_timed(self.store.sweep) for _ in range(3)]))
        for step in range(_WINDOW):
            self.store.release(key_of(size + step), OWNER)
        _wait_for_sweeps()
        sweeping = DiskStore(self.store.root, durable=False, release_grace=0.0)
        begun = time.perf_counter()
        dropped = sweeping.sweep()
        points.append(Point("sweep that drops 200", size, time.perf_counter() - begun, 1))
        if dropped != _WINDOW:
            raise RuntimeError(f"{dropped} of {_WINDOW} released chunks were dropped")
        used = [_timed(self._usage) for _ in range(3)]
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


def _wait_for_sweeps() -> None:
    """A claim may start one in the background, and of two sweeps at once one does nothing."""
    for thread in threading.enumerate():
        if thread.name == "kvcache-rag-sweep":
            thread.join()


def _timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _each(call: Callable[[int], Any], seeds: Iterable[int]) -> list[float]:
    return [_timed(partial(call, seed)) for seed in seeds]


def _point(curve: str, size: int, seconds: list[float]) -> Point:
    return Point(curve, size, statistics.median(seconds), len(seconds))
