"""Prefetch while queued, across processes: what waits is handed to a generator of its own.

The paper's configuration A (a device that only generates) and B (the CPU): one more process with
the same model over the same store.  It computes each key once, as every process of a directory does
(`ChunkStore.locked`), and the replica that answers finds it there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache_rag.serve.work import Work

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
