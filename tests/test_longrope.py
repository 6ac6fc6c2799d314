"""Frequencies that change with length: longrope has two sets, dynamic NTK one per length.

The references are forward passes of a model that nobody has touched, which takes the frequencies of
long prompts by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import access
import pytest
import torch
import zoo
from laws import (
    QUESTION,
    TEMPLATE,
    TEXTS,
    TOLERANCE,
    error,
    make_engine,
    masked_logits,
    plain_logits,
    sequence_logits,
)
from torch import Tensor
from zoo import build, byte_tokenizer

from kvcache_rag import (
    CacheBlend,
    Engine,
    FullRecompute,
    InvalidInputError,
    LegoLink,
    MemoryStore,
    Reuse,
)
from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.kv.mask import block_mask
from kvcache_rag.models.cache import growing_cache, layer_tensors

# Shorter than the prompt of the laws, some 200 tokens.
ORIGINAL = 96
SHORT = ["abc ab", "bca"]


@pytest.fixture(autouse=True)
def short_original(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama longrope", "llama dynamic"):
        model_type, changes, special = zoo.FAMILIES[name]
        parameters = {**changes["rope_parameters"], "original_max_position_embeddings": ORIGINAL}
        own: dict[str, Any] = {"rope_parameters": parameters}
        if name == "llama dynamic":
            own = {**changes, "max_position_embeddings": ORIGINAL}
        monkeypatch.setitem(zoo.FAMILIES, name, (model_type, own, special))


def untouched() -> Engine:
    """An engine whose model is only run by itself, with the frequencies as they come."""
    return make_engine("llama longrope")


@pytest.mark.parametrize("scheme", ["reordered", "composite"])
def test_law_3_long_prompts_are_those_of_the_model_by_itself(scheme: Any) -> None:
    engine, plain = make_engine("llama longrope", context_window=2048), untouched()
    assert engine.context_window == 2048
    assert len(engine.tokenize(QUESTION, TEXTS).all) > ORIGINAL
    engine.add(TEXTS[::-1])
    expected = masked_logits(plain, TEXTS, scheme)
    found = engine.logits(QUESTION, TEXTS, policy=Reuse(positions=scheme))
    assert error(found, expected) < TOLERANCE
    policy = CacheBlend(0.999, positions=scheme)
    full = plain_logits(plain, TEXTS)
    assert error(engine.logits(QUESTION, TEXTS, policy=policy), full) < TOLERANCE
    assert error(engine.logits(QUESTION, TEXTS, policy=FullRecompute()), full) < TOLERANCE
    assert error(expected, full) > 10 * TOLERANCE


@pytest.mark.parametrize("policy", [Reuse(), LegoLink(3)], ids=repr)
def test_law_8_answers_streams_and_batches_of_both_lengths(policy: Any) -> None:
    engine = make_engine("llama longrope", context_window=2048)
    questions = [(QUESTION, TEXTS), ("What is it that they saw there?", SHORT), ("x", [])]
    options: dict[str, Any] = {"policy": policy, "max_new_tokens": 6, "repetition_penalty": 1.1}
    batch = engine.generate_batch(questions, **options)
    for asked, answer in zip(questions, batch, strict=True):
        single = engine.generate(*asked, **options)
        assert answer.token_ids == single.token_ids
        assert "".join(engine.stream(*asked, **options)) == single.text


def test_short_prompts_have_the_frequencies_of_long_ones_too() -> None:
    engine, plain = make_engine("llama longrope", context_window=2048), untouched()
    ids = engine.tokenize(QUESTION, SHORT)
    assert len(ids.all) < ORIGINAL
    sequence = block_mask(ids.prefix, ids.chunks, ids.query)
    # Rotations know distances alone, so a pass beyond the original length has them by itself.
    later = replace(sequence, positions=sequence.positions + 4 * ORIGINAL)
    found = engine.logits(QUESTION, SHORT)
    assert error(found, sequence_logits(plain, later)) < TOLERANCE
    assert error(found, sequence_logits(plain, sequence)) > 10 * TOLERANCE


def test_chunks_of_the_two_never_share_a_key() -> None:
    engine, plain = make_engine("llama longrope", context_window=2048), untouched()
    assert engine.spec != plain.spec
    again = make_engine("llama longrope", context_window=1024)
    assert engine.keys(TEXTS) == again.keys(TEXTS)


def test_rotating_keys_from_one_set_to_the_other_would_not_do() -> None:
    """A chunk's values, which know no position, are of the frequencies it attended by."""
    model = access.adapter(untouched())
    ids = torch.arange(5, 45)

    def values(first: int) -> list[Tensor]:
        cache = growing_cache(model.measured.kinds)
        model.forward(ids[None], cache, torch.arange(first, first + len(ids)))
        return [kept[1] for kept in layer_tensors(cache) if kept is not None]

    short, long = values(0), values(2 * ORIGINAL)
    assert max(map(error, long, values(3 * ORIGINAL))) < TOLERANCE
    assert max(map(error, short, values(20))) < TOLERANCE
    first, *deeper = map(error, short, long)
    assert first < TOLERANCE  # nothing was attended to before it
    assert min(deeper) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama longrope", "other frequencies; give the engine a larger context_window"),
        ("llama dynamic", r"change with every token \(dynamic NTK\)"),
    ],
)
def test_longer_prompts_are_refused_with_the_reason(name: str, said: str) -> None:
    engine = make_engine(name)
    limit = engine.context_window
    assert limit == ORIGINAL
    with pytest.raises(
        ContextTooLongError, match=f"room for .*; beyond {limit} .*{said}"
    ) as caught:
        engine.generate(QUESTION, TEXTS, max_new_tokens=2)
    # The dynamic one's window ends there in any case.
    assert ("FullRecompute()" in str(caught.value)) == (name == "llama longrope")
    lower = make_engine(name, context_window=limit - 1)
    with pytest.raises(ContextTooLongError, match=r'"refine"$'):
        lower.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=2)


