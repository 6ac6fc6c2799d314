"""A backend over the engines of this process: one model, one thread that answers."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from cachetools import LRUCache

from kvcache_rag.errors import InvalidInputError, KVCacheRagError
from kvcache_rag.forks import new_lock
from kvcache_rag.generation.stream import cancellable, in_thread
from kvcache_rag.models.adapters import trained_for_blocks
from kvcache_rag.policies import policy_by_name
from kvcache_rag.policies.default import reuse_warning
from kvcache_rag.policies.policy_registry import name_of
from kvcache_rag.stores import DiskStore, MemoryStore
from kvcache_rag.stores.listing import namespaces
from kvcache_rag_server.backend import Failed, Finished, OwnPolicy, Prefilled
from kvcache_rag_server.calls import EngineCall, answered_from, grounded, prompt_tokens, split
from kvcache_rag_server.errors import SHUT_DOWN, ApiError, failure
from kvcache_rag_server.limits import ensure_fits, is_doubtful
from kvcache_rag_server.prefetch import Engines, Prefetcher, ensure_same_keys, twin
from kvcache_rag_server.queue import Explained
from kvcache_rag_server.scheduler import Scheduler
from kvcache_rag_server.traces import attached
from kvcache_rag_server.worker import JobRunner

if TYPE_CHECKING:
    import threading
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.stores import ChunkStore
    from kvcache_rag.verdict import Identity
    from kvcache_rag_server.backend import BackendRequest, Event

MOMENT = 1.0  # seconds

PREFETCH_OFF, PREFETCH_SAME = "off", "same"

# Requests that were counted and not answered yet, whose chunks' keys are remembered.
COUNTED = 1024

# Seconds for which the size of a folder is believed: it is found by looking at every file.
RECOUNT = 60.0

_COUNTS = (
    "misses",
    "puts",
    "evictions",
    "corrupt",
    "untrusted",
    "put_failures",
    "declined",
    "failures",
)


_PREFILLS: Final = 8
"""Requests of `/v1/prefill` that compute at a time; the model is one."""


class LocalBackend:
    """A `Backend` that answers requests with one model, one after the other or in batches.

    Tenants share the model and its stores but only see their own chunks.  Close it, or its threads
    live as long as the process.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str = "",
        prefetch: Engine | str = PREFETCH_OFF,
        prefetch_after: float = 0.05,
        max_batch: int = 8,
        max_waiting: int = 256,
    ) -> None:
        """Serve `engine`; nothing is started yet.

        Args:
            engine: Answers for its own namespace, and is what those of others are made from.
            name: Under which clients ask for the model; "" for the model's own.
            prefetch: Where chunks of waiting requests are computed: "off", "same" (the model that
                answers, between answers), a device for a second model ("cpu", "cuda:1"), or an
                engine over the same store.
            prefetch_after: Seconds that a request waits before that begins.
            max_batch: Most requests that are answered together.
            max_waiting: Requests that may wait; one more is refused.

        Raises:
            InvalidInputError: If the model cannot be put on that device, or the engine for
                prefetching computes other keys.
        """
        self._engines = Engines(engine)
        self._name = name or str(getattr(engine.model.config, "_name_or_path", "")) or "model"
        self._prefetcher = Prefetcher(_second(engine, prefetch))
        self._tiers = TierCounters([engine.store, engine.combinations])
        # Of requests that were counted; used in the event loop alone.
        self._keys: LRUCache[str, tuple[ChunkKey, ...]] = LRUCache(COUNTED)
        # Each holds a thread while it computes, of those that count, too.
        self._prefilling = asyncio.Semaphore(_PREFILLS)
        self._scheduler = Scheduler(
            JobRunner(self._engines),
            prefetcher=None if prefetch == PREFETCH_OFF else self._prefetcher,
            prefetch_after=prefetch_after,
            max_batch=max_batch,
            max_waiting=max_waiting,
        )

    async def answer(self, work: BackendRequest) -> AsyncGenerator[Event, None]:
        """Answer a request, event by event; see `Backend.answer`."""
        try:
            await self._ensure_fits(work)
        except Exception as error:
            yield failure(error, f"request {work.id}")
            return
        async with aclosing(self._events(work)) as events:
            async for event in events:
                yield event

    async def _events(
        self, work: BackendRequest, *, explains: bool = False
    ) -> AsyncGenerator[Any, None]:
        """What comes of a request; left before its end, it is taken back."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Any] = asyncio.Queue()

        def deliver(event: Event | Explained) -> None:
            with suppress(RuntimeError):  # the loop is closed, and its request with it
                loop.call_soon_threadsafe(events.put_nowait, event)

        keys, is_over = self._keys.pop(work.id, ()), False
        job = self._scheduler.submit(work, deliver, () if explains else keys, explains=explains)
        try:
            while not is_over:
                event = await events.get()
                is_over = isinstance(event, Finished | Failed | Explained)
                yield event
        finally:
            if job is not None and not is_over:
                self._scheduler.cancel(job)

    async def count(self, work: BackendRequest) -> int:
        """Tokens of the request's prompt; see `Backend.count`."""
        await self._ensure_fits(work)
        tokens, keys = await in_thread(self._count, work)
        if keys:
            self._keys[work.id] = keys
        return tokens

    async def _ensure_fits(self, work: BackendRequest) -> None:
        """Refuse, without holding anybody up, what is much too long."""
        engine = self._engines.base
        if is_doubtful(engine, work):
            await in_thread(_ensure_fits, engine, work)

    def _count(self, work: BackendRequest) -> tuple[int, tuple[ChunkKey, ...]]:
        """Tokens of a prompt, and the keys of its chunks, so that they are tokenised once.

        Chunks that the policy leaves out have no part in it.
        """
        engine = self._engines.for_namespace(work.namespace)
        if work.is_plain or work.is_chat:
            return len(engine.tokenize_text(EngineCall.of(engine, work).prompt)), ()
        chunks = answered_from(engine, work)
        try:
            keys = tuple(engine.keys(chunks))
        except KVCacheRagError:  # a chunk has no key: how long it is can be told all the same
            question, history = split(grounded(engine, work)[0])
            return len(engine.tokenize(question, chunks, history).all), ()
        tokens = prompt_tokens(engine, work, sum(key.tokens for key in keys))
        return tokens, keys if chunks == work.chunks else ()

    async def prefill(self, work: BackendRequest) -> Prefilled:
        """Compute and store chunks, between answers; see `Backend.prefill`.

        Raises:
            ApiError: If the server shuts down.
        """
        async with self._prefilling:
            if self._scheduler.is_closed:
                raise ApiError(SHUT_DOWN)
            engine = self._engines.for_namespace(work.namespace)
            with attached(work.trace):
                return await cancellable(_prefilled, engine, work.chunks)

    async def explain(self, work: BackendRequest) -> Mapping[str, Any]:
        """The prompt's spans and tokens; see `Backend.explain`.

        It waits for its turn as an answer does.  Cancelling it takes the request back, unless its
        turn has come.

        Raises:
            ApiError: If too many requests wait, or the server shuts down.
        """
        await self._ensure_fits(work)
        async with aclosing(self._events(work, explains=True)) as events:
            event = await anext(events)
        if isinstance(event, Failed):
            raise ApiError(event)
        try:
            if event.error is not None:
                raise event.error
            explanation: Mapping[str, Any] = event.explanation
            return explanation
        finally:
            del event  # or it and its error would hold each other

    async def ready(self) -> bool:
        """Whether the model has answered with a token; the first one is waited for a moment."""
        self._scheduler.start()
        warmed = asyncio.wrap_future(self._scheduler.warmed)
        await asyncio.wait([warmed], timeout=MOMENT)
        is_warm = warmed.done() and warmed.result()
        return is_warm and self._scheduler.is_alive and not self._scheduler.is_closed

    async def stats(self) -> Mapping[str, Any]:
        """Counters of this process; see `Backend.stats`."""
        tiers = await in_thread(self._tiers.read)
        return {
            "replicas": [
                {
                    "replica": "",
                    **self._scheduler.stats(),
                    "prefetch": self._prefetcher.stats(),
                    "tiers": tiers,
                }
            ]
        }

    async def models(self) -> Mapping[str, int | None]:
        return {self._name: self._engines.base.context_window}

    async def identity(self) -> Identity:
        return await in_thread(getattr, self._engines.base, "identity")

    async def own_policy(self) -> OwnPolicy:
        engine, name = self._engines.base, ""
        with suppress(InvalidInputError):  # made in a program, with settings that no name says
            name = name_of(engine.policy)
        trained = trained_for_blocks(engine.model)
        warnings = {
            each: reuse_warning(policy_by_name(each), trained=trained)
            for each in ("reuse", "composite")
        }
        return OwnPolicy(name, {each: said for each, said in warnings.items() if said})

    async def drain(self) -> None:
        self._scheduler.drain()

    async def close(self) -> None:
        await in_thread(self._close)

    def _close(self) -> None:
        self._scheduler.close()
        self._prefetcher.close()


