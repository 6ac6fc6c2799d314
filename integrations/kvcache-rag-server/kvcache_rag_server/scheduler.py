"""Who is answered next, alone or in a batch: fairly between tenants, together if that is faster.

A padded batch reads the weights once for all its rows, but it lasts as long as its longest answer,
and its first row waits for its last.  Nothing is assumed of a device: both sides are measured
(`BatchRule`, `ServiceTimes`), and one thread answers what waits (`Scheduler`).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache

from kvcache_rag.forks import new_condition
from kvcache_rag_server.backend import Started
from kvcache_rag_server.errors import FAULT, SHUT_DOWN, failure, overloaded
from kvcache_rag_server.prefetch import close_at_exit
from kvcache_rag_server.queue import Explained, Job, Stage, TenantQueue
from kvcache_rag_server.worker import is_alike, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag_server.backend import BackendRequest, Event, Failed
    from kvcache_rag_server.prefetch import Prefetcher
    from kvcache_rag_server.worker import JobRunner, Served

_LOG = logging.getLogger(__name__)

# Times of one size that are looked back at; with their median, one that was held up decides little.
SAMPLES = 9

# Answers one by one that must be known before a batch is tried.
FEWEST_SINGLES = 3

# What a batch must save; less is noise.
SAVING = 0.05

# Of so many chances that were not taken, one is: a size that was slower is measured again, and so
# are single answers where batches are sooner.
RETRY = 64

# Kinds of requests whose times are remembered.
KINDS = 128

# How much the last answer counts in the mean time of an answer, and that time before any.
WEIGHT, FIRST_GUESS = 0.2, 1.0

LONGEST_RETRY = 60.0


class BatchRule:
    """Times of single answers and of batches, and what follows from them.

    Seconds are those that depend on batching: without those for loading or prefilling chunks, which
    a batch does one row after the other too.  Not thread-safe.

    Attributes:
        most: Largest batch.
    """

    def __init__(self, most: int) -> None:
        self.most = max(1, most)
        self._times: LRUCache[Hashable, dict[int, deque[float]]] = LRUCache(KINDS)
        self._passed: LRUCache[Hashable, Counter[int]] = LRUCache(KINDS)

    @property
    def sizes(self) -> list[int]:
        """Sizes that are tried: powers of two, and the largest."""
        powers = [1 << bit for bit in range(1, self.most.bit_length()) if 1 << bit < self.most]
        return [*powers, self.most] if self.most > 1 else []

    def measured(self, kind: Hashable, size: int, seconds: float) -> None:
        """Note that `size` answers of a kind took `seconds` together."""
        times = self._times.setdefault(kind, {})
        times.setdefault(size, deque(maxlen=SAMPLES)).append(seconds)

    def failed(self, kind: Hashable, size: int) -> None:
        """Note that a batch could not be answered as one: it takes for ever."""
        for _ in range(SAMPLES):
            self.measured(kind, size, float("inf"))

    def seconds(self, kind: Hashable, size: int) -> float | None:
        """What `size` answers of a kind take together; None if too few were measured."""
        times = self._times.get(kind, {}).get(size, ())
        # The median: one that was held up decides nothing.
        return median(times) if len(times) >= (FEWEST_SINGLES if size == 1 else 1) else None

    def size(self, kind: Hashable, alike: int, behind: int) -> int:
        """How many requests to answer together now, 1 for no batch.

        What counts is the time that everybody waits together, those behind included.

        Args:
            kind: What the requests have in common.
            alike: How many could be answered together.
            behind: How many wait besides.
        """
        possible = [size for size in self.sizes if size <= alike]
        single = self.seconds(kind, 1) if possible else None
        if single is None:
            return 1
        trial = self._trial(kind, single, possible)
        if trial:
            return trial
        best = max(possible, key=lambda size: self._saving(kind, single, size, alike + behind))
        if self._saving(kind, single, best, alike + behind) <= 0:
            best = 1
        passed = self._passed.setdefault(kind, Counter())
        for other in (1, *possible):
            if other != best and other in self._times[kind]:
                passed[other] += 1
                if passed[other] % RETRY == 0:
                    return other
        return best

    def _trial(self, kind: Hashable, single: float, possible: list[int]) -> int:
        """The smallest size without a time, if the one below was no slower than single answers."""
        for size in possible:
            seconds = self.seconds(kind, size)
            if seconds is None:
                return size
            if seconds > size * single:
                return 0
        return 0

    def _saving(self, kind: Hashable, single: float, size: int, waiting: int) -> float:
        """Seconds that all who wait save by a batch of `size`, beyond what would be noise."""
        seconds = self.seconds(kind, size)
        if seconds is None:
            return 0.0
        behind = waiting - size
        together = (size + behind) * seconds
        apart = single * size * ((size + 1) / 2 + behind)
        return apart * (1 - SAVING) - together


class ServiceTimes:
    """How fast requests are answered, and what follows for those that wait.  Not thread-safe.

    Attributes:
        most: Largest batch.
        taken: Requests whose turn has come since the start.
    """

    def __init__(self, most: int) -> None:
        self._rule = BatchRule(most)
        self.most = self._rule.most
        self.taken = 0
        self._batches: Counter[int] = Counter()
        self._service: float | None = None

    def size(self, work: BackendRequest, alike: int, behind: int) -> int:
        """How many requests to answer together now; see `BatchRule.size`."""
        return self._rule.size(kind_of(work), alike, behind)

    def note(self, work: BackendRequest, size: int, served: Served) -> None:
        """Note what answering `size` requests like `work` took."""
        if served.is_too_large:
            self._rule.failed(kind_of(work), size)
        if served.count:
            each = served.seconds / served.count
            before = each if self._service is None else self._service
            self._service = before + WEIGHT * (each - before)
        if served.generating is not None:
            self._batches[size] += 1
            self._rule.measured(kind_of(work), size, served.generating)

    def turn_in(self, place: int, taken: int) -> float:
        """Seconds until the turn of a request, as far as can be told; from any thread.

        Args:
            place: How many stood before it when it came.
            taken: What `taken` was then.
        """
        if self._service is None:
            return float("inf")
        return (max(0, place - (self.taken - taken)) + 0.5) * self._service

    def retry_after(self, waiting: int) -> float:
        """Seconds in which those that wait will have been answered, as far as can be told."""
        each = FIRST_GUESS if self._service is None else self._service
        return min(max(waiting, 1) * each, LONGEST_RETRY)

    def stats(self) -> dict[str, Any]:
        """`service_seconds` and `batches`; see `Backend.stats`."""
        sizes = {str(size): count for size, count in sorted(self._batches.items())}
        return {"service_seconds": self._service, "batches": sizes}


class Scheduler:
    """Holds what waits and lets one thread answer it.

    Safe to use from any thread; nothing blocks for longer than a look at the queue, but `close`.

    Attributes:
        max_waiting: Requests that may wait.
        warmed: Done when the model has generated its first token; its result says whether it could.
        is_closed: Whether nothing more is taken; what runs may go on.
    """

    def __init__(
        self,
        server: JobRunner,
        *,
        prefetcher: Prefetcher | None = None,
        prefetch_after: float = 0.05,
        max_batch: int = 8,
        max_waiting: int = 256,
    ) -> None:
        """Schedule for `server`; the thread starts with the first request, or by `start`.

        Args:
            server: Answers.
            prefetcher: Computes ahead for those who wait; None for no prefetching.
            prefetch_after: Seconds after which that begins.
            max_batch: Most requests that are answered together.
            max_waiting: Requests that may wait; one more is refused.
        """
        self.max_waiting = max_waiting
        self.warmed: Future[bool] = Future()
        self._server, self._prefetcher, self._prefetch_after = server, prefetcher, prefetch_after
        self._service = ServiceTimes(max_batch)
        self._changed = new_condition()
        self._queue = TenantQueue()
        self._running: list[Job] = []
        self._numbers = itertools.count()
        self._counts: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self.is_closed = False
        self.warmed.set_running_or_notify_cancel()

    def start(self) -> None:
        """Start the thread, which lets the model generate a first token; once."""
        with self._changed:
            if self._thread is None and not self.is_closed:
                self._thread = threading.Thread(
                    target=self._work, name="kvcache-rag-serve", daemon=True
                )
                close_at_exit(self)
                self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs that answers."""
        return self._thread is not None and self._thread.is_alive()

    def submit(
        self,
        work: BackendRequest,
        deliver: Callable[[Event | Explained], None],
        keys: tuple[ChunkKey, ...] = (),
        *,
        explains: bool = False,
    ) -> Job | None:
        """Let a request wait for its turn.

        Args:
            work: The request.
            deliver: Takes its events, from any thread, and never blocks.
            keys: Addresses of its chunks, if they are known.
            explains: Whether it gets an `Explained` in place of an answer.

        Returns:
            What to give to `cancel`; None if it was refused, which was delivered.
        """
        self.start()
        with self._changed:
            refusal = self._refusal(work)
            if refusal is not None:
                deliver(refusal)
                return None
            now, number = time.monotonic(), next(self._numbers)
            job = Job(work, deliver, now, number, keys, explains)
            self._admit(job)
        return job

    def _refusal(self, work: BackendRequest) -> Failed | None:
        """Why a request cannot wait; whoever crowds the queue gives way to others."""
        if self.is_closed:
            return SHUT_DOWN
        if len(self._queue) < self.max_waiting:
            return None
        last = self._queue.crowding(work.namespace)
        if last is None:
            self._counts["refused"] += 1
            return self._overloaded()
        self._queue.remove(last)
        self._end(last, "refused", self._overloaded())
        return None

    def _overloaded(self) -> Failed:
        waiting = len(self._queue)
        return overloaded(waiting, self._service.retry_after(waiting))

    def _admit(self, job: Job) -> None:
        self._queue.add(job)
        self._changed.notify_all()
        work, service = job.work, self._service
        is_over_chunks = not (job.explains or work.is_plain or work.is_chat)
        if self._prefetcher is not None and is_over_chunks:
            job.prefetch = self._prefetcher.want(
                job.inputs,
                namespace=work.namespace,
                policy=work.policy,
                after=self._prefetch_after,
                turn_in=partial(service.turn_in, self._queue.place(job), service.taken),
                scores=work.scores,
                question=work.asked,
            )

    def cancel(self, job: Job) -> None:
        """Take a request back: it leaves the queue, or stops at its next token."""
        with self._changed:
            job.cancelled.set()
            if job.stage is Stage.WAITING:
                self._queue.remove(job)
                self._end(job, "cancelled", None)
            elif job.stage is Stage.RUNNING:
                self._counts["cancelled"] += 1

    def _end(self, job: Job, name: str, event: Event | None) -> None:
        """A job that waited ends; counted as `name`."""
        job.stage = Stage.ENDED
        self._counts[name] += 1
        if job.prefetch is not None and self._prefetcher is not None:
            self._prefetcher.drop(job.prefetch)
        if event is not None:
            job.deliver(event)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what is so now; see `Backend.stats`."""
        with self._changed:
            names = ("answered", "failed", "cancelled", "refused")
            return {
                "waiting": len(self._queue),
                "running": len(self._running),
                **{name: self._counts[name] for name in names},
                **self._service.stats(),
            }

    def drain(self) -> None:
        """Take nothing more: what waits or comes later gets `Failed`, what runs goes on."""
        with self._changed:
            self._turn_away(SHUT_DOWN)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop: what waits gets `Failed`, what runs ends at its next token; wait for that one."""
        with self._changed:
            self._abandon(SHUT_DOWN)
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        elif not self.warmed.done():
            self.warmed.set_result(False)

    def _abandon(self, why: Failed) -> None:
        """End everything that waits or runs, and take nothing more."""
        self._turn_away(why)
        for job in self._running:
            if not job.cancelled.is_set():
                job.cancelled.set()
                job.deliver(why)

    def _turn_away(self, why: Failed) -> None:
        """End everything that waits, and take nothing more."""
        self.is_closed = True
        for job in self._queue.drain():
            job.cancelled.set()
            self._end(job, "failed", why)

    def _work(self) -> None:
        self.warmed.set_result(self._server.warm_up())
        try:
            while jobs := self._next():
                self._answer(jobs)
        except BaseException:  # whoever waits has to be told
            _LOG.exception("the thread that answers has ended")
            with self._changed:
                self._abandon(FAULT)

    def _answer(self, jobs: list[Job]) -> None:
        try:
            self._serve(jobs)
        except Exception as error:  # a fault of our own must not end the thread
            for job in jobs:
                if job.explains:  # told, and logged, by who waits: under the name its client reads
                    job.deliver(Explained({}, error))
                else:
                    job.deliver(failure(error, f"request {job.work.id}"))
        with self._changed:
            for job in jobs:
                job.stage = Stage.ENDED
            self._running = []

    def _next(self) -> list[Job]:
        """Whose turn it is now, waiting for the first; none once it is closed."""
        with self._changed:
            while not self.is_closed:
                head = self._queue.head()
                if head is None:
                    self._changed.wait()
                    continue
                jobs = self._together(head)
                self._queue.take(jobs)
                self._service.taken += len(jobs)
                for job in jobs:
                    job.stage = Stage.RUNNING
                self._running = jobs
                return jobs
        return []

    def _together(self, head: Job) -> list[Job]:
        """The head, and who is answered in one batch with it."""
        fellows = self._queue.fellows(head, partial(_are_alike, head), self._service.most - 1)
        alike = [head, *fellows]
        behind = len(self._queue) - len(alike)
        return alike[: self._service.size(head.work, len(alike), behind)]

    def _serve(self, jobs: list[Job]) -> None:
        now, server = time.monotonic(), self._server
        if jobs[0].explains:
            server.explain(jobs[0])
            return
        begun = [Started(now - job.arrived, self._turn(job), len(jobs)) for job in jobs]
        is_single = len(jobs) == 1
        served = server.one(jobs[0], begun[0]) if is_single else server.together(jobs, begun)
        with self._changed:
            self._note(jobs, served)

    def _turn(self, job: Job) -> bool:
        """A job is answered now; whether what it needs was made ready."""
        if job.prefetch is None or self._prefetcher is None:
            return False
        return self._prefetcher.turn(job.prefetch)

    def _note(self, jobs: list[Job], served: Served) -> None:
        wanted = sum(not job.cancelled.is_set() for job in jobs)
        self._counts["answered"] += served.count
        self._counts["failed"] += max(0, wanted - served.count)
        self._service.note(jobs[0].work, len(jobs), served)


def _are_alike(head: Job, other: Job) -> bool:
    return not (head.explains or other.explains) and is_alike(head.work, other.work)
