"""Batches: only where they are measured to be sooner, and their answers are those of singles."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import access
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_works import (
    QUESTION,
    TEXTS,
    Valve,
    answer_of,
    events_of,
    eventually,
    make_work,
    reader,
    serve_threads,
)

from kvcache_rag_server import scheduler
from kvcache_rag_server.backend import Failed, Finished, Started
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.scheduler import BatchRule
from kvcache_rag_server.worker import is_alike, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_rag import Answer
    from kvcache_rag_server.backend import BackendRequest

KIND = "kind"


def rounds(
    rule: BatchRule, seconds: Callable[[int], float], count: int, alike: int = 8, behind: int = 0
) -> list[int]:
    """Sizes that the rule chooses where batches take `seconds`."""
    chosen = []
    for _ in range(count):
        size = rule.size(KIND, alike, behind)
        rule.measured(KIND, size, seconds(size))
        chosen.append(size)
    return chosen


def test_singles_are_measured_first_and_then_each_size_once() -> None:
    chosen = rounds(BatchRule(8), lambda size: 1 + 0.1 * size, 12)
    assert chosen[: scheduler.FEWEST_SINGLES + 3] == [1, 1, 1, 2, 4, 8]
    assert set(chosen[6:]) == {8}


def test_a_batch_that_is_measured_slower_is_hardly_ever_tried_again() -> None:
    chosen = rounds(BatchRule(8), lambda size: size if size == 1 else 1.2 * size, 1000)
    slower = [size for size in chosen if size > 1]
    assert slower[0] == 2, "it had to be measured once"
    assert len(slower) <= 1 + 1000 // scheduler.RETRY
    assert 4 not in chosen, "nor any larger one"


def test_what_became_sooner_is_noticed_and_what_became_slower_too() -> None:
    rule = BatchRule(2)
    rounds(rule, lambda size: 2.0 * size, 100)
    rounds(rule, lambda size: 1 + 0.1 * size, scheduler.RETRY * scheduler.SAMPLES)
    assert rounds(rule, lambda size: 1 + 0.1 * size, 50).count(2) >= 48
    rounds(rule, lambda size: 2.0 * size, 2 * scheduler.SAMPLES)
    assert rounds(rule, lambda size: 2.0 * size, 50).count(1) >= 48


def test_the_first_of_a_batch_waits_for_its_last_so_few_who_wait_gain_less() -> None:
    alone, crowded = BatchRule(2), BatchRule(2)
    slow = 1.7  # seconds of two together: sooner than 2, but the first waits for the second
    assert rounds(alone, lambda size: slow if size == 2 else 1.0, 20, alike=2)[5:].count(2) == 0
    chosen = rounds(crowded, lambda size: slow if size == 2 else 1.0, 20, alike=2, behind=50)
    assert chosen[5:].count(1) == 0


def test_a_size_that_failed_is_left_alone() -> None:
    rule = BatchRule(4)
    rounds(rule, lambda size: 1.0, 4)
    rule.failed(KIND, 4)
    assert set(rounds(rule, lambda size: 1.0, 30)) <= {1, 2}


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.floats(0.01, 10.0), min_size=8, max_size=8),
    alike=st.integers(1, 8),
    behind=st.integers(0, 100),
)
def test_what_is_chosen_costs_no_more_than_singles(
    times: list[float], alike: int, behind: int
) -> None:
    rule = BatchRule(8)
    for size in (1, 1, 1, 2, 4, 8):
        rule.measured(KIND, size, times[size - 1])
    size = rule.size(KIND, alike, behind)
    assert 1 <= size <= alike
    together = (alike + behind) * times[size - 1]  # what all who wait spend while these are served
    apart = times[0] * (sum(range(1, size + 1)) + size * (alike + behind - size))
    assert together <= apart + 1e-9


def test_only_requests_that_ask_alike_share_a_batch() -> None:
    work = make_work(0)
    assert is_alike(work, make_work(1, question="Where?", chunks=TEXTS[:1]))
    assert is_alike(work, make_work(1, options={"temperature": 0, "seed": 7, "top_p": 0.5}))
    different: list[dict[str, Any]] = [
        {"policy": "full"},
        {"max_new_tokens": 9},
        {"stop": ("x",)},
        {"system": "Be brief."},
        {"streaming": True},
        {"is_plain": True},
        {"is_chat": True},
        {"options": {"temperature": 0.5}},
        {"options": {"do_sample": True}},
        {"options": {"repetition_penalty": 1.2}},
    ]
    for fields in different:
        assert not is_alike(work, make_work(1, **fields)), fields
        assert not is_alike(make_work(1, **fields), work), fields


# ------------------------------------------------------------------------------ with the model
@pytest.fixture
def backend() -> Iterator[LocalBackend]:
    made = LocalBackend(reader(), max_batch=4)
    yield made
    made._close()
    assert not serve_threads()


def prefer_batches(backend: LocalBackend, work: BackendRequest) -> None:
    rule = access.scheduler(backend)._service._rule
    rule._times.clear()
    for size, seconds in ((1, 1.0), (1, 1.0), (1, 1.0), (2, 0.6), (4, 0.5)):
        rule.measured(kind_of(work), size, seconds)


async def together(
    backend: LocalBackend,
    patch: pytest.MonkeyPatch,
    works: list[BackendRequest],
    passes: int | None = None,
) -> tuple[Valve, list[asyncio.Task[Any]]]:
    """Let works wait together behind one that the model is busy with, and then begin as a batch."""
    prefer_batches(backend, works[0])
    valve = Valve(access.engines(backend).base.model, patch)
    valve.close()
    first = asyncio.create_task(answer_of(backend, make_work(99, policy="full", max_new_tokens=1)))
    await eventually(valve.held.is_set)
    tasks = [asyncio.create_task(events_of(backend, work)) for work in works]
    await eventually(lambda: access.scheduler(backend).stats()["waiting"] == len(works))
    valve.budget = passes
    valve.held.clear()
    valve.open.set()
    await first
    return valve, tasks


async def ensure_as_singles(
    backend: LocalBackend, patch: pytest.MonkeyPatch, works: list[BackendRequest]
) -> list[Answer]:
    """Answers of singles, which a batch gives as well."""
    singles = [await answer_of(backend, work) for work in works]
    _, tasks = await together(backend, patch, works)
    for task, single in zip(tasks, singles, strict=True):
        begun, last = await task
        assert isinstance(begun, Started)
        assert isinstance(last, Finished)
        assert begun.batch == len(works)
        assert (last.answer.text, last.answer.token_ids) == (single.text, single.token_ids)
        assert last.answer.finish_reason == single.finish_reason
        for name in ("prompt_tokens", "fresh_tokens"):
            assert getattr(last.answer.metrics, name) == getattr(single.metrics, name)
    return singles


@pytest.mark.parametrize("policy", [None, "full", "cacheblend:0.3", "combination"])
async def test_a_batch_gives_the_answers_of_singles(
    backend: LocalBackend, policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [TEXTS, TEXTS[:2], TEXTS[1:], TEXTS[::-1]]
    questions = [QUESTION, "When was the lighthouse built?", "Who sells maps?", QUESTION]
    works = [
        make_work(number, policy=policy, chunks=chunks, question=question, max_new_tokens=12)
        for number, (chunks, question) in enumerate(zip(asked, questions, strict=True))
    ]
    await ensure_as_singles(backend, monkeypatch, works)


async def test_a_batch_ends_at_stops_where_singles_do(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = await answer_of(backend, make_work(0, max_new_tokens=12))
    # It stands in what the prompt and the answer are together, not in the answer alone.
    stop = (f" {free.text.split()[0]}", f">{free.text[:3]}", free.text.split()[-1])
    works = [make_work(number, stop=stop, max_new_tokens=12) for number in range(4)]
    works[1] = make_work(1, stop=stop, max_new_tokens=12, chunks=TEXTS[1:])
    alone = await ensure_as_singles(backend, monkeypatch, works)
    assert alone[0].text == free.text[: free.text.index(stop[2])] != ""


async def test_requests_of_a_batch_have_scores_of_their_own(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [(0.1, 0.2, 0.9), None, (0.0, 1.0, 0.0), (0.9, 0.2, 0.1)]
    works = [make_work(at, policy="bestlast", scores=scores) for at, scores in enumerate(every)]
    singles = await ensure_as_singles(backend, monkeypatch, works)
    assert len({single.metrics.fresh_tokens for single in singles}) > 1, "it must be able to fail"


async def test_one_mistake_in_a_batch_is_told_to_its_own_client(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [make_work(number) for number in range(4)]
    works[2] = make_work(2, chunks=("  ",))
    single = await answer_of(backend, works[0])
    _, tasks = await together(backend, monkeypatch, works)
    ends = [(await task)[-1] for task in tasks]
    wrong = ends.pop(2)
    assert isinstance(wrong, Failed)
    assert wrong.status == 400
    assert [end.answer.text for end in ends] == [single.text] * 3
    rule = access.scheduler(backend)._service._rule
    assert rule.seconds(kind_of(works[0]), 4) == 0.5, "no fault of batches"


async def test_who_leaves_a_batch_does_not_stop_the_others(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = access.engines(backend).base.model
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)  # or it ends too soon
    works = [make_work(number, max_new_tokens=20) for number in range(2)]
    single = await answer_of(backend, works[0])
    valve, (leaving, staying) = await together(backend, monkeypatch, works, passes=3)
    await eventually(valve.held.is_set)
    leaving.cancel()
    await eventually(lambda: access.scheduler(backend).stats()["cancelled"] == 1)
    assert not staying.done()
    valve.open.set()
    (_, last) = await staying
    assert isinstance(last, Finished)
    assert last.answer.token_ids == single.token_ids
