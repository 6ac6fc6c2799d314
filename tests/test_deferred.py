"""Laws of deferred rotation: whatever is asked, chunks attended to in place equal copied ones."""

from __future__ import annotations

import copy
import threading
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import QUESTION, TEMPLATE, TEXTS, Recorder, error, make_engine, refused
from torch import Tensor
from zoo import FAMILIES, OWN_ATTENTION, SEVERAL, build, byte_tokenizer

from kvcache_rag import (
    Ape,
    Combination,
    DiskStore,
    Engine,
    FullRecompute,
    LegoLink,
    MemoryStore,
    PromptTemplate,
    Reuse,
    TieredStore,
)
from kvcache_rag.codecs import Int4
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.deferred import attention, support

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKV
    from kvcache_rag.models.deferred.cache import LayerSegments
    from kvcache_rag.models.deferred.segments import LayerCall

# One angle per chunk, exact for the distance: a prompt of 200 tokens needs no more than rounding.
TOLERANCE = 1e-4
# Copied for good, and why: nothing else may fall back unnoticed.
NOT_DEFERRED = {
    "gemma2": "gemma2: Gemma2Attention passes softcap, which no kernel knows",
    "falcon alibi": "falcon: its attention does not go through transformers' attention interface",
    "bloom": "bloom: its attention does not go through transformers' attention interface",
    "mpt": "mpt: its attention does not go through transformers' attention interface",
    **{
        name: f"{name}: its attention does not go through transformers' attention interface"
        for name in OWN_ATTENTION
    },
    "deepseek_v2": "deepseek_v2: layer 0 keeps rotated columns in its V slot",
    "deepseek_v3": "deepseek_v3: layer 0 keeps rotated columns in its V slot",
}
LONG = "What is the name of the person that was seen there by all of the others on that day?"


@cache
def deferred_engine(name: str) -> Engine:
    return make_engine(name, rotation="deferred")


@cache
def copying_engine(name: str) -> Engine:
    return make_engine(name, rotation="copied")


@pytest.mark.parametrize("policy", [Reuse(), Reuse(positions="composite")], ids=repr)
@pytest.mark.parametrize("name", FAMILIES)
def test_deferred_is_copied(name: str, policy: Reuse) -> None:
    deferred, copied = deferred_engine(name), copying_engine(name)
    if refused(deferred, policy) or refused(copied, policy):
        return
    for question, chunks in ((QUESTION, TEXTS), (LONG, TEXTS[:1]), ("x", []), ("y", TEXTS * 2)):
        found = deferred.logits(question, chunks, policy=policy)
        assert error(found, copied.logits(question, chunks, policy=policy)) < TOLERANCE
    metrics = deferred.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
    if name in NOT_DEFERRED:
        assert (metrics.rotation, metrics.not_deferred) == ("copied", NOT_DEFERRED[name])
    else:
        assert (metrics.rotation, metrics.not_deferred) == ("deferred", "")
    assert copied.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.rotation == "copied"


@pytest.mark.parametrize("name", ["llama", "mistral window", "gemma3", "gpt_oss"])
def test_questions_of_other_lengths_in_bfloat16_stay_finite(name: str) -> None:
    """Padding that sees nothing behind a window gave NaN, which spread to the answers."""
    model = build(name, dtype=torch.bfloat16, width=32)
    questions = [(QUESTION, TEXTS), ("x", []), ("Why?", TEXTS[:1]), (LONG * 3, TEXTS[1:])]
    steps = []
    for rotation in ("copied", "deferred"):
        engine = Engine(
            model, byte_tokenizer(), template=TEMPLATE, store=MemoryStore(), rotation=rotation
        )
        seen = Recorder()
        answers = engine.generate_batch(questions, max_new_tokens=1, logits_processor=[seen])
        assert {answer.metrics.rotation for answer in answers} == {rotation}
        steps.append(seen.steps[0])
    assert all(bool(step.isfinite().all()) for step in steps)
    # By rows: in 16 bits a near tie sends a token of one question to another expert.
    off = (steps[0] - steps[1]).std(-1) / steps[0].std(-1)
    assert float(off.median()) < 0.05


