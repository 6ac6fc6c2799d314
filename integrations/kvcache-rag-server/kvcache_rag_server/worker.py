"""Answer jobs with the engines of this process, one by one or in one batch."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvcache_rag_server.backend import Finished
from kvcache_rag_server.calls import (
    OF_SAMPLING,
    EngineCall,
    cited,
    engine_options,
    grounded,
    is_sampled,
    split,
)
from kvcache_rag_server.errors import USERS, failure
from kvcache_rag_server.queue import Explained
from kvcache_rag_server.traces import continued

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.metrics import Answer
    from kvcache_rag_server.backend import BackendRequest, Piece, Started
    from kvcache_rag_server.prefetch import Engines
    from kvcache_rag_server.queue import Job

_LOG = logging.getLogger(__name__)


def kind_of(work: BackendRequest) -> Hashable:
    """What requests have in common whose times are compared: form, policy, length of the answer."""
    return (work.is_plain or work.is_chat, work.policy, work.max_new_tokens.bit_length())


def can_share(work: BackendRequest) -> bool:
    """Whether a request may be answered in a batch: as a whole, without chance, over a context."""
    is_whole = not (work.streaming or work.is_plain or work.is_chat)
    is_greedy = not is_sampled(work) and work.options.keys() <= OF_SAMPLING
    return is_whole and is_greedy and work.is_simple


def is_alike(work: BackendRequest, other: BackendRequest) -> bool:
    """Whether two requests of one tenant may be answered in one batch."""
    return (
        can_share(work)
        and can_share(other)
        and (work.policy, work.max_new_tokens, work.stop, work.system)
        == (other.policy, other.max_new_tokens, other.stop, other.system)
    )


@dataclass(frozen=True)
class Served:
    """What answering took.

    Attributes:
        count: Answers given to who still wanted them.
        seconds: Wall time of all together.
        generating: The part of it that depends on batching: without loading or prefilling chunks.
            None if nothing can be learned from it.
        is_too_large: Whether a batch failed that should not be tried again.
    """

    count: int = 0
    seconds: float = 0.0
    generating: float | None = None
    is_too_large: bool = False


class JobRunner:
    """Runs jobs on the model; called by one thread.

    Attributes:
        engines: Of the tenants.
    """

    def __init__(self, engines: Engines) -> None:
        self.engines = engines

    def warm_up(self) -> bool:
        """Let the model generate one token; whether it can, the log says why not."""
        try:
            self.engines.base.complete("a", max_new_tokens=1)
        except Exception:
            _LOG.exception("the model could not generate a first token")
            return False
        return True

    def one(self, job: Job, begun: Started) -> Served:
        """Answer one job; what goes wrong is told to its client.

        Args:
            job: Whose events are delivered.
            begun: Its `Started`, delivered before its first text.
        """
        started = time.perf_counter()
        try:
            with continued(_traces([job], [begun])):
                finished = self._answered(job, begun)
        except Exception as error:  # whatever it is, the next job has to be answered
            if not job.cancelled.is_set():
                job.deliver(failure(error, f"request {job.work.id}"))
            return Served()
        seconds = time.perf_counter() - started
        if job.cancelled.is_set():
            return Served()
        job.deliver(finished)
        metrics = finished.answer.metrics
        return Served(1, seconds, seconds - metrics.load - metrics.reading)

    def _answered(self, job: Job, begun: Started) -> Finished:
        work = job.work
        is_begun = False

        def emit(piece: Piece) -> None:
            nonlocal is_begun
            if not is_begun:
                is_begun = True
                job.deliver(begun)
            job.deliver(piece)

        engine = self.engines.for_namespace(work.namespace)
        with _seeded(work, engine):
            call = EngineCall.of(engine, work)
            sends = emit if work.streaming else None
            first, *others = call.answers(job.inputs, sends, job.cancelled)
        if not is_begun and not job.cancelled.is_set():
            job.deliver(begun)
        return replace(first, others=tuple(others))

    def explain(self, job: Job) -> None:
        """Say what would become of a job's prompt; what goes wrong is raised."""
        work, engine = job.work, self.engines.for_namespace(job.work.namespace)
        question, history = split(grounded(engine, work)[0])
        explanation = engine.explain(
            question,
            work.chunks,
            policy=work.policy,
            history=history,
            scores=work.scores,
            asked=work.asked,
        )
        job.deliver(Explained(explanation.to_dict()))

    def together(self, jobs: Sequence[Job], begun: Sequence[Started]) -> Served:
        """Answer jobs that are alike in one batch; one by one if it fails, so that each knows why.

        Args:
            jobs: Of one tenant.
            begun: The `Started` of each.
        """
        started = time.perf_counter()
        event = AllCancelled([job.cancelled for job in jobs])
        try:
            with continued(_traces(jobs, begun)):
                answers = self._batch(jobs, event)
        except Exception as error:  # of one of them, or out of memory for all
            is_ours = not isinstance(error, USERS)
            if is_ours:
                _LOG.warning("a batch of %d failed; its requests are answered singly", len(jobs))
            alone = [
                self.one(job, replace(first, batch=1))
                for job, first in zip(jobs, begun, strict=True)
            ]
            count, seconds = (
                sum(getattr(served, n) for served in alone) for n in ("count", "seconds")
            )
            return Served(count, seconds, is_too_large=is_ours)
        seconds = time.perf_counter() - started
        wanted = [not job.cancelled.is_set() for job in jobs]
        for job, first, answer, is_wanted in zip(jobs, begun, answers, wanted, strict=True):
            if is_wanted:
                job.deliver(first)
                job.deliver(Finished(cited(job.work, answer)))
        load = sum(answer.metrics.load + answer.metrics.reading for answer in answers)
        return Served(sum(wanted), seconds, seconds - load if any(wanted) else None)

    def _batch(self, jobs: Sequence[Job], cancelled: AllCancelled) -> list[Answer]:
        work = jobs[0].work
        engine = self.engines.for_namespace(work.namespace)
        works = [(job.work, job.inputs) for job in jobs]
        asked = []
        for one, chunks in works:
            question, history = split(grounded(engine, one)[0])
            asked.append((question, chunks, history, one.scores, one.asked))
        return engine.generate_batch(
            asked,
            policy=work.policy,
            prefix_mismatch=grounded(engine, work)[1],
            cancelled=cancelled,
            **engine_options(work),
        )


def _traces(jobs: Sequence[Job], begun: Sequence[Started]) -> list[tuple[Mapping[str, str], float]]:
    return [(job.work.trace, one.queue_wait) for job, one in zip(jobs, begun, strict=True)]


class AllCancelled(threading.Event):
    """Set when all of several events are: a batch goes on while anybody wants an answer."""

    def __init__(self, events: Sequence[threading.Event]) -> None:
        super().__init__()
        self._events = tuple(events)

    def is_set(self) -> bool:
        """Whether all are set."""
        return all(event.is_set() for event in self._events)


@contextmanager
def _seeded(work: BackendRequest, engine: Engine) -> Iterator[None]:
    """Chance from the request's seed, if it has one; afterwards as if nothing had been drawn."""
    seed = work.options.get("seed")
    if seed is None:
        yield
        return
    device = engine.model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield
