"""One thread that answers what waits: fairly between tenants, together where that is sooner."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.serve.ending import close_at_exit
from kvcache_rag.serve.pace import Pace
from kvcache_rag.serve.queue_retrieving import Retrievals
from kvcache_rag.serve.queueing import Job, Stage, Turns
from kvcache_rag.serve.serving import failure, is_alike, policy_of
from kvcache_rag.serve.work import NOT_READY, OVERLOADED, SERVER_ERROR, Failed, Started

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.serve.prefetcher import Prefetcher
    from kvcache_rag.serve.serving import Served, Server
    from kvcache_rag.serve.work import Event, Retriever, Source, Work

_LOG = logging.getLogger(__name__)


class Scheduler:
    """Holds what waits and lets one thread answer it.

    Safe to use from any thread; nothing blocks for longer than a look at the queue, but `close`.

    Attributes:
        max_waiting: Requests that may wait.
        warmed: Done when the model has generated its first token; its result says whether it could.
        is_closed: Whether nothing is answered any more.
    """

    def __init__(
        self,
        server: Server,
        *,
        prefetcher: Prefetcher | None = None,
        prefetch_after: float = 0.05,
        retriever: Retriever | None = None,
        max_batch: int = 8,
        max_waiting: int = 256,
    ) -> None:
        """Schedule for `server`; the thread starts with the first request, or by `start`.

        Args:
            server: Answers.
            prefetcher: Computes ahead for those who wait; None for nobody.
            prefetch_after: Seconds after which that begins.
            retriever: Finds chunks for requests with a query.
            max_batch: Most requests that are answered together.
            max_waiting: Requests that may wait; one more is refused.
        """
        self.max_waiting = max_waiting
        self.warmed: Future[bool] = Future()
        self._server, self._prefetcher = server, prefetcher
        self._retrievals = Retrievals(retriever)
        self._after = prefetch_after
        self._pace = Pace(max_batch)
        self._changed = threading.Condition()
        self._turns = Turns()
        self._retrieving: set[Job] = set()
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

    def submit(self, work: Work, deliver: Callable[[Event], None]) -> Job | None:
        """Let a request wait for its turn.

        Args:
            work: The request.
            deliver: Takes its events, from any thread, and never blocks.

        Returns:
            What to give to `cancel`; None if it was refused, which was delivered.
        """
        self.start()
        with self._changed:
            refusal = self._refusal(work)
            if refusal is not None:
                deliver(refusal)
                return None
            job = Job(work, deliver, time.monotonic(), next(self._numbers))
            if work.query:
                self._retrieving.add(job)
                job.retrieving = self._retrievals.begin(work, partial(self._retrieved, job))
            else:
                self._admit(job)
        return job

    def _refusal(self, work: Work) -> Failed | None:
        """Why a request cannot wait; whoever crowds the queue gives way to others."""
        if self.is_closed:
            return _shut_down()
        refusal = self._retrievals.refusal(work)
        if refusal is not None or len(self._turns) + len(self._retrieving) < self.max_waiting:
            return refusal
        last = self._turns.crowding(work.namespace)
        if last is None:
            self._counts["refused"] += 1
            return self._overloaded()
        self._turns.remove(last)
        self._end(last, "refused", self._overloaded())
        return None

    def _overloaded(self) -> Failed:
        waiting = len(self._turns) + len(self._retrieving)
        return Failed(
            NOT_READY,
            OVERLOADED,
            f"{waiting} requests wait already; repeat this one later",
            retry_after=self._pace.retry_after(waiting),
        )

    def _retrieved(self, job: Job, found: Sequence[Source], failed: Failed | None) -> None:
        with self._changed:
            self._retrieving.discard(job)
            if job.stage is not Stage.WAITING:
                return
            job.sources = tuple(found)
            if failed is None:
                self._admit(job)
            else:
                self._end(job, "failed", failed)

    def _admit(self, job: Job) -> None:
        self._turns.add(job)
        self._changed.notify_all()
        work = job.work
        if self._prefetcher is None or work.is_plain or work.is_chat:
            return
        try:
            policy = policy_of(work)
        except InvalidInputError:
            return  # as its answer will say
        job.prefetch = self._prefetcher.want(
            job.chunks,
            namespace=work.namespace,
            policy=policy,
            after=self._after,
            turn_in=partial(self._pace.turn_in, self._turns.place(job), self._pace.taken),
        )

    def cancel(self, job: Job) -> None:
        """Take a request back: it leaves the queue, or stops at its next token."""
        with self._changed:
            job.cancelled.set()
            if job.stage is Stage.WAITING:
                self._turns.remove(job)
                self._retrieving.discard(job)
                self._end(job, "cancelled", None)
            elif job.stage is Stage.RUNNING:
                self._counts["cancelled"] += 1

    def _end(self, job: Job, name: str, event: Event | None) -> None:
        """A job that waited ends; counted as `name`."""
        job.stage = Stage.ENDED
        self._counts[name] += 1
        if job.retrieving is not None:
            job.retrieving.cancel()
        if job.prefetch is not None and self._prefetcher is not None:
            self._prefetcher.drop(job.prefetch)
        if event is not None:
            job.deliver(event)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what is so now; see `Backend.stats`."""
        with self._changed:
            names = ("answered", "failed", "cancelled", "refused")
            return {
                "waiting": len(self._turns) + len(self._retrieving),
                "running": len(self._running),
                **{name: self._counts[name] for name in names},
                **self._pace.stats(),
            }

    def close(self) -> None:
        """Stop: what waits gets `Failed`, what runs stops at its next token; wait for the end."""
        with self._changed:
            self.is_closed = True
            for job in [*self._turns.drain(), *self._retrieving]:
                job.cancelled.set()
                self._end(job, "failed", _shut_down())
            self._retrieving.clear()
            for job in self._running:
                if not job.cancelled.is_set():
                    job.cancelled.set()
                    job.deliver(_shut_down())
            thread = self._thread
            self._changed.notify_all()
        self._retrievals.close()
        if thread is not None:
            thread.join()
        elif not self.warmed.done():
            self.warmed.set_result(False)

    def _work(self) -> None:
        try:
            self._server.warm_up()
            self.warmed.set_result(True)
        except Exception:
            _LOG.exception("the model could not generate a first token")
            self.warmed.set_result(False)
        while jobs := self._next():
            try:
                self._serve(jobs)
            except Exception as error:  # a fault of our own must not end the thread
                for job in jobs:
                    job.deliver(failure(error, f"request {job.work.id}"))
            with self._changed:
                for job in jobs:
                    job.stage = Stage.ENDED
                self._running = []

    def _next(self) -> list[Job]:
        """Whose turn it is now, waiting for somebody; nobody at the end."""
        with self._changed:
            while not self.is_closed:
                head = self._turns.head()
                if head is None:
                    self._changed.wait()
                    continue
                jobs = self._together(head)
                self._turns.take(jobs)
                self._pace.taken += len(jobs)
                for job in jobs:
                    job.stage = Stage.RUNNING
                self._running = jobs
                return jobs
        return []

    def _together(self, head: Job) -> list[Job]:
        """The head, and who is answered in one batch with it."""
        fellows = self._turns.fellows(head, partial(_are_alike, head), self._pace.most - 1)
        alike = [head, *fellows]
        behind = len(self._turns) - len(alike)
        return alike[: self._pace.size(head.work, len(alike), behind)]

    def _serve(self, jobs: list[Job]) -> None:
        now, server = time.monotonic(), self._server
        begun = [
            Started(now - job.arrived, job.sources, self._turn(job), len(jobs), server.replica)
            for job in jobs
        ]
        is_single = len(jobs) == 1
        served = server.one(jobs[0], begun[0]) if is_single else server.together(jobs, begun)
        with self._changed:
            self._note(jobs, served)

    def _turn(self, job: Job) -> bool:
        if job.prefetch is None or self._prefetcher is None:
            return False
        return self._prefetcher.turn(job.prefetch)

    def _note(self, jobs: list[Job], served: Served) -> None:
        wanted = sum(not job.cancelled.is_set() for job in jobs)
        self._counts["answered"] += served.count
        self._counts["failed"] += max(0, wanted - served.count)
        self._pace.note(jobs[0].work, len(jobs), served)


def _are_alike(head: Job, other: Job) -> bool:
    return is_alike(head.work, other.work)


def _shut_down() -> Failed:
    return Failed(NOT_READY, SERVER_ERROR, "the server shuts down; repeat the request later", 1.0)
