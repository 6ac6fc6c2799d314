"""What every `Backend` guarantees; a test class names how one is opened and ended, and inherits it.

Every backend here answers by the packaged reader, whose forward passes a `Valve` holds.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
from serve_works import (
    QUESTION,
    TEXTS,
    Valve,
    answer_of,
    events_of,
    eventually,
    failure_of,
    loaded,
    make_work,
    reader,
    text_of,
)

from kvcache_rag import BestLast, KVCacheRagError, Message
from kvcache_rag.errors import ContextTooLongError
from kvcache_rag_server.backend import Failed, Finished, OwnPolicy, Piece, Prefilled, Started

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from kvcache_rag_server.backend import Backend, BackendRequest, Event

MAX_WAITING = 2
COUNTERS = ("waiting", "running", "answered", "failed", "cancelled", "refused")
TIER = ("bytes", "hits", "bytes_read", "bytes_written", "seconds", "misses", "puts", "evictions")


class BackendContract:
    """What every `Backend` guarantees."""

    def open(self) -> Backend:
        """A backend of one process that answers, where at most `MAX_WAITING` requests wait."""
        raise NotImplementedError

    async def end(self, backend: Backend) -> None:
        """Close it as a server does that ends, with all that was started for it."""
        raise NotImplementedError

    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        found = self.open()
        while not await found.ready():
            await asyncio.sleep(0.01)
        await answer_of(found, make_work(0))  # its first token is over
        yield found
        await self.end(found)

    @pytest.fixture
    def valve(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Valve]:
        made = Valve(loaded()[0], monkeypatch)
        yield made
        made.fails = False
        made.open.set()  # also behind a test that failed

    async def counters(self, backend: Backend) -> dict[str, Any]:
        """Those of its only process."""
        (counters,) = (await backend.stats())["replicas"]
        return dict(counters)

    async def settled(self, backend: Backend) -> dict[str, Any]:
        """Counters once the model is warm and they rest: what was answered before is counted."""
        while not await backend.ready():
            await asyncio.sleep(0.01)
        last = await self.counters(backend)
        quiet = 0
        while quiet < 20:
            await asyncio.sleep(0.01)
            now = await self.counters(backend)
            quiet, last = (quiet + 1 if now == last else 0), now
        return last

    async def until(self, backend: Backend, **expected: int) -> None:
        """Wait until counters say so."""
        for _ in range(10_000):
            counters = await self.counters(backend)
            if {name: counters[name] for name in expected} == expected:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"never {expected}: {counters}")

    def asked(self, backend: Backend, work: BackendRequest) -> asyncio.Task[list[Event]]:
        return asyncio.create_task(events_of(backend, work))

    async def held(self, backend: Backend, valve: Valve) -> asyncio.Task[list[Event]]:
        """A request that the model is busy with."""
        valve.close()
        running = self.asked(backend, make_work(1, streaming=True))
        await eventually(valve.held.is_set)
        return running

    # Law: started, then pieces if they are wanted, then finished; nothing else.

    @pytest.mark.parametrize("streaming", [False, True])
    async def test_events_come_in_order(self, backend: Backend, streaming: bool) -> None:
        expected = reader().generate(QUESTION, TEXTS, max_new_tokens=8)
        first, *pieces, last = await self.asked(backend, make_work(1, streaming=streaming))
        assert isinstance(first, Started)
        assert first.queue_wait >= 0
        assert isinstance(last, Finished)
        assert all(isinstance(piece, Piece) for piece in pieces)
        assert text_of(pieces) == (expected.text if streaming else "")
        assert last.answer.text == expected.text
        assert last.answer.token_ids == expected.token_ids

    async def test_pieces_come_while_the_answer_is_made(
        self, backend: Backend, valve: Valve
    ) -> None:
        valve.budget = 3
        async with aclosing(backend.answer(make_work(1, streaming=True))) as events:
            async for event in events:
                if isinstance(event, Piece):
                    break
            assert not isinstance(event, Finished)
            valve.open.set()

    # Law: who leaves takes the request back, waiting or running.

    async def test_closing_the_events_stops_the_model(self, backend: Backend, valve: Valve) -> None:
        work = make_work(1, streaming=True, max_new_tokens=1000, options={"min_new_tokens": 900})
        async with aclosing(backend.answer(work)) as events:
            async for event in events:
                if isinstance(event, Piece):
                    break
        await self.until(backend, running=0, cancelled=1)
        assert valve.passes < 500

    async def test_a_reader_that_is_cancelled_leaves_the_queue(
        self, backend: Backend, valve: Valve
    ) -> None:
        running = await self.held(backend, valve)
        waiting = self.asked(backend, make_work(2))
        await self.until(backend, waiting=1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await self.until(backend, waiting=0, cancelled=1)
        valve.open.set()
        assert isinstance((await running)[-1], Finished)

    # Law: what is too much is refused at once, and says when to come back.

    async def test_a_full_queue_refuses(self, backend: Backend, valve: Valve) -> None:
        running = await self.held(backend, valve)
        waiting = [self.asked(backend, make_work(2 + n)) for n in range(MAX_WAITING)]
        await self.until(backend, waiting=MAX_WAITING)
        refused = failure_of(await asyncio.wait_for(self.asked(backend, make_work(9)), 10))
        assert (refused.status, refused.kind) == (503, "overloaded")
        assert refused.retry_after is not None
        assert refused.retry_after > 0
        await self.until(backend, refused=1, waiting=MAX_WAITING)
        valve.open.set()
        for task in (running, *waiting):
            assert isinstance((await task)[-1], Finished)

    # Law: nothing is raised; a user's mistake is told, a fault of the server is not.

    @pytest.mark.parametrize(
        ("fields", "word", "code"),
        [
            ({"question": " "}, "question", None),
            ({"chunks": ("",)}, "empty", None),
            ({"options": {"temprature": 1}}, "temprature", None),
            ({"policy": 0.5}, "policy_by_name", None),
            ({"max_new_tokens": 0}, "max_new_tokens", None),
            ({"question": "\ud800"}, "Unicode", None),
            ({"chunks": ("word " * 4_000,)}, "context window", "context_length_exceeded"),
            ({"chunks": ("word " * 100_000,)}, "context window", "context_length_exceeded"),
        ],
    )
    async def test_a_mistake_is_the_only_event(
        self, backend: Backend, fields: dict[str, Any], word: str, code: str | None
    ) -> None:
        failed = failure_of(await self.asked(backend, make_work(1, **fields)))
        assert (failed.status, failed.kind) == (400, "invalid_request_error")
        assert (failed.code, failed.retry_after) == (code, None)
        assert word in failed.message
        assert "\n" not in failed.message

    async def test_a_fault_is_in_the_log_alone(
        self, backend: Backend, valve: Valve, caplog: pytest.LogCaptureFixture
    ) -> None:
        valve.fails = True
        failed = failure_of(await self.asked(backend, make_work(1)))
        assert (failed.status, failed.kind) == (500, "server_error")
        assert "secret" not in failed.message
        assert "secret" in caplog.text
        valve.fails = False
        expected = reader().generate(QUESTION, TEXTS, max_new_tokens=8)
        assert (await answer_of(backend, make_work(2))).text == expected.text

    # Law: scores say which chunk is best.

    async def test_the_best_by_score_is_computed_with_the_question(self, backend: Backend) -> None:
        scores, policy = (0.1, 0.2, 0.9), BestLast()
        expected = reader().generate(
            QUESTION, TEXTS, policy=policy, scores=scores, max_new_tokens=8
        )
        work = make_work(1, policy="bestlast", scores=scores)
        answer = await answer_of(backend, work)
        assert answer.token_ids == expected.token_ids
        assert answer.metrics.fresh_tokens == expected.metrics.fresh_tokens > 0
        told = await backend.explain(work)
        assert told["fresh_tokens"] == answer.metrics.fresh_tokens

    # Law: a prompt is counted and explained as it would be answered.

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"chunks": ()},
            {"is_plain": True, "chunks": ()},
            {"is_chat": True, "chunks": ()},
            {"history": (Message("user", "Hi."),), "system": "Be brief."},
        ],
    )
    async def test_tokens_are_counted_as_the_answer_counts_them(
        self, backend: Backend, fields: dict[str, Any]
    ) -> None:
        work = make_work(1, **fields)
        tokens = await backend.count(work)
        last = (await self.asked(backend, work))[-1]
        assert isinstance(last, Finished)
        assert last.answer.metrics.prompt_tokens == tokens

    async def test_a_prompt_is_explained_in_plain_values(self, backend: Backend) -> None:
        work = make_work(1, policy="full")
        explained = json.loads(json.dumps(dict(await backend.explain(work))))
        assert len(explained["tokens"]) == await backend.count(work)
        assert explained["policy"] == "FullRecompute()"

    async def test_what_cannot_be_a_prompt_is_neither_counted_nor_explained(
        self, backend: Backend
    ) -> None:
        work = make_work(1, chunks=("\ud800",))
        for call in (backend.count, backend.explain):
            with pytest.raises(KVCacheRagError, match="Unicode"):
                await call(work)

    # Law: counters are plain values.

    async def test_counters_are_plain_and_count(self, backend: Backend) -> None:
        before = await self.settled(backend)
        await self.asked(backend, make_work(1))
        await self.until(backend, answered=before["answered"] + 1, running=0)
        counters = json.loads(json.dumps(await self.counters(backend)))
        assert set(COUNTERS) <= set(counters)
        assert counters["service_seconds"] > 0
        assert sum(counters["batches"].values()) == counters["answered"]
        assert isinstance(counters["prefetch"], dict)
        for tier in counters["tiers"]:
            assert {"tier", *TIER} <= set(tier)

    # Law: before the end what runs goes on, and nothing else: all others are told at once.

    async def test_what_runs_goes_on_and_what_waits_is_refused(
        self, backend: Backend, valve: Valve
    ) -> None:
        assert await backend.ready()
        running = await self.held(backend, valve)
        waiting = self.asked(backend, make_work(2))
        await self.until(backend, waiting=1)
        await backend.drain()
        await backend.drain()
        later = self.asked(backend, make_work(3))
        for task in (waiting, later):
            failed = failure_of(await asyncio.wait_for(task, 10))
            assert (failed.status, failed.code) == (503, "shutting_down")
            assert failed.retry_after is not None
        with pytest.raises(KVCacheRagError, match="shuts down"):
            await backend.explain(make_work(4))
        assert not await backend.ready()
        assert not running.done()
        valve.open.set()
        assert isinstance((await running)[-1], Finished)

    # Law: what was prefilled is there for the tenant that brought it.

    async def test_what_was_prefilled_is_reused(self, backend: Backend) -> None:
        texts = ("A green box stands here.", "A brown box stands there.")
        work = make_work(7, chunks=(*texts, texts[0]), namespace="prefilled")
        keys = reader().keys(texts)
        tokens = sum(key.tokens for key in keys)
        assert await backend.prefill(work) == Prefilled(2, tokens, 2)
        assert await backend.prefill(work) == Prefilled(2, tokens, 0)
        asked = make_work(8, chunks=texts[::-1], namespace="prefilled")
        assert (await answer_of(backend, asked)).metrics.misses == 0
        other = make_work(9, chunks=texts, namespace="other")
        assert (await answer_of(backend, other)).metrics.misses == 2
        with pytest.raises(ContextTooLongError):
            await backend.prefill(make_work(10, chunks=("box " * 9000,)))

    async def test_a_verdict_is_about_its_engine(self, backend: Backend) -> None:
        assert await backend.identity() == reader().identity
        assert await backend.models() == {"reader": reader().context_window}

    async def test_what_is_reused_unless_a_request_says_it(self, backend: Backend) -> None:
        assert await backend.own_policy() == OwnPolicy("reuse")

    # Law: the end is final, however often it is asked for, and leaves no request without an event.

    async def test_the_end_is_told_to_all_and_final(self, backend: Backend, valve: Valve) -> None:
        assert await backend.ready()
        assert [*await backend.models()] == ["reader"]
        running = await self.held(backend, valve)
        waiting = self.asked(backend, make_work(2))
        await self.until(backend, waiting=1)
        ending = asyncio.create_task(self.end(backend))
        ended = failure_of(await waiting)
        assert ended.status == 503
        valve.open.set()
        assert isinstance((await running)[-1], Finished | Failed)
        await ending
        await backend.close()
        assert not await backend.ready()
        assert failure_of(await self.asked(backend, make_work(3))).status == 503
        for asked in (backend.explain, backend.prefill):
            with pytest.raises(KVCacheRagError):
                await asked(make_work(4))
