"""Answers of llama.cpp: batches, streams, beams, samples and options are those of transformers.

The same float32 weights run in both engines, so what chooses tokens from logits chooses the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import LONG_QUESTION, QUESTION, TEXTS, TURNS, Recorder, error
from llamacpp.asking import FixedScorer, opened
from llamacpp.ggufs import FAMILIES, ORIGINAL

from kvcache_rag import (
    BestFew,
    BestLast,
    CacheClip,
    Combination,
    Engine,
    FullRecompute,
    InvalidInputError,
    LegoLink,
    Reuse,
)
from kvcache_rag.models import generate as generating
from kvcache_rag.models.decode import Decoded, decode
from kvcache_rag.models.prompt_lookup import PromptLookup

if TYPE_CHECKING:
    from llamacpp.conftest import Files

    from kvcache_rag.policies import ReusePolicy

# Questions of other lengths, the same chunks and others, one, none.
ASKED: list[tuple[str, list[str]]] = [
    (QUESTION, TEXTS),
    (LONG_QUESTION, TEXTS),
    ("x", TEXTS[1:]),
    (LONG_QUESTION, [TEXTS[2], TEXTS[0]]),
    ("Where is it?", TEXTS[:1]),
    ("y", []),
]
POLICIES = [
    Reuse(), BestLast(), BestFew(1), BestFew(2), LegoLink(5), FullRecompute(), Combination(),
    CacheClip(FixedScorer(), ratio=0.4),
]  # fmt: skip


@pytest.fixture(scope="module", params=list(FAMILIES))
def engine(request: pytest.FixtureRequest, files: Files) -> Engine:
    return opened(files(request.param))


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def both(request: pytest.FixtureRequest, files: Files) -> tuple[Engine, Engine]:
    """llama.cpp and transformers."""
    path = files(request.param)
    return opened(path), opened(path, backend="transformers")


def same(both: tuple[Engine, Engine], *asked: Any, **options: Any) -> Any:
    """The answer of both engines, which is one."""
    ours, theirs = (one.generate(*asked, **options) for one in both)
    assert ours.token_ids == theirs.token_ids
    assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
    return ours


# ---------------------------------------------------------------------- batches and streams
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_batch_is_its_singles(engine: Engine, policy: ReusePolicy) -> None:
    options: dict[str, Any] = {"policy": policy, "max_new_tokens": 8, "min_new_tokens": 8}
    singles = [engine.generate(*asked, **options) for asked in ASKED]
    batch = engine.generate_batch(ASKED, **options)
    assert [one.token_ids for one in batch] == [one.token_ids for one in singles]
    assert len({one.token_ids for one in batch}) > 1


@pytest.mark.parametrize("beams", [1, 5])
def test_a_batch_of_more_rows_than_llama_cpp_has_sequences(files: Files, beams: int) -> None:
    engine = opened(files("llama"))
    questions = [(f"{number} is what?", [TEXTS[number % 3]]) for number in range(280 // beams)]
    options: dict[str, Any] = {"policy": Reuse(), "max_new_tokens": 3, "num_beams": beams}
    batch = engine.generate_batch(questions, **options)
    assert len(batch) == len(questions)
    for number in (0, len(batch) // 2, len(batch) - 1):
        assert batch[number].token_ids == engine.generate(*questions[number], **options).token_ids


def test_a_batch_that_is_longer_than_longrope_may_be(files: Files) -> None:
    """Prompts that do not fit one context of these frequencies are answered one by one."""
    engine = opened(files("phi3"))
    asked = [(f"{number}?", TEXTS) for number in range(6)]
    tokens = len(engine.tokenize(*asked[0]).all)
    assert tokens < ORIGINAL < len(asked) * tokens
    for policy in (Reuse(), FullRecompute()):
        batch = engine.generate_batch(asked, policy=policy, max_new_tokens=4)
        singles = [engine.generate(*one, policy=policy, max_new_tokens=4) for one in asked]
        assert [one.token_ids for one in batch] == [one.token_ids for one in singles]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_stream_joins_to_the_answer(engine: Engine, policy: ReusePolicy) -> None:
    for question, chunks in ASKED[:3]:
        single = engine.generate(question, chunks, policy=policy, max_new_tokens=12)
        stream = engine.stream(question, chunks, policy=policy, max_new_tokens=12)
        assert "".join(stream) == single.text
        assert stream.answer.token_ids == single.token_ids


def test_the_same_question_has_the_same_bits_whatever_was_asked_before(engine: Engine) -> None:
    first = engine.logits(QUESTION, TEXTS, policy=LegoLink(5))
    engine.generate_batch(ASKED, policy=Reuse(), max_new_tokens=3)
    engine.generate(LONG_QUESTION, [*TEXTS, *TEXTS], policy=FullRecompute(), max_new_tokens=30)
    engine.add(["something new", "and more"])
    assert torch.equal(engine.logits(QUESTION, TEXTS, policy=LegoLink(5)), first)


# ---------------------------------------------------------------------- how tokens are chosen
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_greedy_answers(both: tuple[Engine, Engine], policy: ReusePolicy) -> None:
    for question, chunks in ASKED:
        same(both, question, chunks, policy=policy, max_new_tokens=24)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("beams", [2, 5])
def test_beams(both: tuple[Engine, Engine], policy: ReusePolicy, beams: int) -> None:
    for question, chunks in ASKED:
        options = {"num_beams": beams, "max_new_tokens": 12, "policy": policy}
        same(both, question, chunks, **options)


def test_beams_of_a_batch(both: tuple[Engine, Engine]) -> None:
    for policy in (Reuse(), FullRecompute()):
        options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 8, "policy": policy}
        ours, theirs = (one.generate_batch(ASKED, **options) for one in both)
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]


def test_beams_have_cells_when_all_of_them_differ(engine: Engine) -> None:
    model, ids = access.adapter(engine), torch.arange(10, 14)[None]
    cache = model.new_cache(torch.ones_like(ids), room=60, beams=6)
    model.forward(ids, cache, torch.arange(4), keep=1)
    cache.batch_repeat_interleave(6)
    for step in range(60):
        tokens = 20 + 6 * step % 97 + torch.arange(6)[:, None]  # (6, 1)
        logits = model.forward(tokens, cache, torch.tensor([4 + step]), keep=1)
    assert len({*map(tuple, logits[:, 0].tolist())}) == 6


def test_beams_behind_windows(engine: Engine) -> None:
    """Where everything is computed again, they are those of a full prefill."""
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 12}
    again = engine.generate(QUESTION, TEXTS, policy=LegoLink(1000), **options)
    full = engine.generate(QUESTION, TEXTS, policy=FullRecompute(), **options)
    assert again.token_ids == full.token_ids


def test_samples(both: tuple[Engine, Engine]) -> None:
    said = set()
    for seed in range(4):
        answers = []
        for engine in both:
            torch.manual_seed(seed)
            options: dict[str, Any] = {"temperature": 1.3, "top_k": 50, "max_new_tokens": 16}
            answers.append(engine.generate(LONG_QUESTION, TEXTS, policy=Reuse(), **options))
        assert answers[0].token_ids == answers[1].token_ids
        said.add(answers[0].token_ids)
    assert len(said) == 4


def test_logits_processors_see_what_they_would_see_of_transformers(
    both: tuple[Engine, Engine],
) -> None:
    seen = []
    for engine in both:
        recorder = Recorder()
        options: dict[str, Any] = {"logits_processor": [recorder], "max_new_tokens": 6}
        engine.generate(LONG_QUESTION, TEXTS, policy=Reuse(), min_new_tokens=6, **options)
        seen.append(torch.cat(recorder.steps).masked_fill(torch.cat(recorder.steps).isinf(), 0.0))
    assert len(seen[0]) == 6
    assert error(*seen) < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 20},
        {"no_repeat_ngram_size": 2},
        {"stop": ["a", "qu"]},
        {"stop_strings": ["e"]},
        {"history": TURNS, "stop": ["z"], "repetition_penalty": 1.1},
        {"prefill_chunk_size": 3},
        {"skip_special_tokens": False},
        {"bad_words_ids": [[40], [41, 42]]},
    ],
    ids=str,
)
def test_options(both: tuple[Engine, Engine], options: dict[str, Any]) -> None:
    same(both, LONG_QUESTION, TEXTS, policy=Reuse(), **{"max_new_tokens": 20, **options})


# ---------------------------------------------------------------------- guesses
@pytest.mark.parametrize("policy", [Reuse(), FullRecompute()], ids=lambda policy: policy.name)
def test_guesses_change_nothing(
    engine: Engine, policy: ReusePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right ones, and wrong ones behind them."""
    options: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40, "policy": policy}
    plain = engine.generate(QUESTION, TEXTS, prompt_lookup_num_tokens=0, **options).token_ids
    tokens, seen = len(engine.tokenize(QUESTION, TEXTS).all), list[Decoded]()

    def guess(self: Any, room: int) -> list[int]:
        said = self._length - tokens
        return [*plain[said : said + said % 4], *[7] * (said % 3)][:room]

    def noted(*values: Any, **given: Any) -> Decoded:
        seen.append(decode(*values, **given))
        return seen[-1]

    monkeypatch.setattr(PromptLookup, "guess", guess)
    monkeypatch.setattr(PromptLookup, "record_outcome", lambda *_: None)
    monkeypatch.setattr(generating, "decode", noted)
    assert engine.generate(QUESTION, TEXTS, **options).token_ids == plain
    assert seen[0].passes < 25


# ---------------------------------------------------------------------- what cannot be
def test_more_than_one_context_may_hold(files: Files) -> None:
    engine = opened(files("phi3"))
    with pytest.raises(
        InvalidInputError, match=r"^\d+ tokens are wanted in one batch, and beyond 512"
    ):
        engine.generate(
            QUESTION, TEXTS, policy=Reuse(), num_beams=6, max_new_tokens=100, min_new_tokens=100
        )
    with pytest.raises(InvalidInputError, match=r"sequences are wanted in one batch"):
        engine.generate("x", ["a"], policy=Reuse(), num_beams=130, max_new_tokens=1)
    assert engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=4).token_ids
