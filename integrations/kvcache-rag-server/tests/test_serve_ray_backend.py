"""A backend over handles, without Ray's processes: which replica answers, and what a loss becomes.

`integrations/kvcache-rag-server/tests/test_serve_ray.py` runs the same over real replicas.
"""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
import sys
import threading
import warnings
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from contracts_backend import MAX_WAITING, BackendContract
from serve_works import reader, serve_threads

from kvcache_rag import Answer, Metrics
from kvcache_rag.errors import CorruptChunkError, InvalidInputError, KVCacheRagError
from kvcache_rag_server.backend import (
    BackendRequest,
    Dequeued,
    Event,
    Failed,
    Finished,
    OwnPolicy,
    Piece,
    RetrievedText,
    Started,
)
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.ray.backend import (
    RETRIEVALS,
    RayBackend,
    RemotePrefetcher,
    failed_of,
    raised_of,
)
from kvcache_rag_server.ray.launch import Shares, _reason
from kvcache_rag_server.ray.replica import Replica
from kvcache_rag_server.ray_session import _SETTINGS, _environment, _import
from kvcache_rag_server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvcache_rag_server.backend import Backend

WORK = BackendRequest("w", "Who?", ("A text.",))
DONE = Finished(Answer("Ada", Metrics()))
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def ray() -> Any:
    """Ray's exceptions; imported as `ray_session` does, which a later test may want to start."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the extra ray is not installed")
    with _environment(_SETTINGS, ()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray about itself
        found = sys.modules.get("ray") or _import(needs_token=True)
        importlib.import_module("ray.serve")
    return found


@pytest.fixture(autouse=True)
def _with_ray(ray: Any) -> None:
    """Every test here needs it."""


class Response:
    """A call of a handle: gives its script, step by step."""

    def __init__(self, script: list[Any]) -> None:
        self.script, self.cancelled = list(script), False

    def __aiter__(self) -> Response:
        return self

    async def __anext__(self) -> Any:
        if not self.script:
            raise StopAsyncIteration
        step = self.script.pop(0)
        if isinstance(step, asyncio.Event):
            await step.wait()
            return await self.__anext__()
        if isinstance(step, BaseException):
            raise step
        return step

    def __await__(self) -> Any:
        return self.__anext__().__await__()

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s > 0
        assert return_exceptions
        return list(await self.__anext__())

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A handle of a deployment whose calls follow scripts, one after the other."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.responses: list[Response] = []
        self.works: list[BackendRequest] = []

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in (
            "answer",
            "context_window",
            "count",
            "explain",
            "identity",
            "own_policy",
            "prefetch",
            "prefill",
        ):
            raise AttributeError(name)
        return self

    def remote(self, *works: BackendRequest) -> Response:
        self.works += works
        self.responses.append(Response(self.scripts.pop(0)))
        return self.responses[-1]

    def broadcast(self, method: str) -> Response:
        assert method in ("stats", "drain")
        return Response(self.scripts.pop(0))


def backend(handle: Handle, running: Callable[[], int] = lambda: 2, **options: Any) -> RayBackend:
    return RayBackend(handle, name="tiny", replicas=2, running=running, **options)


async def events(answers: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in answers]


def died(ray: Any) -> BaseException:
    error: BaseException = ray.exceptions.ActorDiedError()
    return error


def wrapped(ray: Any, cause: Exception) -> BaseException:
    """As it comes from a replica: Ray's class, with a traceback for a text."""
    error: BaseException = ray.exceptions.RayTaskError(
        "answer", "Traceback (most recent call last):\n  File secret.py", cause
    ).as_instanceof_cause()
    return error


class Call:
    """A call of a replica of this process: what it gives crosses as Ray lets it cross."""

    def __init__(self, ray: Any, name: str, given: Any) -> None:
        self._ray, self._name = ray, name
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self.task = asyncio.create_task(self._run(given))

    async def _run(self, given: Any) -> None:
        try:
            if self._name == "answer":
                async with aclosing(given) as items:
                    async for item in items:
                        self._items.put_nowait(pickle.loads(pickle.dumps(item)))
            else:
                self._items.put_nowait(pickle.loads(pickle.dumps(await given)))
            self._items.put_nowait(StopAsyncIteration())
        except asyncio.CancelledError:
            self._items.put_nowait(self._ray.exceptions.TaskCancelledError())
        except Exception as error:
            self._items.put_nowait(wrapped(self._ray, error))

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def __await__(self) -> Any:
        return self.__anext__().__await__()

    def cancel(self) -> None:
        self.task.cancel()


