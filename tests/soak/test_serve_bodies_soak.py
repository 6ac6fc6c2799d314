"""Bodies that are made to hold a server up, sixteen at a time, while others ask."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
from pace import seconds_to_make

from kvcache_rag_server.auth import new_key
from tests.reliability import record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Event
    from pathlib import Path

    from tests.soak.conftest import Amount

LOG = logging.getLogger(__name__)  # pytest -o log_cli=true -o log_cli_level=INFO

AT_ONCE = 16
VALUES = 2_000_000  # nobody waits longer by more than the machine takes to make so many lists
PATIENCE = 120.0
REST = 1.0  # seconds between an answer and the next body

SPACES = ",".join(f'"x{" " * 1_000_000}y{at}"' for at in range(7)).encode()
CHAT = b'{"model": "tiny", "messages": [{"role": "user", "content": "Where?"}], '
HOSTILE = (
    b'{"x":[' + b"[]," * 2_700_000 + b"[]]}",
    b'{"x":[' + b"{}," * 2_700_000 + b"{}]}",
    CHAT + b'"documents": [' + SPACES + b"]}",
    CHAT + b'"metadata": {"a": "' + b"\\n" * 4_000_000 + b'"}, "none": 1}',
)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A server in a process of its own: its URL, and a key for each tenant."""
    file = folder / "keys"
    keys = {name: new_key(file, name) for name in ("hostile", "other")}
    words = [
        "serve",
        "tiny",
        "--port",
        "0",
        "--api-keys",
        str(file),
        "--kv-dir",
        str(folder / "kv"),
    ]
    command = [sys.executable, "-m", "kvcache_rag.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            match = re.search(r" at (http://[^ ]+)/v1,", process.stdout.readline())
            assert match
            yield match[1], {name: f"Bearer {key}" for name, key in keys.items()}
        finally:
            process.kill()


class Asker(threading.Thread):
    """Asks one thing after the other, and notes how long each took.

    Attributes:
        seconds: Of each.
    """

    def __init__(self, url: str, key: str, until: threading.Event) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._url, self._key, self._until = url, key, until

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE) as http:
            while not self._until.is_set():
                started = time.perf_counter()
                self.ask(http)
                self.seconds.append(time.perf_counter() - started)
                time.sleep(0.02)

    def ask(self, http: httpx.Client) -> None:
        raise NotImplementedError

    @property
    def slow(self) -> float:
        """The 95th percentile."""
        return sorted(self.seconds)[int(0.95 * len(self.seconds))]


class Health(Asker):
    """Asks whether the process is alive."""

    def ask(self, http: httpx.Client) -> None:
        assert http.get("/health").status_code == 200


class FirstToken(Asker):
    """Asks a question over a document, and waits for the first text of the answer."""

    def ask(self, http: httpx.Client) -> None:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "How much does the Mobrit cost?"}],
            "documents": ["The Mobrit costs 412 euros.", "The Fandel costs 77 euros."],
            "max_tokens": 4,
            "stream": True,
        }
        path, headers = "/v1/chat/completions", {"authorization": self._key}
        with http.stream("POST", path, json=body, headers=headers) as reply:
            assert reply.status_code == 200
            assert any('"content":"4' in line for line in reply.iter_lines())


def attack(url: str, key: str, begun: Event, until: Event, told: Queue[Counter[int]]) -> None:
    """Send sixteen bodies at a time, and count what is told; in a process of its own, which does
    not hold up the threads that measure.

    Sixteen that never rest would measure how fast this machine copies bytes.
    """
    seen: Counter[int] = Counter()
    headers = {"authorization": key, "content-type": "application/json"}

    def send(body: bytes) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE) as http:
            while not until.is_set():
                reply = http.post("/v1/chat/completions", content=body, headers=headers)
                seen[reply.status_code] += 1
                until.wait(REST)

    bodies = [HOSTILE[at % len(HOSTILE)] for at in range(AT_ONCE)]
    begun.set()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(send, bodies))
    told.put(seen)


def asked(url: str, key: str, seconds: float) -> tuple[Health, FirstToken]:
    """What others see of the server for a while."""
    until = threading.Event()
    askers = Health(url, key, until), FirstToken(url, key, until)
    for one in askers:
        one.start()
    time.sleep(seconds)
    until.set()
    for one in askers:
        one.join(PATIENCE)
        assert len(one.seconds) >= 5
    return askers


@pytest.mark.timeout(600)
def test_bodies_of_one_tenant_hold_nobody_up(tmp_path: Path, amount: Amount) -> None:
    seconds = amount(10, 60)
    with serving(tmp_path) as (url, keys):
        asked(url, keys["other"], 2.0)  # what is computed once is computed
        quiet = asked(url, keys["other"], seconds)
        spawn = multiprocessing.get_context("spawn")
        begun, until, answers = spawn.Event(), spawn.Event(), spawn.Queue()
        process = spawn.Process(target=attack, args=(url, keys["hostile"], begun, until, answers))
        process.start()
        try:
            assert begun.wait(PATIENCE)
            busy = asked(url, keys["other"], seconds)
        finally:
            until.set()
        told: Counter[int] = answers.get(timeout=PATIENCE)
        process.join(PATIENCE)
    p95 = {
        name: (round(before.slow, 3), round(after.slow, 3))
        for name, before, after in zip(("health", "first token"), quiet, busy, strict=True)
    }
    LOG.info("%s; %s, quiet and busy; %d processors", dict(told), p95, os.cpu_count())
    assert told.total() >= AT_ONCE
    assert set(told) <= {400, 503}, told
    most = seconds_to_make(VALUES)
    for name, (before, after) in p95.items():
        assert after <= before + most, (name, p95, most)
    record(
        "bodies",
        "requests",
        "hostile bodies of 7 to 8 MB, sixteen at a time, while another tenant asks",
        told.total(),
        refused_by_4xx=told[400],
        refused_by_503=told[503],
        p95_of_health_quiet_and_busy=", ".join(f"{one} s" for one in p95["health"]),
        p95_of_first_token_quiet_and_busy=", ".join(f"{one} s" for one in p95["first token"]),
    )
