"""Policies together: unions, budgets, names; all of them values that can be written down."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_rag
from kvcache_rag import (
    Ape,
    BestFew,
    BestLast,
    CacheBlend,
    CacheClip,
    Combination,
    FullRecompute,
    InvalidInputError,
    LegoLink,
    ProphetKV,
    Reuse,
)
from kvcache_rag.models.language import Abilities
from kvcache_rag.policies import POLICY_NAMES, ReusePolicy, policy_by_name
from kvcache_rag.policies.checks import why_not
from kvcache_rag.stitching.stitch import StitchedPrompt

PROMPT = StitchedPrompt.of(10, [100, 100, 100, 100], 20)
TOKENS = PROMPT.context_tokens
ALL: list[ReusePolicy] = [
    Reuse(),
    Reuse("composite"),
    FullRecompute(),
    Combination(),
    LegoLink(4),
    ProphetKV(),
    CacheBlend(0.3, check_layer=2),
    CacheBlend(positions="composite"),
    CacheClip(ratio=0.1, window=4, threshold=2),
    CacheClip(threshold=None),
    Ape(0.8, 0.7),
]


class Scorer:
    def scores(self, question: str, chunks: Any) -> list[Tensor]:
        return [torch.zeros(len(chunk)) for chunk in chunks]


@pytest.mark.parametrize("policy", ALL, ids=repr)
def test_policies_are_values(policy: ReusePolicy) -> None:
    names = {name: getattr(kvcache_rag, name) for name in kvcache_rag.__all__}
    pasted = eval(repr(policy), names)
    assert pasted == policy
    assert hash(pasted) == hash(policy)
    assert repr(pasted) == repr(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert sum(other == policy for other in ALL) == 1
    with pytest.raises(AttributeError):
        policy.ratio = 0.5  # type: ignore[attr-defined]  # wrong on purpose


SCORER = Scorer()


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("full", FullRecompute()),
        ("reuse", Reuse()),
        (" Composite ", Reuse("composite")),
        ("legolink", LegoLink()),
        ("legolink:4", LegoLink(4)),
        ("cacheblend", CacheBlend()),
        ("cacheblend:0.3", CacheBlend(0.3)),
        ("cacheclip", CacheClip(SCORER)),
        ("cacheclip: 0.4", CacheClip(SCORER, 0.4)),
        ("cacheclip:0.4,3", CacheClip(SCORER, 0.4, threshold=3)),
        ("cacheclip:0.4,mean", CacheClip(SCORER, 0.4, threshold=None)),
        ("ape", Ape()),
        ("ape:0.8,0.7", Ape(0.8, 0.7)),
        ("combination", Combination()),
    ],
)
def test_policies_have_names(text: str, policy: ReusePolicy) -> None:
    assert policy_by_name(text, SCORER) == policy


def test_every_name_is_known() -> None:
    for name in POLICY_NAMES:
        assert isinstance(policy_by_name(name), ReusePolicy)
    assert policy_by_name("cacheclip") == CacheClip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cacheblnd", "did you mean cacheblend"),
        ("", "one of full, reuse"),
        ("vllm", "one of full, reuse"),
        ("legolink:x", "whole number"),
        ("legolink:1.5", "whole number"),
        ("legolink:-1", "tokens must be"),
        ("cacheblend:", "nothing stands behind"),
        ("cacheblend:2", "ratio must be"),
        ("cacheblend:0.1,2", "does not take"),
        ("full:1", "does not take"),
        ("ape:0.9", "does not take"),
        ("cacheclip:0.1,2,3", "does not take"),
        ("cacheclip:0.1,some", "whole number"),
        ("ape|legolink", "there is no policy"),
        ("auto:0.5", "there is no policy"),
        (None, "is a text"),
    ],
)
def test_names_that_are_none(text: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        policy_by_name(text)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- what a model cannot do
RATIOS: list[ReusePolicy] = [CacheBlend(0.3), ProphetKV(0.3), CacheClip(Scorer(), ratio=0.3)]
OVERLAPPING: list[ReusePolicy] = [Reuse("composite"), BestLast(0, "composite"), Ape()]
MOVING: list[ReusePolicy] = [Reuse(), BestLast(), LegoLink(4), *RATIOS, *OVERLAPPING]
# Ability -> the policies that need it, of all that are asked about.
NEEDED: dict[str, list[ReusePolicy]] = {
    "cannot_capture": [*MOVING, BestFew(), Combination()],
    "cannot_move": MOVING,
    "cannot_overlap": OVERLAPPING,
    "cannot_choose": RATIOS,
    "cannot_observe": RATIOS[:2],
    "cannot_weigh": [Ape()],
}
ANYWHERE: list[ReusePolicy] = [FullRecompute(), CacheBlend(1)]


def lacking(*names: str) -> Abilities:
    changes: dict[str, Any] = dict.fromkeys(names, "it cannot")
    return Abilities(**changes)


@pytest.mark.parametrize("ability", NEEDED)
def test_why_a_policy_cannot_run_is_said_by_what_the_model_cannot(ability: str) -> None:
    poor = lacking(ability)
    for policy in (*NEEDED["cannot_capture"], *ANYWHERE):
        assert why_not(policy, Abilities()) == ""
        said = why_not(policy, poor)
        assert said.startswith("it cannot") == (policy in NEEDED[ability]), policy
        assert bool(said) == (policy in NEEDED[ability]), policy


@pytest.mark.parametrize("policy", ALL, ids=repr)
def test_one_chunk_needs_no_more_than_to_be_kept_and_weighed(policy: ReusePolicy) -> None:
    poor = lacking("cannot_move", "cannot_overlap", "cannot_choose", "cannot_observe")
    assert why_not(policy, poor, 1) == ""
    assert why_not(policy, lacking("cannot_capture"), 0) == ""


def test_ratios_of_nothing_need_nothing() -> None:
    poor = lacking("cannot_choose", "cannot_observe")
    for policy in (CacheBlend(0), ProphetKV(0), CacheClip(ratio=0)):
        assert why_not(policy, poor) == ""


@pytest.mark.parametrize("name", ["chosen", "arranged"])
def test_a_policy_with_a_hook_that_went_is_told_which_one_there_is(name: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"Mine\.{name}\(\) .* plan\(retrieved\)"):
        type("Mine", (Reuse,), {name: lambda self, given: ()})
