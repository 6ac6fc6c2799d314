"""A backend over engines of this process."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvcache_rag.serve.asking import grounded, plain_prompt
from kvcache_rag.serve.engines import Engines, ensure_same_keys, twin
from kvcache_rag.serve.prefetcher import Prefetcher
from kvcache_rag.serve.scheduler import Scheduler
from kvcache_rag.serve.serving import Server, policy_of
from kvcache_rag.serve.tiers import TierCounters
from kvcache_rag.serve.work import Failed, Finished
from kvcache_rag.streaming import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from kvcache_rag.engine import Engine
    from kvcache_rag.serve.work import Event, Retriever, Work

MOMENT = 1.0  # seconds
PREFETCH_OFF, PREFETCH_SAME = "off", "same"


class LocalBackend:
    """Answers requests with one model, one after the other or in batches; a `Backend`.

    Tenants share the model and its stores and see their own chunks only.  Close it, or its threads
    live as long as the process.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str = "",
        retriever: Retriever | None = None,
        prefetch: Engine | str = PREFETCH_OFF,
        prefetch_after: float = 0.05,
        max_batch: int = 8,
        max_waiting: int = 256,
        replica: str = "",
    ) -> None:
        """Serve `engine`; nothing is started yet.

        Args:
            engine: Answers for its own namespace, and is what those of others are made from.
            name: Under which clients ask for the model; "" for the model's own.
            retriever: Finds chunks for requests with a query; None if none is.
            prefetch: Where chunks of waiting requests are computed: "off", "same" (the model that
                answers, between answers), a device for a second model ("cpu", "cuda:1"), or an
                engine over the same store.
            prefetch_after: Seconds that a request waits before that begins.
            max_batch: Most requests that are answered together.
            max_waiting: Requests that may wait; one more is refused.
            replica: Name of this process.

        Raises:
            InvalidInputError: If the model cannot be put on that device, or the engine for
                prefetching computes other keys.
        """
        self._engines = Engines(engine)
        self._name = name or str(getattr(engine.model.config, "_name_or_path", "")) or "model"
        self._prefetcher = Prefetcher(_second(engine, prefetch))
        self._tiers = TierCounters([engine.store, engine.combinations])
        self._replica = replica
        self._scheduler = Scheduler(
            Server(self._engines, replica),
            prefetcher=None if prefetch == PREFETCH_OFF else self._prefetcher,
            prefetch_after=prefetch_after,
            retriever=retriever,
            max_batch=max_batch,
            max_waiting=max_waiting,
        )

    async def answer(self, work: Work) -> AsyncGenerator[Event, None]:
        """Answer a request, event by event; see `Backend.answer`."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits for it any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = self._scheduler.submit(work, deliver)
        is_over = False
        try:
            while not is_over:
                event = await events.get()
                is_over = isinstance(event, Finished | Failed)
                yield event
        finally:
            if job is not None and not is_over:
                self._scheduler.cancel(job)

    async def prefetch(self, work: Work) -> None:
        """Compute or load what a request will need that is answered elsewhere.

        Cancelling it stops that, as does `close`.

        Raises:
            KVCacheRagError: If the request names an unknown policy.
        """
        wanted = self._prefetcher.want(
            work.chunks, namespace=work.namespace, policy=policy_of(work)
        )
        if wanted is None:
            return
        try:
            await asyncio.shield(asyncio.wrap_future(wanted.done))
        except asyncio.CancelledError:
            self._prefetcher.drop(wanted)
            raise
        self._prefetcher.turn(wanted)

    async def count(self, work: Work) -> int:
        """Tokens of the request's prompt; see `Backend.count`."""
        return await in_thread(self._count, work)

    def _count(self, work: Work) -> int:
        engine = self._engines.of(work.namespace)
        if work.is_plain or work.is_chat:
            return len(engine.tokenize_text(plain_prompt(engine, work)))
        ids = engine.tokenize(grounded(engine, work)[0], work.chunks, work.history)
        return len(ids.prefix) + sum(map(len, ids.chunks)) + len(ids.query)

    async def explain(self, work: Work) -> Mapping[str, Any]:
        """The prompt's spans and tokens; see `Backend.explain`."""
        return await in_thread(self._explain, work)

    def _explain(self, work: Work) -> Mapping[str, Any]:
        engine = self._engines.of(work.namespace)
        question = grounded(engine, work)[0]
        found = engine.explain(question, work.chunks, policy=policy_of(work), history=work.history)
        return found.to_dict()

    async def ready(self) -> bool:
        """Whether the model has answered with a token; the first one is waited for a moment."""
        self._scheduler.start()
        warmed = asyncio.wrap_future(self._scheduler.warmed)
        await asyncio.wait([warmed], timeout=MOMENT)
        is_warm = warmed.done() and warmed.result()
        return is_warm and not self._scheduler.is_closed

    async def stats(self) -> Mapping[str, Any]:
        """Counters of this process; see `Backend.stats`."""
        tiers = await in_thread(self._tiers.read)
        return {
            "replicas": [
                {
                    "replica": self._replica,
                    **self._scheduler.stats(),
                    "prefetch": self._prefetcher.stats(),
                    "tiers": tiers,
                }
            ]
        }

    async def models(self) -> list[str]:
        """The model's name."""
        return [self._name]

    async def close(self) -> None:
        """Stop; see `Backend.close`."""
        await in_thread(self._close)

    def _close(self) -> None:
        self._scheduler.close()
        self._prefetcher.close()


def _second(engine: Engine, prefetch: Engine | str) -> Engine:
    """The engine that computes ahead."""
    if isinstance(prefetch, str):
        is_same = prefetch in (PREFETCH_OFF, PREFETCH_SAME)
        return engine if is_same else twin(engine, prefetch)
    ensure_same_keys(engine, prefetch)
    return prefetch
