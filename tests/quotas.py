"""Processes that fill a folder with a quota, and what it holds at moments when all of them stand.

Whoever adds up sizes while files come and go counts some that were never there together.  So the
sampler, a process of its own, stops every writer before it looks and lets them go on afterwards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_rag.stores.file import ALIGNMENT
from tests import forks
from tests.contracts import make_chunk

if TYPE_CHECKING:
    from pathlib import Path

# Every other `put` is made under `locked`, as an engine does.
_SAMPLER = """
import json, os, random, signal, sys, time
import torch
from kvcache_rag.stores import DiskStore
from tests.contracts import key_of, make_chunk

torch.set_num_threads(1)
ROOT, QUOTA, WRITERS, TOKENS, SECONDS, LIMIT, KILLS = json.loads({arguments!r})

def write(number, pipe):
    store = DiskStore(ROOT, durable=False, **{{LIMIT: QUOTA}})
    # Of three sizes; other ids each time make other chunks of them.
    chunks = [make_chunk(number, tokens=TOKENS // part) for part in (1, 2, 8)]
    end, tried, kept = time.monotonic() + SECONDS, 0, 0
    while time.monotonic() < end:
        chunk = chunks[tried % len(chunks)]
        chunk.tokens[:2] = torch.tensor([number, tried])
        key = key_of(chunk, namespace="a")
        tried += 1
        with store.locked([key] if tried % 2 else []):
            kept += store.put(key, chunk)
    stats = store.stats()
    counts = [tried, kept, getattr(stats, "declined", 0), stats.put_failures]
    os.write(pipe, json.dumps(counts).encode() + b"\\n")
    os._exit(0)

def held(folder):
    return sum(
        held(item.path) if item.is_dir() else item.stat().st_size
        for item in os.scandir(folder)
        if item.name != "used"
    )

def begin(number):
    child = os.fork()
    if child == 0:
        write(number, pipe)
    return child

read, pipe = os.pipe()
running = {{begin(number) for number in range(WRITERS)}}
most, looks, killed = 0, 0, 0
while running:
    for child in sorted(running):
        os.kill(child, signal.SIGSTOP)
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            running.discard(child)
    most, looks = max(most, held(ROOT)), looks + 1
    if running and killed < KILLS:
        child = random.choice(sorted(running))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1
        running = running - {{child}} | {{begin(WRITERS + killed)}}
    for child in running:
        os.kill(child, signal.SIGCONT)
    time.sleep(0.002)
os.close(pipe)
rows = [json.loads(row) for row in open(read)]
print(json.dumps([most, looks, *map(sum, zip(*rows))]))
"""


@dataclass(frozen=True)
class Contention:
    """What writers did to a folder with a quota.

    Attributes:
        most: Bytes of all files in it, at the worst moment that was seen.
        looks: How often it was looked at.
        puts: Chunks that were put.
        kept: Of these, how many were kept.
        declined: Of these, how many were declined.
        failed: Of these, how many could not be written.
    """

    most: int
    looks: int
    puts: int
    kept: int
    declined: int
    failed: int

    def check(self, quota: int, writers: int, tokens: int) -> None:
        """Hold them to the law: the quota, and a chunk for each of several."""
        largest = ALIGNMENT + make_chunk(tokens=tokens).nbytes + 4 * tokens
        assert self.looks > 5
        assert self.most <= quota + largest * (writers if writers > 1 else 0)
        assert self.most >= quota // 2, "too little was written to reach the limit"
        assert (self.kept + self.declined, self.failed) == (self.puts, 0)
        assert self.kept > self.puts // 4


def contend(
    folder: Path,
    *,
    quota: int,
    writers: int,
    tokens: int,
    seconds: float,
    limit: str = "quota",
    kills: int = 0,
) -> Contention:
    """Let processes put chunks into a folder for a time.

    Args:
        folder: It need not exist.
        quota: Bytes that it may hold.
        writers: Number of processes.
        tokens: Length of every chunk.
        seconds: How long they write.
        limit: Which limit of the store it is: "quota" or "max_bytes".
        kills: How many of them are killed at some moment, and replaced by others.
    """
    (folder / "kv").mkdir(parents=True)
    arguments = json.dumps([str(folder / "kv"), quota, writers, tokens, seconds, limit, kills])
    status, printed, errors = forks.run(_SAMPLER.format(arguments=arguments), folder)
    if status:
        raise RuntimeError(errors)
    return Contention(*json.loads(printed))
