"""The local backend: the answers of its engine, for every policy, streamed or not, per tenant."""

from __future__ import annotations

import asyncio
import warnings
from contextlib import aclosing
from itertools import count
from typing import TYPE_CHECKING, Any

import access
import pytest
from contracts_backend import MAX_WAITING, BackendContract
from hybrid_reader import FOLDER, IS_READ
from hybrid_reader import asked as read_by_hybrid
from serve_fakes import chat, client, settings
from serve_works import (
    QUESTION,
    TEXTS,
    Valve,
    answer_of,
    events_of,
    eventually,
    failure_of,
    held,
    make_work,
    reader,
    serve_threads,
    text_of,
)
from small import Loop, make_tokenizer, make_untrained

from kvcache_rag import DiskStore, Engine, InvalidInputError, Message, Reuse
from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.policies import policy_by_name
from kvcache_rag_server import limits
from kvcache_rag_server.app import build_app
from kvcache_rag_server.backend import BackendRequest, Finished, Started
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.local import LocalBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from kvcache_rag import Answer
    from kvcache_rag_server.backend import Backend
    from kvcache_rag_server.queue import Job

POLICIES = ["reuse", "composite", "full", "legolink:4", "cacheblend:0.3", "ape:0.9,1.0"]


class TestLocalBackend(BackendContract):
    """The contract, over an engine of this process."""

    def open(self) -> LocalBackend:
        return LocalBackend(reader(), name="reader", max_waiting=MAX_WAITING)

    async def end(self, backend: Backend) -> None:
        await backend.close()
        assert not serve_threads()


@pytest.fixture(scope="module")
def backend() -> Iterator[LocalBackend]:
    made = LocalBackend(reader(), name="reader")
    yield made
    made._close()
    assert not serve_threads()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("policy", [None, *POLICIES, "combination"])
async def test_answers_are_those_of_the_engine_alone(
    backend: LocalBackend, policy: str | None, streaming: bool
) -> None:
    chosen = policy_by_name(policy) if policy else None
    history = (Message("user", "Hello."), Message("assistant", "Good day."))
    alone = reader().generate(
        QUESTION, TEXTS, policy=chosen, history=history, max_new_tokens=16, stop=["zz"]
    )
    work = make_work(
        0, policy=policy, history=history, max_new_tokens=16, stop=("zz",), streaming=streaming
    )
    for _ in range(2):  # prefilled, then cached
        first, *pieces, last = await events_of(backend, work)
        assert isinstance(first, Started)
        assert isinstance(last, Finished)
        assert last.answer.text == alone.text
        assert last.answer.token_ids == alone.token_ids
        assert last.answer.finish_reason == alone.finish_reason
        assert text_of(pieces) == (alone.text if streaming else "")
        assert len(pieces) > 1 or not streaming, "piece by piece"


async def test_plain_reuse_of_an_untrained_model_is_warned_of_once() -> None:
    backend = LocalBackend(Engine(make_untrained(), make_tokenizer()))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert (await answer_of(backend, make_work(0))).metrics.fresh_tokens > 0, "the default"
        assert not found
        for number, namespace in enumerate(("", "", "tenant"), start=1):
            await answer_of(backend, make_work(number, policy="reuse", namespace=namespace))
    await backend.close()
    assert [repr(Reuse()) in str(one.message) for one in found] == [True]


@pytest.mark.parametrize("streaming", [False, True])
async def test_texts_and_conversations_are_completed(
    backend: LocalBackend, streaming: bool
) -> None:
    engine = reader()
    fields: dict[str, Any] = {"chunks": (), "streaming": streaming}
    plain = await answer_of(backend, make_work(0, is_plain=True, **fields))
    assert plain.text == engine.complete(QUESTION, max_new_tokens=8).text
    chat = await answer_of(backend, make_work(1, is_chat=True, **fields))
    asked = engine.render_chat([{"role": "user", "content": QUESTION}])
    assert chat.text == engine.complete(asked, max_new_tokens=8).text


