"""The laws: every fast path equals the slow, plain one, for every supported family, in float32.

Errors are the largest difference of logits over the standard deviation of the reference.  A control
shows for each family that the law can fail.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from laws import (
    QUESTION,
    TEXTS,
    TOLERANCE,
    error,
    make_engine,
    masked_logits,
    plain_logits,
    refused,
    sequence_logits,
)
from zoo import BY_PLACE, FAMILIES, build, byte_tokenizer

from kvcache_rag import Engine, FullRecompute, MemoryStore, PromptTemplate, Reuse
from kvcache_rag.kv.mask import block_mask


@pytest.fixture(scope="module", params=list(FAMILIES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(request.param)


def test_law_1_full_recompute_is_a_plain_prefill(engine: Engine) -> None:
    found = engine.logits(QUESTION, TEXTS, policy=FullRecompute())
    assert error(found, plain_logits(engine, TEXTS)) < TOLERANCE


def test_law_2_one_chunk_in_its_natural_place_is_a_plain_prefill(engine: Engine) -> None:
    found = engine.logits(QUESTION, TEXTS[1:2], policy=Reuse())
    assert error(found, plain_logits(engine, TEXTS[1:2])) < TOLERANCE


@pytest.mark.parametrize("scheme", ["reordered", "composite"])
def test_law_3_reuse_is_one_forward_under_the_block_mask(engine: Engine, scheme: Any) -> None:
    if refused(engine, Reuse(positions=scheme)):
        return
    engine.add(TEXTS[::-1])
    found = engine.logits(QUESTION, TEXTS, policy=Reuse(positions=scheme))
    assert error(found, masked_logits(engine, TEXTS, scheme)) < TOLERANCE
    again = engine.logits(QUESTION, TEXTS, policy=Reuse(positions=scheme))
    assert torch.equal(found, again), "a stored chunk was changed by using it"


def test_law_3_holds_for_repeated_chunks_and_any_order(engine: Engine) -> None:
    texts = [TEXTS[2], TEXTS[0], TEXTS[2]]
    found = engine.logits(QUESTION, texts, policy=Reuse())
    assert error(found, masked_logits(engine, texts, "reordered")) < TOLERANCE


def test_law_3_would_notice_keys_that_were_not_moved(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache_rag.stitching.loader.materialise", lambda *_: None)
    engine.forget_buffer()  # in which the same prompt may lie as it should
    found = engine.logits(QUESTION, TEXTS, policy=Reuse())
    assert error(found, masked_logits(engine, TEXTS, "reordered")) > 10 * TOLERANCE


@pytest.mark.parametrize("name", BY_PLACE)
def test_law_3_would_notice_a_bias_by_other_positions(name: str) -> None:
    engine = make_engine(name)
    # What asking for composite positions gave before it was refused: the reordered logits.
    found = engine.logits(QUESTION, TEXTS, policy=Reuse())
    assert error(found, masked_logits(engine, TEXTS, "composite")) > 100 * TOLERANCE
    ids = engine.tokenize(QUESTION, TEXTS)
    sequence = block_mask(ids.prefix, ids.chunks, ids.query)
    in_order = replace(sequence, positions=torch.arange(len(sequence.ids)))
    assert error(found, sequence_logits(engine, in_order)) > 10 * TOLERANCE


def test_law_8_generate_joins_the_stream_and_a_batch_equals_its_singles(engine: Engine) -> None:
    questions = [(QUESTION, TEXTS), ("What is it that they saw there?", TEXTS[:1]), ("x", [])]
    singles = [engine.generate(q, c, max_new_tokens=6) for q, c in questions]
    for (question, chunks), single in zip(questions, singles, strict=True):
        stream = engine.stream(question, chunks, max_new_tokens=6)
        assert "".join(stream) == single.text == stream.text
        assert stream.answer.token_ids == single.token_ids
    batch = engine.generate_batch(questions, max_new_tokens=6)
    assert [one.token_ids for one in batch] == [one.token_ids for one in singles]


def test_law_9_logits_processors_see_what_they_would_see_without_us(engine: Engine) -> None:
    ids = engine.tokenize(QUESTION, TEXTS)
    settings = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 2, "max_new_tokens": 8}
    plain = engine.model.generate(torch.tensor([ids.all]), do_sample=False, **settings)
    expected = plain[0, len(ids.all) :].tolist()
    full = engine.generate(QUESTION, TEXTS, policy=FullRecompute(), **settings)
    assert list(full.token_ids) == expected
    one = engine.tokenize(QUESTION, TEXTS[:1])
    plain = engine.model.generate(torch.tensor([one.all]), do_sample=False, **settings)
    reused = engine.generate(QUESTION, TEXTS[:1], **settings)
    assert list(reused.token_ids) == plain[0, len(one.all) :].tolist()


def test_law_7_order_of_ingestion_does_not_matter() -> None:
    first, second = make_engine("qwen2"), make_engine("qwen2")
    assert sorted(k.digest for k in first.add(TEXTS)) == sorted(
        k.digest for k in second.add(TEXTS[::-1])
    )
    assert error(first.logits(QUESTION, TEXTS), second.logits(QUESTION, TEXTS)) < 1e-4


def test_law_3_with_an_empty_prefix_is_turborags_mask() -> None:
    engine = Engine(
        build("llama"), byte_tokenizer(), template=PromptTemplate(system=""), store=MemoryStore()
    )
    assert engine.prefix_text == ""
    found = engine.logits(QUESTION, TEXTS)
    assert error(found, masked_logits(engine, TEXTS, "reordered")) < TOLERANCE
