"""Our own way to decode one greedy answer: the tokens of `generate()`, with and without guesses."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import QUESTION, TEXTS, make_engine
from transformers import LogitsProcessorList
from zoo import FAMILIES, SEVERAL

from kvcache_rag import Engine, FullRecompute, Reuse
from kvcache_rag.models import decode as decoding
from kvcache_rag.models import generate as generating
from kvcache_rag.models.decode import Decoded, decode, decodes
from kvcache_rag.models.prompt_lookup import FEWEST, LONGEST, PromptLookup

if TYPE_CHECKING:
    from collections.abc import Sequence

LENGTH = 40


def _watched(monkeypatch: pytest.MonkeyPatch) -> list[Decoded]:
    """What `decode` gives from here on."""
    seen: list[Decoded] = []

    def noted(*values: Any, **options: Any) -> Decoded:
        seen.append(decode(*values, **options))
        return seen[-1]

    monkeypatch.setattr(generating, "decode", noted)
    return seen


def _by_generate(monkeypatch: pytest.MonkeyPatch, engine: Engine, **options: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(generating, "decodes", lambda *values: False)
        return engine.generate(QUESTION, TEXTS, **options)


# ------------------------------------------------------------------ generate() is the law
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *((family, Reuse()) for family in FAMILIES),
        *((family, FullRecompute()) for family in SEVERAL),
    ],
)
def test_tokens_are_those_of_generate(
    family: str, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(family)
    if engine.refusal:
        policy = FullRecompute()
    options: dict[str, Any] = {"max_new_tokens": 10, "policy": policy}
    seen = _watched(monkeypatch)
    law = _by_generate(monkeypatch, engine, **options)
    assert not seen
    for lookup in (0, None, 3):
        answer = engine.generate(QUESTION, TEXTS, prompt_lookup_num_tokens=lookup, **options)
        assert answer.token_ids == law.token_ids, lookup
        assert (answer.text, answer.finish_reason) == (law.text, law.finish_reason)
    if seen:  # a family may prepare its inputs in a way of its own
        assert seen[0].passes == len(law.token_ids)


@pytest.mark.parametrize("family", ["llama", "qwen2 window", "gemma2", "cohere2"])
@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
def test_guesses_right_and_wrong_give_the_tokens_of_generate(
    family: str, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(family)
    law = _by_generate(monkeypatch, engine, max_new_tokens=LENGTH)
    dice = random.Random(1)

    class Oracle(PromptLookup):
        told = 0

        def extend(self, tokens: Sequence[int]) -> None:
            self.told += len(tokens)

        def guess(self, room: int) -> list[int]:
            coming = law.token_ids[self.told : self.told + min(room, dice.randint(0, 6))]
            return [(one + (dice.random() < wrong)) % 300 for one in coming]

        def record_outcome(self, guessed: int, right: int) -> None:
            assert right <= guessed

    monkeypatch.setattr(decoding, "PromptLookup", Oracle)
    seen = _watched(monkeypatch)
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=LENGTH)
    assert answer.token_ids == law.token_ids
    assert seen[0].passes < LENGTH / 2 if not wrong else seen[0].passes <= LENGTH


@pytest.mark.parametrize("minimum", [0, 7])
def test_an_answer_ends_where_generate_ends_it(
    minimum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("qwen2")
    free = engine.generate(QUESTION, TEXTS, max_new_tokens=20)
    ending = {"eos_token_id": [2, 10**6, free.token_ids[3]], "min_new_tokens": minimum or None}
    law = _by_generate(monkeypatch, engine, max_new_tokens=20, **ending)
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=20, **ending)
    assert answer.token_ids == law.token_ids
    assert answer.finish_reason == law.finish_reason
    assert minimum or len(answer.token_ids) <= 4


def test_processors_see_what_they_would_see(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("llama")
    watches: list[list[tuple[list[int], torch.dtype]]] = [[], []]

    def asked(watch: list[tuple[list[int], torch.dtype]]) -> dict[str, Any]:
        def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            watch.append((ids[0].tolist(), scores.dtype))
            return scores.masked_fill(scores == scores.max(), -torch.inf)  # the second best

        return {"max_new_tokens": 6, "logits_processor": LogitsProcessorList([processor])}

    expected = _by_generate(monkeypatch, engine, **asked(watches[0]))
    seen = _watched(monkeypatch)
    answer = engine.generate(QUESTION, TEXTS, **asked(watches[1]))
    assert (len(seen), seen[0].passes) == (1, 6)
    assert answer.token_ids == expected.token_ids
    assert watches[0] == watches[1]


def test_a_cancelled_answer_ends_at_its_next_token() -> None:
    engine, cancelled = make_engine("llama"), threading.Event()
    cancelled.set()
    ids = torch.tensor([engine.tokenize(QUESTION, TEXTS).all])
    given = generating.generate(
        access.adapter(engine), ids, torch.ones_like(ids), None, max_new_tokens=9,
        tokenizer=engine.tokenizer, options={}, cancelled=cancelled,
    )  # fmt: skip
    assert (len(given.rows[0]), given.finish_reasons) == (0, ("length",))


def test_a_time_limit_ends_an_answer() -> None:
    engine = make_engine("llama")
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=50, max_time=1e-9)
    assert len(answer.token_ids) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"num_beams": 2},
        {"renormalize_logits": True},
        {"suppress_tokens": [5]},
        {"stopping_criteria": []},
    ],
    ids=lambda options: next(iter(options)),
)
def test_whatever_is_not_written_here_goes_to_generate(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = make_engine("llama"), _watched(monkeypatch)
    engine.generate(QUESTION, TEXTS, max_new_tokens=3, prompt_lookup_num_tokens=2, **options)
    assert not seen


def test_a_model_that_prepares_its_own_inputs_goes_to_generate() -> None:
    model = access.adapter(make_engine("llama"))
    config = model.model.generation_config
    assert decodes(model, 1, config, {})
    assert not decodes(model, 2, config, {})

    class Preparing(type(model.model)):  # type: ignore[misc]  # a class that is known at run time
        def prepare_inputs_for_generation(self, *values: Any, **options: Any) -> Any:
            return super().prepare_inputs_for_generation(*values, **options)

    model.model.__class__ = Preparing
    assert not decodes(model, 1, config, {})


# ------------------------------------------------------------------ guesses
PROMPT = torch.tensor([*range(10, 40), 12, 13, 14, 90, 91, 92, 93])


@pytest.mark.parametrize(
    ("said", "room", "guess"),
    [
        ([77, 13, 14], 9, [90, 91, 92, 93]),  # two runs of two tokens: the later one
        ([11, 12, 13, 14], 9, [15, 16, 17, 18]),  # a run of four, before one of three
        ([11, 12, 13, 14], 2, [15, 16]),
        ([70, 71, 72, 73, 70, 71], 9, [72, 73, 70, 71]),  # of the answer itself
        ([77, 78], 9, []),
        ([11, 12, 13, 14], 0, []),
    ],
)
def test_a_guess_is_what_stood_behind_the_longest_then_latest_run(
    said: list[int], room: int, guess: list[int]
) -> None:
    drafts = PromptLookup(PROMPT, 4, row_cost=0.0)
    drafts.extend(said)
    assert drafts.guess(room) == guess


def test_nothing_is_guessed_of_a_short_prompt() -> None:
    assert PromptLookup(PROMPT[:FEWEST], 4).guess(9) == []


def test_guesses_that_fail_become_fewer_and_those_that_hold_longer() -> None:
    def lengths(right: bool) -> list[int]:
        drafts, found = PromptLookup(torch.arange(10, 4000), 10, row_cost=0.06), []
        for turn in range(30):
            start = 20 + 60 * turn
            drafts.extend([5, *range(start, start + LONGEST)])
            guess = drafts.guess(99)
            found.append(len(guess))
            drafts.record_outcome(len(guess), len(guess) if right else 0)
        return found

    failing, holding = lengths(False), lengths(True)
    assert failing[0] > 0
    assert failing[-1] == 0
    assert holding[-1] == 10
    assert holding == lengths(True)


def test_a_dear_row_makes_guesses_short() -> None:
    cheap, dear = PromptLookup(PROMPT, 10, row_cost=0.0), PromptLookup(PROMPT, 10, row_cost=0.5)
    for drafts in (cheap, dear):
        drafts.extend([11, 12, 13, 14])
    assert len(cheap.guess(99)) == 10
    assert len(dear.guess(99)) < 5


def test_an_answer_may_be_longer_than_what_was_set_aside() -> None:
    drafts = PromptLookup(PROMPT, 4, row_cost=0.0)
    for start in range(0, 3000, 3):
        drafts.extend([start + 100, start + 101, start + 102])
    drafts.extend([100, 101])
    assert drafts.guess(9) == [102, 103, 104, 105]