@pytest.mark.parametrize("name", [name for name in SEVERAL if name not in NOT_DEFERRED])
def test_answers_batches_and_streams_are_those_of_copying(name: str) -> None:
    deferred, copied = deferred_engine(name), copying_engine(name)
    questions = [
        (QUESTION, TEXTS),
        ("What is it that they saw there?", TEXTS[:1]),
        ("x", []),
        (LONG, [TEXTS[2], TEXTS[0], TEXTS[2]]),
        ("Why?", TEXTS[1:]),
    ]
    together = Recorder()
    batch = deferred.generate_batch(questions, max_new_tokens=6, logits_processor=[together])
    for row, (question, chunks) in enumerate(questions):
        mine, theirs = Recorder(), Recorder()
        single = deferred.generate(question, chunks, max_new_tokens=6, logits_processor=[mine])
        expected = copied.generate(question, chunks, max_new_tokens=6, logits_processor=[theirs])
        assert single.token_ids == expected.token_ids == batch[row].token_ids
        assert single.metrics.rotation == batch[row].metrics.rotation == "deferred"
        for step, reference in enumerate(theirs.steps):
            assert error(mine.steps[step][0], reference[0]) < TOLERANCE
            assert error(together.steps[step][row], reference[0]) < TOLERANCE
        stream = deferred.stream(question, chunks, max_new_tokens=6)
        assert "".join(stream) == expected.text
        assert stream.metrics.rotation == "deferred"


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_metrics_count_the_same(name: str) -> None:
    times = {"ttft", "load", "stitch", "prefill", "total", "rotation", "not_deferred"}
    counts = [
        one.name for one in fields(deferred_engine(name).generate("x", max_new_tokens=1).metrics)
    ]
    mine, theirs = (make_engine(name, rotation=mode) for mode in ("deferred", "copied"))
    for question, chunks in (
        (QUESTION, TEXTS),
        (QUESTION, TEXTS),
        ("y", [TEXTS[0]] * 2),
        ("z", []),
    ):
        for policy in (Reuse(), FullRecompute()):
            found, expected = (
                one.generate(question, chunks, max_new_tokens=3, policy=policy).metrics
                for one in (mine, theirs)
            )
            for count in counts:
                if count not in times:
                    assert getattr(found, count) == getattr(expected, count), count
            assert found.rotation == ("" if policy.is_full else "deferred")
    batches = [
        one.generate_batch(
            [(QUESTION, TEXTS), ("a", TEXTS[1:]), ("b", TEXTS[1:])], max_new_tokens=3
        )
        for one in (mine, theirs)
    ]
    for found, expected in zip(*batches, strict=True):
        assert found.metrics.hits == expected.metrics.hits
        assert found.metrics.reused_tokens == expected.metrics.reused_tokens


def snapshot(chunk: ChunkKV) -> list[Tensor]:
    return [part.clone() for group in chunk.tensors for part in group]


def test_stored_chunks_are_the_ones_attended_to_and_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines share the store's tensors: no K is copied, none is written."""
    store = MemoryStore()
    engines = [
        Engine(
            build("qwen2"), byte_tokenizer(), template=TEMPLATE, store=store, rotation="deferred"
        )
        for _ in range(3)
    ]
    keys = engines[0].add(TEXTS)
    layout = access.chunk_layout(engines[0])
    chunks = [store.get(key, layout).chunk for key in keys]
    before = [snapshot(chunk) for chunk in chunks]
    pointers = {chunk.keys(0)[layer].data_ptr() for chunk in chunks for layer in range(4)}
    met: dict[int, set[int]] = {}
    capacities = set()
    plain = attention.fast_attention

    def watched(call: LayerCall, layer: LayerSegments) -> Tensor:
        for held, _ in layer.held.views[layer.group].values():
            met.setdefault(threading.get_ident(), set()).add(held[layer.place].data_ptr())
        capacities.add(call.key.untyped_storage().nbytes())
        return plain(call, layer)

    monkeypatch.setattr(attention, "fast_attention", watched)
    answers: dict[int, list[tuple[int, ...]]] = {}

    def ask(number: int) -> None:
        answers[number] = [
            engines[number].generate(QUESTION, order, max_new_tokens=5).token_ids
            for order in (TEXTS, TEXTS[::-1])
        ]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[0] == answers[1] == answers[2]
    assert len(met) == 3
    assert all(pointers <= one for one in met.values())
    # The buffer of the tail is one step of room, whatever the length of the context.
    whole = 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, width, float32
    assert capacities == {256 * whole}
    for chunk, kept in zip(chunks, before, strict=True):
        assert all(map(torch.equal, snapshot(chunk), kept))
    copied = Engine(
        build("qwen2"), byte_tokenizer(), template=TEMPLATE, store=store, rotation="copied"
    )
    assert answers[0][0] == copied.generate(QUESTION, TEXTS, max_new_tokens=5).token_ids