async def test_chance_follows_the_seed(backend: LocalBackend) -> None:
    def work(seed: int | None) -> BackendRequest:
        options = {"temperature": 30.0} if seed is None else {"temperature": 30.0, "seed": seed}
        return make_work(0, options=options, max_new_tokens=24)

    first = await answer_of(backend, work(1))
    await answer_of(backend, work(None))
    again = await answer_of(backend, work(1))
    others = [await answer_of(backend, work(seed)) for seed in (2, 3, 4)]
    assert first.token_ids == again.token_ids
    assert any(other.token_ids != first.token_ids for other in others)


async def test_tenants_share_a_model_and_no_chunk(tmp_path: Path) -> None:
    backend = LocalBackend(reader(store=DiskStore(tmp_path)))
    numbers = count()

    async def ask(namespace: str, **fields: Any) -> Answer:
        return await answer_of(backend, make_work(next(numbers), namespace=namespace, **fields))

    try:
        first, other, again = [await ask(namespace) for namespace in "aba"]
        assert [one.metrics.misses for one in (first, other, again)] == [3, 3, 0]
        assert again.metrics.hits == {"disk": len(TEXTS)}
        assert first.text == other.text == again.text
        for namespace in "ab":
            assert (await ask(namespace, policy="combination")).metrics.misses == 1
        engine = access.engines(backend).for_namespace("a")
        assert engine.keys(TEXTS) == reader(store=DiskStore(tmp_path), namespace="a").keys(TEXTS)
        assert engine.delete_namespace() > 0
        gone, kept = [await ask(namespace) for namespace in "ab"]
        assert (gone.metrics.misses, kept.metrics.misses) == (len(TEXTS), 0)
    finally:
        await backend.close()


