"""Requests that wait: for documents, for what is computed ahead, for the model.

Nothing here is thread-safe: the scheduler holds a lock around it.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvcache_rag.generation.request import StoredChunk
from kvcache_rag_server.errors import NO_RETRIEVER, failure
from kvcache_rag_server.prefetch import keys_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from typing import TypeAlias

    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag_server.backend import BackendRequest, Event, Failed, RetrievedText, Retriever
    from kvcache_rag_server.prefetch import Prefetch, Prefetcher

    OnRetrieved: TypeAlias = Callable[["Job", Sequence[RetrievedText], Failed | None], None]

# Retrievals at a time: they wait for a database more than they compute.  A tenant of whom none runs
# does not wait for those of others.
AT_ONCE = 4

# Threads that retrieve for one tenant and for all, those included whose request was taken back:
# what hangs in a database cannot be stopped.
OF_ONE, OF_ALL = 8, 32

DEADLINE = 30.0
"""Seconds after which a request whose documents have not come is given up."""

GRACE = 2.0
"""Seconds in which retrievals may end when the server does."""


class Stage(Enum):
    """How far a request has come."""

    WAITING = 1
    RUNNING = 2
    ENDED = 3


def nothing() -> None:
    """Where the model's taking a request is not to be told."""


@dataclass(eq=False)
class Job:
    """A request on its way through the queue; changed under the scheduler's lock only.

    Attributes:
        work: The request.
        deliver: Takes its events, from any thread, and never blocks.
        arrived: When it came, on the monotonic clock.
        number: Its place in the order of arrival.
        keys: Addresses of the first of its chunks, as far as they are known.
        explained: Takes what its prompt would become, instead of an answer; None for an answer.
        sources: What was retrieved for it.
        stage: Whether it waits, runs or has ended.
        cancelled: Set when its answer is not wanted any more.
        prefetch: What is computed ahead for it, if anything is.
        on_turn: Called when the model takes it, from any thread; never blocks.
    """

    work: BackendRequest
    deliver: Callable[[Event], None]
    arrived: float
    number: int
    keys: tuple[ChunkKey, ...] = ()
    explained: Future[Mapping[str, Any]] | None = None
    sources: tuple[RetrievedText, ...] = ()
    stage: Stage = Stage.WAITING
    cancelled: threading.Event = field(default_factory=threading.Event)
    prefetch: Prefetch | None = None
    on_turn: Callable[[], None] = nothing

    @property
    def chunks(self) -> tuple[str, ...]:
        """Texts that it is answered over; see `BackendRequest.over`."""
        return self.work.over(self.sources)[0]

    @property
    def scores(self) -> tuple[float, ...] | None:
        """Of these texts."""
        return self.work.over(self.sources)[1]

    @property
    def inputs(self) -> list[str | StoredChunk]:
        """Its chunks for the engine: what is stored under a known key is not tokenised again."""
        ahead = () if self.prefetch is None else keys_of(self.prefetch)
        keys, chunks = ahead or self.keys, self.chunks
        return [*map(StoredChunk, keys, chunks), *chunks[len(keys) :]]


class TenantQueue:
    """Who comes next: tenants in turn, and of each the one that came first."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, list[Job]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, job: Job) -> bool:
        return job in self._queues.get(job.work.namespace, ())

    def jobs(self) -> list[Job]:
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
        """Whose turn it is; None if the queue is empty."""
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
        jobs = self.jobs()
        self._queues.clear()
        self._count = 0
        return jobs


def _number(job: Job) -> int:
    return job.number


class Retrievals:
    """Who waits for documents, retrieved in threads: several at a time, tenants in turn.

    What it calls back is called in those threads, without the scheduler's lock.
    """

    def __init__(self, retriever: Retriever | None, done: OnRetrieved) -> None:
        """Retrieve with `retriever`, or refuse; `done` takes what was found, or why nothing was."""
        self._retriever, self._done = retriever, done
        self._pending = TenantQueue()
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

    def refusal(self, work: BackendRequest) -> Failed | None:
        """Why nothing can be retrieved for a request."""
        return NO_RETRIEVER if work.query and self._retriever is None else None

    def add(self, job: Job) -> None:
        """Retrieve for a job once its turn has come."""
        self._pending.add(job)
        self._begin()

    def remove(self, job: Job) -> None:
        """Forget a job; what its thread may still find is dropped."""
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
            self._threads = {worker for worker in self._threads if worker.is_alive()}
            thread = threading.Thread(
                target=self._retrieve, args=(job,), name="kvcache-rag-retrieve", daemon=True
            )
            self._threads.add(thread)
            thread.start()

    def _may_begin(self, job: Job) -> bool:
        tenant = job.work.namespace
        if self._living[tenant] >= OF_ONE or self._living.total() >= OF_ALL:
            return False
        is_first = all(other.work.namespace != tenant for other in self._running)
        return is_first or len(self._running) < AT_ONCE

    def _retrieve(self, job: Job) -> None:
        work = job.work
        texts: Sequence[RetrievedText] = ()
        failed = None
        try:
            if self._retriever is not None:
                texts = self._retriever.retrieve(work.query, work.top_k, work.namespace)
        except Exception as error:
            failed = failure(error, f"retrieval for request {work.id}")
        self._done(job, texts, failed)

    def drain(self) -> list[Job]:
        """Forget all that wait for documents, and give them back."""
        jobs = self.jobs()
        self._pending.drain()
        self._running.clear()
        return jobs

    def join(self) -> None:
        """Wait a moment, without the lock, for threads that are about to end."""
        until = time.monotonic() + GRACE
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))


class JobPrefetches:
    """Has a prefetcher, if there is one, compute ahead for jobs that wait."""

    def __init__(self, prefetcher: Prefetcher | None, after: float) -> None:
        """Let `prefetcher` begin with a job `after` seconds; None for no prefetching."""
        self._prefetcher, self._after = prefetcher, after

    def begin(self, job: Job, turn_in: Callable[[], float]) -> None:
        """A job begins to wait for its turn; `turn_in` tells how many seconds that will take."""
        work = job.work
        is_over_chunks = not (work.is_plain or work.is_chat)
        if self._prefetcher is None or job.explained is not None or not is_over_chunks:
            return
        chunks: Any = job.inputs  # for its engine, which takes keys too
        job.prefetch = self._prefetcher.want(
            chunks,
            namespace=work.namespace,
            policy=work.policy,
            after=self._after,
            turn_in=turn_in,
            scores=job.scores,
        )

    def turn(self, job: Job) -> bool:
        """A job is answered now; whether what it needs was made ready."""
        if job.prefetch is None or self._prefetcher is None:
            return False
        return self._prefetcher.turn(job.prefetch)

    def drop(self, job: Job) -> None:
        """A job was taken back, or has ended without an answer."""
        if job.prefetch is not None and self._prefetcher is not None:
            self._prefetcher.drop(job.prefetch)
