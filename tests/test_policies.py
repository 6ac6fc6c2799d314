"""Every policy keeps the laws of policies, has a name, and says what a model cannot do for it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

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
from tests.contracts_policies import PolicyContract


class TestReuse(PolicyContract):
    written = ("Reuse()", "Reuse(positions='composite')")
    names: ClassVar = {
        "reuse": "Reuse()",
        "composite": "Reuse('composite')",
    }
    wrong = ("Reuse('local')",)


class TestFullRecompute(PolicyContract):
    written = ("FullRecompute()",)
    names: ClassVar = {"full": "FullRecompute()"}
    computes_everything = True


class TestCombination(PolicyContract):
    written = ("Combination()",)
    names: ClassVar = {"combination": "Combination()"}


class TestBestLast(PolicyContract):
    written = (
        "BestLast()",
        "BestLast(share=0.4, positions='composite')",
    )
    names: ClassVar = {"bestlast": "BestLast()", "bestlast:0.4": "BestLast(0.4)"}
    wrong = (
        "BestLast(-0.1)",
        "BestLast(1.5)",
        "BestLast(0.2, 'local')",
    )


class TestBestFew(PolicyContract):
    written = ("BestFew()", "BestFew(count=2)")
    names: ClassVar = {"bestfew": "BestFew()", "bestfew:2": "BestFew(2)"}
    wrong = ("BestFew(0)", "BestFew(-1)", "BestFew(True)", "BestFew(1.5)", "BestFew('2')")


class TestBestRead(PolicyContract):
    written = ("BestRead()", "BestRead(count=2)")
    names: ClassVar = {"bestread": "BestRead()", "bestread:2": "BestRead(2)"}
    wrong = ("BestRead(0)", "BestRead(-1)", "BestRead(True)", "BestRead(1.5)", "BestRead('2')")


class TestProphetKV(PolicyContract):
    written = (
        "ProphetKV()",
        "ProphetKV(ratio=0.3, positions='composite')",
        "ProphetKV(0)",
        "ProphetKV(1)",
    )
    names: ClassVar = {"prophetkv": "ProphetKV()", "prophetkv:0.3": "ProphetKV(0.3)"}
    wrong = (
        "ProphetKV(-0.1)",
        "ProphetKV(True)",
        "ProphetKV('0.2')",
        "ProphetKV(0.2, 'local')",
    )
    at_ratio = ProphetKV
    computes_everything = True


class TestLegoLink(PolicyContract):
    written = ("LegoLink()", "LegoLink(tokens=4, positions='composite')", "LegoLink(0)")
    names: ClassVar = {"legolink": "LegoLink()", "legolink:4": "LegoLink(4)"}
    wrong = ("LegoLink(-1)", "LegoLink(True)", "LegoLink(1.5)", "LegoLink(4, 'local')")


class TestCacheBlend(PolicyContract):
    written = (
        "CacheBlend()",
        "CacheBlend(ratio=0.3, check_layer=2, positions='composite')",
        "CacheBlend(0)",
    )
    names: ClassVar = {
        "cacheblend": "CacheBlend()",
        "cacheblend:0.3": "CacheBlend(0.3)",
    }
    wrong = (
        "CacheBlend(2)",
        "CacheBlend(True)",
        "CacheBlend(float('nan'))",
        "CacheBlend(check_layer=0)",
        "CacheBlend(positions='local')",
    )
    at_ratio = CacheBlend


class TestCacheClip(PolicyContract):
    written = (
        "CacheClip()",
        "CacheClip(ratio=0.4, window=4, threshold=None)",
        "CacheClip(ratio=0.3, ratio_of='recomputed')",
        "CacheClip(ratio=0)",
    )
    names: ClassVar = {
        "cacheclip": "CacheClip()",
        "cacheclip:0.3": "CacheClip(ratio=0.3)",
        "cacheclip:0.3,4": "CacheClip(ratio=0.3, threshold=4)",
        "cacheclip:0.3,mean": "CacheClip(ratio=0.3, threshold=None)",
        "cacheclip:0.3,4,recomputed": "CacheClip(ratio=0.3, threshold=4, ratio_of='recomputed')",
    }
    wrong = (
        "CacheClip(ratio=-1)",
        "CacheClip(ratio=1.5)",
        "CacheClip(window=0)",
        "CacheClip(threshold=-1)",
        "CacheClip(threshold=8)",
        "CacheClip(positions='local')",
        "CacheClip(ratio_of='computed')",
        "CacheClip('tiny')",
    )
    at_ratio = staticmethod(lambda ratio: CacheClip(ratio=ratio, window=1, threshold=0))


class TestApe(PolicyContract):
    written = ("Ape()", "Ape(temperature=0.7, scale=1.1)")
    names: ClassVar = {"ape": "Ape()", "ape:0.8,0.7": "Ape(0.8, 0.7)"}
    wrong = ("Ape(0)", "Ape(scale=float('inf'))", "Ape(True)")


def test_every_name_belongs_to_a_policy_that_keeps_them() -> None:
    named = {name for kind in PolicyContract.__subclasses__() for name in kind.names}
    assert {*POLICY_NAMES} == {name for name in named if name.isalpha()}


# ---------------------------------------------------------------------- names
class Scorer:
    def __repr__(self) -> str:
        return "Scorer()"

    def scores(self, question: str, chunks: Any) -> list[Tensor]:
        return [torch.zeros(len(chunk)) for chunk in chunks]


def test_a_name_may_come_with_an_auxiliary_model() -> None:
    scorer = Scorer()
    assert policy_by_name("cacheclip", scorer) == CacheClip(scorer)
    assert policy_by_name("cacheclip: 0.4,3", scorer) == CacheClip(scorer, 0.4, threshold=3)
    assert policy_by_name("legolink:4", scorer) == LegoLink(4)


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


@pytest.mark.parametrize("policy", [*NEEDED["cannot_capture"], *ANYWHERE], ids=repr)
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