def _ensure_fits(engine: Engine, work: BackendRequest) -> None:
    """`ensure_fits` of what would be answered."""
    if work.chunks:
        work = replace(work, chunks=answered_from(engine, work))
    ensure_fits(engine, work)


def _prefilled(
    engine: Engine, texts: Sequence[str], cancelled: threading.Event | None = None
) -> Prefilled:
    keys = dict.fromkeys(engine.keys(texts))
    missing = [key for key in keys if not engine.store.contains(key)]
    engine.add(texts, cancelled=cancelled)
    return Prefilled(len(keys), sum(key.tokens for key in keys), len(missing))


def _second(engine: Engine, prefetch: Engine | str) -> Engine:
    """The engine that computes ahead."""
    if isinstance(prefetch, str):
        is_same = prefetch in (PREFETCH_OFF, PREFETCH_SAME)
        return engine if is_same else twin(engine, prefetch)
    ensure_same_keys(engine, prefetch)
    return prefetch


class TierCounters:
    """What the stores of an engine hold and did, per tier.  Safe to use from any thread."""

    def __init__(self, stores: Sequence[ChunkStore]) -> None:
        """Look at `stores`; a store that is given twice counts once."""
        self._tiers = list(
            dict.fromkeys(tier for store in stores for tier in getattr(store, "tiers", (store,)))
        )
        self._lock = new_lock()
        self._folders: dict[DiskStore, tuple[float, int]] = {}

    def read(self) -> list[dict[str, Any]]:
        """One entry per tier, fastest first; see `Backend.stats`.  It may look at many files."""
        counters: list[dict[str, Any]] = []
        for store in self._tiers:
            stats = store.stats()
            names = [tier["tier"] for tier in counters]
            counters.append(
                {
                    # Metrics are told apart by it: chunks and combinations may both lie on disk.
                    "tier": store.tier if store.tier not in names else f"combinations-{store.tier}",
                    "bytes": self._held(store),
                    "hits": sum(stats.hits.values()),
                    "bytes_read": sum(stats.bytes_read.values()),
                    "bytes_written": sum(stats.bytes_written.values()),
                    "seconds": sum(stats.seconds.values()),
                    **{name: getattr(stats, name) for name in _COUNTS},
                }
            )
        return counters

    def _held(self, store: ChunkStore) -> int | None:
        if isinstance(store, MemoryStore):
            return store.nbytes
        if not isinstance(store, DiskStore):
            return None
        with self._lock:
            counted, nbytes = self._folders.get(store, (0.0, 0))
            now = time.monotonic()
            if store not in self._folders or now - counted > RECOUNT:
                nbytes = _folder_bytes(store)
                self._folders[store] = (now, nbytes)
        return nbytes


def _folder_bytes(store: DiskStore) -> int:
    return sum(
        file.nbytes
        for namespace in namespaces(store.root)
        for spec in namespace.specs()
        for file in spec.chunks()
    )
