"""Requests that wait for the model: in order of arrival, and taking turns between tenants."""

from __future__ import annotations

import threading
from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future
    from typing import Any

    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.serve.prefetcher import Prefetch
    from kvcache_rag.serve.work import Event, Source, Work


class Stage(Enum):
    """How far a request has come."""

    WAITING = 1
    RUNNING = 2
    ENDED = 3


def nothing() -> None:
    """Where nobody wants to be told."""


@dataclass(eq=False)
class Job:
    """A request on its way through the queue; changed under the scheduler's lock only.

    Attributes:
        work: The request.
        deliver: Takes its events, from any thread, and never blocks.
        arrived: When it came, on the monotonic clock.
        number: Its place in the order of arrival.
        policy: What the request names; None for the engine's own.
        explained: Takes what its prompt would become, instead of an answer; None for an answer.
        sources: What was retrieved for it.
        stage: Whether it waits, runs or has ended.
        cancelled: Set when nobody wants its answer any more.
        prefetch: What is computed ahead for it, if anything is.
        on_turn: Called when the model takes it, from any thread; never blocks.
    """

    work: Work
    deliver: Callable[[Event], None]
    arrived: float
    number: int
    policy: ReusePolicy | None = None
    explained: Future[Mapping[str, Any]] | None = None
    sources: tuple[Source, ...] = ()
    stage: Stage = Stage.WAITING
    cancelled: threading.Event = field(default_factory=threading.Event)
    prefetch: Prefetch | None = None
    on_turn: Callable[[], None] = nothing

    @property
    def chunks(self) -> tuple[str, ...]:
        """Texts that it is answered over: those it brought, then those retrieved, each once."""
        brought = self.work.chunks
        found = dict.fromkeys(source.text for source in self.sources if source.text not in brought)
        return (*brought, *found)


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

    def __contains__(self, job: Job) -> bool:
        return job in self._queues.get(job.work.namespace, ())

    def jobs(self) -> list[Job]:
        """All that wait."""
        return [job for queue in self._queues.values() for job in queue]

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
        return next(self.heads(), None)

    def heads(self) -> Iterator[Job]:
        """The first of each tenant, in turn."""
        return (queue[0] for queue in self._queues.values())

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

    def crowding(self, namespace: str, others: Iterable[Job] = ()) -> Job | None:
        """Who has to give way when there is no room left for a job of `namespace`.

        It is the last one of the tenant with most jobs, unless that is hardly more than the
        newcomer would have: a tenant that fills the queue keeps nobody else out.

        Args:
            namespace: Tenant of the newcomer.
            others: Jobs that take room and do not wait here.
        """
        tenants: dict[str, list[Job]] = {}
        for job in (*self.jobs(), *others):
            tenants.setdefault(job.work.namespace, []).append(job)
        longest = max(tenants.values(), key=len, default=[])
        own = len(tenants.get(namespace, ()))
        return max(longest, key=_number) if len(longest) > own + 1 else None

    def drain(self) -> list[Job]:
        """Take out everything."""
        left = self.jobs()
        self._queues.clear()
        self._count = 0
        return left


def _number(job: Job) -> int:
    return job.number
