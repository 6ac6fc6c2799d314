"""2,000 requests from 32 clients to two replicas, one of which is killed in the middle."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from kvcache_rag import Engine
from kvcache_rag_lab.reader import make_example
from tests.ray_server import RayServer, wait_until
from tests.reliability import record

if importlib.util.find_spec("ray") is None:  # importing it would be too early for a later test
    pytest.skip("the extra ray is not installed", allow_module_level=True)

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG = logging.getLogger(__name__)  # pytest -o log_cli=true -o log_cli_level=INFO

REQUESTS, CLIENTS, CONTEXTS = 2000, 32, 60
WARMING, SEEN = 1600, 200  # requests before the first, about the first of those that will be asked
TOKENS = 16
# Of chunks in each replica; so little that it is full soon.
MEMORY = 8 << 20
# What a request may be repeated when the server says 503, and how long a restart may take.
REPEATS, RESTART = 10, 240.0
LOST = "the replica that was answering has ended; repeat the request"

# Python reads this in every process of the server before anything else.  It notes each chunk that
# is computed for the store: before it is, and once it is stored.  Computing for other ends (a trial
# of the model's speed, a cached chunk that is sooner computed than read) stores nothing.
SITE = """
import importlib.abc, importlib.util, os, sys, threading

LOG = os.environ["COMPUTED"]

def note(word, keys):
    lines = "".join(f"{word} {os.getpid()} {key.digest}\\n" for key in keys)
    file = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, lines.encode())
    os.close(file)

def watch(module):
    inside = threading.local()
    fill, compute = module.Prefiller.fill_batch, module.Prefiller.compute

    def filled(self, batch):
        inside.keys = {tuple(one.ids): one.key for one in batch}
        try:
            done = fill(self, batch)
        finally:
            inside.keys = None
        note("stored", done)
        return done

    def computed(self, ids):
        keys = getattr(inside, "keys", None)
        if keys:
            note("begun", [keys[tuple(one)] for one in ids])
        return compute(self, ids)

    module.Prefiller.fill_batch, module.Prefiller.compute = filled, computed

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "kvcache_rag.prefill":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            watch(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@dataclass(frozen=True)
class Asked:
    """A question over documents, and what one engine alone answers."""

    question: str
    documents: tuple[str, ...]
    answer: str


@dataclass
class Run:
    """What happened."""

    done: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    quarters: list[float] = field(default_factory=list)
    killed: int = 0
    prefetched: int = 0
    whole: float = 0.0
    restarted: float = 0.0


def questions() -> list[Asked]:
    """Two per context; every chunk occurs in one context."""
    alone = Engine.from_pretrained("tiny", device="cpu")
    found = []
    for seed in range(CONTEXTS):
        example = make_example(seed, documents=4, questions=2)
        for one in example.questions:
            answer = alone.generate(one.text, example.documents, max_new_tokens=TOKENS)
            found.append(Asked(one.text, example.documents, answer.text))
    return found


def anonymous(pid: int) -> int:
    """Bytes of a process that no file backs."""
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) * 1024
    raise OSError(f"process {pid} is ending")


def plan(known: list[Asked]) -> list[Asked]:
    """Every question once, in even steps, so that chunks are computed all the time; between them
    those that came before, the popular ones more often, as in Zipf's law."""
    chance = random.Random(7)
    weights = [1 / (rank + 1) for rank in range(len(known))]
    step = REQUESTS // len(known)
    found = []
    for count in range(1, len(known) + 1):
        again = chance.choices(known[:count], weights[:count], k=step - 1)
        found += [known[count - 1], *again]
    return [*found, *chance.choices(known, weights, k=REQUESTS - len(found))]


