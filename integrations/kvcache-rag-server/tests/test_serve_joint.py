"""What a server has beside chunks: combinations, and an auxiliary model for cacheclip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from serve_works import answer_of, events_of, failure_of, make_work, reader

from kvcache_rag import CacheClip, Engine
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.cli import main
from kvcache_rag.stores import DiskStore, MemoryStore, RemoteStore, TieredStore
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.settings import ServerSettings
from kvcache_rag_server.startup import open_combinations, open_engine, open_store

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ("The red lamp stands in the hall.", "The blue lamp is broken.")
FACTS = ("The Mobrit costs 412 euros.", "Drenko was founded by Osha Grell.")


def opened(folder: Path) -> Engine:
    """An engine as one more process of the server has it."""
    return open_engine(ServerSettings(model="tiny", kv_dir=str(folder), device="cpu"))


async def test_what_one_server_computed_together_another_finds(tmp_path: Path) -> None:
    first, other = (LocalBackend(opened(tmp_path / "kv")) for _ in range(2))
    work = make_work(chunks=TEXTS, policy="combination", max_new_tokens=2)
    try:
        await answer_of(first, work)
        metrics = (await answer_of(other, work)).metrics
        assert (metrics.hits, metrics.misses) == ({"combinations-disk": 1}, 0)
        assert metrics.prefilled_tokens == 0
        (stats,) = (await other.stats())["replicas"]
        names = [tier["tier"] for tier in stats["tiers"]]
        assert names == ["memory", "disk", "combinations", "combinations-disk"]
    finally:
        await first.close()
        await other.close()


def test_commands_see_each_of_the_two_folders_alone(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "kv"
    engine = opened(folder)
    engine.add(TEXTS)
    engine.add_combination([TEXTS])
    for place, chunks in ((folder, 3), (folder / "combinations", 2)):  # and the prefix of each
        assert main(["store", "check", str(place)]) == 0
        assert f"{chunks} files" in capsys.readouterr().out
        assert main(["store", "ls", str(place)]) == 0
        assert capsys.readouterr().out.count("namespace ") == 1


def test_one_limit_holds_for_chunks_and_combinations_together(tmp_path: Path) -> None:
    """A fourth is for combinations."""
    folder, url = str(tmp_path / "kv"), "memory://bucket/kv"
    memory = ServerSettings(model="tiny", memory_bytes=40)
    for opened, limit, tier in (
        (open_store, 30, "memory"),
        (open_combinations, 10, "combinations"),
    ):
        alone = opened(memory)
        assert isinstance(alone, MemoryStore)
        assert (alone.max_bytes, alone.tier) == (limit, tier)
    limits: dict[str, Any] = {"kv_max_bytes": 1003, "memory_bytes": 103, "kv_codec": "int8"}
    disk = ServerSettings(model="tiny", kv_dir=folder, **limits)
    for opened, expected in ((open_store, [78, 753]), (open_combinations, [25, 250])):
        tiered = opened(disk)
        assert isinstance(tiered, TieredStore)
        assert [type(one) for one in tiered.tiers] == [MemoryStore, DiskStore]
        assert [one.max_bytes for one in tiered.tiers] == expected  # type: ignore[attr-defined]  # checked above
        assert tiered.codec.name == "int8-kc-vt"
    for opened, place in ((open_store, url), (open_combinations, f"{url}/combinations")):
        tiered = opened(ServerSettings(model="tiny", kv_dir=url))
        assert isinstance(tiered, TieredStore)
        assert isinstance(tiered.tiers[1], RemoteStore)
        assert tiered.tiers[1].url == place


# ---------------------------------------------------------------------- an auxiliary model
@pytest.fixture
def scored(tmp_path: Path) -> Engine:
    return open_engine(ServerSettings(model="tiny", kv_dir=str(tmp_path / "kv"), auxiliary="tiny"))


async def test_a_request_may_ask_for_cacheclip_where_there_is_an_auxiliary(scored: Engine) -> None:
    work = make_work(chunks=FACTS, policy="cacheclip:0.5,mean", namespace="a")
    backend, without = LocalBackend(scored), LocalBackend(reader())
    try:
        answer = await answer_of(backend, work)
        failed = failure_of(await events_of(without, work))
    finally:
        await backend.close()
        await without.close()
    assert answer.metrics.policy.startswith("CacheClip(")
    assert answer.metrics.recomputed_tokens > 0
    alone = scored.generate(work.question, FACTS, policy=work.policy, max_new_tokens=8)
    assert answer.token_ids == alone.token_ids
    assert failed.status == 400
    assert "auxiliary model" in failed.message


def test_what_one_tenant_had_scored_another_has_not(scored: Engine) -> None:
    one, other = (scored.in_namespace(name).auxiliary.engine for name in ("one", "other"))

    def held(scoring: Engine) -> list[bool]:
        return [scoring.store.contains(key) for key in scoring.keys(TEXTS)]

    tenant = scored.in_namespace("one")
    tenant.add(TEXTS)
    assert {key.namespace for key in one.keys(TEXTS)} == {"one"}
    assert (held(one), held(other)) == ([True, True], [False, False])
    assert tenant.delete_namespace() > 0
    assert not any(held(one))


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
