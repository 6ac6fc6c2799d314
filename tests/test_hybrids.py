"""The laws of models with recurrent layers: stitched states are those of tokens one by one."""

from __future__ import annotations

from functools import cache
from typing import Any

import access
import pytest
import torch
import transformers
from laws import (
    LONG_QUESTION,
    QUESTION,
    TEMPLATE,
    TEXTS,
    Recorder,
    error,
    make_engine,
    plain_logits,
    refused,
)
from packaging import version
from recurrent_reference import reference_answer, reference_logits
from zoo import HYBRIDS, build, byte_tokenizer

from kvcache_rag import CacheBlend, Combination, Engine, FullRecompute, LegoLink, Reuse
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.models import decode as decoding
from kvcache_rag.models.adapters import note_training
from kvcache_rag.models.prompt_lookup import PromptLookup
from kvcache_rag.policies.default import UNTRAINED

TOLERANCE = 5e-4


@pytest.fixture(scope="module", params=list(HYBRIDS))
def engine(request: pytest.FixtureRequest) -> Engine:
    engine = make_engine(request.param)
    if engine.refusal and version.parse(transformers.__version__) < version.parse("5.23"):
        pytest.skip(engine.refusal)  # where its modules keep their states by themselves
    return engine


def texts_of(order: tuple[int, ...]) -> list[str]:
    return [[*TEXTS, "q", "no"][number] for number in order]


# Long ones, two as short as a head that is computed again or shorter, and one twice.
ALL, SOME = texts_of((3, 1, 4, 0, 3)), texts_of((2, 3))


def reference(engine: Engine, texts: list[str], question: str = QUESTION) -> torch.Tensor:
    return _reference(engine, (*texts,), question)


@cache  # tokens one by one take seconds
def _reference(engine: Engine, texts: tuple[str, ...], question: str) -> torch.Tensor:
    ids = engine.tokenize(question, texts)
    return reference_logits(engine.model, ids.prefix, ids.chunks, ids.query)


def test_full_recompute_is_a_plain_prefill(engine: Engine) -> None:
    found = engine.logits(QUESTION, TEXTS, policy=FullRecompute())
    assert error(found, plain_logits(engine, TEXTS)) < TOLERANCE


def test_one_chunk_in_its_natural_place_is_a_plain_prefill(engine: Engine) -> None:
    found = engine.logits(QUESTION, TEXTS[1:2], policy=Reuse())
    assert error(found, plain_logits(engine, TEXTS[1:2])) < TOLERANCE


def test_stitched_chunks_are_tokens_one_by_one(engine: Engine) -> None:
    found = engine.logits(QUESTION, ALL, policy=Reuse())
    assert error(found, reference(engine, ALL)) < TOLERANCE
    again = engine.logits(QUESTION, ALL, policy=Reuse())
    assert torch.equal(found, again), "a stored chunk was changed by using it"


def test_chunks_at_the_same_positions_are_tokens_one_by_one(engine: Engine) -> None:
    policy, ids = Reuse(positions="composite"), engine.tokenize(QUESTION, TEXTS)
    if refused(engine, policy):
        return
    parts = ids.prefix, ids.chunks, ids.query
    expected = reference_logits(engine.model, *parts, composite=True)
    assert error(engine.logits(QUESTION, TEXTS, policy=policy), expected) < TOLERANCE


def test_heads_computed_again_are_tokens_one_by_one(engine: Engine) -> None:
    texts, policy = ALL, LegoLink(6)
    cut = Engine(engine.model, engine.tokenizer, template=engine.template, policy=policy)
    ids = cut.tokenize(QUESTION, texts)
    parts = ids.prefix, ids.chunks, ids.query
    expected = reference_logits(engine.model, *parts, head=6)
    found = cut.logits(QUESTION, texts)
    assert error(found, expected) < TOLERANCE
    # Chunks that are cut can be reused as they are, too, which is something else.
    reused = cut.logits(QUESTION, texts, policy=Reuse())
    assert error(reused, engine.logits(QUESTION, texts, policy=Reuse())) < TOLERANCE
    assert error(found, reused) > 10 * TOLERANCE


def test_heads_as_long_as_their_chunks_are_a_full_prefill(engine: Engine) -> None:
    policy = LegoLink(1000)
    cut = Engine(engine.model, engine.tokenizer, template=engine.template, policy=policy)
    assert error(cut.logits(QUESTION, TEXTS), plain_logits(cut, TEXTS)) < TOLERANCE


SAID_OF = texts_of((2, 3, 0))


@pytest.fixture(scope="module")
def said(engine: Engine) -> list[int]:
    ids = engine.tokenize(QUESTION, SAID_OF)
    return reference_answer(engine.model, ids.prefix, ids.chunks, ids.query, 4)


