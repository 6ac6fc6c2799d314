"""Policies together: unions, budgets, names; all of them values that can be written down."""

from __future__ import annotations

import pickle
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_rag
from kvcache_rag import (
    Ape,
    CacheBlend,
    CacheClip,
    Combination,
    FullRecompute,
    InvalidInputError,
    LegoLink,
    ProphetKV,
    Reuse,
    ReusePolicy,
    Union,
    auto,
    policy_by_name,
)
from kvcache_rag.policies import POLICY_NAMES
from kvcache_rag.policies.auto import at_ratio
from kvcache_rag.policies.base import MOST_PARTS
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
    ProphetKV(0.1) | LegoLink(4),
    auto(1, ProphetKV()),
    CacheBlend(0.3, check_layer=2),
    CacheBlend(positions="composite"),
    CacheClip(ratio=0.1, window=4, threshold=2),
    CacheClip(threshold=None),
    Ape(0.8, 0.7),
    LegoLink(4) | CacheBlend(0.1),
    LegoLink(4) | CacheBlend(0.1) | CacheClip(),
    auto(0.25),
    auto(2, CacheClip(ratio=0.4)),
    auto(0.5, LegoLink(2) | CacheBlend()),
]


class Clock:
    """Time passes only where it is said so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    # By its name the module hides behind the function `auto`.
    monkeypatch.setattr(import_module("kvcache_rag.policies.auto"), "perf_counter", CLOCK)


class Scorer:
    def scores(self, question: str, chunks: Any) -> list[Tensor]:
        return [torch.zeros(len(chunk)) for chunk in chunks]


class Fake:
    """Signals of a machine that computes `rate` tokens a second."""

    def __init__(self, rate: float = 1000.0, delay: float = 0.0, layers: int = 4) -> None:
        self.rate, self.delay, self.layers = rate, delay, layers
        self.asked: list[str] = []
        self._known: set[str] = set()

    def _wait(self, name: str) -> Tensor:
        self.asked.append(name)
        if name not in self._known:
            CLOCK.now += self.delay
        self._known.add(name)
        return torch.rand(TOKENS, generator=torch.Generator().manual_seed(len(name)))

    def deviation(self, layer: int) -> Tensor:
        return self._wait(f"deviation {layer}")

    def deviation_tokens(self, layer: int) -> int:
        return 0 if f"deviation {layer}" in self._known else TOKENS * layer // self.layers

    def relevance(self) -> Tensor:
        return self._wait("relevance")

    def attention(self) -> Tensor:
        return self._wait("attention")

    def attention_tokens(self) -> int:
        return 0 if "attention" in self._known else 20

    def affordable(self, seconds: float) -> int:
        return min(int(seconds * self.rate), TOKENS)


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


def test_a_union_selects_what_any_selects() -> None:
    parts = [LegoLink(4), CacheBlend(0.1), CacheClip(ratio=0.4)]
    union = parts[0] | parts[1] | parts[2]
    signals = Fake()
    expected = torch.zeros(TOKENS, dtype=torch.bool)
    for part in parts:
        own = part.select(PROMPT, signals)
        assert own.any()
        assert (own & ~expected).any()
        expected |= own
    assert torch.equal(union.select(PROMPT, signals), expected)


def test_a_union_of_unions_is_flat() -> None:
    union = (LegoLink(4) | CacheBlend()) | (CacheClip() | LegoLink(4))
    assert union == Union(LegoLink(4), CacheBlend(), CacheClip())
    assert isinstance(union, Union)
    assert len(union.policies) == 3


def test_a_union_has_the_hooks_of_its_parts() -> None:
    scorer = Scorer()
    union = LegoLink(4, positions="composite") | CacheClip(scorer, positions="composite")
    assert union.positions == "composite"
    assert union.needs_scorer
    assert union.auxiliary is scorer
    assert not union.is_reuse
    assert not union.is_full
    assert not (LegoLink(4) | CacheBlend()).needs_scorer
    assert (LegoLink(0) | Reuse()).is_reuse
    assert (FullRecompute() | LegoLink(4)).is_full
    assert (Combination() | FullRecompute()).is_full
    assert (LegoLink(4) | CacheClip(ratio=0)).needs_scorer is False
    assert Union(Ape(0.8, 0.8)).scaling == Ape(0.8, 0.8).scaling
    assert Union(Ape(0.8, 0.8)).adjacent_query
    assert Union(Combination()).joint


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((LegoLink(4), CacheBlend(positions="composite")), "positions of the chunks"),
        ((Ape(), LegoLink(4, positions="composite")), "no place of their own"),
        ((Ape(), Reuse("composite")), "scaling of the attention"),
        ((Ape(0.8, 0.8), Ape(0.9, 0.9)), "scaling of the attention"),
        ((Combination(), LegoLink(4)), "computed together"),
        ((CacheClip(Scorer()), CacheClip(Scorer(), ratio=0.5)), "different auxiliary models"),
        ((), "at least one policy"),
        ((LegoLink(4), "cacheblend"), "joins policies"),
    ],
)
def test_unions_that_cannot_be(parts: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        Union(*parts)
    assert "\n" not in str(caught.value)


def test_or_with_something_else_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        _ = LegoLink(4) | "cacheblend"  # type: ignore[operator]  # wrong on purpose


@pytest.mark.parametrize("policy", [CacheBlend(), CacheClip(), LegoLink(2) | CacheBlend()])
@pytest.mark.parametrize("seconds", [0.15, 0.2, 0.25])
def test_auto_takes_the_largest_ratio_that_fits(policy: ReusePolicy, seconds: float) -> None:
    signals = Fake(rate=1000.0)
    resolved = auto(seconds, policy).resolved(PROMPT, signals)
    chosen = int(resolved.select(PROMPT, signals).sum())
    assert chosen <= seconds * 1000
    parts = resolved.policies if isinstance(resolved, Union) else (resolved,)
    (ratio,) = [part.ratio for part in parts if hasattr(part, "ratio")]
    assert 0 < ratio < 1
    more = int(at_ratio(policy, ratio + 0.01).select(PROMPT, signals).sum())
    assert more > seconds * 1000
    assert repr(ratio) in repr(resolved)
    assert int(auto(seconds, policy).select(PROMPT, signals).sum()) <= seconds * 1000


def test_auto_computes_everything_where_all_fits_and_asks_no_signal() -> None:
    signals = Fake(rate=1e6)
    resolved = auto(1.0).resolved(PROMPT, signals)
    assert resolved == CacheBlend(ratio=1.0)
    assert resolved.is_full
    selected = auto(1.0).select(PROMPT, signals)
    assert selected.nonzero()[:, 0].tolist() == list(range(110, 410))
    assert signals.asked == []


@pytest.mark.parametrize("policy", [CacheBlend(), CacheClip(), LegoLink(2) | CacheBlend()])
def test_auto_reuses_where_nothing_fits(policy: ReusePolicy) -> None:
    signals = Fake(rate=1.0)
    assert auto(0.5, policy).resolved(PROMPT, signals).is_reuse
    assert not auto(0.5, policy).select(PROMPT, signals).any()
    assert signals.asked == []


def test_auto_leaves_a_signal_out_that_takes_all_the_time() -> None:
    signals = Fake(rate=1000.0)  # the deviation counts as 102 tokens
    assert auto(0.1, CacheBlend()).resolved(PROMPT, signals).is_reuse
    assert signals.asked == []
    assert not auto(0.12, CacheBlend()).resolved(PROMPT, signals).is_reuse


def test_auto_takes_the_time_of_the_signal_off_the_budget() -> None:
    quick, slow = Fake(), Fake(delay=0.1)
    fast = int(auto(0.25).select(PROMPT, quick).sum())
    rest = int(auto(0.25).select(PROMPT, slow).sum())
    assert 245 < fast <= 250
    assert 145 < rest <= 150
    assert auto(0.05, CacheClip()).resolved(PROMPT, Fake(delay=0.1)).is_reuse


def test_auto_keeps_the_places_of_its_policy() -> None:
    scorer = Scorer()
    policy = auto(1, CacheClip(scorer, positions="composite"))
    assert policy.positions == "composite"
    assert policy.auxiliary is scorer
    assert policy.needs_scorer
    assert not auto(1).needs_scorer
    assert auto(0).is_reuse
    assert auto(1, CacheClip(ratio=0)).needs_scorer
    assert auto(0.0001, CacheBlend(positions="composite")).resolved(PROMPT, Fake()) == Reuse(
        "composite"
    )


@pytest.mark.parametrize("budget", [-1, float("nan"), float("inf"), "1", True, None])
def test_a_budget_is_seconds(budget: Any) -> None:
    with pytest.raises(InvalidInputError, match="budget must be seconds"):
        auto(budget)


@pytest.mark.parametrize("policy", [LegoLink(4), Reuse(), Ape(), "cacheblend"])
def test_auto_needs_a_ratio_to_turn(policy: Any) -> None:
    with pytest.raises(InvalidInputError, match="CacheBlend"):
        auto(1.0, policy)


SCORER = Scorer()


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("full", FullRecompute()),
        ("reuse", Reuse()),
        ("reordered", Reuse()),
        (" Composite ", Reuse("composite")),
        ("legolink", LegoLink()),
        ("legolink:4", LegoLink(4)),
        ("cacheblend", CacheBlend()),
        ("cacheblend:0.3", CacheBlend(0.3)),
        ("cacheclip", CacheClip(SCORER)),
        ("cacheclip: 0.4", CacheClip(SCORER, 0.4)),
        ("cacheclip:0.4,3", CacheClip(SCORER, 0.4, threshold=3)),
        ("cacheclip:0.4,mean", CacheClip(SCORER, 0.4, threshold=None)),
        ("auto:1,cacheclip:0.1,mean", auto(1, CacheClip(SCORER, 0.1, threshold=None))),
        ("ape", Ape()),
        ("ape:0.8,0.7", Ape(0.8, 0.7)),
        ("combination", Combination()),
        ("auto:0.5", auto(0.5)),
        ("auto:0.5,cacheclip:0.1", auto(0.5, CacheClip(SCORER, 0.1))),
        ("legolink:4|cacheblend:0.1", LegoLink(4) | CacheBlend(0.1)),
    ],
)
def test_policies_have_names(text: str, policy: ReusePolicy) -> None:
    assert policy_by_name(text, SCORER) == policy


def test_every_name_is_known() -> None:
    for name in POLICY_NAMES:
        assert isinstance(policy_by_name(name + ":1" * (name == "auto")), ReusePolicy)
    assert policy_by_name("cacheclip") == CacheClip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cacheblnd", "did you mean cacheblend"),
        ("", "one of full, reordered"),
        ("vllm", "one of full, reordered"),
        ("legolink:x", "whole number"),
        ("legolink:1.5", "whole number"),
        ("legolink:-1", "tokens must be"),
        ("cacheblend:", "nothing stands behind"),
        ("cacheblend:2", "ratio must be"),
        ("cacheblend:0.1,0.2", "not a whole number"),
        ("full:1", "does not take"),
        ("ape:0.9", "does not take"),
        ("cacheclip:0.1,2,3", "does not take"),
        ("cacheclip:0.1,some", "whole number"),
        ("auto", "time budget"),
        ("auto:soon", "is not a number"),
        ("auto:1,legolink", "policy that has one"),
        ("ape|legolink", "cannot be joined"),
        (None, "is a text"),
    ],
)
def test_names_that_are_none(text: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        policy_by_name(text)
    assert "\n" not in str(caught.value)


def test_a_union_has_a_bounded_number_of_parts() -> None:
    parts = [CacheBlend(ratio=(1 + number) / 1000) for number in range(MOST_PARTS + 1)]
    assert len(Union(*parts[:-1]).policies) == MOST_PARTS
    assert Union(*[parts[0]] * 1000).policies == (parts[0],), "equal ones count once"
    with pytest.raises(InvalidInputError, match=f"at most {MOST_PARTS}"):
        Union(*parts)
    with pytest.raises(InvalidInputError, match=f"at most {MOST_PARTS}"):
        policy_by_name("|".join(["cacheblend:0.5"] * (MOST_PARTS + 1)))
    names = "|".join(f"cacheblend:{part.ratio}" for part in parts[:-1])
    assert policy_by_name(names) == Union(*parts[:-1])
