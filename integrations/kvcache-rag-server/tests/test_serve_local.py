"""The local backend: the answers of its engine, for every policy, streamed or not, per tenant."""

from __future__ import annotations

import asyncio
import json
import warnings
from typing import TYPE_CHECKING, Any

import access
import pytest
from contracts_backend import MAX_WAITING, BackendContract
from serve_works import (
    QUESTION,
    TEXTS,
    Valve,
    answer_of,
    events_of,
    eventually,
    failure_of,
    make_work,
    reader,
    serve_threads,
    text_of,
)
from small import Loop, make_tokenizer, make_untrained

from kvcache_rag import DiskStore, Engine, MemoryStore, Message, Reuse, TieredStore
from kvcache_rag.policies import policy_by_name
from kvcache_rag_server.backend import BackendRequest, Finished, Started
from kvcache_rag_server.local import LocalBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvcache_rag_server.backend import Backend

POLICIES = [
    None,
    "reuse",
    "composite",
    "full",
    "legolink:4",
    "cacheblend:0.3",
    "ape:0.9,1.0",
    "combination",
]


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
@pytest.mark.parametrize("policy", POLICIES)
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
    try:
        first = await answer_of(backend, make_work(0, namespace="a"))
        assert first.metrics.misses == len(TEXTS)
        other = await answer_of(backend, make_work(1, namespace="b"))
        assert other.metrics.misses == len(TEXTS), "another namespace misses"
        again = await answer_of(backend, make_work(2, namespace="a"))
        assert again.metrics.hits == {"disk": len(TEXTS)}, "the same one hits"
        assert first.text == other.text == again.text
        joint = await answer_of(backend, make_work(3, namespace="a", policy="combination"))
        assert joint.metrics.misses == 1
        joint = await answer_of(backend, make_work(4, namespace="b", policy="combination"))
        assert joint.metrics.misses == 1, "nor a combination"
        engine = access.engines(backend).of("a")
        assert engine.keys(TEXTS) == reader(store=DiskStore(tmp_path), namespace="a").keys(TEXTS)
        assert engine.delete_namespace() > 0
        gone = await answer_of(backend, make_work(5, namespace="a"))
        assert gone.metrics.misses == len(TEXTS)
        kept = await answer_of(backend, make_work(6, namespace="b"))
        assert kept.metrics.misses == 0
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
    valve = Valve(access.engines(backend).base.model, monkeypatch)
    valve.close()
    running = asyncio.create_task(events_of(backend, make_work(0)))
    await eventually(valve.held.is_set)
    expected = await backend.count(make_work(1))
    assert await backend.count(make_work(1, namespace="never seen before")) == expected
    assert not running.done()
    valve.open.set()
    await running


async def test_it_is_ready_once_the_model_has_answered_and_not_after_its_end() -> None:
    backend = LocalBackend(reader(), name="reader")
    assert await backend.ready()
    assert [*await backend.models()] == ["reader"]
    await backend.close()
    await backend.close()
    assert not await backend.ready()
    assert failure_of(await events_of(backend, make_work(1))).status == 503


async def test_a_model_that_cannot_answer_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = LocalBackend(reader())
    with monkeypatch.context() as patch:
        Valve(access.engines(backend).base.model, patch).fails = True
        assert not await backend.ready()
    assert "secret" in caplog.text
    await backend.close()


async def test_counters_are_plain_values_per_tier(tmp_path: Path) -> None:
    store = TieredStore(MemoryStore(), DiskStore(tmp_path))
    backend = LocalBackend(reader(store=store, prompt_memory=0))  # each question asks the store
    try:
        await answer_of(backend, make_work(0))
        await answer_of(backend, make_work(1))
        await eventually(lambda: access.scheduler(backend).stats()["answered"] == 2)
        stats = json.loads(json.dumps(await backend.stats()))
    finally:
        await backend.close()
    (replica,) = stats["replicas"]
    tiers = {tier["tier"]: tier for tier in replica["tiers"]}
    assert set(tiers) == {"memory", "disk", "combinations"}
    assert tiers["memory"]["hits"] == len(TEXTS)
    assert tiers["disk"]["puts"] >= len(TEXTS)
    assert tiers["disk"]["bytes"] > tiers["memory"]["bytes"] > 0
    assert (replica["answered"], replica["waiting"], replica["failed"]) == (2, 0, 0)
    assert replica["service_seconds"] > 0
    assert replica["batches"] == {"1": 2}


async def test_a_foreign_instruction_stands_before_the_question(backend: LocalBackend) -> None:
    answer = await answer_of(backend, make_work(0, system=("Be brief.",)))
    assert answer.metrics.prefix_mismatch
    own = access.engines(backend).base.template.system
    answer = await answer_of(backend, make_work(1, system=(own,)))
    assert not answer.metrics.prefix_mismatch
