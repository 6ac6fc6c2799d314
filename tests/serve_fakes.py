"""A backend that does as it is told, a small real one, and a server in a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn

from kvcache_rag import Answer, DiskStore, Engine, MemoryStore, Metrics, TieredStore
from kvcache_rag.verdict import Identity
from kvcache_rag_server.app import build_app
from kvcache_rag_server.backend import (
    BackendRequest,
    Event,
    Finished,
    OwnPolicy,
    Piece,
    Prefilled,
    Started,
)
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

DEADLINE = 60.0
"""Seconds after which something that should happen has not happened."""
MODEL = "tiny"
Script = Callable[[BackendRequest], AsyncGenerator[Event, None]]


def answer(text: str = "yes", **costs: Any) -> Answer:
    """An answer of one token a letter; `costs` are fields of its metrics."""
    metrics = Metrics(**{"policy": "Reuse()", "generated_tokens": len(text), **costs})
    return Answer(text, metrics, tuple(range(len(text))))


async def says_yes(work: BackendRequest) -> AsyncGenerator[Event, None]:
    """A whole answer in two pieces."""
    yield Started(0.25, batch=2, replica="r1")
    if work.streaming:
        yield Piece("y")
        yield Piece("es")
    yield Finished(answer())


async def says_nothing(work: BackendRequest) -> AsyncGenerator[Event, None]:
    """Waits until it is taken back."""
    await asyncio.Event().wait()
    yield Started(0.0)


class Scripted:
    """A backend that follows a script."""

    def __init__(self, script: Script = says_yes) -> None:
        self._script = script
        self.works: list[BackendRequest] = []  # in the order in which they were asked
        self.has_begun = threading.Event()
        self.was_taken_back = threading.Event()  # a script was ended before its end
        self.is_ready = True

    async def answer(self, work: BackendRequest) -> AsyncGenerator[Event, None]:
        self.works.append(work)
        is_over = False
        events = self._script(work)
        self.has_begun.set()
        try:
            async for event in events:
                yield event
            is_over = True
        finally:
            await events.aclose()
            if not is_over:
                self.was_taken_back.set()

    async def count(self, work: BackendRequest) -> int:
        return len(work.question)

    async def explain(self, work: BackendRequest) -> Mapping[str, Any]:
        return {"answered_from": ()}

    async def ready(self) -> bool:
        return self.is_ready

    async def stats(self) -> Mapping[str, Any]:
        return {"replicas": []}

    async def prefill(self, work: BackendRequest) -> Prefilled:
        self.works.append(work)
        return Prefilled(len(work.chunks), sum(map(len, work.chunks)), len(work.chunks))

    async def models(self) -> Mapping[str, int | None]:
        return {MODEL: 512}

    async def identity(self) -> Identity:
        return Identity("tiny", "r", "native", "float32", "p", "t", "s")

    async def own_policy(self) -> OwnPolicy:
        return OwnPolicy("reuse", {"composite": "It costs."})

    async def drain(self) -> None:
        return None

    async def close(self) -> None:
        return None


def settings(**changes: Any) -> ServerSettings:
    """Settings of a server of the packaged reader."""
    limits = changes.pop("limits", None)
    return ServerSettings(**{"model": MODEL, **(dict(limits) if limits else {}), **changes})


def client(app: FastAPI) -> httpx.AsyncClient:
    """A client of an application in this event loop; it gets streams as a whole."""
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=DEADLINE)


def scripted(script: Script = says_yes, **changes: Any) -> tuple[FastAPI, Scripted]:
    """An application over a scripted backend, and that backend."""
    backend = Scripted(script)
    return build_app(backend, settings(**changes)), backend


def chat(question: str = "Where is it?", **fields: Any) -> dict[str, Any]:
    """The body of a chat."""
    return {"model": MODEL, "messages": [{"role": "user", "content": question}], **fields}


def data_of(text: str) -> list[Any]:
    """Events of a stream; `[DONE]` as itself."""
    texts = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in texts]


@contextmanager
def tiny_backend(folder: Any = None, **options: Any) -> Iterator[LocalBackend]:
    """The packaged reader over memory, and over a folder if there is one."""
    memory = MemoryStore()
    store = memory if folder is None else TieredStore(memory, DiskStore(folder))
    engine = Engine.from_pretrained(MODEL, store=store, device="cpu")
    backend = LocalBackend(engine, name=MODEL, **options)
    try:
        yield backend
    finally:
        asyncio.run(backend.close())


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """Serve an application with uvicorn in a thread; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            # Connections wait at the socket until the server takes them.
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(DEADLINE)
            if thread.is_alive():
                raise RuntimeError("the server does not end")
