"""Very many requests to one server, good, bad and left: it answers right and does not grow."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from serve_fakes import chat, data_of

from kvcache_rag import Engine
from kvcache_rag_lab.reader import examples
from tests.fuzz.targets import TARGETS
from tests.reliability import record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.soak.conftest import Amount, Serve

LOG = logging.getLogger(__name__)  # pytest -o log_cli=true -o log_cli_level=INFO

CLIENTS, CONTEXTS, TOKENS = 8, 24, 2
PATIENCE = 120.0
KINDS = {"whole": 4, "stream": 3, "left": 3, "malformed": 60, "other": 30}  # of 100 requests
# PyTorch keeps up to 1024 pieces of code for shapes that it met, which takes thousands of requests
# to be full; with so few, growth is the server's own.
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
BODIES = tuple(TARGETS["schema"].kept().values())
OTHERS = (("GET", "/v1/models", 200), ("GET", "/health", 200), ("GET", "/none", 404))


@dataclass(frozen=True)
class Asked:
    """A question over documents, and what one engine alone answers."""

    question: str
    documents: tuple[str, ...]
    answer: str

    def body(self, *, stream: bool) -> dict[str, Any]:
        documents = list(self.documents)
        return chat(self.question, documents=documents, max_tokens=TOKENS, stream=stream)


@dataclass(frozen=True)
class Figures:
    """A process at one moment; bytes are those that no file backs."""

    memory: int
    descriptors: int
    threads: int

    @classmethod
    def from_process(cls, pid: int) -> Figures:
        process = psutil.Process(pid)
        status = Path(f"/proc/{pid}/status").read_text("ascii")
        match = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert match
        return cls(int(match[1]) << 10, process.num_fds(), process.num_threads())


def questions() -> list[Asked]:
    alone = Engine.from_pretrained("tiny", device="cpu")
    found = []
    known = (*examples("single"), *examples("same_relation"))
    for example in known[:CONTEXTS]:
        documents = example.documents[:3]
        for one in example.questions[:2]:
            answer = alone.generate(one.text, documents, max_new_tokens=TOKENS)
            found.append(Asked(one.text, documents, answer.text))
    return found


class Client:
    """Asks whatever the dice say, and counts what came of it."""

    def __init__(self, http: httpx.AsyncClient, known: list[Asked], seed: int) -> None:
        self._http, self._known = http, known
        self._chance = random.Random(seed)
        self.seen: Counter[str] = Counter()

    async def ask(self, numbers: Iterator[int]) -> None:
        for _ in numbers:
            kind = self._chance.choices(list(KINDS), list(KINDS.values()))[0]
            await getattr(self, kind)()
            self.seen[kind] += 1

    async def whole(self) -> None:
        asked = self._chance.choice(self._known)
        reply = await self._post(json=asked.body(stream=False))
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == asked.answer

    async def stream(self) -> None:
        asked = self._chance.choice(self._known)
        reply = await self._post(json=asked.body(stream=True))
        *frames, done = data_of(reply.text)
        assert done == "[DONE]", frames
        choices = [choice for frame in frames for choice in frame["choices"]]
        assert "".join(one["delta"].get("content") or "" for one in choices) == asked.answer

    async def left(self) -> None:
        body = self._chance.choice(self._known).body(stream=True)
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200
            if self._chance.random() < 0.5:
                async for _ in reply.aiter_lines():
                    break

    async def malformed(self) -> None:
        content = self._chance.choice(BODIES)
        reply = await self._post(content=content, headers={"content-type": "application/json"})
        assert reply.status_code < 500, (content, reply.text)
        self.seen[str(reply.status_code)] += 1

    async def other(self) -> None:
        method, path, status = self._chance.choice(OTHERS)
        assert (await self._http.request(method, path)).status_code == status

    async def _post(self, **sent: Any) -> httpx.Response:
        return await self._http.post("/v1/chat/completions", **sent)


@pytest.mark.timeout(5400)
async def test_a_server_stays_as_it_is_over_very_many_requests(
    tmp_path: Path, amount: Amount, serve: Serve
) -> None:
    total, warming = amount(1200, 50_000), amount(400, 1000)
    known = questions()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    figures = []
    folder = str(tmp_path)
    pid, url = serve("--kv-dir", folder, "--memory-bytes", "4000000", **ENVIRONMENT)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
        clients = [Client(http, known, seed) for seed in range(CLIENTS)]
        for requests in (warming, *[total // 4] * 4):
            numbers = iter(range(requests))
            await asyncio.gather(*(one.ask(numbers) for one in clients))
            await asyncio.sleep(1.0)  # what was left is ended
            figures.append(Figures.from_process(pid))
            LOG.info("%d requests: %s", requests, figures[-1])
    seen = sum((one.seen for one in clients), Counter())
    LOG.info("%s", dict(seen))
    quarters = figures[1:]
    first, *_, last = quarters
    assert last.memory <= 1.05 * first.memory, figures
    assert last.descriptors <= first.descriptors + 2, figures
    assert last.threads <= first.threads + 1, figures
    asked = sum(seen[kind] for kind in KINDS) - warming
    assert asked == total
    tried = "requests to one server: answers, streams, streams left, malformed bodies, other paths"
    grown = {
        "memory MB": ", ".join(f"{one.memory / 1e6:.0f}" for one in quarters),
        "descriptors": ", ".join(str(one.descriptors) for one in quarters),
        "threads": ", ".join(str(one.threads) for one in quarters),
    }
    record("requests", "requests", tried, asked, wrong_answers=0, answers_5xx=0, **grown)
