"""Lookups of tiny files: among few and many entries, and while a sweep runs."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.timing import Row, chunk_of, row_of
from kvcache_rag.kv.chunk import ChunkKey, ChunkLayout, GroupLayout
from kvcache_rag.stores import DiskStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TINY = ChunkLayout((GroupLayout((0,), (1, 8), (1, 8)),), torch.bfloat16)


def _is_over(thread: threading.Thread) -> bool:
    return not thread.is_alive()


def tiny_store(folder: Path, entries: int) -> tuple[DiskStore, list[ChunkKey]]:
    """A store of many tiny chunks."""
    store = DiskStore(folder, durable=False)
    keys = []
    for seed in range(entries):
        key, chunk = chunk_of(TINY, 1, seed)
        store.put(key, chunk)
        keys.append(key)
    if store.stats().puts != entries:
        raise RuntimeError(f"chunks could not be written: {store.stats().last_failure}")
    return store, keys


def lookups(store: DiskStore, keys: Sequence[ChunkKey], chance: random.Random) -> list[float]:
    """Seconds of single lookups."""
    found = []
    for key in chance.choices(keys, k=200):
        begun = time.perf_counter()
        if not store.contains(key):
            raise RuntimeError("a chunk went away")
        store.get(key, TINY)
        found.append(time.perf_counter() - begun)
    return found


def measure_lookups(stores: dict[int, tuple[DiskStore, list[ChunkKey]]], rounds: int) -> list[Row]:
    """Lookups among few and many entries, taking turns."""
    chance = random.Random(0)
    found: dict[int, list[float]] = {entries: [] for entries in stores}
    for number in range(rounds + 1):
        for entries, (store, keys) in stores.items():
            seconds = lookups(store, keys, chance)
            found[entries] += seconds if number else []
    fewest = min(found)
    few = f"lookup of {fewest}"
    return [
        row_of(f"lookup of {n}", found[n], few, found[fewest], 0.0 if n == fewest else 1.5)
        for n in found
    ]


def sweep_there(root: str, ready: Any, begin: Any, done: Any) -> None:
    """Sweep in another process, once it may begin."""
    store = DiskStore(root, durable=False)
    ready.set()
    begin.wait()
    store.sweep()
    done.set()


def measure_sweeps(store: DiskStore, keys: Sequence[ChunkKey], rounds: int) -> list[Row]:
    """Lookups with and without a sweep beside them, taking turns."""
    chance = random.Random(1)
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[float]] = {"no": [], "thread": [], "process": []}
    lasted: dict[str, list[float]] = {"thread": [], "process": []}

    def beside(kind: str, is_over: Callable[[], bool]) -> None:
        begun = time.perf_counter()
        while not is_over():
            found[kind] += lookups(store, keys, chance)
        lasted[kind].append(time.perf_counter() - begun)

    for _ in range(rounds):
        ready, begin, done = (context.Event() for _ in range(3))
        arguments = (str(store.root), ready, begin, done)
        process = context.Process(target=sweep_there, args=arguments)
        process.start()
        ready.wait()
        found["no"] += lookups(store, keys, chance)
        begin.set()
        beside("process", done.is_set)
        process.join()
        found["no"] += lookups(store, keys, chance)
        thread = threading.Thread(target=store.sweep)
        thread.start()
        beside("thread", partial(_is_over, thread))
    rows = [row_of("lookup, no sweep", found["no"])]
    for kind in lasted:
        rows.append(row_of(f"lookup, sweep in a {kind}", found[kind], rows[0].side, found["no"]))
        rows.append(row_of(f"the sweep in a {kind}", lasted[kind]))
    return rows
