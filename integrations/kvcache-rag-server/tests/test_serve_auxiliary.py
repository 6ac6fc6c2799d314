"""A server with an auxiliary model: cacheclip per request, and tenants apart in its chunks too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from serve_works import make_work

from kvcache_rag import CacheClip, Engine
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag_server.backend import Failed, Finished
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.settings import ServerSettings
from kvcache_rag_server.startup import open_engine

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ("The Mobrit costs 412 euros.", "Drenko was founded by Osha Grell.")
POLICY = CacheClip(ratio=0.5, threshold=None)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return open_engine(ServerSettings(model="tiny", kv_dir=str(tmp_path / "kv"), auxiliary="tiny"))


async def ask(engine: Engine, **fields: Any) -> Finished | Failed:
    backend = LocalBackend(engine)
    try:
        work = make_work(chunks=TEXTS, policy="cacheclip:0.5,mean", **fields)
        found = [event async for event in backend.answer(work)][-1]
        assert isinstance(found, Finished | Failed)
        return found
    finally:
        await backend.close()


async def test_a_request_may_ask_for_cacheclip(engine: Engine) -> None:
    found = await ask(engine, namespace="a")
    assert isinstance(found, Finished)
    metrics = found.answer.metrics
    assert metrics.policy.startswith("CacheClip(")
    assert metrics.recomputed_tokens > 0
    alone = engine.generate(make_work().question, TEXTS, policy=POLICY)
    assert found.answer.token_ids == alone.token_ids


async def test_without_one_the_answer_says_what_is_missing() -> None:
    found = await ask(open_engine(ServerSettings(model="tiny")))
    assert isinstance(found, Failed)
    assert (found.status, "auxiliary model" in found.message) == (400, True)


def test_what_one_tenant_had_scored_another_has_not(engine: Engine) -> None:
    one, other = engine.in_namespace("one"), engine.in_namespace("other")
    one.add(TEXTS)
    assert {key.namespace for key in one.auxiliary.engine.keys(TEXTS)} == {"one"}
    for tenant, expected in ((one, True), (other, False)):
        scoring = tenant.auxiliary.engine
        held = [scoring.store.contains(key) for key in scoring.keys(TEXTS)]
        assert held == [expected] * len(TEXTS)
    assert one.delete_namespace() > 0
    scoring = one.auxiliary.engine
    assert not any(scoring.store.contains(key) for key in scoring.keys(TEXTS))


def test_an_engines_own_policy_scores_for_its_tenant_only() -> None:
    plain = Engine.from_pretrained("tiny", device="cpu")
    scoring = Auxiliary(Engine(plain.model, plain.tokenizer))
    policy = CacheClip(scoring, ratio=0.5, threshold=None)
    engine = Engine(plain.model, plain.tokenizer, policy=policy)
    one = engine.in_namespace("one")
    one.generate(make_work().question, TEXTS, max_new_tokens=1)
    moved = one.policy.auxiliary
    assert isinstance(moved, Auxiliary)
    assert {key.namespace for key in moved.engine.keys(TEXTS)} == {"one"}
    assert not any(map(scoring.engine.store.contains, scoring.engine.keys(TEXTS)))
    assert engine.policy.auxiliary is scoring, "the first one's is left alone"
    assert type(one.policy) is type(policy)
