"""From settings to a running server: model, store, backend, application."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.models.pretrained import note_name
from kvcache_rag.policies import policy_by_name
from kvcache_rag.stores import MemoryStore
from kvcache_rag.stores.filesystem import why_unwritable
from kvcache_rag_server.app import build_app
from kvcache_rag_server.connections import SETTINGS, AcceptErrors, patient
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.settings import VLLM
from kvcache_rag_server.shutdown import leave
from kvcache_rag_server.status import is_ready

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from types import FrameType

    import uvicorn
    from fastapi import FastAPI

    from kvcache_rag.engine import Engine
    from kvcache_rag.stores import ChunkStore
    from kvcache_rag_server.backend import Backend
    from kvcache_rag_server.lifecycle import AppContext
    from kvcache_rag_server.settings import ServerSettings


_LOG: Final = logging.getLogger("kvcache_rag_server")

# Seconds for which a connection may ask nothing.  Longer than clients keep one that they might use
# again (httpx, and with it the OpenAI client: 5 s): who closes first must be the one who asks, or a
# request meets a connection that is being closed.
_PATIENCE: Final = 15

COMBINATIONS: Final = "combinations"
"""Folder below the store, and name in metrics, of chunks that were computed together."""

_PART: Final = 4  # of each limit, a fourth is theirs

_SWITCH: Final = 0.0005  # seconds; Python's own: 0.005

_LOOK: Final = 0.05  # seconds between two questions whether the model is ready


def run(
    settings: ServerSettings, listener: socket.socket, announce: Callable[[str, str], None]
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings: What to serve.
        listener: Where: the address that the settings name.
        announce: Called once a question would be answered, with one line that says what is served
            where, and the URL of the page to look at.

    Raises:
        InvalidInputError: If the model, the store or the keys cannot be used.
    """
    backend = open_backend(settings)
    _check_store(settings)
    app = build_app(backend, settings)
    url = _url(listener)
    line = announcement(settings, url)
    with frozen(), _yielding():
        asyncio.run(_serve(app, listener, lambda: announce(line, f"{url}/")))
    if not app.state.context.shutdown.is_complete:
        leave()


def _check_store(settings: ServerSettings) -> None:
    """Say if nothing can be added to the folder of this process's engine."""
    if settings.kv_dir is None or settings.is_remote:
        return
    if why := why_unwritable(settings.kv_dir):
        _LOG.warning(
            "the store %s cannot be written (%s): what it holds is read, and what is computed is "
            "kept in memory alone",
            *(settings.kv_dir, why),
        )


@contextmanager
def frozen() -> Iterator[None]:
    """Leave out what is loaded wherever garbage is looked for: a model is a million objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _yielding() -> Iterator[None]:
    """Let threads that are busy give the interpreter away soon.

    Each operation of the model gives it away, and waits so long to have it back.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def open_backend(settings: ServerSettings) -> Backend:
    """The backend that the settings describe; who runs the server closes it in its event loop."""
    if settings.backend == VLLM:
        from vllm_kvcache_rag.front.launch import vllm_backend

        return vllm_backend(settings)
    return local_backend(settings)


def local_backend(settings: ServerSettings) -> LocalBackend:
    """An engine in this process, and what lets requests wait for it.

    Args:
        settings: Those about model, store, prefetching and waiting are read.
    """
    return LocalBackend(
        open_engine(settings),
        name=settings.name,
        prefetch=settings.prefetch,
        prefetch_after=settings.prefetch_after,
        max_batch=settings.max_batch,
        max_waiting=settings.max_waiting,
    )


def open_engine(settings: ServerSettings) -> Engine:
    """Load the model, over the store.

    Raises:
        InvalidInputError: If one of them cannot be used.
    """
    policy = policy_by_name(settings.policy) if settings.policy else None
    engine = settings.open_engine(open_store(settings), open_combinations(settings), policy=policy)
    note_name(engine.model, settings.name)
    return engine


def open_store(settings: ServerSettings) -> ChunkStore:
    """Memory in front of a folder or a URL; without either, memory alone.

    The limits hold for chunks and combinations together, so these get a part only.
    """
    return _store(settings, lambda limit: limit - _part(limit))


