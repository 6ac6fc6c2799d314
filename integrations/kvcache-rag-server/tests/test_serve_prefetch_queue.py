"""Prefetch behind the backend: who waits finds its chunks ready, and every key is computed once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import access
import pytest
from serve_works import (
    QUESTION,
    TEXTS,
    Prefills,
    Valve,
    answer_of,
    events_of,
    eventually,
    held,
    make_work,
    reader,
    serve_threads,
)

from kvcache_rag import DiskStore
from kvcache_rag_server.backend import Finished, Started
from kvcache_rag_server.local import LocalBackend

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> Prefills:
    return Prefills(monkeypatch)


@pytest.mark.parametrize("policy", [None, "cacheblend:0.3", "combination", "bestfew:2"])
@pytest.mark.parametrize("where", ["cpu", "same"])
async def test_who_waits_finds_its_chunks_ready(
    where: str, policy: str | None, prefills: Prefills, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = reader()
    expected = alone.generate(QUESTION, TEXTS, max_new_tokens=8)
    prefills.counts.clear()
    backend = LocalBackend(reader(), prefetch=where, prefetch_after=0.0)
    valve = Valve(access.engines(backend).base.model, monkeypatch)
    try:
        # The question in front comes with the valve closed, so the other one waits for long.
        valve.close()
        front = asyncio.create_task(events_of(backend, make_work(0, chunks=(), is_plain=True)))
        await eventually(valve.held.is_set)
        behind = asyncio.create_task(events_of(backend, make_work(1, policy=policy)))
        if where == "same":
            await eventually(lambda: access.scheduler(backend).stats()["waiting"] == 1)
            valve.open.set()
        else:
            await eventually(lambda: backend._prefetcher.stats()["finished"] == 1)
            valve.open.set()
        await front
        begun, last = await behind
        assert isinstance(begun, Started)
        assert isinstance(last, Finished)
        assert begun.queue_wait > 0
        if where == "cpu":
            assert begun.prefetched
            assert last.answer.metrics.misses == 0
        if policy is None:
            assert last.answer.text == expected.text
    finally:
        valve.open.set()
        await backend.close()
    assert max(prefills.counts.values()) == 1
    # All of a combination together; of the best two one, as the other comes with the question.
    assert sum(prefills.by_chunk) == (1 if policy in ("combination", "bestfew:2") else 3)
    if policy == "bestfew:2":
        assert prefills.by_chunk == [1, 0, 0, 0]
        assert last.answer.metrics.answered_from == (0, 1)
    assert not serve_threads()


@pytest.mark.parametrize(
    "system", [(), ("Tomas Brandt, maps, harbour of Vell, sells: say who sells maps in Vell.",)]
)
async def test_what_is_not_answered_from_is_not_prefetched(
    system: tuple[str, ...], prefills: Prefills, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk is chosen by what is asked: a foreign instruction stands before it, and is not."""
    backend = LocalBackend(reader(), prefetch="cpu", prefetch_after=0.0)
    valve, front = await held(backend, monkeypatch)
    long = "The harbour is deep. " * backend._engines.base.context_window
    work = make_work(1, policy="bestfew:1", system=system, chunks=(*TEXTS, long))
    behind = asyncio.create_task(events_of(backend, work))
    await eventually(lambda: backend._prefetcher.stats()["finished"] == 1)
    valve.open.set()
    await front
    begun, last = await behind
    await backend.close()
    assert isinstance(begun, Started)
    assert isinstance(last, Finished)
    assert begun.prefetched
    assert last.answer.metrics.answered_from == (0,)
    assert last.answer.metrics.misses == 0
    assert prefills.by_chunk == [1, 0, 0, 0]
    assert sum(prefills.counts.values()) == 1


async def test_a_turn_that_comes_midway_waits_for_the_chunk_and_computes_the_rest(
    prefills: Prefills, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(reader(), prefetch="cpu", prefetch_after=0.0)
    valve, front = await held(backend, monkeypatch)
    prefills.go.clear()
    behind = asyncio.create_task(events_of(backend, make_work(1)))
    await eventually(prefills.busy.is_set)  # the second engine holds the first chunk
    valve.open.set()
    await front
    await eventually(lambda: access.scheduler(backend).stats()["running"] == 1)
    assert not behind.done()
    prefills.go.set()
    begun, last = await behind
    await backend.close()
    assert isinstance(begun, Started)
    assert isinstance(last, Finished)
    assert not begun.prefetched
    assert prefills.by_chunk == [1, 1, 1, 0], "nothing twice"
    assert backend._prefetcher.stats()["cancelled"] == 1


async def test_a_client_that_goes_away_takes_its_prefetch_along(
    prefills: Prefills, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(reader(), prefetch="cpu", prefetch_after=0.0)
    valve, front = await held(backend, monkeypatch)
    prefills.go.clear()
    leaving = asyncio.create_task(events_of(backend, make_work(1, chunks=TEXTS[:2])))
    staying = asyncio.create_task(events_of(backend, make_work(2, chunks=TEXTS[1:])))
    await eventually(prefills.busy.is_set)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    prefills.go.set()
    await eventually(lambda: backend._prefetcher.stats()["finished"] == 1)
    valve.open.set()
    await front
    begun = (await staying)[0]
    await backend.close()
    assert isinstance(begun, Started)
    assert begun.prefetched, "what another one wants too is made for that one"
    assert prefills.by_chunk == [1, 1, 1, 0]
    assert backend._prefetcher.stats()["cancelled"] == 1


async def test_two_backends_on_one_directory_compute_every_key_once(
    tmp_path: Path, prefills: Prefills
) -> None:
    backends = [
        LocalBackend(
            reader(store=DiskStore(tmp_path), combinations=DiskStore(tmp_path / "joint")),
            prefetch="cpu",
            prefetch_after=0.0,
        )
        for _ in range(2)
    ]
    texts = [f"{text} It is number {number}." for number in range(6) for text in TEXTS]
    works = [
        make_work(
            number,
            chunks=tuple(texts[number % 7 : number % 7 + 4]),
            policy=(None, "combination")[number % 2],
            max_new_tokens=2,
        )
        for number in range(28)
    ]
    try:
        answers = [answer_of(backends[index % 2], work) for index, work in enumerate(works)]
        await asyncio.gather(*answers)
    finally:
        for backend in backends:
            await backend.close()
    assert len(prefills.counts) == 10 + 7, "ten chunks and seven combinations were asked for"
    assert set(prefills.counts.values()) == {1}
