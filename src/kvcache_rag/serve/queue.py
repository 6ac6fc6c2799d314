"""What a queue tells those whom it does not answer."""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.serve.backend import NOT_READY, OVERLOADED, SERVER_ERROR, SERVER_FAULT, Failed
from kvcache_rag.serve.worker import failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from typing import Any

    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.prefetch import Prefetch, Prefetcher
    from kvcache_rag.serve.backend import Event, Retriever, Source, Work


AGAIN = 1.0
"""Seconds after which to repeat what would have been answered but for an accident."""


def overloaded(waiting: int, retry_after: float) -> Failed:
    """There is no room left.

    Args:
        waiting: Requests that wait.
        retry_after: Seconds in which they will have been answered.
    """
    message = f"{waiting} requests wait already; repeat this one later"
    return Failed(NOT_READY, OVERLOADED, message, retry_after=retry_after)


def shut_down() -> Failed:
    """Nothing is answered any more."""
    message = "the server shuts down; repeat the request later"
    return Failed(NOT_READY, SERVER_ERROR, message, AGAIN)


def broken() -> Failed:
    """The thread that answers has ended by a fault of our own."""
    message = "the server failed to answer this request; its log says why"
    return Failed(SERVER_FAULT, SERVER_ERROR, message)


def overdue() -> Failed:
    """Nothing was retrieved in time."""
    message = "retrieving documents takes too long; repeat the request later, or send them along"
    return Failed(NOT_READY, SERVER_ERROR, message, AGAIN)


# Requests that wait for the model: in order of arrival, and taking turns between tenants.


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


# Retrieval for requests with a query, in threads of its own, while they wait.


if TYPE_CHECKING:
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


# What is computed ahead for those who wait in the queue.


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
