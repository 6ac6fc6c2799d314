"""A store under killed writers, and under many processes with an evictor among them."""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.stores import DiskStore
from tests.contracts import LAYOUT, empty_chunk, key_of, make_chunk, same

ROOT = Path(__file__).parents[2]

# Forks writers from one process, so that a writer need not import torch again.
WRITERS = """
import os, random, signal, sys, time
import torch
from kvcache_rag.stores import DiskStore
from tests.contracts import key_of, make_chunk

torch.set_num_threads(1)
chunks = [make_chunk(seed, tokens=4096) for seed in range(6)]
keys = [key_of(chunk) for chunk in chunks]
chance = random.Random(0)
end = time.monotonic() + float(sys.argv[3])
killed = 0
while time.monotonic() < end:
    child = os.fork()
    if child == 0:
        store = DiskStore(sys.argv[1], durable=sys.argv[2] == "durable")
        while True:
            for key, chunk in zip(keys, chunks):
                with store.locked([key]):
                    store.put(key, chunk)
                store.claim(key, "writer")
                store.release(key, "writer")
    time.sleep(chance.uniform(0.002, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    killed += 1
print(killed)
"""


@pytest.mark.parametrize("durability", ["durable", "quick"])
def test_killed_writers_leave_whole_chunks_and_temporaries_only(
    tmp_path: Path, durability: str
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WRITERS, str(tmp_path), durability, "20"]
    writers = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    store = DiskStore(tmp_path, temp_age=0, release_grace=3600)
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
        assert int(output.read()) > 50
    assert hits > 50
    assert store.stats().corrupt == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    kinds = (".tmp", ".owner-", ".released-", ".safetensors", ".lock")
    assert all(any(kind in path.name for kind in kinds) for path in files)
    store.sweep()
    assert not list(tmp_path.rglob(".tmp*"))
    for chunk in chunks:
        with store.locked([key_of(chunk)]):  # no lock outlives its holder
            assert same(store.get(key_of(chunk), LAYOUT).chunk, chunk)


def work(root: str, seed: int, seconds: float, report: Any) -> None:
    """Get chunks, computing what is missing; report how often, and what was wrong."""
    store = DiskStore(root, durable=False, max_bytes=30 * (4096 + 49152 + 2048), release_grace=0)
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
        owner = f"owner-{chance.randrange(2)}"
        chance.choice([store.claim, store.release])(key, owner)
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
    evictor = DiskStore(tmp_path, max_bytes=10 * (4096 + 49152 + 2048), release_grace=0)
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
