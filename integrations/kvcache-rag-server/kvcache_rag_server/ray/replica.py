"""What runs in the processes of a Ray cluster: replicas that answer, generators that compute ahead.

Both are a `LocalBackend`: queue, turns, batches and prefetch are those of a server of one process.
Nothing of Ray is imported here, so that the class can be used, and tested, without it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import socket
import time
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag_server.backend import Started

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from kvcache_rag.verdict import Identity
    from kvcache_rag_server.backend import BackendRequest, Dequeued, Event, OwnPolicy, Prefilled
    from kvcache_rag_server.local import LocalBackend
    from kvcache_rag_server.settings import ServerSettings

WARMING: Final = 120.0
"""Seconds in which a loaded model has to generate its first token."""

SHAPES: Final = "128"
"""Shapes of matrices for which PyTorch keeps code on the CPU: by itself it keeps 1,024, which, as
batches have any size and length, makes a process grow for hours."""

LOOK: Final = 0.1
"""Seconds between two looks whether it has."""


class Replica:
    """One engine of several over one store; the class of a Ray Serve deployment.

    Serve calls the methods in an event loop of the replica's process.  Works are queued in the
    replica's own scheduler, so that a batch can be formed and a waiting work be prefetched.
    """

    def __init__(
        self,
        settings: ServerSettings,
        make: Callable[[ServerSettings], LocalBackend],
        threads: int,
    ) -> None:
        """Load the model; it generates a first token before Serve lets requests come.

        Args:
            settings: Of one process: no replicas, no retrieval.
            make: Loads the model, in this process.
            threads: Of PyTorch on the CPU; 0 leaves it to Ray, which goes by the CPUs that are
                reserved.
        """
        import torch

        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", SHAPES)  # read at its first use
        if threads:
            torch.set_num_threads(threads)
        self._backend = make(settings)
        gc.collect()
        gc.freeze()  # as `startup.frozen`, for as long as the process lives
        self._was_well = self._is_draining = False

    async def check_health(self) -> None:
        """Raise if not well; Serve asks before the first request and from time to time.

        The first time, this waits for the model's first token.  Memory that is kept for nothing is
        given back each time.

        Raises:
            RuntimeError: If the model does not answer.
        """
        until = time.monotonic() + WARMING
        if self._is_draining:  # Serve ends what is not well, with what still runs there
            return
        while not await self._backend.ready():
            if self._was_well or time.monotonic() > until:
                raise RuntimeError("the model does not answer")
            await asyncio.sleep(LOOK)
        self._was_well = True
        await asyncio.to_thread(_give_back)

    async def answer(self, work: BackendRequest) -> AsyncIterator[Event | Dequeued]:
        """Events of a request, and its `Dequeued`; cancelling the call takes the request back."""
        async with aclosing(self._backend.followed(work)) as events:
            async for event in events:
                yield replace(event, replica=_name()) if isinstance(event, Started) else event

    async def count(self, work: BackendRequest) -> int:
        """Tokens of the request's prompt."""
        return await self._backend.count(work)

    async def explain(self, work: BackendRequest) -> Mapping[str, Any]:
        """Spans of the request's prompt."""
        return await self._backend.explain(work)

    async def prefill(self, work: BackendRequest) -> Prefilled:
        """Compute and store chunks, between answers."""
        return await self._backend.prefill(work)

    async def context_window(self) -> int | None:
        """Of the model, in tokens."""
        return next(iter((await self._backend.models()).values()))

    async def identity(self) -> Identity:
        """What a verdict on its answers is about."""
        return await self._backend.identity()

    async def own_policy(self) -> OwnPolicy:
        """How requests that name no policy are answered."""
        return await self._backend.own_policy()

    async def prefetch(self, work: BackendRequest) -> bool:
        """Compute and store what the request will need; it is not queued here.

        Returns:
            Whether something was computed, and all is there now.
        """
        return await self._backend.prefetch(work)

    async def drain(self) -> None:
        """Take no more requests, as the server is about to end."""
        self._is_draining = True
        await self._backend.drain()

    async def stats(self) -> dict[str, Any]:
        """Counters of this process, with its name and process id."""
        (own,) = (await self._backend.stats())["replicas"]
        return {**own, "replica": _name(), "pid": os.getpid()}


def _give_back() -> None:
    """Give memory back that the C library keeps between blocks that are in use; glibc only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _name() -> str:
    """Name of this process in logs and metrics, unique in the cluster."""
    return f"{socket.gethostname()[:40]}:{os.getpid()}"
