"""Retrieval for requests with a query, in threads of its own, while they wait."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.serve.queueing import Turns
from kvcache_rag.serve.serving import failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.serve.queueing import Job
    from kvcache_rag.serve.work import Failed, Retriever, Source, Work

    Retrieved = Callable[[Job, Sequence[Source], Failed | None], None]

# At a time: they wait for a database more than they compute.  A tenant of whom none runs does not
# wait for those of others.
AT_ONCE = 4
# Threads of one tenant and of all, those included whose request nobody waits for any more: what
# hangs in a database cannot be stopped.
OF_ONE, OF_ALL = 8, 32
DEADLINE = 30.0
"""Seconds after which a request whose documents have not come is given up."""
GRACE = 2.0
"""Seconds in which retrievals may end when the server does."""


class Retrievals:
    """Who waits for documents: several at a time, tenants in turn.

    Not thread-safe: the scheduler holds a lock around it.  What it calls back is called in threads
    of its own, without that lock.
    """

    def __init__(self, retriever: Retriever | None, done: Retrieved) -> None:
        """Retrieve with `retriever`, or refuse; `done` takes what was found, or why nothing was."""
        self._retriever, self._done = retriever, done
        self._pending = Turns()
        self._running: set[Job] = set()
        self._living: Counter[str] = Counter()  # threads by tenant
        self._threads: set[threading.Thread] = set()

    def __len__(self) -> int:
        return len(self._pending) + len(self._running)

    def __contains__(self, job: Job) -> bool:
        return job in self._running or job in self._pending

    def jobs(self) -> list[Job]:
        """All that wait for documents."""
        return [*self._running, *self._pending.jobs()]

    def refusal(self, work: Work) -> Failed | None:
        """Why nothing can be retrieved for a request."""
        if self._retriever is not None or not work.query:
            return None
        error = InvalidInputError("this server retrieves nothing; send the documents along")
        return failure(error, "retrieval")

    def add(self, job: Job) -> None:
        """Retrieve for a job once its turn has come."""
        self._pending.add(job)
        self._begin()

    def remove(self, job: Job) -> None:
        """Nobody waits for a job any more; what it would find is left."""
        self._pending.remove(job)
        self._running.discard(job)
        self._begin()

    def ended(self, job: Job) -> None:
        """Note, within `done`, that a job's thread has come to its end."""
        self._living[job.work.namespace] -= 1
        self.remove(job)

    def _begin(self) -> None:
        while job := next(filter(self._may_begin, self._pending.heads()), None):
            self._pending.take([job])
            self._running.add(job)
            self._living[job.work.namespace] += 1
            self._threads = {one for one in self._threads if one.is_alive()}
            thread = threading.Thread(
                target=self._retrieve, args=(job,), name="kvcache-rag-retrieve", daemon=True
            )
            self._threads.add(thread)
            thread.start()

    def _may_begin(self, job: Job) -> bool:
        tenant = job.work.namespace
        if self._living[tenant] >= OF_ONE or self._living.total() >= OF_ALL:
            return False
        is_first = all(one.work.namespace != tenant for one in self._running)
        return is_first or len(self._running) < AT_ONCE

    def _retrieve(self, job: Job) -> None:
        work = job.work
        found: Sequence[Source] = ()
        failed = None
        try:
            if self._retriever is not None:
                found = self._retriever.retrieve(work.query, work.top_k, work.namespace)
        except Exception as error:
            failed = failure(error, f"retrieval for request {work.id}")
        self._done(job, found, failed)

    def drain(self) -> list[Job]:
        """Let go of all that wait for documents."""
        left = self.jobs()
        self._pending.drain()
        self._running.clear()
        return left

    def join(self) -> None:
        """Wait a moment, without the lock, for threads that are about to end."""
        until = time.monotonic() + GRACE
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
