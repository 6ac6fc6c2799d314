"""What the scheduler's tests share: works, a model that can be held, a server without one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import aclosing
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any

import access

from kvcache_rag import Answer, Engine, MemoryStore, Metrics
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.policies import policy_by_name
from kvcache_rag_server.backend import BackendRequest, Failed, Finished, Piece, Started
from kvcache_rag_server.queue import Explained
from kvcache_rag_server.worker import Served

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag_server.backend import Backend, Event
    from kvcache_rag_server.local import LocalBackend
    from kvcache_rag_server.queue import Job

PATIENCE = 60.0
TEXTS = (
    "Marta Lindqvist keeps the lighthouse of Orrin.",
    "The lighthouse of Orrin was built in 1872.",
    "Tomas Brandt sells maps in the harbour of Vell.",
)
QUESTION = "Who keeps the lighthouse of Orrin?"


@lru_cache(maxsize=1)
def loaded() -> tuple[Any, Any, Any]:
    """Model, tokenizer and template of the packaged reader, loaded once."""
    engine = Engine.from_pretrained("tiny", device="cpu")
    return engine.model, engine.tokenizer, engine.template


def reader(**options: Any) -> Engine:
    """An engine over the packaged reader."""
    model, tokenizer, template = loaded()
    options = {"store": MemoryStore(), **options}
    return Engine(model, tokenizer, template=template, **options)


def make_work(number: int = 0, **fields: Any) -> BackendRequest:
    """A request; its policy may be given by name, as a client gives it."""
    fields = {"question": QUESTION, "chunks": TEXTS, "max_new_tokens": 8, **fields}
    if isinstance(fields.get("policy"), str):
        fields["policy"] = policy_by_name(fields["policy"])
    return BackendRequest(id=f"work-{number}", **fields)


async def events_of(backend: Backend, work: BackendRequest) -> list[Event]:
    async with aclosing(backend.answer(work)) as events:
        return [event async for event in events]


async def answer_of(backend: Backend, work: BackendRequest) -> Answer:
    last = (await events_of(backend, work))[-1]
    assert isinstance(last, Finished), last
    return last.answer


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece))


def failure_of(events: Sequence[Event]) -> Failed:
    (only,) = events
    assert isinstance(only, Failed)
    return only


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait on the event loop until another thread has come so far."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came so far"
        await asyncio.sleep(0.002)


def serve_threads() -> list[str]:
    """Threads of backends; those of waiting calls are shared by the process and stay."""
    names = ("kvcache-rag-serve", "kvcache-rag-prefetch", "kvcache-rag-retrieve")
    return [one.name for one in threading.enumerate() if one.name.startswith(names)]


class Valve:
    """Lets the forward passes of a model through, or holds them."""

    def __init__(self, model: Any, patch: Any, name: str = "forward") -> None:
        self.open, self.held = threading.Event(), threading.Event()
        self.open.set()
        self.passes = 0
        self.budget: int | None = None  # passes after which it closes by itself
        self.fails = False
        forward = getattr(model, name)

        @wraps(forward)  # transformers looks at its signature
        def held(*args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            if self.fails:
                raise RuntimeError("the device at /dev/secret is gone")
            if self.budget is not None:
                self.budget -= 1
                if self.budget < 0:
                    self.budget = None
                    self.close()
            if not self.open.is_set():
                self.held.set()
                assert self.open.wait(PATIENCE)
            return forward(*args, **kwargs)

        patch.setattr(model, name, held)

    def close(self) -> None:
        self.held.clear()
        self.open.clear()


async def held(backend: LocalBackend, patch: Any) -> tuple[Valve, asyncio.Task[list[Event]]]:
    """A backend whose model is held by a first question; open the valve, then await its answer."""
    valve = Valve(access.engines(backend).base.model, patch)
    valve.close()
    front = asyncio.create_task(events_of(backend, make_work(0, chunks=(), is_plain=True)))
    await eventually(valve.held.is_set)
    return valve, front


class Inbox:
    """Events of one request, and when the last one came."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.over = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, (Finished, Failed, Explained)):
            self.over.set()

    def last(self) -> Event:
        assert self.over.wait(PATIENCE)
        return self.events[-1]


class Desk:
    """A server without a model: notes who was answered, and waits when it is told to."""

    def __init__(self) -> None:
        self.answered: list[list[str]] = []
        self.go, self.busy = threading.Semaphore(0), threading.Event()
        self.is_held = False
        self.seconds: Callable[[int], float] = lambda size: 0.001 * size
        self.fails = False

    def warm_up(self) -> bool:
        return True

    def explain(self, job: Job) -> None:
        self.answered.append([f"explain {job.work.id}"])
        job.deliver(Explained({}))

    def one(self, job: Job, begun: Started) -> Served:
        return self._serve([job], [begun])

    def together(self, jobs: Sequence[Job], begun: Sequence[Started]) -> Served:
        return self._serve(jobs, begun)

    def _serve(self, jobs: Sequence[Job], begun: Sequence[Started]) -> Served:
        self.answered.append([job.work.id for job in jobs])
        self.busy.set()
        if self.is_held:
            assert self.go.acquire(timeout=PATIENCE)
        if self.fails:
            raise ValueError("a fault of our own")
        for job, first in zip(jobs, begun, strict=True):
            job.deliver(first)
            job.deliver(Finished(Answer("", Metrics())))
        seconds = self.seconds(len(jobs))
        return Served(len(jobs), seconds, seconds)


class Prefills:
    """Counts how often the ids of every chunk were computed, by whatever engine."""

    def __init__(self, patch: Any) -> None:
        reader()  # its probe is over
        self.counts: Counter[tuple[int, ...]] = Counter()
        self.go, self.busy = threading.Event(), threading.Event()
        self.go.set()
        self.fails = False
        prefill = TransformersModel.prefill

        def counted(model: Any, prefix: Any, chunks: Sequence[Sequence[int]]) -> Any:
            if prefix is not None:
                self.counts.update(map(tuple, chunks))
                self.busy.set()
                assert self.go.wait(PATIENCE)
                if self.fails:
                    raise RuntimeError("no memory left")
            return prefill(model, prefix, chunks)

        patch.setattr(TransformersModel, "prefill", counted)

    @property
    def by_chunk(self) -> list[int]:
        """Of each text, and of all together."""
        engine = reader()
        ids = engine.tokenize(QUESTION, TEXTS).chunks
        return [self.counts[one] for one in (*ids, tuple(id_ for one in ids for id_ in one))]