def test_full_prefills_may_be_longer_and_leave_no_trace() -> None:
    engine, plain = make_engine("llama longrope"), untouched()
    ids = torch.tensor([engine.tokenize(QUESTION, TEXTS).all])
    expected = plain.model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    short = masked_logits(engine, SHORT, "reordered")
    for _ in range(2):
        full = engine.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=4)
        assert list(full.token_ids) == expected.tolist()
        assert error(engine.logits(QUESTION, SHORT), short) < TOLERANCE
    whole = ["".join(TEXTS)]  # also in one chunk
    assert engine.generate(QUESTION, whole, policy=FullRecompute(), max_new_tokens=1).token_ids


def test_dynamic_frequencies_stay_those_of_short_prompts() -> None:
    assert make_engine("llama dynamic", context_window=2048).context_window == ORIGINAL


def test_a_model_in_use_is_not_changed_under_who_uses_it() -> None:
    model = build("llama longrope")
    short = Engine(model, byte_tokenizer(), template=TEMPLATE, store=MemoryStore())
    expected = short.logits(QUESTION, SHORT)
    with pytest.raises(InvalidInputError, match="load it anew for this engine"):
        Engine(model, byte_tokenizer(), template=TEMPLATE, context_window=2048)
    assert torch.equal(short.logits(QUESTION, SHORT), expected)
    other = build("llama longrope")
    for _ in range(2):
        engine = Engine(other, byte_tokenizer(), template=TEMPLATE, context_window=2048)
        assert engine.context_window == 2048
    assert engine.in_namespace("other").context_window == 2048


def test_a_model_that_changes_by_more_than_its_frequencies_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_type, changes, special = zoo.FAMILIES["phimoe"]
    parameters = zoo.FAMILIES["llama longrope"][1]["rope_parameters"]
    scaled = {"rope_parameters": {**parameters, "short_mscale": 1.1, "long_mscale": 1.3}}
    monkeypatch.setitem(zoo.FAMILIES, "phimoe", (model_type, {**changes, **scaled}, special))
    with pytest.raises(InvalidInputError, match=f"is more than the {ORIGINAL} tokens beyond which"):
        make_engine("phimoe", context_window=2048)
    engine = make_engine("phimoe")
    assert engine.context_window == ORIGINAL
    found = engine.logits(QUESTION, SHORT)
    assert error(found, masked_logits(engine, SHORT, "reordered")) < TOLERANCE