@pytest.mark.parametrize("rotation", ["copied", "deferred"])
def test_answers_are_those_of_tokens_one_by_one(
    engine: Engine, said: list[int], rotation: str
) -> None:
    options: dict[str, Any] = {"template": engine.template, "store": engine.store}
    other = Engine(engine.model, engine.tokenizer, rotation=rotation, **options)
    ways: list[dict[str, Any]] = [{}, {"do_sample": True, "top_k": 1}]
    if not access.adapter(engine).measured.groups:
        with pytest.raises(UnsupportedModelError, match="without attention is decoded greedily"):
            other.generate(QUESTION, SAID_OF, policy=Reuse(), **ways.pop())
    for way in ways:
        answer = other.generate(QUESTION, SAID_OF, policy=Reuse(), max_new_tokens=4, **way)
        assert list(answer.token_ids) == said[: len(answer.token_ids)]
        assert answer.metrics.reused_tokens + answer.metrics.prefilled_tokens


def test_batches_of_other_lengths_are_answered_as_one_by_one(engine: Engine) -> None:
    asked = [(QUESTION, SOME), (LONG_QUESTION, texts_of((1,))), ("x", [])]
    asked.append((LONG_QUESTION, SOME))
    seen = Recorder()
    answers = engine.generate_batch(
        asked, policy=Reuse(), max_new_tokens=4, logits_processor=[seen]
    )
    alone = [engine.generate(*one, policy=Reuse(), max_new_tokens=4) for one in asked]
    assert [one.token_ids for one in answers] == [one.token_ids for one in alone]
    # One step of all; a model without attention answers one after the other.
    for row, (question, texts) in enumerate(asked[: len(seen.steps[0])]):
        expected = reference(engine, texts, question)[-1]
        assert error(seen.steps[0][row], expected) < TOLERANCE


def test_guesses_right_and_wrong_change_no_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = texts_of((2, 3, 0))
    options = {"policy": Reuse(), "max_new_tokens": 12, "eos_token_id": 298}
    plain = engine.generate(QUESTION, texts, prompt_lookup_num_tokens=0, **options).token_ids
    # By turns a right guess, one of which all is wrong, one that begins right, and none.
    wrong = (plain[-1] + 1) % 200
    kinds = [(2, 0), (0, 2), (1, 2), (2, 1), (0, 0)]
    rounds: list[int] = []

    class Oracle(PromptLookup):
        def guess(self, room: int) -> list[int]:
            right, others = kinds[len(rounds) % len(kinds)]
            rounds.append(right)
            told = self._length - len(engine.tokenize(QUESTION, texts).all)
            return [*plain[told : told + right], *[wrong] * others][:room]

        def record_outcome(self, guessed: int, right: int) -> None:
            assert right <= guessed

    monkeypatch.setattr(decoding, "PromptLookup", Oracle)
    found = engine.generate(QUESTION, texts, prompt_lookup_num_tokens=4, **options)
    assert list(found.token_ids) == list(plain)
    # These are decoded by `generate()`, or have layers that take nothing back.
    others = {"bamba", "minimax", "falcon_h1", "nemotron_h", "zamba", "zamba2"}
    assert bool(rounds) != (engine.model.config.model_type in others)


@pytest.mark.parametrize("name", [name for name in ("qwen3_5", "lfm2") if name in HYBRIDS])
def test_only_an_engine_that_computes_heads_again_cuts_its_chunks(name: str) -> None:
    model = build(name)
    note_training(model.config, blocks=False)

    def keys(**options: Any) -> Any:
        engine = Engine(model, byte_tokenizer(), template=TEMPLATE, **options)
        return engine.policy, engine.keys(TEXTS)

    policy, default = keys()
    assert policy == UNTRAINED
    for uncut in (Reuse(), LegoLink(0), Combination()):
        assert keys(policy=uncut)[1] == default
    # A convolution alone has nothing to keep of a head.
    is_cut = name != "lfm2"
    assert (keys(policy=LegoLink(4))[1] != default) == is_cut
    assert (keys(policy=LegoLink(4))[1] != keys(policy=LegoLink(5))[1]) == is_cut
    with pytest.raises(UnsupportedModelError, match=r"LegoLink\(n\) as the policy"):
        Engine(model, byte_tokenizer(), template=TEMPLATE).generate(
            QUESTION, TEXTS, policy=CacheBlend(0.3), max_new_tokens=1
        )


def test_guesses_are_made_where_several_tokens_cost_less_than_so_many_passes() -> None:
    for name, dear in {"lfm2": False, "qwen3_5": False, "bamba": True, "jamba": True}.items():
        if name in HYBRIDS:
            cost = access.adapter(make_engine(name)).row_cost
            drafts = PromptLookup(torch.tensor([5, 6, 7, 8, 9, 5, 6]), 4, cost)
            drafts.extend([7, 8])
            assert bool(drafts.guess(9)) != dear
