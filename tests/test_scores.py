"""Scores say which chunk is best: to policies that ask for it, and to nobody else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from laws import QUESTION, TEXTS, make_engine
from serve_works import PATIENCE, Prefills, reader
from serve_works import QUESTION as ASKED
from serve_works import TEXTS as SENTENCES

from kvcache_rag import (
    Ape,
    BestLast,
    CacheBlend,
    Combination,
    FullRecompute,
    InvalidInputError,
    LegoLink,
    Reuse,
)
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag.prompt.scores import scores_by_step, whole_scores
from kvcache_rag_server.prefetch import Prefetcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag import Engine
    from kvcache_rag.policies import ReusePolicy

SCORES = (0.1, -2.0, 0.7)
MOVED = [TEXTS[2], *TEXTS[:2]]
OTHERS: list[ReusePolicy] = [
    *(Reuse(), Reuse("composite"), FullRecompute(), Combination()),
    *(LegoLink(2), CacheBlend(0.3), Ape(0.9, 1.0)),
]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(request.param)


# ---------------------------------------------------------------------- laws
@pytest.mark.parametrize("overflow", ["error", "refine"])
def test_law_the_best_by_score_is_the_best_by_place(engine: Engine, overflow: Any) -> None:
    options: dict[str, Any] = {"policy": BestLast(), "max_new_tokens": 6, "overflow": overflow}
    expected = engine.generate(QUESTION, MOVED, **options)
    found = engine.generate(QUESTION, TEXTS, scores=SCORES, **options)
    assert found.token_ids == expected.token_ids
    assert found.metrics.fresh_tokens == expected.metrics.fresh_tokens > 0
    told = engine.explain(QUESTION, TEXTS, policy=BestLast(), scores=SCORES)
    moved = engine.explain(QUESTION, MOVED, policy=BestLast())
    assert told == replace(moved, answered_from=told.answered_from)
    assert [TEXTS[at] for at in told.answered_from] == [MOVED[at] for at in moved.answered_from]
    other = engine.explain(QUESTION, TEXTS, policy=BestLast())
    assert told != replace(other, answered_from=told.answered_from), "it must be able to fail"


def test_law_a_batch_with_scores_each_equals_single_answers(engine: Engine) -> None:
    asked: list[Any] = [
        (QUESTION, TEXTS, (), SCORES),
        ("Where?", TEXTS[:2], (), None),
        (QUESTION, TEXTS, (), SCORES[::-1]),
        ("Where?", TEXTS),
    ]
    options: dict[str, Any] = {"policy": BestLast(), "max_new_tokens": 6}
    batch = engine.generate_batch(asked, **options)
    singles = [
        engine.generate(question, chunks, scores=more[1] if more else None, **options)
        for question, chunks, *more in asked
    ]
    assert [one.token_ids for one in batch] == [one.token_ids for one in singles]
    fresh = [one.metrics.fresh_tokens for one in batch]
    assert fresh == [one.metrics.fresh_tokens for one in singles]
    assert len(set(fresh)) > 1, "it must be able to fail"


def test_scores_of_one_question_are_none_of_the_others() -> None:
    with pytest.raises(InvalidInputError, match="2 scores for 3 chunks; give one each"):
        make_engine("llama").generate_batch([(QUESTION, TEXTS), (QUESTION, TEXTS, (), (1.0, 2.0))])


@pytest.mark.parametrize("policy", OTHERS, ids=repr)
def test_law_no_other_policy_moves_a_chunk(policy: ReusePolicy) -> None:
    engine = make_engine("llama")
    assert policy.plan(Retrieved("", tuple(TEXTS), SCORES)).brought == (0, 1, 2)
    expected = engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=6)
    found = engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=6, scores=SCORES)
    assert found.token_ids == expected.token_ids
    told = [engine.explain(QUESTION, TEXTS, policy=policy, scores=s) for s in (None, SCORES)]
    assert told[0].text == told[1].text
    assert told[0].spans == told[1].spans


# ---------------------------------------------------------------------- what is no score
@pytest.mark.parametrize(
    "scores",
    [(1.0, math.nan, 0.0), (1, 10**400, 0), (1.0, "2", 0.0), (1.0, True, 0.0), (1, None, 0)],
)
def test_a_score_is_a_finite_number(engine: Engine, scores: Any) -> None:
    for call in (engine.generate, engine.explain):
        with pytest.raises(InvalidInputError, match=r"the score of chunk 1 is .*; give a finite"):
            call(QUESTION, TEXTS, scores=scores)
    with pytest.raises(InvalidInputError, match="score of chunk 1"):
        engine.needed(TEXTS, Reuse(), scores)
    assert whole_scores(scores) is None


@pytest.mark.parametrize(
    ("given", "known"),
    [([], None), ([0.5, None], None), ([1, 0.5], (1.0, 0.5)), ([math.inf], None)],
)
def test_scores_count_where_all_have_one(given: Sequence[Any], known: Any) -> None:
    assert whole_scores(given) == known


# Texts from the best to the worst.
@pytest.mark.parametrize(
    ("steps", "ranked"),
    [
        ([[("a", None), ("b", None)], [("c", None), ("d", None)]], "cdab"),
        ([[("a", 0.9), ("b", 0.8)], [("c", 0.1), ("d", 0.2)]], "dcab"),
        ([[("a", 0.1), ("b", 0.9)], [("c", math.nan), ("d", 0.2)], []], "cdba"),
        ([[("a", 0.9), ("b", None)], [("c", 0.1), ("b", 0.2)]], "bca"),
        ([[("a", None), ("b", None)], [("b", None), ("c", None), ("b", None)]], "bca"),
        ([[], [("a", 0.1), ("b", 0.9), ("a", 1)]], "ab"),
    ],
)
def test_a_later_step_found_what_is_better(steps: Any, ranked: str) -> None:
    found = scores_by_step(steps)
    assert found is not None
    assert "".join(sorted(found, key=lambda text: -found[text])) == ranked
    assert whole_scores(found.values()) == tuple(found.values())


def test_one_step_has_its_own_scores_or_none() -> None:
    assert scores_by_step([[("a", 0.1), ("b", 7)], []]) == {"a": 0.1, "b": 7.0}
    equal = scores_by_step([[("a", 2), ("b", 2)], [("c", 1)]])
    assert equal == {"a": 0.0, "b": 0.0, "c": 1.0}
    for steps in ([], [[]], [[("a", 0.1), ("b", None)]]):
        assert scores_by_step(steps) is None


# ---------------------------------------------------------------------- what is made ahead
def test_what_is_needed_is_what_an_answer_loads(engine: Engine) -> None:
    keys = engine.keys(TEXTS)
    assert engine.needed(TEXTS, BestLast()) == keys[1:]
    assert engine.needed(TEXTS, BestLast(), SCORES) == keys[:2]
    assert engine.needed(TEXTS, Reuse(), SCORES) == keys


@pytest.mark.parametrize(("scores", "left"), [(None, 0), ((0.1, 0.2, 0.9), 2), ((0, 1, 0), 1)])
def test_what_is_computed_with_the_question_is_not_made_ahead(
    monkeypatch: pytest.MonkeyPatch, scores: Any, left: int
) -> None:
    prefills, engine = Prefills(monkeypatch), reader()
    made = Prefetcher(engine, ahead=2)
    try:
        wanted = made.want(SENTENCES, policy=BestLast(), scores=scores)
        assert wanted is not None
        assert wanted.done.result(PATIENCE)
    finally:
        prefills.go.set()
        made.close()
    held = [engine.store.contains(key) for key in engine.keys(SENTENCES)]
    assert held == [at != left for at in range(3)], "each by itself, and no combination"
    answer = engine.generate(ASKED, SENTENCES, policy=BestLast(), scores=scores, max_new_tokens=4)
    assert (answer.metrics.misses, answer.metrics.prefilled_tokens) == (0, 0)
