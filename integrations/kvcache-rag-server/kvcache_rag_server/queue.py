"""Requests that wait for the model.

Nothing here is thread-safe: the scheduler holds a lock around it.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvcache_rag.generation.question import StoredChunk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag_server.backend import BackendRequest, Event
    from kvcache_rag_server.prefetch import Prefetch


class Stage(Enum):
    """How far a request has come."""

    WAITING = 1
    RUNNING = 2
    ENDED = 3


@dataclass(frozen=True)
class Explained:
    """What would become of a request's prompt, as plain values; or why nobody can say.

    Attributes:
        explanation: The values.
        error: To be raised where the explanation is waited for; None if there is one.
    """

    explanation: Mapping[str, Any]
    error: Exception | None = None


@dataclass(eq=False)
class Job:
    """A request on its way through the queue; changed under the scheduler's lock only.

    Attributes:
        work: The request.
        deliver: Takes its events, from any thread, and never blocks.
        arrived: When it came, on the monotonic clock.
        number: Its place in the order of arrival.
        keys: Addresses of the first of its chunks, as far as they are known.
        explains: Whether it gets an `Explained` instead of an answer.
        stage: Whether it waits, runs or has ended.
        cancelled: Set when its answer is not wanted any more.
        prefetch: What is computed ahead for it, if anything is.
    """

    work: BackendRequest
    deliver: Callable[[Event | Explained], None]
    arrived: float
    number: int
    keys: tuple[ChunkKey, ...] = ()
    explains: bool = False
    stage: Stage = Stage.WAITING
    cancelled: threading.Event = field(default_factory=threading.Event)
    prefetch: Prefetch | None = None

    @property
    def inputs(self) -> list[str | StoredChunk]:
        """Its chunks for the engine: what is stored under a known key is not tokenised again."""
        ahead = () if self.prefetch is None else self.prefetch.keys
        keys, chunks = ahead or self.keys, self.work.chunks
        return [*map(StoredChunk, keys, chunks), *chunks[len(keys) :]]


class TenantQueue:
    """Who comes next: tenants in turn, and of each the one that came first."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, list[Job]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def jobs(self) -> list[Job]:
        return [job for queue in self._queues.values() for job in queue]

    def add(self, job: Job) -> None:
        """Take a job in, at its place by arrival."""
        insort(self._queues.setdefault(job.work.namespace, []), job, key=attrgetter("number"))
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
        """Whose turn it is; None if the queue is empty."""
        return next((queue[0] for queue in self._queues.values()), None)

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

        Args:
            namespace: Tenant of the newcomer.
        """
        longest = max(self._queues.values(), key=len, default=[])
        own = len(self._queues.get(namespace, ()))
        return longest[-1] if len(longest) > own + 1 else None

    def drain(self) -> list[Job]:
        """Take out all."""
        jobs = self.jobs()
        self._queues.clear()
        self._count = 0
        return jobs