class Memory(threading.Thread):
    """Samples the memory of the replicas: anonymous pages.

    Pages of files, such as the libraries, are left out: how many of them count for a process
    depends on which others have them too, so a replica would seem to grow when its fellow dies.
    """

    def __init__(self, server: RayServer) -> None:
        super().__init__(daemon=True)
        self._server, self._over = server, threading.Event()
        self.samples: list[tuple[float, dict[int, int]]] = []

    def run(self) -> None:
        while not self._over.wait(1.0):
            found = {}
            for process in self._server.processes():
                with suppress(psutil.Error, OSError):
                    if ":Replica" in process.name() or ":Replica" in " ".join(process.cmdline()):
                        found[process.pid] = anonymous(process.pid)
            self.samples.append((time.monotonic(), found))

    def stop(self) -> None:
        self._over.set()
        self.join()

    def median(self, begin: float, end: float, pids: set[int]) -> float:
        """Bytes of these processes together, in the middle of what was seen in a time."""
        seen = [one for at, one in self.samples if begin <= at <= end and pids <= one.keys()]
        assert len(seen) >= 3, "too few samples: ask more"
        return statistics.median(sum(one[pid] for pid in pids) for one in seen)


async def ask(client: httpx.AsyncClient, asked: Asked, *, stream: bool) -> tuple[str, str, bool]:
    """Text, what the server says of its failure, and whether it had been prefetched."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": asked.question}],
        "documents": list(asked.documents),
        "max_tokens": TOKENS,
        "stream": stream,
    }
    response = await client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        assert response.status_code == 503, response.text
        assert float(response.headers["retry-after"]) > 0
        return "", response.json()["error"]["message"], False
    if not stream:
        found = response.json()
        return found["choices"][0]["message"]["content"], "", found["kvcache"]["prefetched"]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    frames = [json.loads(line) for line in lines if line.startswith("{")]
    if "error" in frames[-1]:
        return "", frames[-1]["error"]["message"], False
    assert lines[-1] == "[DONE]", lines[-1]
    choices = [choice for frame in frames for choice in frame["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, "", frames[-1]["kvcache"]["prefetched"]


class Drive:
    """Asks everything; kills one replica after half of it, and goes on to the end when it is back.

    Attributes:
        run: What happened.
    """

    def __init__(self, server: RayServer, todo: list[Asked]) -> None:
        self.run = Run()
        self._server, self._todo = server, todo
        self._numbers = iter(range(REQUESTS))
        self._whole = asyncio.Event()
        self._killing: asyncio.Task[None] | None = None

    async def all(self) -> Run:
        """All requests, by all clients.

        Before them, others by twice as many clients: a replica that is left alone has twice the
        queue, so batches of more shapes, for each of which PyTorch keeps code and buffers; both
        have seen that before their memory is looked at.
        """
        limits = httpx.Limits(max_connections=2 * CLIENTS)
        url = self._server.url
        async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
            warming = iter(range(WARMING))
            await asyncio.gather(*(self._warm(client, warming) for _ in range(2 * CLIENTS)))
            self.run.quarters.append(time.monotonic())
            await asyncio.gather(*(self._client(client) for _ in range(CLIENTS)))
        self.run.quarters.append(time.monotonic())
        return self.run

    async def _warm(self, client: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        for number in numbers:
            asked = self._todo[number % SEEN]
            _, failure, _ = await ask(client, asked, stream=bool(number % 4 == 1))
            assert not failure

    async def _client(self, client: httpx.AsyncClient) -> None:
        for number in self._numbers:
            if number and number % (REQUESTS // 4) == 0:
                self.run.quarters.append(time.monotonic())
            if number == REQUESTS // 2:
                self._killing = asyncio.create_task(asyncio.to_thread(self._kill))
            if number >= REQUESTS * 3 // 4 and self._killing is not None:
                await self._killing
                self.run.quarters[3] = max(self.run.quarters[3], self.run.whole)
            await self._one(client, number)

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        asked = self._todo[number]
        for _ in range(REPEATS):
            text, failure, prefetched = await ask(client, asked, stream=bool(number % 2))
            if not failure:
                break
            self.run.failures[failure] += 1
            await asyncio.sleep(1.0)
        else:
            raise AssertionError(f"{REPEATS} times: {failure}")
        if text != asked.answer:
            self.run.wrong.append((text, asked.answer))
        self.run.prefetched += prefetched
        self.run.done += 1

    def _kill(self) -> None:
        """Kill a replica and wait for the one that replaces it."""
        run, begun = self.run, time.monotonic()
        run.killed = self._server.replicas()[0]
        os.kill(run.killed, signal.SIGKILL)

        def is_whole() -> bool:
            return len(set(self._server.replicas()) - {run.killed}) == 2

        wait_until(is_whole, RESTART, 0.5)
        run.whole = time.monotonic()
        run.restarted = run.whole - begun


def computed_twice(log: Path, killed: int) -> tuple[int, dict[str, list[str]]]:
    """How many keys were computed, and those that were although they had been before.

    What the killed process was computing, and had not stored, had to be computed again.
    """
    begun: dict[str, list[str]] = defaultdict(list)
    stored: set[tuple[str, str]] = set()
    for line in log.read_text("ascii").splitlines():
        word, pid, digest = line.split()
        if word == "begun":
            begun[digest].append(pid)
        else:
            stored.add((pid, digest))
    for digest, pids in begun.items():
        if str(killed) in pids and (str(killed), digest) not in stored:
            pids.remove(str(killed))
    return len(begun), {digest: pids for digest, pids in begun.items() if len(pids) > 1}


@pytest.mark.timeout(1500)
async def test_every_request_is_answered_while_a_replica_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    log = tmp_path / "computed"
    environment = {"PYTHONPATH": str(tmp_path), "COMPUTED": str(log)}
    todo = plan(questions())
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # A process of its own computes ahead: three processes, one computation per key.
    server = RayServer(
        "tiny", "--replicas", "2", "--store", str(tmp_path / "kv"), "--max-concurrency", "128",
        "--memory-bytes", str(MEMORY), "--prefetch", "cpu", environment=environment,
    )  # fmt: skip
    memory = Memory(server)
    memory.start()
    try:
        before = set(server.replicas())
        run = await Drive(server, todo).all()
        after = set(server.replicas())
        children = server.processes()
        memory.stop()
        assert server.end(signal.SIGTERM) == 0
        wait_until(lambda: not any(one.is_running() for one in children), 20.0)
    finally:
        memory.stop()
        server.kill()
    at = run.quarters
    second = memory.median(at[1], at[2], before)
    last = memory.median(at[3], at[4], after)
    survivor = before & after
    own = [memory.median(at[n], at[n + 1], survivor) for n in (1, 3)]
    for pid in sorted(before | after):
        series = [(at_, one[pid]) for at_, one in memory.samples if pid in one]
        LOG.info("%d: %s MB", pid, [round(size / 1e6) for _, size in series[::10]])
    keys, twice = computed_twice(log, run.killed)
    took = [round(end - begin, 1) for begin, end in pairwise(at)]
    LOG.info("start %.1f s, quarters %s s, restart %.1f s", server.started, took, run.restarted)
    LOG.info("%d answers, %d prefetched, 503: %s", run.done, run.prefetched, dict(run.failures))
    LOG.info("%d keys computed; memory %.1f MB, then %.1f MB", keys, second / 1e6, last / 1e6)
    LOG.info("of the survivor %.1f MB, then %.1f MB", own[0] / 1e6, own[1] / 1e6)
    assert run.done == REQUESTS
    assert run.wrong == []
    assert set(run.failures) <= {LOST}, "only the kill makes requests fail"
    assert keys == 4 * CONTEXTS
    assert twice == {}
    assert run.prefetched > 0
    assert len(survivor) == 1
    # The new process is younger than the one it replaces.  The one that lived on answered for both
    # meanwhile, in batches of shapes that it had not seen: some growth, and then no more.
    assert last <= 1.05 * second
    assert own[1] <= 1.10 * own[0], "the replica that lived on grew"
    record(
        "requests-replicas",
        "requests",
        "requests of 32 clients to 2 replicas, one of which is killed",
        run.done,
        wrong_answers=len(run.wrong),
        repeated_after_a_503=sum(run.failures.values()),
        computed_twice=len(twice),
        seconds_to_a_new_replica=round(run.restarted, 1),
    )
