"""What hangs, what floods and what breaks: nobody else waits for it, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import access
import pytest
from serve_fakes import chat, client, says_nothing, scripted
from serve_works import (
    PATIENCE,
    QUESTION,
    TEXTS,
    Desk,
    Inbox,
    Valve,
    answer_of,
    events_of,
    eventually,
    failure_of,
    make_work,
    reader,
)

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import ContextTooLongError
from kvcache_rag_server import limits
from kvcache_rag_server.backend import BackendRequest, Failed, Finished
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from kvcache_rag_server.queue import Job


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def scheduler(desk: Desk) -> Iterator[Scheduler]:
    server: Any = desk
    made = Scheduler(server, max_waiting=16)
    yield made
    desk.go.release(1000)
    made.close()


def submit(scheduler: Scheduler, **fields: Any) -> Inbox:
    inbox = Inbox()
    scheduler.submit(make_work(**fields), inbox)
    return inbox


# ------------------------------------------------------------------------------- the thread itself
def test_a_thread_that_dies_leaves_nobody_waiting(
    scheduler: Scheduler, desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.is_held = True
    submit(scheduler, number=0)
    assert desk.busy.wait(PATIENCE)
    waiting = submit(scheduler, number=1)

    def head() -> Job:
        raise MemoryError("no memory for a look at the queue")

    scheduler._queue.head = head  # type: ignore[method-assign]  # a fault is made
    desk.go.release()
    failed = waiting.last()
    assert isinstance(failed, Failed)
    assert failed.status == 500
    assert "no memory" in caplog.text
    assert "no memory" not in failed.message
    assert scheduler._thread is not None
    scheduler._thread.join(PATIENCE)
    assert not scheduler.is_alive
    assert isinstance(submit(scheduler, number=2).last(), Failed)


async def test_a_backend_whose_thread_has_died_is_not_ready() -> None:
    backend = LocalBackend(reader())
    assert await backend.ready()

    def head() -> Job:
        raise MemoryError

    scheduler = access.scheduler(backend)
    scheduler._queue.head = head  # type: ignore[method-assign]  # a fault is made
    assert failure_of(await events_of(backend, make_work())).status == 500
    assert not await backend.ready()
    await backend.close()


async def test_an_unknown_policy_does_not_wait() -> None:
    app, backend = scripted(says_nothing)
    async with client(app) as http:
        busy = asyncio.create_task(http.post("/v1/chat/completions", json=chat()))
        await eventually(backend.has_begun.is_set)
        body = chat(documents=[TEXTS[0]], kvcache={"policy": "cacheblnd"})
        reply = await http.post("/v1/chat/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "kvcache.policy")
        assert len(backend.works) == 1, "it is refused where it is read"
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)


# ----------------------------------------------------------------------------------- explanations
def explanation(scheduler: Scheduler, **fields: Any) -> tuple[Future[Mapping[str, Any]], Inbox]:
    explained: Future[Mapping[str, Any]] = Future()
    inbox = Inbox()
    scheduler.submit(make_work(**fields), inbox, explained=explained)
    return explained, inbox


def test_explanations_take_turns_with_answers(scheduler: Scheduler, desk: Desk) -> None:
    desk.is_held = True
    submit(scheduler, number=0, namespace="first")
    assert desk.busy.wait(PATIENCE)
    desk.answered.clear()
    found = [explanation(scheduler, number=n, namespace="evil")[0] for n in range(1, 9)]
    inbox = submit(scheduler, number=9, namespace="good")
    desk.is_held = False
    desk.go.release()
    assert isinstance(inbox.last(), Finished)
    assert all(one.result(PATIENCE) == {} for one in found)
    assert desk.answered.index(["work-9"]) == 1
    assert len(desk.answered) == 9, "one at a time"


def test_an_explanation_is_refused_like_an_answer(scheduler: Scheduler, desk: Desk) -> None:
    desk.is_held = True
    submit(scheduler, number=0, namespace="a")
    assert desk.busy.wait(PATIENCE)
    waiting = [explanation(scheduler, number=n, namespace="a") for n in range(1, 17)]
    _, inbox = explanation(scheduler, number=17, namespace="a")
    failed = inbox.last()
    assert isinstance(failed, Failed)
    assert failed.status == 503
    desk.is_held = False
    desk.go.release()
    assert all(one.result(PATIENCE) == {} for one, _ in waiting)


@pytest.fixture
async def backend() -> AsyncIterator[LocalBackend]:
    made = LocalBackend(reader(), max_waiting=4)
    await answer_of(made, make_work(0))  # its first token is over
    yield made
    await made.close()


async def test_explanations_can_be_taken_back_and_do_not_hold_up_the_end(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    valve = Valve(access.engines(backend).base.model, monkeypatch)
    valve.close()
    running = asyncio.create_task(events_of(backend, make_work(0)))
    await eventually(valve.held.is_set)
    tasks = [asyncio.create_task(backend.explain(make_work(n))) for n in range(1, 6)]
    await eventually(lambda: tasks[-1].done())
    with pytest.raises(ApiError) as refused:
        await tasks.pop()
    assert refused.value.failed.status == 503
    gone = tasks.pop()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert access.scheduler(backend).stats()["waiting"] == 3
    closing = asyncio.create_task(backend.close())
    for task in tasks:
        with pytest.raises(ApiError, match="shuts down"):
            await task
    valve.open.set()
    await closing
    await running


async def test_all_tenants_have_the_memory_of_one_prompt_explained_or_not(
    backend: LocalBackend,
) -> None:
    await answer_of(backend, make_work(0, namespace="a"))
    for tenant in ("a", "b", "c"):
        await backend.explain(make_work(1, namespace=tenant, policy="cacheblend:0.5"))
    engines = access.engines(backend)
    await eventually(lambda: access.scheduler(backend).stats()["running"] == 0)
    memory, *others = [access.runner(engines.of(name)).memory for name in "abc"]
    assert all(one is memory for one in others)
    assert len(memory._held) == 1


# ---------------------------------------------------------------------------- what cannot ever fit
async def test_what_cannot_fit_is_refused_while_the_model_is_busy(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    valve = Valve(access.engines(backend).base.model, monkeypatch)
    valve.close()
    running = asyncio.create_task(events_of(backend, make_work(0)))
    await eventually(valve.held.is_set)
    long = "the lamp " * 100_000
    for work in (
        make_work(1, question=long),
        make_work(1, chunks=(long,)),
        make_work(1, question=long, is_plain=True, chunks=()),
    ):
        failed = failure_of(await events_of(backend, work))
        assert (failed.status, failed.kind) == (400, "invalid_request_error")
        assert "context window" in failed.message
        for ask in (backend.count, backend.explain):
            with pytest.raises(ContextTooLongError, match="context window"):
                await ask(work)
    valve.open.set()
    await running


def test_no_more_is_tokenised_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = reader()
    read = 0
    whole = type(engine).brought_ids

    def counted(self: Any, text: str) -> Any:
        nonlocal read
        read += len(text)
        return whole(self, text)

    monkeypatch.setattr(type(engine), "brought_ids", counted)
    work = BackendRequest("x", "the lamp " * 1_000_000)
    assert limits.is_doubtful(engine, work)
    with pytest.raises(ContextTooLongError):
        limits.ensure_fits(engine, work)
    assert read < 40 * engine.context_window
    with pytest.raises(InvalidInputError):
        limits.ensure_fits(engine, BackendRequest("x", "\ud800"))


async def test_long_texts_of_few_tokens_are_answered(backend: LocalBackend) -> None:
    spaced = QUESTION.replace(" ", " " * 50_000)
    assert limits.is_doubtful(access.engines(backend).base, make_work(0, question=spaced))
    long = await answer_of(backend, make_work(0, question=spaced))
    assert long.text == (await answer_of(backend, make_work(1))).text
    async with aclosing(backend.answer(make_work(2, chunks=TEXTS))) as events:
        async for _ in events:
            break
