"""A store under killed writers, and under many processes with an evictor among them."""

from __future__ import annotations

import logging
import multiprocessing
import random
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.stores import DiskStore
from tests.contracts import LAYOUT, empty_chunk, key_of, make_chunk, same
from tests.reliability import record

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.kv.chunk import ChunkKV
    from tests.soak.conftest import Amount

pytestmark = pytest.mark.timeout(2400)
ROOT = Path(__file__).parents[2]
LOG = logging.getLogger(__name__)  # pytest -o log_cli=true -o log_cli_level=INFO

# Forks writers from one process, so that a writer need not import torch again.  A kill comes
# before, within or after any of the first few writes; a writer says when one is done, since on a
# busy machine no time is long enough for it.
WRITERS = """
import os, random, signal, sys, time
import torch
from kvcache_rag.stores import DiskStore
from tests.contracts import key_of, make_chunk

torch.set_num_threads(1)
chunks = [make_chunk(seed, tokens=4096) for seed in range(6)]
pairs = [(key_of(chunk), chunk) for chunk in chunks]
chance = random.Random(sys.argv[2])
killed = 0
for number in range(int(sys.argv[3])):
    done, says = os.pipe()
    child = os.fork()
    if child == 0:
        random.Random(number).shuffle(pairs)
        store = DiskStore(sys.argv[1], durable=sys.argv[2] == "durable")
        while True:
            for key, chunk in pairs:
                with store.locked([key]):
                    store.put(key, chunk)
                os.write(says, b".")
    os.close(says)
    for _ in range(chance.randrange(3)):
        os.read(done, 1)
    time.sleep(chance.uniform(0.0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.close(done)
    killed += os.waitpid(child, 0)[1] == signal.SIGKILL
print(killed)
"""
KILLS, KILLS_LONG = 150, 1000  # for each of two ways of writing


@pytest.mark.parametrize("durability", ["durable", "quick"])
def test_killed_writers_leave_whole_chunks_and_temporaries_only(
    tmp_path: Path, durability: str, amount: Amount
) -> None:
    kills = amount(KILLS, KILLS_LONG)
    command = [sys.executable, "-W", "ignore", "-c", WRITERS, str(tmp_path), durability, str(kills)]
    writers = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    store = DiskStore(tmp_path, temp_age=0)
    chunks = [make_chunk(seed, tokens=4096) for seed in range(6)]
    out = empty_chunk(4096)
    hits = 0
    while writers.poll() is None:
        for chunk in chunks:
            try:
                store.get(key_of(chunk), LAYOUT, out)
            except ChunkNotFoundError:
                continue
            assert same(out, chunk)
            hits += 1
    assert writers.stdout is not None
    with writers.stdout as output:
        assert int(output.read()) == kills, "a writer ended by itself"
    assert hits > kills / 10
    assert store.stats().corrupt == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    kinds = (".tmp", ".safetensors", ".lock")
    assert all(any(kind in path.name for kind in kinds) for path in files)
    torsos = len(list(tmp_path.rglob(".tmp*")))
    assert torsos > kills / 50, "too few were killed in the middle of a write"
    store.sweep()
    assert not list(tmp_path.rglob(".tmp*"))
    for chunk in chunks:
        with store.locked([key_of(chunk)]):  # no lock outlives its holder
            assert same(store.get(key_of(chunk), LAYOUT).chunk, chunk)
    LOG.info("%d kills, %d in the middle of a write, %d right reads", kills, torsos, hits)
    tried = f"`kill -9` of a process that writes chunks ({durability})"
    seen = {"in the middle of a write": torsos, "reads meanwhile": hits, "wrong tensors": 0}
    record(f"kills-{durability}", "kills", tried, kills, **seen, chunks_lost=0, locks_left=0)


FILE = 4096 + 49152 + 2048  # bytes of a chunk's, of so many tokens
TOKENS = 512


