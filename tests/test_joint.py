"""Combinations: chunks computed together are a plain prefill, also where keys cannot move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import QUESTION, TEMPLATE, TOLERANCE, error, plain_logits
from zoo import FAMILIES, build, byte_tokenizer

from kvcache_rag import (
    Combination,
    DiskStore,
    Engine,
    FullRecompute,
    InvalidInputError,
    MemoryStore,
    Message,
    Reuse,
    TieredStore,
)
from kvcache_rag.codecs import Int8
from kvcache_rag.errors import ChunkNotFoundError, ContextTooLongError
from kvcache_rag.generation import StoredChunk
from kvcache_rag.kv import rotary

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.policies import ReusePolicy

TEXTS = ["The cat sat on the mat.", "A dog ran away from home, it is said.", "It rained for days."]
IMMOVABLE = ["gpt2", "opt", "hunyuan"]


def make_engine(name: str = "qwen2", **options: Any) -> Engine:
    options = {"template": TEMPLATE, "policy": Combination(), **options}
    return Engine(build(name), byte_tokenizer(), **options)


@pytest.fixture(scope="module", params=[*FAMILIES, *IMMOVABLE])
def engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(request.param)


@pytest.fixture(scope="module")
def qwen() -> Engine:
    return make_engine()


def context(engine: Engine, texts: list[str]) -> int:
    return sum(map(len, engine.tokenize(QUESTION, texts).chunks))


# ---------------------------------------------------------------------- the law
def test_law_a_combination_is_a_plain_prefill_in_any_order_computed_or_found(
    engine: Engine,
) -> None:
    for texts in (TEXTS, TEXTS[::-1], [TEXTS[1], TEXTS[1]], TEXTS[:1], []):
        reference = plain_logits(engine, texts)
        computed = engine.logits(QUESTION, texts)
        assert error(computed, reference) < TOLERANCE
        found = engine.logits(QUESTION, texts)
        assert torch.equal(found, computed), "a stored combination was changed by using it"


def test_law_answers_streams_and_batches_are_those_of_a_plain_prefill(engine: Engine) -> None:
    history = [Message("user", "And before?"), Message("assistant", "Nothing.")]
    questions: list[Any] = [
        (QUESTION, TEXTS, history),
        ("What is it that they saw there?", TEXTS[1:]),
        (QUESTION, TEXTS[:1]),
        ("x", []),
    ]
    mine = []
    for question, chunks, *turns in questions:
        options: dict[str, Any] = {"max_new_tokens": 6, "history": turns[0] if turns else ()}
        full = engine.generate(question, chunks, policy=FullRecompute(), **options)
        mine.append(engine.generate(question, chunks, **options))
        assert mine[-1].token_ids == full.token_ids
        assert "".join(engine.stream(question, chunks, **options)) == mine[-1].text
    batch = engine.generate_batch(questions, max_new_tokens=6)
    assert [one.token_ids for one in batch] == [one.token_ids for one in mine]


# ---------------------------------------------------------------------- found, counted, bounded
def test_a_combination_is_found_by_its_chunks_in_their_order() -> None:
    engine = make_engine()
    first = engine.generate(QUESTION, TEXTS, max_new_tokens=2).metrics
    tokens = context(engine, TEXTS)
    assert (first.hits, first.misses, first.prefilled_tokens) == ({}, 1, tokens)
    second = engine.generate("Why?", TEXTS, max_new_tokens=2).metrics
    assert (second.hits, second.misses) == ({"combinations": 1}, 0)
    assert (second.reused_tokens, second.prefilled_tokens) == (tokens, 0)
    turned = engine.generate(QUESTION, TEXTS[::-1], max_new_tokens=2).metrics
    assert (turned.hits, turned.misses) == ({}, 1)


def test_combinations_never_push_out_chunks() -> None:
    store = MemoryStore()
    probe = make_engine()
    (key,) = probe.add_combination([TEXTS])
    room = int(1.5 * probe.nbytes(key)) + 4000
    engine = make_engine(store=store, combinations=MemoryStore(room, tier="joint"))
    engine.add(TEXTS)
    held = store.stats()
    for texts in (TEXTS, TEXTS[::-1], TEXTS):
        assert engine.generate(QUESTION, texts, max_new_tokens=1).metrics.misses == 1
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.hits == {"joint": 1}
    assert engine.combinations.stats().evictions >= 2
    assert store.stats().puts == held.puts
    assert all(map(store.contains, engine.keys(TEXTS)))


def test_one_chunk_is_a_plain_chunk() -> None:
    engine = make_engine()
    (key,) = engine.add(TEXTS[:1])
    assert engine.add_combination([TEXTS[:1]]) == [key]
    assert engine.generate(QUESTION, TEXTS[:1], max_new_tokens=1).metrics.hits == {"memory": 1}
    assert engine.combinations.stats().puts == 0


# ---------------------------------------------------------------------- ahead of the question
def test_combinations_are_prefilled_ahead_each_once() -> None:
    engine = make_engine()
    lists = [TEXTS, TEXTS[:2], TEXTS]
    keys = engine.add_combination(lists)
    assert keys[0] == keys[2] != keys[1]
    assert [key.tokens for key in keys] == [context(engine, texts) for texts in lists]
    puts = engine.combinations.stats().puts
    assert engine.add_combination(lists) == keys
    for texts in lists:
        assert engine.generate(QUESTION, texts, max_new_tokens=1).metrics.misses == 0
    assert engine.combinations.stats().puts == puts
    assert engine.add_combination([]) == []


def test_what_cannot_be_combined_is_said_before_anything_is_computed(qwen: Engine) -> None:
    engine = make_engine(context_window=100)
    with pytest.raises(ContextTooLongError, match=r"combination 1 has .* fewer or smaller chunks"):
        engine.add_combination([TEXTS[:2], [*TEXTS, *TEXTS]])
    assert engine.combinations.stats().puts == 0
    with pytest.raises(InvalidInputError, match="combination 1 is empty; leave it out"):
        qwen.add_combination([TEXTS, []])
    with pytest.raises(InvalidInputError, match="a list of texts or keys, not one text"):
        qwen.add_combination(TEXTS)


# ---------------------------------------------------------------------- by reference
def test_references_find_the_combination_of_their_texts() -> None:
    engine = make_engine()
    keys = engine.add(TEXTS)
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=6)
    stored = [StoredChunk(key, text) for key, text in zip(keys, TEXTS, strict=True)]
    ways: list[list[Any]] = [[*keys], [*stored], [TEXTS[0], keys[1], stored[2]]]
    for chunks in ways:
        answer = engine.generate(QUESTION, chunks, max_new_tokens=6)
        assert answer.token_ids == expected.token_ids
        assert answer.metrics.hits == {"combinations": 1}
    with pytest.raises(ChunkNotFoundError, match="pass its text"):
        make_engine().generate(QUESTION, keys)


def test_bare_keys_find_a_combination_whose_chunks_were_never_stored_alone() -> None:
    engine = make_engine("opt")
    engine.add_combination([TEXTS])
    answer = engine.generate(QUESTION, engine.keys(TEXTS), max_new_tokens=6)
    assert answer.metrics.hits == {"combinations": 1}
    assert answer.token_ids == engine.generate(QUESTION, TEXTS, max_new_tokens=6).token_ids


# ---------------------------------------------------------------------- forgetting
def test_a_deleted_chunk_takes_its_combinations_along() -> None:
    engine = make_engine()
    keys = engine.add(TEXTS)
    both, others = engine.add_combination([TEXTS[:2], TEXTS[1:]])
    engine.delete(keys[:1])
    assert not engine.combinations.contains(both)
    assert engine.combinations.contains(others)
    engine.delete([others])
    assert not engine.combinations.contains(others), "and is deleted by its own key"


def test_a_deleted_namespace_leaves_neither_chunks_nor_combinations() -> None:
    stores = MemoryStore(), MemoryStore(tier="combinations")
    options: dict[str, Any] = {"store": stores[0], "combinations": stores[1]}
    mine, others = (make_engine(namespace=name, **options) for name in ("mine", "others"))
    for engine in (mine, others):
        engine.add(TEXTS)
        engine.add_combination([TEXTS])
    expected = mine.generate(QUESTION, TEXTS, max_new_tokens=6)
    assert mine.delete_namespace() >= len(TEXTS) + 1
    assert access.runner(mine).memory.kept is None
    assert not any(kept.memory.numel() for kept in rotary._KEPT_BY.values())
    prefiller: Any = access.prefiller(mine)
    assert (prefiller._computed_prefix, prefiller._stored_prefix) == (None, None)
    assert not any(map(mine.store.contains, mine.keys(TEXTS)))
    with pytest.raises(ChunkNotFoundError):
        mine.generate(QUESTION, mine.keys(TEXTS))
    assert others.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.misses == 0
    again = mine.generate(QUESTION, TEXTS, max_new_tokens=6)
    assert (again.metrics.misses, again.token_ids) == (1, expected.token_ids)


def test_a_namespace_deleted_by_others_is_forgotten(tmp_path: Path) -> None:
    store = TieredStore(MemoryStore(), DiskStore(tmp_path))
    engine = make_engine(store=store, namespace="mine")
    keys = engine.add(TEXTS)
    combined = engine.add_combination([keys])[0]

    def hits(chunks: Any) -> dict[str, int]:
        return dict(engine.generate(QUESTION, chunks, max_new_tokens=1).metrics.hits)

    assert hits(keys) == {"combinations": 1}
    DiskStore(tmp_path).delete_namespace("others")
    assert hits(keys) == {"combinations": 1}
    DiskStore(tmp_path).delete_namespace("mine")
    with pytest.raises(ChunkNotFoundError):
        engine.generate(QUESTION, keys)
    assert not engine.combinations.contains(combined)
    assert hits(TEXTS) == {}
    assert hits(TEXTS) == {"combinations": 1}


def test_combinations_on_disk_go_with_the_chunks_and_once(tmp_path: Path) -> None:
    store = MemoryStore()
    engine = make_engine(store=store, combinations=DiskStore(tmp_path))
    key = engine.add_combination([TEXTS])[0]
    store.delete_namespace("")
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.misses == 1
    assert engine.combinations.contains(key)
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.misses == 0


@pytest.mark.parametrize("policy", [Reuse(), FullRecompute(), Combination()])
def test_a_chunk_that_lies_about_its_tokens_is_never_used(policy: ReusePolicy) -> None:
    engine = make_engine()
    honest, liar = engine.add(["The cat sat on the mat.", "The dog sat on the mat."])
    layout = access.chunk_layout(engine)
    engine.store.put(liar, engine.store.get(honest, layout).chunk)
    with pytest.raises(ChunkNotFoundError):
        engine.logits(QUESTION, [TEXTS[1], liar], policy=policy)
    assert not engine.store.contains(liar)


# ---------------------------------------------------------------------- codecs
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "deepseek_v3", "opt"])
def test_a_coarser_form_is_a_little_off_and_no_more(name: str, tmp_path: Path) -> None:
    engine = make_engine(name, combinations=DiskStore(tmp_path, codec=Int8()))
    reference = plain_logits(engine, TEXTS)
    engine.add_combination([TEXTS])
    assert 0 < error(engine.logits(QUESTION, TEXTS), reference) < 0.2
    assert engine.combinations.stats().hits["disk"] >= 1
