"""Prefetch while queued, across processes: what waits is handed to a generator of its own.

The paper's configuration A (a device that only generates) and B (the CPU): one more process with
the same model over the same store.  It computes each key once, as every process of a directory does
(`ChunkStore.locked`), and the replica that answers finds it there.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import time
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.serve.backend import Started

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from kvcache_rag.serve.backend import Event, Turn, Work
    from kvcache_rag.serve.settings import ServerSettings


LOG = logging.getLogger(__name__)

AT_ONCE = 4
"""Works that a generator holds at a time; it computes one after the other."""


@dataclass(eq=False)
class Watched:
    """A work that waits.

    Attributes:
        is_prefetched: Whether the generator has computed or loaded what it needs.
        task: What waits for the threshold, then for the generator.
    """

    is_prefetched: bool = False
    task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """It waits no longer: what was not computed ahead the replica computes itself."""
        if self.task is not None:
            self.task.cancel()


class Ahead:
    """Hands works that wait longer than a threshold to a generator, oldest first.

    Attributes:
        counts: "started", "finished", "cancelled", "failed" since the start.
    """

    def __init__(self, generator: Any, after: float, at_once: int = AT_ONCE) -> None:
        """Watch for one backend.

        Args:
            generator: Handle of a deployment of `Replica`.
            after: Seconds that a work waits before it is handed on.
            at_once: Works that the generator is given at a time; others wait for a place, and give
                up as soon as they are answered.
        """
        self.counts: Counter[str] = Counter(started=0, finished=0, cancelled=0, failed=0)
        self._generator, self._after = generator, after
        self._places = asyncio.Semaphore(at_once)

    def watch(self, work: Work) -> Watched:
        """Begin to watch a work that was queued now; call `stop` when it is begun or gone."""
        watched = Watched()
        if work.chunks:
            watched.task = asyncio.create_task(self._prefetch(work, watched))
        return watched

    async def _prefetch(self, work: Work, watched: Watched) -> None:
        await asyncio.sleep(self._after)
        async with self._places:
            self.counts["started"] += 1
            response = self._generator.prefetch.remote(work)
            try:
                is_prefetched = bool(await response)
            except asyncio.CancelledError:
                self.counts["cancelled"] += 1
                response.cancel()
                raise
            except Exception as error:  # the answer does not depend on it
                self.counts["failed"] += 1
                LOG.warning("a prefetch failed: %s", type(error).__name__)
                return
            self.counts["finished"] += 1
            watched.is_prefetched = is_prefetched


# What runs in the processes of a Ray cluster: replicas that answer, generators that compute ahead.
#
# Both are a `LocalBackend`: queue, turns, batches and prefetch are those of a server of one
# process. Nothing of Ray is imported here, so that the classes can be used, and tested, without it.


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

    def __init__(self, settings: ServerSettings, threads: int) -> None:
        """Load the model; it generates a first token before Serve lets requests come.

        Args:
            settings: Of one process: no replicas, no retrieval.
            threads: Of PyTorch on the CPU; 0 leaves it to Ray, which goes by the CPUs that are
                reserved.
        """
        import torch

        from kvcache_rag.serve.startup import local_backend

        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", SHAPES)  # read at its first use
        if threads:
            torch.set_num_threads(threads)
        self._backend = local_backend(settings)
        self._was_well = False

    async def check_health(self) -> None:
        """Raise if not well; Serve asks before the first request and from time to time.

        The first time, this waits for the model's first token.  Memory that is kept for nothing is
        given back each time.

        Raises:
            RuntimeError: If the model does not answer.
        """
        until = time.monotonic() + WARMING
        while not await self._backend.ready():
            if self._was_well or time.monotonic() > until:
                raise RuntimeError("the model does not answer")
            await asyncio.sleep(LOOK)
        self._was_well = True
        await asyncio.to_thread(_give_back)

    async def answer(self, work: Work) -> AsyncIterator[Event | Turn]:
        """Events of a request, and its `Turn`; cancelling the call takes the request back."""
        async with aclosing(self._backend.followed(work)) as events:
            async for event in events:
                yield replace(event, replica=_name()) if isinstance(event, Started) else event

    async def count(self, work: Work) -> int:
        """Tokens of the request's prompt."""
        return await self._backend.count(work)

    async def explain(self, work: Work) -> Mapping[str, Any]:
        """Spans of the request's prompt."""
        return await self._backend.explain(work)

    async def prefetch(self, work: Work) -> bool:
        """Compute and store what the request will need; it is not queued here.

        Returns:
            Whether something was computed, and all is there now.
        """
        return await self._backend.prefetch(work)

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
