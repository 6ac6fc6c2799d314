"""The queue: in order, fair, bounded, cancellable; no fault ends it and nothing is left behind."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
from serve_works import PATIENCE, Desk, Inbox, make_work, serve_threads

from kvcache_rag_server.backend import Failed, Finished, Started
from kvcache_rag_server.queue import Job
from kvcache_rag_server.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_rag_server.backend import BackendRequest


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def schedule(desk: Desk) -> Iterator[Callable[..., Scheduler]]:
    made: list[Scheduler] = []

    def make(**options: Any) -> Scheduler:
        made.append(Scheduler(desk, **options))  # type: ignore[arg-type]  # it stands for a Server
        return made[-1]

    yield make
    desk.is_held = False
    for scheduler in made:
        desk.go.release(1000)
        scheduler.close()
    assert not serve_threads()


def hold(desk: Desk, scheduler: Scheduler) -> Inbox:
    """Let the desk begin with a request and keep it."""
    desk.is_held = True
    first = Inbox()
    scheduler.submit(make_work(999, namespace="first"), first)
    assert desk.busy.wait(PATIENCE)
    desk.answered.clear()
    return first


def release(desk: Desk) -> None:
    desk.is_held = False
    desk.go.release()


def submit(scheduler: Scheduler, *works: BackendRequest) -> tuple[list[Job | None], list[Inbox]]:
    inboxes = [Inbox() for _ in works]
    jobs = [scheduler.submit(*pair) for pair in zip(works, inboxes, strict=True)]
    return jobs, inboxes


def test_one_tenant_is_answered_in_order_of_arrival(
    desk: Desk, schedule: Callable[..., Scheduler]
) -> None:
    scheduler = schedule(max_batch=1)
    hold(desk, scheduler)
    _, inboxes = submit(scheduler, *map(make_work, range(5)))
    release(desk)
    for inbox in inboxes:
        inbox.last()
        first, last = inbox.events
        assert isinstance(first, Started)
        assert first.queue_wait > 0
        assert isinstance(last, Finished)
    assert desk.answered == [[f"work-{number}"] for number in range(5)]


def test_a_tenant_with_many_requests_does_not_starve_another(
    desk: Desk, schedule: Callable[..., Scheduler]
) -> None:
    scheduler = schedule(max_batch=1)
    hold(desk, scheduler)
    many = [make_work(number, namespace="many") for number in range(200)]
    few = [make_work(1000 + number, namespace="few") for number in range(3)]
    submit(scheduler, *many)
    _, inboxes = submit(scheduler, *few)
    release(desk)
    for inbox in inboxes:
        inbox.last()
    order = [one for (one,) in desk.answered]
    assert [order.index(one.id) for one in few] == [1, 3, 5], "they take turns"


def test_a_full_queue_refuses_and_says_when_to_come_back(
    desk: Desk, schedule: Callable[..., Scheduler]
) -> None:
    scheduler = schedule(max_waiting=3, max_batch=1)
    desk.seconds = lambda size: 2.0 * size
    submit(scheduler, make_work(500))[1][0].last()
    desk.busy.clear()
    hold(desk, scheduler)
    _, waiting = submit(scheduler, *map(make_work, range(3)))
    (none,), (inbox,) = submit(scheduler, make_work(3))
    refused = inbox.last()
    assert none is None
    assert isinstance(refused, Failed)
    assert (refused.status, refused.kind) == (503, "overloaded")
    assert refused.retry_after == pytest.approx(3 * 2.0), "three wait, and each takes two seconds"
    assert scheduler.stats()["refused"] == 1
    release(desk)
    assert all(isinstance(one.last(), Finished) for one in waiting)


def test_who_crowds_the_queue_gives_way(desk: Desk, schedule: Callable[..., Scheduler]) -> None:
    scheduler = schedule(max_waiting=4, max_batch=1)
    hold(desk, scheduler)
    _, many = submit(scheduler, *(make_work(number, namespace="many") for number in range(4)))
    _, few = submit(scheduler, make_work(7, namespace="few"), make_work(8, namespace="few"))
    dropped = [inbox.last() for inbox in many[2:]]
    assert [getattr(one, "status", 200) for one in dropped] == [503, 503]
    _, (refused,) = submit(scheduler, make_work(9, namespace="few"))
    assert isinstance(refused.last(), Failed), "with two each, nobody crowds"
    release(desk)
    assert all(isinstance(one.last(), Finished) for one in (*many[:2], *few))


def test_a_waiting_request_is_taken_back(desk: Desk, schedule: Callable[..., Scheduler]) -> None:
    scheduler = schedule(max_waiting=2, max_batch=1)
    hold(desk, scheduler)
    (first, _), (_, other) = submit(scheduler, make_work(0), make_work(1))
    assert first is not None
    scheduler.cancel(first)
    scheduler.cancel(first)
    assert scheduler.stats()["waiting"] == 1
    assert scheduler.stats()["cancelled"] == 1
    _, (newcomer,) = submit(scheduler, make_work(2))
    release(desk)
    assert isinstance(newcomer.last(), Finished), "its place is free again"
    assert isinstance(other.last(), Finished)
    assert desk.answered == [["work-1"], ["work-2"]]


def test_a_running_request_is_told_to_stop(desk: Desk, schedule: Callable[..., Scheduler]) -> None:
    scheduler = schedule()
    desk.is_held = True
    (job,), _ = submit(scheduler, make_work(0))
    assert desk.busy.wait(PATIENCE)
    assert job is not None
    scheduler.cancel(job)
    assert job.cancelled.is_set()
    assert scheduler.stats()["running"] == 1
    release(desk)


def test_closing_ends_what_waits_and_leaves_no_thread(
    desk: Desk, schedule: Callable[..., Scheduler]
) -> None:
    scheduler = schedule()
    running = hold(desk, scheduler)
    _, waiting = submit(scheduler, make_work(0), make_work(1, namespace="other"))
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    for inbox in (*waiting, running):
        ended = inbox.last()
        assert isinstance(ended, Failed)
        assert ended.status == 503
        assert "Traceback" not in ended.message
    release(desk)
    closing.join(PATIENCE)
    assert not serve_threads()
    _, (late,) = submit(scheduler, make_work(2))
    ended = late.last()
    assert isinstance(ended, Failed)
    assert ended.status == 503


def test_a_fault_of_the_server_does_not_end_its_thread(
    desk: Desk, schedule: Callable[..., Scheduler], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = schedule()
    desk.fails = True
    _, (inbox,) = submit(scheduler, make_work(0))
    failed = inbox.last()
    assert isinstance(failed, Failed)
    assert (failed.status, failed.kind) == (500, "server_error")
    assert "fault of our own" not in failed.message
    assert "fault of our own" in caplog.text, "the log says why"
    desk.fails = False
    _, (inbox,) = submit(scheduler, make_work(1))
    assert isinstance(inbox.last(), Finished)


def test_nothing_is_kept_of_thousands_of_requests(
    desk: Desk, schedule: Callable[..., Scheduler]
) -> None:
    scheduler = schedule(max_waiting=5000)
    for start in range(0, 3000, 500):
        works = (make_work(start + number, namespace=str(number % 7)) for number in range(500))
        jobs, inboxes = submit(scheduler, *works)
        for job in jobs[::5]:
            assert job is not None
            scheduler.cancel(job)
        for inbox in (one for index, one in enumerate(inboxes) if index % 5):
            inbox.last()
    del jobs, job, works
    submit(scheduler, make_work(1))[1][0].last()
    gc.collect()
    left = [one for one in gc.get_objects() if type(one) is Job]
    assert len(left) <= 1, "the last one may not have been let go of yet"
