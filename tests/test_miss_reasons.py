"""Every miss says why: which chunk it is, how long, and what became of its keys and values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_args

import pytest
from kv_cache_fields import FIELDS, REASONS
from small import make_model, make_tokenizer

from kvcache_rag import (
    Combination,
    DiskStore,
    Engine,
    FullRecompute,
    MemoryStore,
    Metrics,
    PromptTemplate,
    Reuse,
    TieredStore,
)
from kvcache_rag.generation import StoredChunk
from kvcache_rag.integration import Reference
from kvcache_rag.metrics import MissReason

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.stores import ChunkStore

TEXTS = ["alpha is here", "beta is there now", "gamma is nowhere"]
QUESTION = "Where is gamma?"


def make_engine(store: ChunkStore, system: str = "Read.\n", **options: Any) -> Engine:
    template = PromptTemplate(system=system)
    return Engine(make_model(), make_tokenizer(), store=store, template=template, **options)


def reasons(engine: Engine, chunks: Any = TEXTS, **options: Any) -> list[tuple[int, str]]:
    metrics = engine.generate(QUESTION, chunks, max_new_tokens=1, **options).metrics
    assert metrics.misses == len(metrics.missed)
    assert sum(miss.tokens for miss in metrics.missed) == metrics.prefilled_tokens
    return [(miss.chunk, miss.reason) for miss in metrics.missed]


@pytest.fixture(params=["memory", "disk", "tiers"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    disk = DiskStore(tmp_path, durable=False)
    stores: dict[str, ChunkStore] = {
        "memory": MemoryStore(),
        "disk": disk,
        "tiers": TieredStore(MemoryStore(), disk),
    }
    return make_engine(stores[request.param])


@pytest.mark.parametrize(
    ("policy", "missed"), [(None, [1, 2]), (Combination(), [0])], ids=["chunks", "combination"]
)
def test_what_is_new_was_not_prefilled(
    engine: Engine, policy: ReusePolicy | None, missed: list[int]
) -> None:
    engine.add(TEXTS[:1])
    assert reasons(engine, policy=policy) == [(number, "not prefilled") for number in missed]
    assert reasons(engine, policy=policy) == []


def test_a_chunk_that_stands_twice_is_one_miss(engine: Engine) -> None:
    new = [(0, "not prefilled"), (1, "not prefilled")]
    assert reasons(engine, [TEXTS[0], TEXTS[1], TEXTS[0]]) == new


def test_what_was_stored_and_dropped_was_evicted(engine: Engine) -> None:
    keys = engine.add(TEXTS)
    engine.store.delete(keys[1])
    assert reasons(engine) == [(1, "evicted")]


def test_a_reference_tells_of_an_eviction_in_another_process(tmp_path: Path) -> None:
    first = make_engine(DiskStore(tmp_path, durable=False))
    keys = first.add(TEXTS)
    first.store.delete(keys[2])
    second = make_engine(DiskStore(tmp_path, durable=False))
    stored = [StoredChunk(key, text) for key, text in zip(keys, TEXTS, strict=True)]
    assert reasons(second, stored) == [(2, "evicted")]


def test_a_reference_of_another_model_says_so(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, durable=False)
    (key,) = make_engine(store, "Another instruction.\n").add(TEXTS[:1])
    engine = make_engine(store)
    assert reasons(engine, [StoredChunk(key, TEXTS[0])]) == [(0, "other model")]
    assert reasons(engine, [StoredChunk(key, TEXTS[0])]) == []


def test_a_reference_of_another_text_says_so(engine: Engine) -> None:
    (key,) = engine.add(TEXTS[:1])
    reference = Reference.of(key, TEXTS[0], engine)
    changed = reference.chunk("alpha is gone", engine)
    assert reasons(engine, [changed]) == [(0, "other text")]
    assert reasons(engine, [changed]) == []


@pytest.mark.parametrize("tiers", [False, True])
def test_damage_says_so(tmp_path: Path, *, tiers: bool) -> None:
    disk = DiskStore(tmp_path, durable=False)
    engine = make_engine(disk)
    path = disk.path(engine.add(TEXTS)[1])
    path.write_bytes(path.read_bytes()[:-1])
    if tiers:
        engine = make_engine(TieredStore(MemoryStore(), DiskStore(tmp_path, durable=False)))
    assert reasons(engine) == [(1, "damaged")]
    assert reasons(engine) == []


@pytest.mark.parametrize("tiers", [False, True])
def test_a_folder_that_may_not_be_read_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, tiers: bool
) -> None:
    disk = DiskStore(tmp_path, durable=False)
    keys = make_engine(disk).add(TEXTS)
    engine = make_engine(TieredStore(MemoryStore(), disk) if tiers else disk)
    stored = [StoredChunk(key, text) for key, text in zip(keys, TEXTS, strict=True)]

    def refuse(*_: Any) -> Any:
        raise PermissionError("it belongs to another user")

    for name in ("get", "list"):
        monkeypatch.setattr(disk.place, name, refuse)
    assert reasons(engine, stored) == [(place, "unreadable") for place in range(3)]


def test_a_file_that_is_not_signed_says_so(tmp_path: Path) -> None:
    make_engine(DiskStore(tmp_path, durable=False)).add(TEXTS)
    signed = make_engine(DiskStore(tmp_path, durable=False, signing_key=b"k" * 32))
    assert reasons(signed, TEXTS[:1]) == [(0, "not signed")]


def test_a_batch_tells_each_row_its_own(engine: Engine) -> None:
    engine.add(TEXTS[:1])
    asked = [(QUESTION, TEXTS[:2]), (QUESTION, [TEXTS[2], TEXTS[0]])]
    rows = engine.generate_batch(asked, max_new_tokens=1)
    found = [[(one.chunk, one.reason) for one in row.metrics.missed] for row in rows]
    assert found == [[(1, "not prefilled")], [(0, "not prefilled")]]


def test_several_rounds_number_the_chunks_as_given(engine: Engine) -> None:
    texts = [f"{text} and so on " * 8 for text in TEXTS]
    engine.add(texts[:1])
    small = make_engine(engine.store, context_window=512)
    answer = small.generate(QUESTION, texts, max_new_tokens=1, overflow="refine")
    assert answer.metrics.rounds > 1
    assert [miss.chunk for miss in answer.metrics.missed] == [1, 2]


def test_a_full_prefill_misses_nothing_and_computes_everything(engine: Engine) -> None:
    metrics = engine.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=1).metrics
    assert metrics.missed == ()
    assert metrics.computed_tokens == metrics.prompt_tokens


def test_reused_and_computed_are_the_prompt_but_for_the_prefix(engine: Engine) -> None:
    for _ in range(2):
        metrics = engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=1).metrics
        held = metrics.reused_tokens + metrics.continued_tokens
        together = held + metrics.computed_tokens + metrics.prefix_tokens
        assert together == metrics.prompt_tokens


def test_plain_values_have_them(engine: Engine) -> None:
    metrics = engine.generate(QUESTION, TEXTS[:1], max_new_tokens=1).metrics
    found = json.loads(json.dumps(metrics.to_dict()))
    (miss,) = metrics.missed
    assert found["missed"] == [{"chunk": 0, "tokens": miss.tokens, "reason": "not prefilled"}]
    assert found["computed_tokens"] == metrics.computed_tokens
    assert Metrics().to_dict()["missed"] == []


def test_the_page_tells_all_fields_and_reasons() -> None:
    of_frameworks = {"prompt", "answered_from_ids"}
    assert {*Metrics().to_dict(), *of_frameworks} == FIELDS
    assert {*get_args(MissReason)} == REASONS