class OneReplica:
    """A handle of a deployment of one replica, which runs in this process."""

    def __init__(self, ray: Any, replica: Replica) -> None:
        self.replica = replica
        self._ray, self._calls = ray, list[Call]()

    def options(self, *, stream: bool) -> OneReplica:
        assert stream
        return self

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *works: self._call(name, works))

    def _call(self, name: str, works: tuple[BackendRequest, ...]) -> Call:
        given = getattr(self.replica, name)(*pickle.loads(pickle.dumps(works)))
        self._calls.append(Call(self._ray, name, given))
        return self._calls[-1]

    def broadcast(self, method: str) -> Any:
        async def results(*, timeout_s: float, return_exceptions: bool) -> list[Any]:
            return [await asyncio.wait_for(getattr(self.replica, method)(), timeout_s)]

        return SimpleNamespace(results_async=results)

    async def end(self) -> None:
        """End the process, with all that it was asked."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*(call.task for call in self._calls))
        await self.replica._backend.close()


class TestRayBackend(BackendContract):
    """The contract, over a replica that is reached as Ray reaches it."""

    @pytest.fixture(autouse=True)
    def _cluster(self, ray: Any) -> None:
        def make(settings: ServerSettings) -> LocalBackend:
            return LocalBackend(reader(), max_waiting=MAX_WAITING)

        self.handle = OneReplica(ray, Replica(ServerSettings("tiny"), make, 0))

    def open(self) -> RayBackend:
        return RayBackend(self.handle, name="reader", replicas=1, running=lambda: 1)

    async def end(self, backend: Backend) -> None:
        await backend.close()
        await self.handle.end()
        assert not serve_threads()


async def test_the_policy_of_the_replicas_is_asked_for_until_one_says_it(ray: Any) -> None:
    own = OwnPolicy("bestlast", {"reuse": "It costs."})
    asked = backend(Handle([died(ray)], [own]))
    assert await asked.own_policy() == OwnPolicy()
    assert await asked.own_policy() == await asked.own_policy() == own


async def test_the_events_of_a_replica_are_passed_on() -> None:
    handle = Handle([Started(0.5, replica="a"), Piece("A"), Piece("da"), DONE])
    started, *rest = await events(backend(handle).answer(WORK))
    assert isinstance(started, Started)
    assert started.queue_wait >= 0.5
    assert started.replica == "a"
    assert rest == [Piece("A"), Piece("da"), DONE]
    assert handle.works == [WORK]
    assert not handle.responses[0].cancelled


async def test_what_a_dead_replica_had_not_begun_is_answered_by_another(ray: Any) -> None:
    handle = Handle([died(ray)], [Started(0.0), DONE])
    subject = backend(handle)
    assert [type(event) for event in await events(subject.answer(WORK))] == [Started, Finished]
    handle.scripts.append([[]])
    assert (await subject.stats())["handed_on"] == 1


async def test_what_a_dead_replica_had_begun_is_a_clean_503(ray: Any) -> None:
    handle = Handle([Started(0.0), Piece("A"), died(ray)], [Started(0.0), DONE])
    subject = backend(handle)
    *_, last = await events(subject.answer(WORK))
    assert isinstance(last, Failed)
    assert (last.status, last.kind, last.retry_after) == (503, "overloaded", 1.0)
    assert last.message == "the replica that was answering has ended; repeat the request"
    assert handle.scripts, "it was handed on"
    assert isinstance((await events(subject.answer(WORK)))[-1], Finished), "repeated, it succeeds"


async def test_a_work_that_ends_every_replica_is_given_up(ray: Any) -> None:
    handle = Handle(*[[died(ray)] for _ in range(9)])
    (failed,) = await events(backend(handle).answer(WORK))
    assert isinstance(failed, Failed)
    assert failed.status == 503
    assert len(handle.works) == 2


async def test_a_cancellation_by_the_end_of_a_replica_is_a_loss_not_a_cancellation() -> None:
    handle = Handle([Started(0.0), asyncio.CancelledError()])
    *_, last = await events(backend(handle).answer(WORK))
    assert isinstance(last, Failed)
    assert last.status == 503


async def test_closing_the_answer_takes_the_request_back() -> None:
    handle = Handle([Started(0.0), Piece("A"), asyncio.Event()])
    async with aclosing(backend(handle).answer(WORK)) as answers:
        assert isinstance(await anext(answers), Started)
        assert not handle.responses[0].cancelled
    assert handle.responses[0].cancelled


async def test_cancelling_the_reader_takes_a_waiting_request_back() -> None:
    handle = Handle([asyncio.Event()])
    task = asyncio.create_task(events(backend(handle).answer(WORK)))
    while not handle.responses:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The generator is closed by the task's end, its finally runs in the loop.
    while not handle.responses[0].cancelled:
        await asyncio.sleep(0)


async def test_without_any_replica_a_request_fails_after_some_patience() -> None:
    handle = Handle([asyncio.Event()])
    subject = backend(handle, lambda: 0, patience=0.05, look=0.01)
    (failed,) = await events(subject.answer(WORK))
    assert failed == Failed(
        503, "overloaded", "no replica is running; repeat the request later", 10.0
    )
    assert handle.responses[0].cancelled
    assert len(handle.works) == 1


async def test_a_replica_that_computes_for_long_is_waited_for() -> None:
    looked = 0
    computed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def running() -> int:
        nonlocal looked
        looked += 1
        if looked == 5:
            loop.call_soon_threadsafe(computed.set)
        return 1

    handle = Handle([computed, Started(0.0), DONE])
    subject = backend(handle, running, patience=0.02, look=0.01)
    assert (await events(subject.answer(WORK)))[-1] == DONE
    assert looked >= 5


async def test_a_count_is_asked_of_another_replica_and_a_mistake_is_raised(ray: Any) -> None:
    assert await backend(Handle([died(ray)], [17])).count(WORK) == 17
    mistake = InvalidInputError("there is no policy 'x'")
    with pytest.raises(InvalidInputError, match=r"^there is no policy 'x'$"):
        await backend(Handle([wrapped(ray, mistake)])).explain(WORK)
    with pytest.raises(ApiError) as caught:
        await backend(Handle(*[[died(ray)]] * 2)).count(WORK)
    assert (caught.value.failed.status, caught.value.failed.retry_after) == (503, 1.0)


async def test_retrieval_happens_once_before_a_replica_is_chosen(ray: Any) -> None:
    asked: list[tuple[str, int, str]] = []

    class Retriever:
        def retrieve(self, query: str, top_k: int, namespace: str) -> list[RetrievedText]:
            asked.append((query, top_k, namespace))
            if query == "nothing":
                raise ApiError(404, "there are no documents in the collection", code="empty")
            return [
                RetrievedText("1", "One."),
                RetrievedText("0", "Zero."),
                RetrievedText("2", "Two."),
            ]

    handle = Handle([died(ray)], [Started(0.0), DONE])
    subject = backend(handle, retriever=Retriever())
    found = await events(subject.answer(BackendRequest("w", "Q?", ("Zero.",), query="q", top_k=2)))
    assert asked == [("q", 2, "")]
    assert isinstance(found[0], Started)
    assert [source.id for source in found[0].sources] == ["1", "0", "2"]
    assert [work.chunks for work in handle.works] == [("Zero.", "One.", "Two.")] * 2
    assert handle.works[0].query == ""
    (failed,) = await events(subject.answer(BackendRequest("w", "Q?", query="nothing", top_k=2)))
    assert failed == Failed(
        404, "invalid_request_error", "there are no documents in the collection", code="empty"
    )


@pytest.mark.parametrize(("scores", "known"), [((0.9, 0.5), (0.9, 0.5)), ((0.9, None), None)])
async def test_what_was_retrieved_is_handed_on_with_its_scores(scores: Any, known: Any) -> None:
    class Retriever:
        def retrieve(self, query: str, top_k: int, namespace: str) -> list[RetrievedText]:
            return [RetrievedText(str(at), f"{at}.", score) for at, score in enumerate(scores)]

    handle = Handle([Started(0.0), DONE])
    await events(
        backend(handle, retriever=Retriever()).answer(BackendRequest("w", "Q?", query="q"))
    )
    (work,) = handle.works
    assert (work.chunks, work.scores) == (("0.", "1."), known)


async def test_retrievals_that_hang_hold_up_nobody_else_and_fail_in_time() -> None:
    released = threading.Event()

    class Hanging:
        def retrieve(self, query: str, top_k: int, namespace: str) -> list[RetrievedText]:
            released.wait(60)
            return []

    subject = backend(Handle(), retriever=Hanging(), retrieval=0.2)
    try:
        asked = BackendRequest("w", "Q?", query="q", top_k=2)
        tasks = [asyncio.create_task(events(subject.answer(asked))) for _ in range(100)]
        await asyncio.sleep(0)
        assert await subject.ready()
        for (failed,) in await asyncio.gather(*tasks):
            assert isinstance(failed, Failed)
            assert (failed.status, failed.retry_after) == (503, 10.0)
        assert await subject.ready()
        hanging = [one for one in threading.enumerate() if one.name == "kvcache-rag-retrieve"]
        assert len(hanging) == RETRIEVALS
    finally:
        released.set()


async def test_requests_that_wait_look_together_whether_a_replica_runs() -> None:
    asked: list[float] = []
    computed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def running() -> int:
        asked.append(loop.time())
        if len(asked) == 3:
            loop.call_soon_threadsafe(computed.set)
        return 1

    handle = Handle(*[[computed, Started(0.0), DONE] for _ in range(50)])
    subject = backend(handle, running, look=0.2)
    found = await asyncio.gather(*(events(subject.answer(WORK)) for _ in range(50)))
    assert all(one[-1] == DONE for one in found)
    assert len(asked) < 10, "each of them asked by itself"


async def test_a_cluster_that_does_not_say_has_no_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcache_rag_server.ray.backend.STATS_WAIT", 0.05)
    released = threading.Event()
    subject = backend(Handle(), lambda: 2 if released.wait(60) else 0)
    assert not await subject.ready()
    released.set()
    while not await subject.ready():
        await asyncio.sleep(0)


async def test_what_waits_is_prefetched_by_the_generator_and_what_does_not_is_not() -> None:
    computed, generated = asyncio.Event(), asyncio.Event()
    generator = Handle([generated, True])
    ahead = RemotePrefetcher(generator, after=0.0)
    subject = backend(Handle([computed, Started(0.0), DONE]), ahead=ahead)
    task = asyncio.create_task(events(subject.answer(WORK)))
    while not generator.works:
        await asyncio.sleep(0)
    generated.set()
    while not ahead.counts["finished"]:
        await asyncio.sleep(0)
    computed.set()
    started = (await task)[0]
    assert isinstance(started, Started)
    assert started.prefetched
    quick = backend(Handle([Started(0.0), DONE]), ahead=RemotePrefetcher(generator, after=3600.0))
    started = (await events(quick.answer(WORK)))[0]
    assert isinstance(started, Started)
    assert not started.prefetched
    assert generator.works == [WORK]


async def test_what_is_prefetched_after_the_turn_came_too_late(ray: Any) -> None:
    turn, generated, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
    generator = Handle([generated, True])
    ahead = RemotePrefetcher(generator, after=0.0)
    handle = Handle([turn, Dequeued(), died(ray)], [Dequeued(), answered, Started(0.0), DONE])
    task = asyncio.create_task(events(backend(handle, ahead=ahead).answer(WORK)))
    while not generator.works:
        await asyncio.sleep(0)
    turn.set()
    while not generator.responses[0].cancelled:  # long before the first text
        await asyncio.sleep(0)
    generated.set()
    answered.set()
    started, *rest = await task
    assert isinstance(started, Started)
    assert not started.prefetched
    assert rest == [DONE], "the turn is not told, nor does it count as begun text"
    assert ahead.counts["cancelled"] == 1


async def test_a_prefetch_ends_when_the_request_begins_or_goes_and_its_failure_costs_nothing(
    ray: Any,
) -> None:
    never, begins = asyncio.Event(), asyncio.Event()
    generator = Handle([never], [died(ray)])
    ahead = RemotePrefetcher(generator, after=0.0, at_once=1)
    first = backend(Handle([begins, Started(0.0), DONE]), ahead=ahead)
    task = asyncio.create_task(events(first.answer(WORK)))
    while not generator.works:
        await asyncio.sleep(0)
    waiting = ahead.watch(WORK)  # the generator has one place
    await asyncio.sleep(0.01)
    assert len(generator.works) == 1
    begins.set()
    assert (await task)[-1] == DONE
    while not generator.responses[0].cancelled:
        await asyncio.sleep(0)
    while not ahead.counts["failed"]:  # now the other one has the place, and fails
        await asyncio.sleep(0)
    assert not waiting.is_prefetched
    assert dict(ahead.counts) == {"started": 2, "finished": 0, "cancelled": 1, "failed": 1}


async def test_it_is_ready_when_all_are_and_stays_so_while_one_is_left() -> None:
    running = 1
    subject = backend(Handle(), lambda: running)
    assert not await subject.ready()
    running = 2
    assert await subject.ready()
    running = 1
    assert await subject.ready()
    running = 0
    assert not await subject.ready()
    running = 2
    await subject.close()
    assert not await subject.ready()
    (failed,) = await events(subject.answer(WORK))
    assert isinstance(failed, Failed)
    assert failed.status == 503


async def test_counters_of_those_replicas_that_answer(ray: Any) -> None:
    handle = Handle([[{"replica": "a", "waiting": 1}, died(ray)]], [died(ray)], [ValueError("x")])
    subject = backend(handle, ahead=RemotePrefetcher(Handle(), after=1.0))
    first, generator = (await subject.stats())["replicas"]
    assert first == {"replica": "a", "waiting": 1}
    assert generator["prefetch"] == {"started": 0, "finished": 0, "cancelled": 0, "failed": 0}
    assert (await subject.stats())["replicas"] == [generator]
    with pytest.raises(ApiError):
        await subject.stats()
    assert await subject.models() == {"tiny": None}


def test_no_exception_of_ray_shows_through(ray: Any, caplog: Any) -> None:
    from ray.serve.exceptions import BackPressureError

    full = failed_of(BackPressureError(9, 8))
    assert (full.status, full.kind, full.retry_after) == (503, "overloaded", 1.0)
    unknown = failed_of(wrapped(ray, ZeroDivisionError("secret")))
    assert unknown == Failed(500, "server_error", "the server failed to answer; its log says why")
    assert "secret" in caplog.text, "an operator must be told"
    refused = failed_of(wrapped(ray, ApiError(429, "too much", kind="k", retry_after=2.0)))
    assert refused == Failed(429, "k", "too much", 2.0)
    assert failed_of(wrapped(ray, InvalidInputError("no"))).status == 400
    ours = failed_of(wrapped(ray, CorruptChunkError("/a/path is damaged")))
    assert (ours.status, "path" in ours.message) == (500, False)
    for error in (died(ray), BackPressureError(9, 8), wrapped(ray, ValueError("secret"))):
        raised = raised_of(error)
        assert isinstance(raised, KVCacheRagError)
        assert "\n" not in str(raised)
        assert "secret" not in str(raised)


def test_a_failed_start_is_told_by_what_the_replica_raised() -> None:
    told = "Deploying application x failed: ...\n  File y\nkvcache_rag.errors.InvalidInputError: "
    assert _reason(f"{told}no model 'z'; name a folder\n  more") == "no model 'z'; name a folder"
    assert _reason("Deploying failed:\n\n  out of luck\n") == (
        "the replicas did not start: out of luck"
    )


@pytest.mark.parametrize(
    ("options", "cores", "gpus", "expected"),
    [
        ({"replicas": 2}, 2, 0, Shares(1, 0.0, 0.0)),
        ({"replicas": 2}, 8, 0, Shares(4, 0.0, 0.0)),
        ({"replicas": 2, "prefetch": "cpu"}, 9, 0, Shares(3, 0.0, 0.0)),
        ({"replicas": 2}, 0, 0, Shares(0, 0.0, 0.0)),
        ({"replicas": 2}, 8, 4, Shares(8, 1.0, 0.0)),
        ({"replicas": 3}, 8, 1, Shares(8, 0.3333, 0.0)),
        ({"replicas": 3, "prefetch": "cuda:3"}, 8, 4, Shares(8, 1.0, 1.0)),
        ({"replicas": 2, "prefetch": "cpu"}, 8, 2, Shares(8, 1.0, 0.0)),
        ({"replicas": 2, "device": "cpu"}, 8, 2, Shares(4, 0.0, 0.0)),
    ],
)
def test_cores_and_gpus_are_shared_equally(
    options: dict[str, Any], cores: int, gpus: int, expected: Shares
) -> None:
    assert Shares.of(ServerSettings("tiny", **options), cores, gpus) == expected


# ------------------------------------------------------------------------------- the end
class Shelf:
    """A retriever that finds nothing until it is told to."""

    def __init__(self) -> None:
        self.is_asked, self.go_on = threading.Event(), threading.Event()

    def retrieve(self, query: str, top_k: int, namespace: str) -> list[RetrievedText]:
        self.is_asked.set()
        assert self.go_on.wait(60)
        return []


async def test_who_waits_for_documents_is_told_at_the_signal() -> None:
    shelf = Shelf()
    one = backend(Handle([[]]), retriever=shelf)
    waiting = asyncio.create_task(events(one.answer(replace(WORK, query="Who?", top_k=1))))
    await asyncio.to_thread(shelf.is_asked.wait, 60)
    await one.drain()
    (failed,) = await asyncio.wait_for(waiting, 10)
    shelf.go_on.set()
    assert isinstance(failed, Failed)
    assert (failed.status, failed.code) == (503, "shutting_down")


async def test_replicas_that_have_died_hold_up_no_end(
    ray: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one = backend(Handle([ray.exceptions.ActorDiedError()]))
    await one.drain()
    assert "could not be told to drain" in caplog.text
    (failed,) = await events(one.answer(WORK))
    assert isinstance(failed, Failed)
    assert failed.code == "shutting_down"
    assert not await one.ready()
