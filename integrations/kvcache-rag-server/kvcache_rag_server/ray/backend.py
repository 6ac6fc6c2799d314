"""A backend over the replicas of a Ray Serve deployment.

A request is handed at once to the replica with the shortest queue (Serve's power of two choices)
and waits there, where batches are formed and chunks prefetched.  When a replica dies, requests of
which no text had come are handed to another one, once: a request may be what ended the replica, and
should not end them all.  A stream that had begun ends with 503, to be repeated.

No exception of Ray reaches a client: its text holds tracebacks, addresses and paths.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import KVCacheRagError
from kvcache_rag_server.backend import Dequeued, Failed, Finished, OwnPolicy, Started
from kvcache_rag_server.errors import (
    REPLICA_FAULT,
    REPLICAS_OVERDUE,
    SHUT_DOWN,
    ApiError,
    NoReplicaError,
    ReplicaLostError,
    ReplicasFullError,
    failure,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from kvcache_rag.verdict import Identity
    from kvcache_rag_server.backend import (
        BackendRequest,
        Event,
        Prefilled,
        RetrievedText,
        Retriever,
    )

LOG = logging.getLogger(__name__)

NEVER: Final = float("-inf")

ATTEMPTS: Final = 2
"""Replicas that a request is handed to, one after the other, before it is given up."""

PATIENCE: Final = 60.0
"""Seconds that requests wait for any replica to run before they fail."""

LOOK: Final = 5.0
"""Seconds of silence after which is looked whether a replica runs at all."""

STATS_WAIT: Final = 5.0
"""Seconds that a replica has to give its counters, and the cluster to say which replicas run."""

RETRIEVALS: Final = 16
"""Requests for which documents are retrieved at a time: they wait for a database."""

RETRIEVAL_WAIT: Final = 30.0
"""Seconds that a request waits for its documents."""

AT_ONCE: Final = 4
"""Requests that a generator is given at a time; it computes one after the other."""


class RayBackend:
    """Answers requests by the replicas of one deployment; a `Backend`."""

    def __init__(
        self,
        handle: Any,
        *,
        name: str,
        replicas: int,
        running: Callable[[], int],
        ahead: RemotePrefetcher | None = None,
        retriever: Retriever | None = None,
        patience: float = PATIENCE,
        look: float = LOOK,
        retrieval: float = RETRIEVAL_WAIT,
    ) -> None:
        """Use a deployment of `Replica` that runs.

        Args:
            handle: Its handle.
            name: Of the model, in requests and answers.
            replicas: How many there are when all is well.
            running: How many are running now; called in threads.
            ahead: Hands waiting requests to a generator; None for none.
            retriever: Finds documents, in threads of this process; None for none.
            patience: Seconds that requests wait when no replica runs.
            look: Seconds of silence after which is looked whether one runs.
            retrieval: Seconds that a request waits for its documents.
        """
        self._handle, self._stream = handle, handle.options(stream=True)
        self._name, self._replicas = name, replicas
        self._running = Running(running, STATS_WAIT)
        self._retrievals = Blocking("kvcache-rag-retrieve", RETRIEVALS, retrieval)
        self._ahead, self._retriever = ahead, retriever
        self._patience, self._look = patience, look
        self._counts: Counter[str] = Counter(handed_on=0, lost=0)
        self._was_ready = self._closed = False
        self._window: int | None = None
        self._own_policy: OwnPolicy | None = None
        self._draining = asyncio.Event()

    async def answer(self, work: BackendRequest) -> AsyncGenerator[Event, None]:
        """Answer a request by one replica, or by another if that dies before it begins."""
        arrived = time.monotonic()
        try:
            work, sources = await self._retrieved(work)
        except asyncio.TimeoutError:
            LOG.warning("the documents of request %s did not come in time", work.id)
            yield REPLICAS_OVERDUE
            return
        except Exception as error:
            yield failed_of(error)
            return
        watched = self._ahead.watch(work) if self._ahead is not None else None
        try:
            async with aclosing(self._handed(work, arrived)) as events:
                async for event in events:
                    if watched is not None:
                        watched.stop()  # with the turn at the latest nothing is ahead any more
                    if isinstance(event, Dequeued):
                        continue
                    if isinstance(event, Started):
                        ahead = watched is not None and watched.is_prefetched
                        yield replace(
                            event,
                            sources=sources or event.sources,
                            prefetched=ahead or event.prefetched,
                        )
                    else:
                        yield event
        finally:
            if watched is not None:
                watched.stop()

    async def count(self, work: BackendRequest) -> int:
        """Tokens of the request's prompt, by any replica."""
        return int(await self._ask("count", work))

    async def explain(self, work: BackendRequest) -> Mapping[str, Any]:
        """Spans of the request's prompt, by any replica."""
        explained: Mapping[str, Any] = await self._ask("explain", work)
        return explained

    async def prefill(self, work: BackendRequest) -> Prefilled:
        """Have chunks computed by any replica; all of them share the store."""
        prefilled: Prefilled = await self._ask("prefill", work)
        return prefilled

    async def ready(self) -> bool:
        """Whether requests would be answered: at first by all replicas, later by one at least.

        While a replica that died is loaded anew, the others answer.
        """
        if self._closed:
            return False
        running = await self._running.count()
        self._was_ready |= running >= self._replicas
        return self._was_ready and running > 0

    async def stats(self) -> Mapping[str, Any]:
        """Counters of every replica that answers in time, and of what was handed on or lost."""
        try:
            response = self._handle.broadcast("stats")
            found = await response.results_async(timeout_s=STATS_WAIT, return_exceptions=True)
        except Exception as error:  # between the death of the last replica and the next one
            if not (is_lost(error) or isinstance(error, TimeoutError)):
                raise raised_of(error) from None
            found = []
        replicas = [dict(one) for one in found if isinstance(one, Mapping)]
        if self._ahead is not None:
            replicas.append({"replica": "generator", "prefetch": dict(self._ahead.counts)})
        return {"replicas": replicas, **self._counts}

    async def models(self) -> Mapping[str, int | None]:
        """The one name under which the model is asked for."""
        if self._window is None:
            with suppress(Exception):  # between the death of the last replica and the next one
                response = self._handle.context_window.remote()
                self._window = int(await asyncio.wait_for(_value(response), STATS_WAIT))
        return {self._name: self._window}

    async def identity(self) -> Identity:
        """That of any replica; all of them load the same."""
        try:
            response = self._handle.identity.remote()
            found: Identity = await asyncio.wait_for(_value(response), STATS_WAIT)
        except Exception as error:  # between the death of the last replica and the next one
            LOG.warning("no replica says what it is: %s", type(error).__name__)
            raise ApiError.of(REPLICA_FAULT) from None
        return found

    async def own_policy(self) -> OwnPolicy:
        """That of any replica; all of them load the same."""
        if self._own_policy is None:
            with suppress(Exception):  # between the death of the last replica and the next one
                response = self._handle.own_policy.remote()
                self._own_policy = await asyncio.wait_for(_value(response), STATS_WAIT)
        return self._own_policy or OwnPolicy()

    async def drain(self) -> None:
        """Have every replica refuse what waits there; a replica that does not answer has died."""
        self._closed = True
        self._draining.set()
        try:
            response = self._handle.broadcast("drain")
            await response.results_async(timeout_s=STATS_WAIT, return_exceptions=True)
        except Exception as error:
            LOG.warning("the replicas could not be told to drain: %s", type(error).__name__)

    async def close(self) -> None:
        """Take no more requests; whoever started the replicas ends them."""
        self._closed = True

    async def _retrieved(
        self, work: BackendRequest
    ) -> tuple[BackendRequest, tuple[RetrievedText, ...]]:
        """The work with what was found for its query, before it is queued."""
        if not work.query or self._retriever is None:
            return work, ()
        found: list[RetrievedText] = await self._unless_draining(
            self._retrievals.call(self._retriever.retrieve, work.query, work.top_k, work.namespace)
        )
        chunks, scores = work.over(found)
        return replace(work, query="", top_k=0, chunks=chunks, scores=scores), tuple(found)

    async def _unless_draining(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What a call gives, unless the server is told to end meanwhile.

        Raises:
            ApiError: If it is.
        """
        tasks = asyncio.create_task(call), asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ApiError.of(SHUT_DOWN)
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()

    async def _handed(
        self, work: BackendRequest, arrived: float
    ) -> AsyncGenerator[Event | Dequeued, None]:
        """Events of the first replica that begins with the work."""
        for attempt in range(1, ATTEMPTS + 1):
            if self._closed:
                yield SHUT_DOWN
                return
            before, has_begun = time.monotonic() - arrived, False
            try:
                async with aclosing(self._events(work)) as events:
                    async for event in events:
                        if isinstance(event, Started):
                            has_begun = True
                            yield replace(event, queue_wait=before + event.queue_wait)
                        else:
                            yield event
                return
            except Exception as error:
                again = is_lost(error) and not isinstance(error, NoReplicaError)
                if has_begun or not again or attempt == ATTEMPTS:
                    self._counts["lost"] += is_lost(error)
                    yield failed_of(error)
                    return
            self._counts["handed_on"] += 1

    async def _events(self, work: BackendRequest) -> AsyncGenerator[Event | Dequeued, None]:
        """Events of one replica; closing this takes the request back there."""
        response, is_over = self._stream.answer.remote(work), False
        try:
            while not is_over:
                event = await self._patiently(_next(response))
                is_over = isinstance(event, Finished | Failed)
                yield event
        finally:
            if not is_over:
                response.cancel()

    async def _patiently(self, step: Any) -> Any:
        """Await what a replica gives, as long as one runs.

        In a task of its own, so that a cancellation by Ray (its task was cancelled with the
        replica) can be told from one by our caller.

        Raises:
            NoReplicaError: If none runs.
            ReplicaLostError: If Ray cancelled it.
        """
        task, without = asyncio.ensure_future(step), 0.0
        task.add_done_callback(_retrieve)
        try:
            while not (await asyncio.wait({task}, timeout=self._look))[0]:
                is_any = await self._running.count(self._look) > 0
                without = 0.0 if is_any else without + self._look
                if without >= self._patience:
                    raise NoReplicaError
        finally:
            task.cancel()
        if task.cancelled():
            raise ReplicaLostError
        return task.result()

    async def _ask(self, method: str, work: BackendRequest) -> Any:
        """A value from any replica; from another one if that dies."""
        for attempt in range(1, ATTEMPTS + 1):
            if self._closed:
                break
            response = getattr(self._handle, method).remote(work)
            try:
                return await self._patiently(_value(response))
            except asyncio.CancelledError:
                response.cancel()
                raise
            except Exception as error:
                if attempt == ATTEMPTS or not is_lost(error):
                    raise raised_of(error) from None
        raise ApiError.of(SHUT_DOWN)


async def _next(response: Any) -> Event | Dequeued:
    """The next event of a streaming call."""
    event: Event | Dequeued
    async for event in response:
        return event
    raise ReplicaLostError  # it ended without an answer


async def _value(response: Any) -> Any:
    return await response


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take note of how a call ended that was taken back, lest asyncio complains."""
    if not task.cancelled():
        task.exception()


class Blocking:
    """Makes calls that may hang, of a database or of the cluster, in daemon threads of its own.

    So many at a time.  One that hangs keeps its place until it ends; its caller waits no longer
    than `seconds`, and the process ends without it.

    Attributes:
        seconds: That a caller waits, for a place and for the result.
    """

    def __init__(self, name: str, at_once: int, seconds: float) -> None:
        """Start no thread yet.

        Args:
            name: Of the threads.
            at_once: Calls that may run at a time; others wait.
            seconds: See the attribute.
        """
        self.seconds = seconds
        self._name, self._places = name, asyncio.Semaphore(at_once)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns or raises.

        Raises:
            asyncio.TimeoutError: If it takes too long.
        """
        return await asyncio.wait_for(self._call(function, arguments), self.seconds)

    async def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def end(error: Exception | None, value: Any) -> None:
            self._places.release()
            if result.done():  # the caller has given up
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        def work() -> None:
            error, value = None, None
            try:
                value = function(*arguments)
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed, and its caller with it
                loop.call_soon_threadsafe(end, error, value)

        await self._places.acquire()
        threading.Thread(target=work, name=self._name, daemon=True).start()
        return await result


class Running:
    """How many replicas run; one question at a time, whoever wants to know."""

    def __init__(self, ask: Callable[[], int], seconds: float) -> None:
        """Ask nothing yet.

        Args:
            ask: Asks the cluster; called in threads, may hang and raise.
            seconds: That an answer is waited for.
        """
        self._ask, self._calls = ask, Blocking("kvcache-rag-status", 1, seconds)
        self._task: asyncio.Task[int] | None = None
        self._known, self._when = 0, NEVER

    async def count(self, age: float = 0.0) -> int:
        """The number, 0 if the cluster does not say.

        Args:
            age: Seconds for which an answer is believed.
        """
        if time.monotonic() - self._when < age:
            return self._known
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        return await asyncio.shield(self._task)  # others may wait for it too

    async def _look(self) -> int:
        try:
            self._known = int(await self._calls.call(self._ask))
        except Exception as error:
            LOG.warning("the cluster does not say which replicas run: %r", error)
            self._known = 0
        self._when = time.monotonic()
        return self._known


@dataclass(eq=False)
class RemotePrefetch:
    """What is computed elsewhere for a request that waits.

    Attributes:
        is_prefetched: Whether the generator has computed or loaded what it needs.
        task: What waits for the threshold, then for the generator.
    """

    is_prefetched: bool = False
    task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """It waits no longer: what was not computed ahead the replica computes itself."""
        if self.task is not None:
            self.task.cancel()


class RemotePrefetcher:
    """Hands requests that wait longer than a threshold to a generator, oldest first.

    The paper's configuration A (a device that only generates) and B (the CPU): one more process
    with the same model over the same store.  It computes each key once, as every process of a
    directory does (`ChunkStore.locked`), and the replica that answers finds it there.

    Attributes:
        counts: "started", "finished", "cancelled", "failed" since the start.
    """

    def __init__(self, generator: Any, after: float, at_once: int = AT_ONCE) -> None:
        """Watch for one backend.

        Args:
            generator: Handle of a deployment of `Replica`.
            after: Seconds that a work waits before it is handed on.
            at_once: Works that the generator is given at a time; others wait for a place, and give
                up as soon as they are answered.
        """
        self.counts: Counter[str] = Counter(started=0, finished=0, cancelled=0, failed=0)
        self._generator, self._after = generator, after
        self._places = asyncio.Semaphore(at_once)

    def watch(self, work: BackendRequest) -> RemotePrefetch:
        """Begin to watch a work that was queued now; call `stop` when it is begun or gone."""
        watched = RemotePrefetch()
        if work.chunks:
            watched.task = asyncio.create_task(self._prefetch(work, watched))
        return watched

    async def _prefetch(self, work: BackendRequest, watched: RemotePrefetch) -> None:
        await asyncio.sleep(self._after)
        async with self._places:
            self.counts["started"] += 1
            response = self._generator.prefetch.remote(work)
            try:
                is_prefetched = bool(await response)
            except asyncio.CancelledError:
                self.counts["cancelled"] += 1
                response.cancel()
                raise
            except Exception as error:  # the answer does not depend on it
                self.counts["failed"] += 1
                LOG.warning("a prefetch failed: %s", type(error).__name__)
                return
            self.counts["finished"] += 1
            watched.is_prefetched = is_prefetched


# ---------------------------------------------------------------------------- errors of Ray
def cause_of(error: BaseException) -> BaseException:
    """What a replica raised, without Ray's wrapping; of Ray's own errors, ours that says the same.

    Args:
        error: As it came from a handle.
    """
    from ray import exceptions
    from ray.serve.exceptions import (
        BackPressureError,
        DeploymentUnavailableError,
        ReplicaUnavailableError,
    )

    if isinstance(error, exceptions.RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, BaseException) and cause is not error:
            return cause_of(cause)
    gone = (
        DeploymentUnavailableError,
        ReplicaUnavailableError,
        exceptions.RayActorError,  # died, or cannot be reached
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,  # an event went with the process that held it
        exceptions.WorkerCrashedError,
        exceptions.TaskCancelledError,  # with the replica: nothing awaits what we cancel
        exceptions.RaySystemError,
    )
    if isinstance(error, gone):
        return ReplicaLostError(type(error).__name__)
    return ReplicasFullError() if isinstance(error, BackPressureError) else error


def is_lost(error: BaseException) -> bool:
    """Whether the replica, or the way to it, has gone; what it was asked is not to blame."""
    return isinstance(cause_of(error), ReplicaLostError)


def failed_of(error: BaseException) -> Failed:
    """One sentence for the client; what is no fault but ours is logged in full.

    Args:
        error: As it came from a handle.
    """
    cause = cause_of(error)
    if isinstance(cause, ReplicaLostError):
        LOG.warning("a request was lost: %s", cause)
    return failure(cause, "a replica", otherwise=REPLICA_FAULT)


def raised_of(error: BaseException) -> KVCacheRagError:
    """The same as an exception, for calls that answer with a value."""
    cause = cause_of(error)
    return cause if isinstance(cause, KVCacheRagError) else ApiError.of(failed_of(error))