def contend(
    folder: Path, worker: Callable[..., None], evictor: DiskStore, drop: Callable[[], int]
) -> Counter[str]:
    """Let four processes work beside one that evicts and drops; what they counted together."""
    context = multiprocessing.get_context("spawn")
    report = context.Queue()
    workers = [context.Process(target=worker, args=(folder, seed, report)) for seed in range(4)]
    for one in workers:
        one.start()
    evicted = 0
    while any(one.is_alive() for one in workers) and report.qsize() < 4:
        evicted += evictor.sweep() + drop()
        time.sleep(0.002)
    total = sum((report.get(timeout=60) for _ in workers), Counter())
    for one in workers:
        one.join(60)
    assert all(total[name] == 0 for name in ("wrong", "twice", "corrupt", "failed")), total
    LOG.info("%s, %d evicted", total, evicted)
    return Counter({**total, "evicted": evicted})


class Reader:
    """Gets chunks of a store, and counts what came of it."""

    def __init__(self, store: DiskStore, chunks: int) -> None:
        self._store, self._out = store, empty_chunk(TOKENS)
        self.chunks = [make_chunk(number, tokens=TOKENS) for number in range(chunks)]
        self.counts: Counter[str] = Counter()

    def finds(self, chunk: ChunkKV) -> bool:
        try:
            self._store.get(key_of(chunk), LAYOUT, self._out)
        except ChunkNotFoundError:
            self.counts["misses"] += 1
            return False
        self.counts["hits"] += 1
        self.counts["wrong"] += not same(self._out, chunk)
        return True

    def told(self) -> Counter[str]:
        stats = self._store.stats()
        return self.counts + Counter(corrupt=stats.corrupt, failed=stats.put_failures)


def work(root: Path, seed: int, report: Any, seconds: float) -> None:
    """For a while: get chunks, computing what is missing, which nobody else does meanwhile."""
    store = DiskStore(root, durable=False, max_bytes=30 * FILE)
    reader, chance = Reader(store, 60), random.Random(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        chunk = chance.choice(reader.chunks)
        key = key_of(chunk)
        with store.locked([key]):
            if not reader.finds(chunk):
                mark = root / f"computing-{key.digest}"
                reader.counts["twice"] += mark.exists()
                mark.touch()
                reader.counts["computed"] += 1
                time.sleep(0.002)
                mark.unlink()
                store.put(key, chunk)
        if chance.random() < 0.02:
            store.delete(key)
    report.put(reader.told())


def test_many_processes_with_an_evictor_never_see_a_wrong_chunk(
    tmp_path: Path, amount: Amount
) -> None:
    worker = partial(work, seconds=amount(8, 25))
    total = contend(tmp_path, worker, DiskStore(tmp_path, max_bytes=10 * FILE), lambda: 0)
    assert total["hits"] > 30
    assert total["computed"] > 30
    assert total["evicted"] > 10
    tried = "reads and writes of 4 processes beside one that evicts"
    count = total["hits"] + total["computed"]
    seen = {"evictions": total["evicted"], "wrong tensors": total["wrong"]}
    record("processes-evictor", "processes", tried, count, **seen, computed_twice=total["twice"])


STEPS = 2000
KEYS = 12


def mixed(root: Path, seed: int, report: Any) -> None:
    """Many times: get a chunk, or compute it if it is missing."""
    store = DiskStore(root, durable=False)
    reader, chance = Reader(store, KEYS), random.Random(seed)
    for _ in range(STEPS):
        chunk, computes = chance.choice(reader.chunks), chance.random() < 0.5
        with store.locked([key_of(chunk)] if computes else []):
            if not reader.finds(chunk) and computes:
                reader.counts["computed"] += store.put(key_of(chunk), chunk)
    report.put(reader.told())


def test_each_key_is_computed_once_between_two_evictions(tmp_path: Path) -> None:
    evictor, chance = DiskStore(tmp_path, max_bytes=KEYS // 2 * FILE), random.Random(9)
    keys = [key_of(make_chunk(number, tokens=TOKENS)) for number in range(KEYS)]
    total = contend(tmp_path, mixed, evictor, lambda: evictor.delete(chance.choice(keys)))
    assert total["hits"] + total["misses"] == 4 * STEPS
    # A file that was written while another of its key was there would be in no eviction.
    assert total["computed"] == total["evicted"] + len(list(tmp_path.rglob("*.safetensors")))
    assert min(total["evicted"], total["misses"]) > 100
    tried = "reads and writes of 4 processes while chunks are evicted and deleted"
    seen = {"evictions": total["evicted"], "wrong tensors": total["wrong"]}
    again = {"computed again without an eviction": 0}
    record("processes-once", "processes", tried, 4 * STEPS, **seen, **again)
