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

from kvcache_rag.serve.ending import close_at_exit
from kvcache_rag.serve.pace import Pace
from kvcache_rag.serve.queue_ahead import Ahead
from kvcache_rag.serve.queue_retrieving import Retrievals
from kvcache_rag.serve.queueing import Job, Stage, Turns, nothing
from kvcache_rag.serve.refusals import broken, overdue, overloaded, shut_down
from kvcache_rag.serve.serving import failure, is_alike, understood
from kvcache_rag.serve.work import Started

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvcache_rag.serve.prefetcher import Prefetcher
    from kvcache_rag.serve.serving import Served, Server
    from kvcache_rag.serve.work import Event, Failed, Retriever, Source, Work

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
        self._server, self._ahead = server, Ahead(prefetcher, prefetch_after)
        self._retrievals = Retrievals(retriever, self._retrieved)
        self._pace = Pace(max_batch)
        self._changed = threading.Condition()
        self._turns = Turns()
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
        work: Work,
        deliver: Callable[[Event], None],
        on_turn: Callable[[], None] = nothing,
        explained: Future[Mapping[str, Any]] | None = None,
    ) -> Job | None:
        """Let a request wait for its turn.

        Args:
            work: The request.
            deliver: Takes its events, from any thread, and never blocks.
            on_turn: Called when the model takes it, from any thread; never blocks.
            explained: Takes what would become of its prompt, in place of an answer.

        Returns:
            What to give to `cancel`; None if it was refused, which was delivered.
        """
        self.start()
        policy, mistake = understood(work)  # which takes its time, so without the lock
        with self._changed:
            self._counts["failed"] += mistake is not None
            refusal = mistake or self._refusal(work)
            if refusal is not None:
                deliver(refusal)
                return None
            now, number = time.monotonic(), next(self._numbers)
            job = Job(work, deliver, now, number, policy, explained, on_turn=on_turn)
            if work.query:
                self._retrievals.add(job)
            else:
                self._admit(job)
        return job

    def _refusal(self, work: Work) -> Failed | None:
        """Why a request cannot wait; whoever crowds the queue gives way to others."""
        if self.is_closed:
            return shut_down()
        refusal = self._retrievals.refusal(work)
        if refusal is not None or self._waiting < self.max_waiting:
            return refusal
        last = self._turns.crowding(work.namespace, self._retrievals.jobs())
        if last is None:
            self._counts["refused"] += 1
            return self._overloaded()
        self._leave(last)
        self._end(last, "refused", self._overloaded())
        return None

    @property
    def _waiting(self) -> int:
        return len(self._turns) + len(self._retrievals)

    def _overloaded(self) -> Failed:
        return overloaded(self._waiting, self._pace.retry_after(self._waiting))

    def _leave(self, job: Job) -> None:
        """A job waits no more, neither for its turn nor for documents."""
        self._turns.remove(job)
        self._retrievals.remove(job)

    def _retrieved(self, job: Job, found: Sequence[Source], failed: Failed | None) -> None:
        with self._changed:
            self._retrievals.ended(job)
            if job.stage is not Stage.WAITING:
                return
            job.sources = tuple(found)
            if failed is None:
                self._admit(job)
            else:
                self._end(job, "failed", failed)

    def give_up(self, job: Job) -> None:
        """End a job that still waits for documents, as it has waited long enough."""
        with self._changed:
            if job.stage is Stage.WAITING and job in self._retrievals:
                self._leave(job)
                self._end(job, "failed", overdue())

    def _admit(self, job: Job) -> None:
        self._turns.add(job)
        self._changed.notify_all()
        pace = self._pace
        self._ahead.begin(job, partial(pace.turn_in, self._turns.place(job), pace.taken))

    def cancel(self, job: Job) -> None:
        """Take a request back: it leaves the queue, or stops at its next token."""
        with self._changed:
            job.cancelled.set()
            if job.stage is Stage.WAITING:
                self._leave(job)
                self._end(job, "cancelled", None)
            elif job.stage is Stage.RUNNING:
                self._counts["cancelled"] += 1

    def _end(self, job: Job, name: str, event: Event | None) -> None:
        """A job that waited ends; counted as `name`."""
        job.stage = Stage.ENDED
        self._counts[name] += 1
        self._ahead.drop(job)
        if event is not None:
            job.deliver(event)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what is so now; see `Backend.stats`."""
        with self._changed:
            names = ("answered", "failed", "cancelled", "refused")
            return {
                "waiting": self._waiting,
                "running": len(self._running),
                **{name: self._counts[name] for name in names},
                **self._pace.stats(),
            }

    def close(self) -> None:
        """Stop: what waits gets `Failed`, what runs ends at its next token; wait for that one."""
        with self._changed:
            self._abandon(shut_down())
            thread = self._thread
            self._changed.notify_all()
        self._retrievals.join()
        if thread is not None:
            thread.join()
        elif not self.warmed.done():
            self.warmed.set_result(False)

    def _abandon(self, why: Failed) -> None:
        """Answer nobody any more."""
        self.is_closed = True
        for job in [*self._turns.drain(), *self._retrievals.drain()]:
            job.cancelled.set()
            self._end(job, "failed", why)
        for job in self._running:
            if not job.cancelled.is_set():
                job.cancelled.set()
                job.deliver(why)

    def _work(self) -> None:
        self.warmed.set_result(self._server.warm_up())
        try:
            while jobs := self._next():
                self._answer(jobs)
        except BaseException:  # whoever waits has to be told
            _LOG.exception("the thread that answers has ended")
            with self._changed:
                self._abandon(broken())

    def _answer(self, jobs: list[Job]) -> None:
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
        now, server, turn = time.monotonic(), self._server, self._ahead.turn
        if jobs[0].explained is not None:
            server.explain(jobs[0], jobs[0].explained)
            return
        begun = [
            Started(now - job.arrived, job.sources, turn(job), len(jobs), server.replica)
            for job in jobs
        ]
        for job in jobs:
            job.on_turn()
        is_single = len(jobs) == 1
        served = server.one(jobs[0], begun[0]) if is_single else server.together(jobs, begun)
        with self._changed:
            self._note(jobs, served)

    def _note(self, jobs: list[Job], served: Served) -> None:
        wanted = sum(not job.cancelled.is_set() for job in jobs)
        self._counts["answered"] += served.count
        self._counts["failed"] += max(0, wanted - served.count)
        self._pace.note(jobs[0].work, len(jobs), served)


def _are_alike(head: Job, other: Job) -> bool:
    return head.explained is other.explained is None and is_alike(head.work, other.work)
