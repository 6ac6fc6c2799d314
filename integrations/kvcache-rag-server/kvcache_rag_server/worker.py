"""Answer jobs with the engines of this process, one by one or in one batch.

What a request asks means the same as in the integrations: with documents, only the engine's own
instruction can stand before the chunks; without any, it is an ordinary conversation.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.generation.request import retrieved_chunks
from kvcache_rag.prompt.conversation import instructed, rendered, said
from kvcache_rag_server.backend import Finished, Piece, Started
from kvcache_rag_server.errors import USERS, failure
from kvcache_rag_server.queue import Explained
from kvcache_rag_server.traces import continued

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.metrics import Answer
    from kvcache_rag_server.backend import BackendRequest, PromptWriter
    from kvcache_rag_server.prefetch import Engines
    from kvcache_rag_server.queue import Job

_LOG = logging.getLogger(__name__)

# Options that change nothing where nothing is sampled.
_OF_SAMPLING = frozenset({"temperature", "top_p", "top_k", "seed", "do_sample"})


def grounded(prompts: PromptWriter, work: BackendRequest) -> tuple[str, bool]:
    """The question of a request with documents, and whether its instruction was another one."""
    turns = [*(said("system", text) for text in work.system), said("user", work.question)]
    asked, is_foreign = instructed(turns, prompts.template.system)
    return asked[-1]["content"] if asked else work.question, is_foreign  # the engine refuses ""


def answered_from(engine: Engine, work: BackendRequest) -> tuple[str, ...]:
    """Chunks of a request that its policy would answer from, as far as it knows before reading."""
    policy = work.policy or engine.policy
    with suppress(InvalidInputError):  # which its answer will tell
        policy, _ = engine._bound.guard.gated(policy, has_chunks=bool(work.chunks))
    found = retrieved_chunks(work.question, work.chunks, work.scores)
    plan = policy.plan(found)
    is_all = plan.others is None  # in the order in which they were given
    return work.chunks if is_all else tuple(work.chunks[at] for at in plan.order)


def plain_prompt(prompts: PromptWriter, work: BackendRequest) -> str:
    """The text that `Engine.complete` continues: a prompt as it is, a conversation as written.

    Raises:
        InvalidInputError: If the tokenizer's chat template cannot write these messages.
    """
    if not work.is_chat:
        return work.question
    turns = [*(said(turn.role, turn.content) for turn in work.history), said("user", work.question)]
    return rendered(prompts.render_chat, turns)


def kind_of(work: BackendRequest) -> Hashable:
    """What requests have in common whose times are compared: form, policy, length of the answer."""
    return (work.is_plain or work.is_chat, work.policy, work.max_new_tokens.bit_length())


def can_share(work: BackendRequest) -> bool:
    """Whether a request may be answered in a batch: as a whole, without chance, over a context."""
    is_whole = not (work.streaming or work.is_plain or work.is_chat)
    return is_whole and not _is_sampled(work) and work.options.keys() <= _OF_SAMPLING


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
                answer = self._answered(job, begun)
        except Exception as error:  # whatever it is, the next job has to be answered
            if not job.cancelled.is_set():
                job.deliver(failure(error, f"request {job.work.id}"))
            return Served()
        seconds = time.perf_counter() - started
        if job.cancelled.is_set():
            return Served()
        job.deliver(Finished(answer))
        return Served(1, seconds, seconds - answer.metrics.load - answer.metrics.reading)

    def _answered(self, job: Job, begun: Started) -> Answer:
        work = job.work
        is_begun = False

        def emit(text: str) -> None:
            nonlocal is_begun
            if not is_begun:
                is_begun = True
                job.deliver(begun)
            job.deliver(Piece(text))

        engine = self.engines.for_namespace(work.namespace)
        options = _options(work)
        options.update(cancelled=job.cancelled, emit=emit if work.streaming else None)
        with _seeded(work, engine):
            if work.is_plain or work.is_chat:
                answer = engine.complete(plain_prompt(engine, work), **options)
            else:
                question, mismatch = grounded(engine, work)
                answer = engine.generate(
                    question,
                    job.inputs,
                    policy=work.policy,
                    history=work.history,
                    scores=work.scores,
                    asked=work.question,
                    prefix_mismatch=mismatch,
                    **options,
                )
        if not is_begun and not job.cancelled.is_set():
            job.deliver(begun)
        return answer

    def explain(self, job: Job) -> None:
        """Say what would become of a job's prompt; what goes wrong is raised."""
        work, engine = job.work, self.engines.for_namespace(job.work.namespace)
        explanation = engine.explain(
            grounded(engine, work)[0],
            work.chunks,
            policy=work.policy,
            history=work.history,
            scores=work.scores,
            asked=work.question,
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
                job.deliver(Finished(answer))
        load = sum(answer.metrics.load + answer.metrics.reading for answer in answers)
        return Served(sum(wanted), seconds, seconds - load if any(wanted) else None)

    def _batch(self, jobs: Sequence[Job], cancelled: AllCancelled) -> list[Answer]:
        work = jobs[0].work
        engine = self.engines.for_namespace(work.namespace)
        works = [(job.work, job.inputs) for job in jobs]
        asked = [
            (grounded(engine, one)[0], chunks, one.history, one.scores, one.question)
            for one, chunks in works
        ]
        return engine.generate_batch(
            asked,
            policy=work.policy,
            prefix_mismatch=grounded(engine, work)[1],
            cancelled=cancelled,
            **_options(work),
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


def _is_sampled(work: BackendRequest) -> bool:
    options = work.options
    return bool(options.get("do_sample", options.get("temperature")))


def _options(work: BackendRequest) -> dict[str, Any]:
    left_out = {"seed"} if _is_sampled(work) else _OF_SAMPLING
    options = {name: value for name, value in work.options.items() if name not in left_out}
    return {**options, "max_new_tokens": work.max_new_tokens, "stop": work.stop}


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
