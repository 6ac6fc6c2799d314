"""Laws of chunks in 8 bits that are attended to where they lie: an answer is that over a copy."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import QUESTION, TEMPLATE, TEXTS, Recorder, error
from zoo import build, byte_tokenizer

from kvcache_rag import BestLast, DiskStore, Engine, LegoLink, MemoryStore, Reuse, TieredStore
from kvcache_rag.codecs import Int8
from kvcache_rag.models.attention import few_queries
from kvcache_rag.models.deferred.int8 import Int8Segments, int8_refusal
from kvcache_rag.models.deferred.segments import LayerCall, Segment

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.stores import ChunkStore

needs_kernel = pytest.mark.skipif(
    few_queries.library() is None, reason="no compiled kernel, or no CPU with AVX-512 for bfloat16"
)
# Sliding windows, YaRN, several groups of layers, layers without positions.
READ = ["llama", "llama yarn", "qwen2", "mistral window", "gemma3", "smollm3"]
DECODED = {
    "phi": "phi: its keys are rotated as half[0:16], not all in halves",
    "cohere": "cohere: its keys are rotated as interleaved[0:32], not all in halves",
    "gemma2": "gemma2: Gemma2Attention passes softcap, which no kernel knows",
}
LONG = "What is the name of the person that was seen there by all of the others on that day?"


@cache
def model(name: str) -> Any:
    return build(name, dtype=torch.bfloat16, width=32)


def asked(name: str, store: ChunkStore, rotation: Any = "deferred", **options: Any) -> Engine:
    options = {"policy": Reuse(), "store": store, "rotation": rotation, **options}
    return Engine(model(name), byte_tokenizer(), template=TEMPLATE, **options)


BATCH_ROUNDING = 0.2  # standard deviations, in bfloat16


def disk(folder: Path) -> DiskStore:
    return DiskStore(folder, codec=Int8(), durable=False)


def pair(name: str, folder: Path, **options: Any) -> tuple[Engine, Engine]:
    """Over one folder in which all texts are, and the prefix: in place, and copying."""
    asked(name, disk(folder)).add(TEXTS)
    return asked(name, disk(folder), **options), asked(name, disk(folder), "copied", **options)


@needs_kernel
@pytest.mark.parametrize("policy", [Reuse(), Reuse(positions="composite")], ids=repr)
@pytest.mark.parametrize("name", READ)
def test_logits_are_bit_for_bit_those_over_a_copy(name: str, policy: Reuse, tmp_path: Path) -> None:
    in_place, copied = pair(name, tmp_path)
    twice = [TEXTS[2], TEXTS[0], TEXTS[2], TEXTS[1]]
    for question, chunks in ((QUESTION, TEXTS), (LONG, TEXTS[:1]), ("x", []), ("y", twice)):
        found, expected = (
            one.logits(question, chunks, policy=policy) for one in (in_place, copied)
        )
        assert torch.equal(found, expected)
    metrics = in_place.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
    assert (metrics.rotation, metrics.not_deferred) == ("deferred", "")
    assert (metrics.hits, metrics.stitch, metrics.misses) == ({"disk": 3}, 0.0, 0)


@needs_kernel
@pytest.mark.parametrize("name", READ)
def test_answers_batches_and_streams_are_those_of_copying(name: str, tmp_path: Path) -> None:
    in_place, copied = pair(name, tmp_path)
    questions = [(QUESTION, TEXTS), (LONG, [TEXTS[2], TEXTS[0], TEXTS[2]]), ("Why?", TEXTS[1:])]
    begun, wanted = Recorder(), Recorder()
    batch = in_place.generate_batch(questions, max_new_tokens=6, logits_processor=[begun])
    copied.generate_batch(questions, max_new_tokens=6, logits_processor=[wanted])
    # Kernels round the rows of a batch in their own ways, so random models break ties.
    assert error(begun.steps[0].float(), wanted.steps[0].float()) < BATCH_ROUNDING
    for row, (question, chunks) in enumerate(questions):
        answer = in_place.generate(question, chunks, max_new_tokens=6)
        expected = copied.generate(question, chunks, max_new_tokens=6)
        assert answer.token_ids == expected.token_ids
        assert answer.metrics.rotation == batch[row].metrics.rotation == "deferred"
        stream = in_place.stream(question, chunks, max_new_tokens=6)
        assert "".join(stream) == expected.text


@needs_kernel
@pytest.mark.parametrize("name", READ)
def test_a_question_that_begins_alike_goes_on_behind_codes(name: str, tmp_path: Path) -> None:
    engine, seen, again = pair(name, tmp_path)[0], Recorder(), Recorder()
    longer = f"{QUESTION}\nAnswer: it was.\n{LONG}"
    engine.generate(longer, TEXTS, max_new_tokens=3, logits_processor=[seen])
    engine.forget_buffer()
    first = engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics
    then = engine.generate(longer, TEXTS, max_new_tokens=3, logits_processor=[again]).metrics
    assert (then.rotation, then.continued_tokens) == ("deferred", first.query_tokens)
    assert error(again.steps[0].float(), seen.steps[0].float()) < BATCH_ROUNDING


@needs_kernel
@pytest.mark.parametrize("policy", [BestLast(), BestLast(0.6, "composite")], ids=repr)
@pytest.mark.parametrize("name", READ)
def test_what_is_computed_with_the_question_attends_to_the_others_in_place(
    name: str, policy: BestLast, tmp_path: Path
) -> None:
    rows = []
    for engine in pair(name, tmp_path, policy=policy):
        seen = Recorder()
        found = engine.logits(QUESTION, TEXTS)
        batch = engine.generate_batch(
            [(QUESTION, TEXTS), (LONG, TEXTS[1:])], max_new_tokens=1, logits_processor=[seen]
        )
        rotation = "copied" if rows else "deferred"
        assert {answer.metrics.rotation for answer in batch} == {rotation}
        assert batch[0].metrics.fresh_tokens > 0
        rows.append(torch.cat([found, seen.steps[0].float()]))
    # Many queries over a copy may go in blocks, by another kernel than those in place.
    assert error(*rows) < BATCH_ROUNDING


@needs_kernel
def test_every_tier_gives_the_same(tmp_path: Path) -> None:
    expected = pair("qwen2", tmp_path / "filled")[1].logits(QUESTION, TEXTS)
    far = disk(tmp_path / "far")
    stores: list[tuple[str, ChunkStore]] = [
        ("memory", MemoryStore(codec=Int8())),
        ("memory", TieredStore(MemoryStore(codec=Int8()), disk(tmp_path / "near"))),
        ("disk", TieredStore(far)),
        ("memory", TieredStore(MemoryStore(codec=Int8()), far)),
    ]
    for tier, store in stores:
        engine = asked("qwen2", store, "auto")
        for times in range(2):  # the first is computed, and promoted where it lay behind
            assert torch.equal(engine.logits(QUESTION, TEXTS), expected)
            metrics = engine.generate(QUESTION, TEXTS, max_new_tokens=2).metrics
            assert metrics.rotation == "deferred", metrics.not_deferred
            assert metrics.hits == {tier: 3}, times


@needs_kernel
def test_memory_is_attended_to_as_it_is_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(codec=Int8())
    engine = asked("llama", store)
    keys = engine.add(TEXTS)
    chunks = [store.encoded(key, access.chunk_layout(engine)).chunk for key in keys]
    assert all(isinstance(chunk.codec, Int8) for chunk in chunks)
    half = sum(chunk.layout.nbytes(len(chunk)) for chunk in chunks) * 0.6
    assert sum(chunk.nbytes for chunk in chunks) < half
    before = [{name: part.clone() for name, part in chunk.stored.items()} for chunk in chunks]
    addresses = {part.data_ptr() for chunk in chunks for part in chunk.stored.values()}
    met: set[int] = set()
    described = few_queries.ChunkSlots.described

    def watched(slots: few_queries.ChunkSlots) -> Any:
        met.update(part.data_ptr() for part in (slots.key, slots.value, *(slots.scales or ())))
        return described(slots)

    monkeypatch.setattr(few_queries.ChunkSlots, "described", watched)
    engine.generate(QUESTION, TEXTS[::-1], max_new_tokens=5)
    assert len(met & addresses) == 12
    for chunk, kept in zip(chunks, before, strict=True):
        assert all(torch.equal(chunk.stored[name], part) for name, part in kept.items())


@needs_kernel
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("queries", [1, 5])
def test_the_kernel_is_as_exact_as_the_specification(queries: int, is_masked: bool) -> None:
    """Rows of unequal lengths, columns that are kept, windows and sinks."""
    engine = asked("gpt_oss", MemoryStore(codec=Int8()))
    store, layout = engine.store, access.adapter(engine).measured
    chunks = [store.encoded(key, layout.chunk_layout).chunk for key in engine.add(TEXTS)]
    sizes = [*map(len, chunks)]
    # The second row has the last chunk alone, behind padding, and two columns of it are kept.
    behind, tail = sum(sizes), queries + 2
    rows = [
        [
            Segment(chunk, sum(sizes[:place]), 3 + sum(sizes[:place]))
            for place, chunk in enumerate(chunks)
        ],
        [Segment(chunks[2], behind + 2 - sizes[2], 0)],
    ]
    segments = Int8Segments.from_rows(layout, rows, behind, [0, 2])
    made = torch.Generator().manual_seed(queries)
    query = torch.randn(2, 4, queries, 32, generator=made).bfloat16()
    key, value = torch.randn(2, 2, 2, tail, 32, generator=made).bfloat16()
    seen = torch.ones(2, 1, queries, behind + tail, dtype=torch.bool).tril(behind + tail - queries)
    seen[1, ..., : behind + 2 - sizes[2]] = False
    if is_masked:
        seen[0] &= ~torch.ones_like(seen[0]).tril(40)  # a window
    mask = seen if is_masked or queries == 1 else seen[1:].expand(2, -1, -1, -1)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if is_masked else None
    call = LayerCall(query, key, value, mask, 32**-0.5, sinks)
    found, expected = segments.attend(1, 0, call), segments.plain_attention(1, 0, call)
    assert found.shape == expected.shape
    assert (found.float() - expected.float()).abs().max() < 0.02


@needs_kernel
def test_without_a_mask_every_new_token_sees_what_is_before_it(tmp_path: Path) -> None:
    engine = asked("llama", MemoryStore(codec=Int8()))
    layout = access.adapter(engine).measured
    (chunk,) = [
        engine.store.encoded(key, layout.chunk_layout).chunk for key in engine.add(TEXTS[:1])
    ]
    segments = Int8Segments.from_rows(layout, [[Segment(chunk, 0, 0)]], len(chunk), [0])
    made = torch.Generator().manual_seed(1)
    query = torch.randn(1, 4, 3, 32, generator=made).bfloat16()
    key, value = torch.randn(2, 1, 2, 3, 32, generator=made).bfloat16()
    call = LayerCall(query, key, value, None, 32**-0.5)
    found, expected = segments.attend(0, 1, call), segments.plain_attention(0, 1, call)
    assert (found.float() - expected.float()).abs().max() < 0.02


@needs_kernel
@pytest.mark.parametrize("name", DECODED)
def test_what_the_kernel_does_not_know_is_decoded_and_says_why(name: str) -> None:
    engine = asked(name, MemoryStore(codec=Int8()))
    metrics = engine.generate(QUESTION, TEXTS, max_new_tokens=2).metrics
    assert (metrics.rotation, metrics.not_deferred) == ("copied", DECODED[name])


def test_other_dtypes_machines_policies_and_tiers_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why(engine: Engine, **options: Any) -> str:
        metrics = engine.generate(QUESTION, TEXTS, max_new_tokens=2, **options).metrics
        return str(metrics.not_deferred)

    engine, policy = asked("llama", disk(tmp_path)), LegoLink(4)
    wide = Engine(
        build("llama", width=32),
        byte_tokenizer(),
        template=TEMPLATE,
        store=MemoryStore(codec=Int8()),
        rotation="deferred",
    )
    assert "bfloat16 models on a CPU" in why(wide)
    decoded = asked("llama", TieredStore(MemoryStore(), disk(tmp_path)))
    assert why(decoded).startswith("a tier of the store keeps chunks decoded; give it codec=")
    assert why(engine, policy=policy) == f"{policy!r} computes tokens again"
    monkeypatch.setattr(few_queries, "library", lambda: None)
    assert "AVX-512" in why(engine)
    assert int8_refusal(access.adapter(engine)) == why(engine)


@needs_kernel
def test_values_that_cannot_be_rounded_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = asked("llama", MemoryStore(codec=Int8()))
    adapter = access.adapter(engine)
    expected = asked("llama", MemoryStore()).generate(QUESTION, TEXTS, max_new_tokens=1)
    capture = type(adapter).prefill

    def endless(*arguments: Any, **named: Any) -> Any:
        for chunk in capture(*arguments, **named):
            chunk.values(0)[0, 0, -1, 0] = torch.inf
            yield chunk

    monkeypatch.setattr(type(adapter), "prefill", lambda *a, **n: list(endless(*a, **n)))
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    assert answer.metrics.rotation == "copied"
    assert "too large to be quantised" in answer.metrics.not_deferred
    assert answer.metrics.reused_tokens == expected.metrics.reused_tokens == 0
    assert engine.store.stats().put_failures == 4  # the prefix, too