def open_combinations(settings: ServerSettings) -> ChunkStore:
    """Where chunks go that were computed together: below the store, for all who share that.

    A folder of their own, so that they never push out chunks; no command or sweep of the store
    around it takes it for a part of that.
    """
    if settings.kv_dir is None:
        return _store(settings, _part, tier=COMBINATIONS)
    kind, place = "remote" if settings.is_remote else "disk", settings.kv_dir.rstrip("/")
    below = settings.model_copy(update={"kv_dir": f"{place}/{COMBINATIONS}"})
    return _store(below, _part, tier=COMBINATIONS, behind=f"{COMBINATIONS}-{kind}")


def _store(
    settings: ServerSettings, share: Callable[[int], int], *, tier: str = "", behind: str = ""
) -> ChunkStore:
    """A store that gets a share of each limit; its tiers are named, if need be.

    Without a place the chunks in memory are as the model made them.
    """
    codec = settings.memory_codec() if settings.kv_dir else None
    named: dict[str, Any] = {"tier": tier} if tier else {}
    memory = MemoryStore(share(settings.memory_bytes), ttl=settings.kv_ttl, codec=codec, **named)
    limit = settings.kv_max_bytes
    part = settings.model_copy(update={"kv_max_bytes": None if limit is None else share(limit)})
    return part.open_store(memory, **({"tier": behind} if behind else {}))


def _part(limit: int) -> int:
    """Bytes of a limit that are for combinations."""
    return limit // _PART


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announcement(settings: ServerSettings, url: str) -> str:
    """One line: where the server is, and what it serves."""
    parts = [
        f"{settings.name} at {url}/v1",
        f"chunks in {settings.kv_dir}" if settings.kv_dir else "chunks in memory only",
    ]
    if settings.backend == VLLM:
        parts[1:] = [f"computed by vLLM at {', '.join(settings.base_url)}"]
    parts.append("API keys" if settings.api_keys else "no API keys")
    return f"serving {', '.join(parts)}"


# ---------------------------------------------------------------------- the loop
async def _serve(app: FastAPI, listener: socket.socket, announce: Callable[[], None]) -> None:
    context: AppContext = app.state.context
    asyncio.get_running_loop().set_exception_handler(AcceptErrors())
    waiting = asyncio.create_task(_announce(context, announce))
    try:
        with _reloading(context):
            await server_of(app).serve([listener])
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        if context.shutdown.is_complete:
            await context.backend.close()


def server_of(app: FastAPI) -> uvicorn.Server:
    """What serves an app, and ends as its `Shutdown` says; the backend has ended with it."""
    import uvicorn

    context: AppContext = app.state.context

    class Server(uvicorn.Server):
        """Ends by a signal as by anything else: uvicorn would raise it again before we clean up."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            wanted = (signal.SIGINT, signal.SIGTERM)
            before = {number: signal.signal(number, self.handle_exit) for number in wanted}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.should_exit = True
            context.shutdown.signal()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for closing in (*self.servers, *(sockets or ())):
                closing.close()
            state = self.server_state
            for connection in list(state.connections):
                connection.shutdown()  # at once, or behind the answer that it waits for
            await context.shutdown.run(state, context.backend, context.exchanges)

    return Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            http=patient(_PATIENCE),
            timeout_keep_alive=2 * _PATIENCE,
            backlog=1,  # accepted at once; see `_Listener`
            **SETTINGS,
        )
    )


@contextmanager
def _reloading(context: AppContext) -> Iterator[None]:
    """Let SIGHUP read the file of keys again, where there are both."""
    keys, is_main = context.keys, threading.current_thread() is threading.main_thread()
    if keys is None or not is_main or not hasattr(signal, "SIGHUP"):
        yield
        return
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def reload() -> None:
        tasks.add(task := asyncio.create_task(keys.reload()))
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def _announce(context: AppContext, announce: Callable[[], None]) -> None:
    while not await is_ready(context):
        await asyncio.sleep(_LOOK)
    announce()
