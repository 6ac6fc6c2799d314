"""Requests that wait for the model: in order of arrival, and taking turns between tenants."""

from __future__ import annotations

import threading
from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from kvcache_rag.serve.prefetcher import Prefetch
    from kvcache_rag.serve.work import Event, Source, Work


class Stage(Enum):
    """How far a request has come."""

    WAITING = 1
    RUNNING = 2
    ENDED = 3


@dataclass(eq=False)
class Job:
    """A request on its way through the queue; changed under the scheduler's lock only.

    Attributes:
        work: The request.
        deliver: Takes its events, from any thread, and never blocks.
        arrived: When it came, on the monotonic clock.
        number: Its place in the order of arrival.
        sources: What was retrieved for it.
        stage: Whether it waits, runs or has ended.
        cancelled: Set when nobody wants its answer any more.
        retrieving: Its retrieval, if it has one.
        prefetch: What is computed ahead for it, if anything is.
    """

    work: Work
    deliver: Callable[[Event], None]
    arrived: float
    number: int
    sources: tuple[Source, ...] = ()
    stage: Stage = Stage.WAITING
    cancelled: threading.Event = field(default_factory=threading.Event)
    retrieving: Future[None] | None = None
    prefetch: Prefetch | None = None

    @property
    def chunks(self) -> tuple[str, ...]:
        """Texts that it is answered over: those it brought, then those retrieved."""
        return (*self.work.chunks, *(source.text for source in self.sources))


class Turns:
    """Who comes next: tenants in turn, and of each the one that came first.

    Not thread-safe: the scheduler holds a lock around it.
    """

    def __init__(self) -> None:
        """Nobody waits."""
        self._queues: OrderedDict[str, list[Job]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, job: Job) -> None:
        """Take a job in, at its place by arrival."""
        insort(self._queues.setdefault(job.work.namespace, []), job, key=_number)
        self._count += 1

    def remove(self, job: Job) -> bool:
        """Take a job out; False if it does not wait here."""
        queue = self._queues.get(job.work.namespace, [])
        if job not in queue:
            return False
        queue.remove(job)
        self._count -= 1
        if not queue:
            del self._queues[job.work.namespace]
        return True

    def head(self) -> Job | None:
        """Whose turn it is; None if nobody waits."""
        return next(iter(self._queues.values()))[0] if self._queues else None

    def place(self, job: Job) -> int:
        """About how many are answered before a job that waits."""
        namespace = job.work.namespace
        before = self._queues[namespace].index(job)
        return sum(
            before if name == namespace else min(before + 1, len(queue))
            for name, queue in self._queues.items()
        )

    def fellows(self, head: Job, is_alike: Callable[[Job], bool], most: int) -> list[Job]:
        """At most `most` jobs of the head's tenant that could be answered together with it."""
        waiting = self._queues.get(head.work.namespace, [])
        return [job for job in waiting if job is not head and is_alike(job)][:most]

    def take(self, jobs: list[Job]) -> None:
        """Take out what is answered now, all of one tenant, whose next turn is the last."""
        namespace = jobs[0].work.namespace
        for job in jobs:
            self.remove(job)
        if namespace in self._queues:
            self._queues.move_to_end(namespace)

    def crowding(self, namespace: str) -> Job | None:
        """Who has to give way when there is no room left for a job of `namespace`.

        It is the last one of the tenant with most jobs, unless that is hardly more than the
        newcomer would have: a tenant that fills the queue keeps nobody else out.
        """
        longest = max(self._queues.values(), key=len, default=[])
        own = len(self._queues.get(namespace, ()))
        return longest[-1] if len(longest) > own + 1 else None

    def drain(self) -> list[Job]:
        """Take out everything."""
        left = [job for queue in self._queues.values() for job in queue]
        self._queues.clear()
        self._count = 0
        return left


def _number(job: Job) -> int:
    return job.number
