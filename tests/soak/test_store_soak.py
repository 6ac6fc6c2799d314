"""A store under killed writers, and under many processes with an evictor among them."""

from __future__ import annotations

import logging
import multiprocessing
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.stores import DiskStore
from tests.contracts import LAYOUT, empty_chunk, key_of, make_chunk, same
from tests.reliability import record

if TYPE_CHECKING:
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
KILLS, KILLS_LONG = 600, 1000  # for each of two ways of writing


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
    record(
        f"kills-{durability}",
        "kills",
        f"`kill -9` of a process that writes chunks ({durability})",
        kills,
        in_the_middle_of_a_write=torsos,
        reads_meanwhile=hits,
        wrong_tensors=0,
        chunks_lost=0,
        locks_left=0,
    )


def work(root: str, seed: int, seconds: float, report: Any) -> None:
    """Get chunks, computing what is missing; report how often, and what was wrong."""
    store = DiskStore(root, durable=False, max_bytes=30 * (4096 + 49152 + 2048))
    chunks = [make_chunk(number, tokens=512) for number in range(60)]
    chance = random.Random(seed)
    counts = {"hits": 0, "computed": 0, "wrong": 0, "twice": 0}
    end = time.monotonic() + seconds
    out = empty_chunk(512)
    while time.monotonic() < end:
        chunk = chance.choice(chunks)
        key = key_of(chunk)
        with store.locked([key]):
            try:
                store.get(key, LAYOUT, out)
                counts["hits"] += 1
                counts["wrong"] += not same(out, chunk)
            except ChunkNotFoundError:
                mark = Path(root, f"computing-{key.digest}")
                counts["twice"] += mark.exists()
                mark.touch()
                counts["computed"] += 1
                time.sleep(0.002)
                mark.unlink()
                store.put(key, chunk)
        if chance.random() < 0.02:
            store.delete(key)
    report.put({**counts, "corrupt": store.stats().corrupt, "failed": store.stats().put_failures})


def test_many_processes_with_an_evictor_never_see_a_wrong_chunk(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    report = context.Queue()
    root = str(tmp_path)
    workers = [context.Process(target=work, args=(root, seed, 25.0, report)) for seed in range(4)]
    for worker in workers:
        worker.start()
    evictor = DiskStore(tmp_path, max_bytes=10 * (4096 + 49152 + 2048))
    evicted = 0
    while any(worker.is_alive() for worker in workers) and report.qsize() < 4:
        evicted += evictor.sweep()
        time.sleep(0.05)
    reports = [report.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    total = {name: sum(counts[name] for counts in reports) for name in reports[0]}
    assert total["hits"] > 200
    assert total["computed"] > 200
    assert evicted > 50
    assert {name: total[name] for name in ("wrong", "twice", "corrupt", "failed")} == {
        "wrong": 0,
        "twice": 0,
        "corrupt": 0,
        "failed": 0,
    }
    record(
        "processes-evictor",
        "processes",
        "reads and writes of 4 processes beside one that evicts",
        total["hits"] + total["computed"],
        evictions=evicted,
        wrong_tensors=total["wrong"],
        computed_twice=total["twice"],
    )


STEPS = 2000
KEYS = 12
FILE = 4096 + 49152 + 2048


def mixed(root: str, seed: int, report: Any) -> None:
    """Read, or compute what is missing; report how often, and what was wrong."""
    store = DiskStore(root, durable=False)
    chunks = [make_chunk(number, tokens=512) for number in range(KEYS)]
    chance = random.Random(seed)
    counts = {"hits": 0, "misses": 0, "computed": 0, "torn": 0}
    out = empty_chunk(512)
    for _ in range(STEPS):
        chunk = chance.choice(chunks)
        key = key_of(chunk)
        computes = chance.random() < 0.5
        with store.locked([key] if computes else []):
            try:
                store.get(key, LAYOUT, out)
                counts["hits"] += 1
                counts["torn"] += not same(out, chunk)
            except ChunkNotFoundError:
                counts["misses"] += 1
                if computes:
                    counts["computed"] += store.put(key, chunk)
    stats = store.stats()
    report.put({**counts, "corrupt": stats.corrupt, "failed": stats.put_failures})


def test_each_key_is_computed_once_between_two_evictions(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    report = context.Queue()
    workers = [context.Process(target=mixed, args=(str(tmp_path), n, report)) for n in range(4)]
    for worker in workers:
        worker.start()
    evictor = DiskStore(tmp_path, max_bytes=KEYS // 2 * FILE)
    keys = [key_of(make_chunk(number, tokens=512)) for number in range(KEYS)]
    chance = random.Random(9)
    evicted = 0
    while any(worker.is_alive() for worker in workers) and report.qsize() < 4:
        evicted += evictor.sweep() + evictor.delete(chance.choice(keys))
        time.sleep(0.002)
    reports = [report.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    total = {name: sum(counts[name] for counts in reports) for name in reports[0]}
    assert {name: total[name] for name in ("torn", "corrupt", "failed")} == {
        "torn": 0,
        "corrupt": 0,
        "failed": 0,
    }
    assert total["hits"] + total["misses"] == 4 * STEPS
    # A file that was written while another of its key was there would be in no eviction.
    assert total["computed"] == evicted + len(list(tmp_path.rglob("*.safetensors")))
    assert min(evicted, total["misses"]) > 100
    LOG.info("%s, %d evicted", total, evicted)
    record(
        "processes-once",
        "processes",
        "reads and writes of 4 processes while chunks are evicted and deleted",
        4 * STEPS,
        evictions=evicted,
        wrong_tensors=total["torn"],
        computed_again_without_an_eviction=0,
    )