class TestReasons:
    """Everything else is copied, and says why."""

    def engine(self, mode: Any = "deferred", **options: Any) -> Engine:
        options = {"store": MemoryStore(), **options}
        return Engine(build("qwen2"), byte_tokenizer(), template=TEMPLATE, rotation=mode, **options)

    def reason(self, engine: Engine, **options: Any) -> str:
        metrics = engine.generate(QUESTION, TEXTS, max_new_tokens=2, **options).metrics
        assert metrics.rotation == "copied"
        (batched,) = engine.generate_batch([(QUESTION, TEXTS)], max_new_tokens=2, **options)
        assert batched.metrics.not_deferred == metrics.not_deferred
        return metrics.not_deferred

    def test_a_policy_that_computes_again(self) -> None:
        engine = self.engine()
        policy = LegoLink(4)
        assert self.reason(engine, policy=policy) == f"{policy!r} computes tokens again"
        assert "Ape(temperature=0.9, scale=0.9) weighs" in self.reason(engine, policy=Ape())
        assert engine.generate(QUESTION, TEXTS, max_new_tokens=2).metrics.rotation == "deferred"

    def test_beams(self) -> None:
        assert "beam search" in self.reason(self.engine(), num_beams=2)

    def test_the_caller(self) -> None:
        assert 'rotation="copied"' in self.reason(self.engine("copied"))

    def test_keys_without_position(self, tmp_path: Path) -> None:
        engine = self.engine(store=DiskStore(tmp_path, codec=Int4()))
        why = self.reason(engine)
        assert why.startswith(f"codec {Int4().name} keeps every key at position 0")

    def test_a_model_loaded_for_other_attention(self) -> None:
        engine = self.engine("copied")
        access.adapter(engine).config._attn_implementation_internal = "flex_attention"
        why = support.deferral_refusal(access.adapter(engine))
        assert why == (
            "qwen2: it was loaded for attention by flex_attention; load it with "
            'attn_implementation="sdpa" instead'
        )

    def test_a_full_prefill_has_none(self) -> None:
        engine = self.engine()
        for answer in (
            engine.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=1),
            engine.complete("Who", max_new_tokens=1),
        ):
            assert (answer.metrics.rotation, answer.metrics.not_deferred) == ("", "")

    def test_an_empty_prefix_is_no_segment(self) -> None:
        bare = PromptTemplate(system="", chunk_start="<d>", chunk_end="</d>")
        tokenizer = copy.deepcopy(byte_tokenizer())
        tokenizer.bos_token = None
        engines = [
            Engine(build("qwen2"), tokenizer, template=bare, rotation=mode)
            for mode in ("deferred", "copied")
        ]
        assert not access.renderer(engines[0]).prefix_ids
        found, expected = (one.logits(QUESTION, TEXTS) for one in engines)
        assert error(found, expected) < TOLERANCE

    @pytest.mark.parametrize("mode", ["lazy", "", None, True])
    def test_unknown_modes_are_refused(self, mode: Any) -> None:
        with pytest.raises(
            InvalidInputError, match=r'^rotation must be "auto", "copied" or "deferred", not '
        ):
            self.engine(mode)


def test_combinations_are_held_too() -> None:
    deferred, copied = deferred_engine("qwen2"), copying_engine("qwen2")
    policy = Combination()
    for chunks in (TEXTS, TEXTS[:1], TEXTS[::-1]):
        found = deferred.logits(QUESTION, chunks, policy=policy)
        assert error(found, copied.logits(QUESTION, chunks, policy=policy)) < TOLERANCE
    answer = deferred.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=4)
    assert answer.metrics.rotation == "deferred"
    assert answer.metrics.hits == {"combinations": 1}
    batch = deferred.generate_batch(
        [(QUESTION, TEXTS), ("x", TEXTS[:1])], policy=policy, max_new_tokens=4
    )
    assert batch[0].token_ids == answer.token_ids


def test_chunks_of_a_slow_tier_are_brought_and_held(tmp_path: Path) -> None:
    engine = make_engine("qwen2", rotation="copied")
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=4).token_ids
    for store in (
        DiskStore(tmp_path / "a"),
        TieredStore(MemoryStore(), DiskStore(tmp_path / "b")),
    ):
        for _ in range(2):  # missing, then held
            fresh = Engine(
                build("qwen2"),
                byte_tokenizer(),
                template=TEMPLATE,
                store=store,
                rotation="deferred",
            )
            answer = fresh.generate(QUESTION, TEXTS, max_new_tokens=4)
            assert (answer.metrics.rotation, answer.token_ids) == ("deferred", expected)
        assert sum(answer.metrics.hits.values()) == len(TEXTS)


def test_a_file_that_lies_about_its_tokens_is_a_miss() -> None:
    engine = make_engine("qwen2", rotation="deferred")
    keys = engine.add(TEXTS)
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    chunk = engine.store.get(keys[0], access.chunk_layout(engine)).chunk
    chunk.tokens[0] += 1
    again = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    assert (again.metrics.misses, again.token_ids) == (1, expected.token_ids)


def test_auto_copies_what_is_not_in_8_bits() -> None:
    engine = make_engine("qwen2")
    for _ in range(3):
        metrics = engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics
        assert metrics.rotation == "copied"
        assert metrics.not_deferred == 'rotation="auto" copies what is not in 8 bits'