async def test_nothing_blocks_the_event_loop(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await answer_of(backend, make_work(0))
    loop = Loop()
    loop.watch(monkeypatch, type(access.engines(backend).base.model), "forward")
    tasks = [events_of(backend, make_work(n)) for n in range(20)]
    await asyncio.gather(*tasks, backend.count(make_work(0)))
    assert loop.turns > 3


async def test_a_new_tenant_is_counted_while_the_model_is_busy(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    valve, running = await held(backend, monkeypatch)
    expected = await backend.count(make_work(1))
    assert await backend.count(make_work(1, namespace="never seen before")) == expected
    assert not running.done()
    valve.open.set()
    await running


async def test_a_model_that_cannot_answer_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = LocalBackend(reader())
    with monkeypatch.context() as patch:
        Valve(access.engines(backend).base.model, patch).fails = True
        assert not await backend.ready()
    assert "secret" in caplog.text
    await backend.close()


async def test_a_foreign_instruction_stands_before_the_question(backend: LocalBackend) -> None:
    answer = await answer_of(backend, make_work(0, system=("Be brief.",)))
    assert answer.metrics.prefix_mismatch
    own = access.engines(backend).base.template.system
    answer = await answer_of(backend, make_work(1, system=(own,)))
    assert not answer.metrics.prefix_mismatch


@pytest.mark.skipif(not IS_READ, reason="this transformers keeps no states as 5.23")
async def test_a_trained_model_with_recurrent_layers_answers_right_in_any_order_after_a_restart(
    tmp_path: Path,
) -> None:
    for restart in range(2):
        store = DiskStore(tmp_path, durable=False)
        backend = LocalBackend(Engine.from_pretrained(FOLDER, store=store), name="reader")
        try:
            async with client(build_app(backend, settings())) as http:
                for documents, entity, value in read_by_hybrid():
                    body = chat(entity, documents=documents, max_tokens=1)
                    told = (await http.post("/v1/chat/completions", json=body)).json()
                    assert told["choices"][0]["message"]["content"].strip() == value
                    if restart:  # further ones are computed with the question
                        assert told["kvcache"]["hits"] == {"disk": 1}
        finally:
            await backend.close()


# ---------------------------------------------------------------------- what hangs and floods
async def test_a_backend_whose_thread_has_died_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def head() -> Job:
        raise MemoryError

    backend = LocalBackend(reader())
    assert await backend.ready()
    monkeypatch.setattr(access.scheduler(backend)._queue, "head", head)
    assert failure_of(await events_of(backend, make_work())).status == 500
    assert not await backend.ready()
    await backend.close()


@pytest.fixture
async def crowded() -> AsyncIterator[LocalBackend]:
    made = LocalBackend(reader(), max_waiting=4)
    await answer_of(made, make_work(0))  # its first token is over
    yield made
    await made.close()


async def test_explanations_can_be_taken_back_and_do_not_hold_up_the_end(
    crowded: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    valve, running = await held(crowded, monkeypatch)
    tasks = [asyncio.create_task(crowded.explain(make_work(n))) for n in range(1, 6)]
    await eventually(lambda: tasks[-1].done())
    with pytest.raises(ApiError) as refused:
        await tasks.pop()
    assert refused.value.failed.status == 503
    gone = tasks.pop()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert access.scheduler(crowded).stats()["waiting"] == 3
    closing = asyncio.create_task(crowded.close())
    for task in tasks:
        with pytest.raises(ApiError, match="shuts down"):
            await task
    valve.open.set()
    await closing
    await running


async def test_the_log_knows_a_failed_explanation_by_the_name_its_client_reads(
    crowded: LocalBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the device at /dev/secret is gone")

    monkeypatch.setattr(access.engines(crowded).base, "explain", fails)
    async with client(build_app(crowded, settings())) as http:
        reply = await http.post("/v1/explain", json=chat(documents=list(TEXTS)))
    error, name = reply.json()["error"], reply.headers["x-request-id"]
    assert (reply.status_code, error["code"]) == (500, "internal_error")
    assert error["message"].endswith(f"its log says why under {name}")
    (logged,) = [one for one in caplog.records if one.exc_info]
    assert logged.getMessage() == f"request {name} failed"
    assert "/dev/secret" in caplog.text
    await answer_of(crowded, make_work(1))  # the thread goes on


async def test_all_tenants_have_the_memory_of_one_prompt_explained_or_not(
    crowded: LocalBackend,
) -> None:
    await answer_of(crowded, make_work(0, namespace="a"))
    for tenant in ("a", "b", "c"):
        await crowded.explain(make_work(1, namespace=tenant, policy="cacheblend:0.5"))
    engines = access.engines(crowded)
    await eventually(lambda: access.scheduler(crowded).stats()["running"] == 0)
    memory, *others = [access.runner(engines.for_namespace(name)).memory for name in "abc"]
    assert all(one is memory for one in others)
    assert len(memory._held) == 1


# ---------------------------------------------------------------------------- what cannot ever fit
async def test_what_cannot_fit_is_refused_while_the_model_is_busy(
    crowded: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    valve, running = await held(crowded, monkeypatch)
    long = "the lamp " * 100_000
    for work in (
        make_work(1, question=long),
        make_work(1, chunks=(long,)),
        make_work(1, question=long, is_plain=True, chunks=()),
    ):
        failed = failure_of(await events_of(crowded, work))
        assert (failed.status, failed.kind) == (400, "invalid_request_error")
        assert "context window" in failed.message
        for ask in (crowded.count, crowded.explain):
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
    for characters, most in ((60, 40), (65, 0)):
        work = BackendRequest("x", "the lamp " * (characters * engine.context_window // 9))
        assert limits.is_doubtful(engine, work)
        with pytest.raises(ContextTooLongError):
            limits.ensure_fits(engine, work)
        assert read <= most * engine.context_window, characters
        read = 0
    with pytest.raises(InvalidInputError):
        limits.ensure_fits(engine, BackendRequest("x", "\ud800"))


async def test_long_texts_of_few_tokens_are_answered(crowded: LocalBackend) -> None:
    spaced = QUESTION.replace(" ", " " * 50_000)
    assert limits.is_doubtful(access.engines(crowded).base, make_work(0, question=spaced))
    long = await answer_of(crowded, make_work(0, question=spaced))
    assert long.text == (await answer_of(crowded, make_work(1))).text
    async with aclosing(crowded.answer(make_work(2, chunks=TEXTS))) as events:
        async for _ in events:
            break
