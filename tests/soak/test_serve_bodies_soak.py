"""Bodies that are made to hold a server up, sixteen at a time, while others ask."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import httpx
import pytest
from pace import seconds_to_make
from serve_fakes import chat

from kvcache_rag_server.auth import new_key
from tests.reliability import record

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Event
    from pathlib import Path

    from tests.soak.conftest import Amount, Serve

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


class Asker(threading.Thread):
    """Asks one thing after the other, and notes how long each took."""

    def __init__(
        self, url: str, until: threading.Event, ask: Callable[[httpx.Client], None]
    ) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._url, self._until, self._ask = url, until, ask

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE) as http:
            while not self._until.is_set():
                started = time.perf_counter()
                self._ask(http)
                self.seconds.append(time.perf_counter() - started)
                time.sleep(0.02)

    @property
    def slow(self) -> float:
        """The 95th percentile."""
        return sorted(self.seconds)[int(0.95 * len(self.seconds))]


def is_alive(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200


def first_token(http: httpx.Client, key: str) -> None:
    """Ask a question over documents, and wait for the first text of the answer."""
    texts = ["The Mobrit costs 412 euros.", "The Fandel costs 77 euros."]
    body = chat("How much does the Mobrit cost?", documents=texts, max_tokens=4, stream=True)
    path, headers = "/v1/chat/completions", {"authorization": key}
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


def asked(url: str, key: str, seconds: float) -> list[Asker]:
    """What others see of the server for a while."""
    until = threading.Event()
    askers = [Asker(url, until, one) for one in (is_alive, partial(first_token, key=key))]
    for one in askers:
        one.start()
    time.sleep(seconds)
    until.set()
    for one in askers:
        one.join(PATIENCE)
        assert len(one.seconds) >= 5
    return askers


@pytest.mark.timeout(600)
def test_bodies_of_one_tenant_hold_nobody_up(tmp_path: Path, amount: Amount, serve: Serve) -> None:
    seconds, file = amount(10, 60), tmp_path / "keys"
    hostile, other = (f"Bearer {new_key(file, name)}" for name in ("hostile", "other"))
    _, url = serve("--api-keys", str(file), "--kv-dir", str(tmp_path / "kv"))
    asked(url, other, 2.0)  # what is computed once is computed
    quiet = asked(url, other, seconds)
    spawn = multiprocessing.get_context("spawn")
    begun, until, answers = spawn.Event(), spawn.Event(), spawn.Queue()
    process = spawn.Process(target=attack, args=(url, hostile, begun, until, answers))
    process.start()
    try:
        assert begun.wait(PATIENCE)
        busy = asked(url, other, seconds)
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
    tried = "hostile bodies of 7 to 8 MB, sixteen at a time, while another tenant asks"
    seen: dict[str, int | str] = {"refused by 4xx": told[400], "refused by 503": told[503]}
    for name, figures in p95.items():
        seen[f"p95 of {name} quiet and busy"] = ", ".join(f"{one} s" for one in figures)
    record("bodies", "requests", tried, told.total(), **seen)
