"""What is computed ahead for those who wait in the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.serve.prefetcher import Prefetcher
    from kvcache_rag.serve.queueing import Job


class Ahead:
    """Has a prefetcher work for jobs that wait, if there is one."""

    def __init__(self, prefetcher: Prefetcher | None, after: float) -> None:
        """Let `prefetcher` begin with a job `after` seconds; None for nobody."""
        self._prefetcher, self._after = prefetcher, after

    def begin(self, job: Job, turn_in: Callable[[], float]) -> None:
        """A job begins to wait for its turn; `turn_in` tells how many seconds that will take."""
        work = job.work
        is_over_chunks = not (work.is_plain or work.is_chat)
        if self._prefetcher is None or job.explained is not None or not is_over_chunks:
            return
        job.prefetch = self._prefetcher.want(
            job.chunks,
            namespace=work.namespace,
            policy=job.policy,
            after=self._after,
            turn_in=turn_in,
        )

    def turn(self, job: Job) -> bool:
        """A job's turn has come; whether what it needs was made ready."""
        if job.prefetch is None or self._prefetcher is None:
            return False
        return self._prefetcher.turn(job.prefetch)

    def drop(self, job: Job) -> None:
        """Nobody waits for a job any more."""
        if job.prefetch is not None and self._prefetcher is not None:
            self._prefetcher.drop(job.prefetch)
