"""The queue: in order, fair, bounded, cancellable; no fault ends it and nothing is left behind."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
from serve_works import PATIENCE, Desk, Inbox, make_work, serve_threads

from kvcache_rag_server.backend import Failed, Finished, Started
from kvcache_rag_server.queue import Explained, Job
from kvcache_rag_server.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_rag_server.backend import BackendRequest


class Held:
    """A scheduler whose desk keeps a first request until it is told to go on."""

    def __init__(self, **options: Any) -> None:
        self.desk = Desk()
        self.scheduler = Scheduler(self.desk, **options)  # type: ignore[arg-type]  # it stands for a JobRunner

    def hold(self) -> Inbox:
        self.desk.busy.clear()
        self.desk.is_held = True
        first = Inbox()
        self.scheduler.submit(make_work(999, namespace="first"), first)
        assert self.desk.busy.wait(PATIENCE)
        self.desk.answered.clear()
        return first

    def release(self) -> None:
        self.desk.is_held = False
        self.desk.go.release()

    def submit(self, *works: BackendRequest) -> tuple[list[Job | None], list[Inbox]]:
        inboxes = [Inbox() for _ in works]
        jobs = [self.scheduler.submit(*pair) for pair in zip(works, inboxes, strict=True)]
        return jobs, inboxes


@pytest.fixture
def schedule() -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def make(**options: Any) -> Held:
        made.append(Held(**{"max_batch": 1, **options}))
        return made[-1]

    yield make
    for one in made:
        one.release()
        one.scheduler.close()
    assert not serve_threads()


def test_one_tenant_is_answered_in_order_of_arrival(schedule: Callable[..., Held]) -> None:
    held = schedule()
    held.hold()
    _, inboxes = held.submit(*map(make_work, range(5)))
    held.release()
    for inbox in inboxes:
        inbox.last()
        first, last = inbox.events
        assert isinstance(first, Started)
        assert first.queue_wait > 0
        assert isinstance(last, Finished)
    assert held.desk.answered == [[f"work-{number}"] for number in range(5)]


def test_a_tenant_with_many_requests_does_not_starve_another(schedule: Callable[..., Held]) -> None:
    held = schedule()
    held.hold()
    few = [make_work(1000 + number, namespace="few") for number in range(3)]
    held.submit(*(make_work(number, namespace="many") for number in range(200)))
    _, inboxes = held.submit(*few)
    held.release()
    for inbox in inboxes:
        inbox.last()
    order = [one for (one,) in held.desk.answered]
    assert [order.index(one.id) for one in few] == [1, 3, 5], "they take turns"


def test_a_full_queue_says_when_to_come_back(schedule: Callable[..., Held]) -> None:
    held = schedule(max_waiting=3)
    held.desk.seconds = lambda size: 2.0 * size
    held.submit(make_work(500))[1][0].last()
    held.hold()
    _, waiting = held.submit(*map(make_work, range(3)))
    (none,), (inbox,) = held.submit(make_work(3))
    refused = inbox.last()
    assert none is None
    assert isinstance(refused, Failed)
    assert refused.retry_after == pytest.approx(3 * 2.0), "three wait, and each takes two seconds"
    held.release()
    assert all(isinstance(one.last(), Finished) for one in waiting)


def test_who_crowds_the_queue_gives_way(schedule: Callable[..., Held]) -> None:
    held = schedule(max_waiting=4)
    held.hold()
    _, many = held.submit(*(make_work(number, namespace="many") for number in range(4)))
    _, few = held.submit(make_work(7, namespace="few"), make_work(8, namespace="few"))
    dropped = [inbox.last() for inbox in many[2:]]
    assert [getattr(one, "status", 200) for one in dropped] == [503, 503]
    _, (refused,) = held.submit(make_work(9, namespace="few"))
    assert isinstance(refused.last(), Failed), "with two each, nobody crowds"
    held.release()
    assert all(isinstance(one.last(), Finished) for one in (*many[:2], *few))


def test_the_place_of_a_waiting_request_that_is_taken_back_is_free(
    schedule: Callable[..., Held],
) -> None:
    held = schedule(max_waiting=2)
    held.hold()
    (first, _), (_, other) = held.submit(make_work(0), make_work(1))
    assert first is not None
    held.scheduler.cancel(first)
    held.scheduler.cancel(first)
    stats = held.scheduler.stats()
    assert (stats["waiting"], stats["cancelled"]) == (1, 1)
    _, (newcomer,) = held.submit(make_work(2))
    held.release()
    assert isinstance(newcomer.last(), Finished)
    assert isinstance(other.last(), Finished)
    assert held.desk.answered == [["work-1"], ["work-2"]]


def test_a_fault_of_the_server_does_not_end_its_thread(
    schedule: Callable[..., Held], caplog: pytest.LogCaptureFixture
) -> None:
    held = schedule()
    held.desk.fails = True
    _, (inbox,) = held.submit(make_work(0))
    failed = inbox.last()
    assert isinstance(failed, Failed)
    assert (failed.status, failed.kind) == (500, "server_error")
    assert "fault of our own" not in failed.message
    assert "fault of our own" in caplog.text
    held.desk.fails = False
    assert isinstance(held.submit(make_work(1))[1][0].last(), Finished)


def test_nothing_is_kept_of_thousands_of_requests(schedule: Callable[..., Held]) -> None:
    held = schedule(max_waiting=5000, max_batch=8)
    for start in range(0, 3000, 500):
        works = (make_work(start + number, namespace=str(number % 7)) for number in range(500))
        jobs, inboxes = held.submit(*works)
        for job in jobs[::5]:
            assert job is not None
            held.scheduler.cancel(job)
        for inbox in (one for index, one in enumerate(inboxes) if index % 5):
            inbox.last()
    del jobs, job, works
    held.submit(make_work(1))[1][0].last()
    gc.collect()
    left = [one for one in gc.get_objects() if type(one) is Job]
    assert len(left) <= 1, "the last one may not have been let go of yet"


def test_a_thread_that_dies_leaves_nobody_waiting(
    schedule: Callable[..., Held], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = schedule()
    held.hold()
    _, (waiting,) = held.submit(make_work(1))

    def head() -> Job:
        raise MemoryError("no memory for a look at the queue")

    monkeypatch.setattr(held.scheduler._queue, "head", head)
    held.release()
    failed = waiting.last()
    assert isinstance(failed, Failed)
    assert failed.status == 500
    assert "no memory" in caplog.text
    assert "no memory" not in failed.message
    assert held.scheduler._thread is not None
    held.scheduler._thread.join(PATIENCE)
    assert not held.scheduler.is_alive
    assert isinstance(held.submit(make_work(2))[1][0].last(), Failed)


def test_explanations_take_turns_with_answers(schedule: Callable[..., Held]) -> None:
    held = schedule()
    held.hold()
    found = [Inbox() for _ in range(8)]
    for number, explained in enumerate(found):
        work = make_work(number, namespace="evil")
        held.scheduler.submit(work, explained, explains=True)
    _, (inbox,) = held.submit(make_work(9, namespace="good"))
    held.release()
    assert isinstance(inbox.last(), Finished)
    assert all(one.last() == Explained({}) for one in found)
    assert held.desk.answered.index(["work-9"]) == 1
    assert len(held.desk.answered) == 9, "one at a time"
