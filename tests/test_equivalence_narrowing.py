"""Laws of a choice that narrows from layer to layer, for every supported family, in float32.

The plain path runs every token through every layer; what has left the choice is overlaid with its
stitched keys and values, so that nothing computed for it is ever read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import access
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
)
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from zoo import FAMILIES

from kvcache_rag import CacheBlend, Engine, InvalidInputError, auto
from kvcache_rag.generation.context import Prompt
from kvcache_rag.models.cache import DummyLayer
from kvcache_rag.policies import ReusePolicy
from kvcache_rag.policies.base import LayerCheck
from kvcache_rag.policies.selection import candidates

if TYPE_CHECKING:
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitching.stitch import StitchedPrompt

RATIO = 0.4


@dataclass
class Choice:
    """What is left of a choice."""

    policy: ReusePolicy
    prompt: StitchedPrompt
    layers: int
    alive: Tensor


class OverlaidLayer(DynamicLayer):
    """A layer that sees new keys and values of what is left of a choice, else stitched ones."""

    def __init__(self, stitched: tuple[Tensor, Tensor], still: int, index: int, choice: Choice):
        super().__init__()
        self.stitched, self.still, self.index, self.choice = stitched, still, index, choice

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        choice, fresh = self.choice, (keys, values)
        before = choice.alive
        context = len(before)
        if self.index in choice.policy.narrowing_layers:
            distance = fresh[self.still][0, :, :context] - self.stitched[self.still][0, :, :context]
            deviation = distance.pow(2).sum((0, 2)) * before
            check = LayerCheck(self.index, choice.layers, before, deviation)
            choice.alive = choice.policy.narrow(choice.prompt, check)
        seen = torch.cat([before, torch.ones(keys.shape[2] - context, dtype=torch.bool)])
        overlaid = [
            torch.where(seen[:, None], new, old[:, :, : keys.shape[2]])
            for new, old in zip(fresh, self.stitched, strict=True)
        ]
        return overlaid[0], overlaid[1]


def overlaid_logits(engine: Engine, policy: ReusePolicy) -> tuple[Tensor, Tensor]:
    """Logits of the query by the plain path, and what was left of the choice at the end."""
    answerer, model = access.answerer(engine), access.adapter(engine)
    made = engine._request(QUESTION, TEXTS, {"policy": policy, "max_new_tokens": 1})
    prompt = Prompt(made.rounds[0], made.query, made)
    row = answerer.filler.choose(prompt)
    slots = row.stitched.buffer.slots()
    tokens, kinds = row.shape.tokens, model.measured.kinds
    chosen = torch.zeros(row.shape.context_tokens, dtype=torch.bool)
    choice = Choice(
        row.policy, row.shape, len(kinds), chosen if row.selected is None else row.selected
    )
    layers = [
        DummyLayer()
        if kind.shared
        else OverlaidLayer(
            tuple(part.clone() for part in slots[index]),
            model.measured.unrotated_slot(index),
            index,
            choice,
        )
        for index, kind in enumerate(kinds)
    ]
    places = torch.arange(tokens)
    mask = model.causal_mask(places, tokens)
    logits = model.forward(row.ids[None], Cache(layers=layers), places, mask=mask)
    return logits[0, row.shape.context_tokens :].float(), choice.alive


@pytest.fixture(scope="module", params=list(FAMILIES))
def engine(request: pytest.FixtureRequest) -> Engine:
    made = make_engine(request.param)
    made.add(TEXTS)
    return made


@pytest.mark.parametrize("scheme", ["reordered", "composite"])
@pytest.mark.parametrize("layers", [(1, 2), (1, 2, 3)])
def test_it_is_one_pass_in_which_dropped_tokens_are_overlaid(
    engine: Engine, scheme: PositionScheme, layers: tuple[int, ...]
) -> None:
    policy = CacheBlend(RATIO, positions=scheme, check_layers=layers)
    if refused(engine, policy):
        return
    expected, left = overlaid_logits(engine, policy)
    assert 0 < int(left.sum()) < RATIO * sum(map(len, TEXTS)), "it was to narrow"
    found = engine.logits(QUESTION, TEXTS, policy=policy)
    assert error(found, expected) < TOLERANCE


def test_dropped_tokens_count(engine: Engine) -> None:
    """The law above could not hold if nothing came of dropping."""
    narrowed = CacheBlend(RATIO, check_layers=(1, 2))
    kept = replace(Everywhere(), ratio=narrowed.shares(_layers(engine))[0])
    found = engine.logits(QUESTION, TEXTS, policy=narrowed)
    assert error(found, engine.logits(QUESTION, TEXTS, policy=kept)) > TOLERANCE


@dataclass(frozen=True)
class Everywhere(CacheBlend):
    """Is asked at every layer and drops nothing."""

    def narrow(self, prompt: StitchedPrompt, check: LayerCheck) -> Tensor:
        return check.alive

    def shares(self, layers: int) -> tuple[float, ...]:
        return (self.ratio,)


def test_dropping_nothing_is_one_choice(engine: Engine) -> None:
    asked = Everywhere(RATIO, check_layers=(1, 2))
    found = engine.logits(QUESTION, TEXTS, policy=asked)
    assert error(found, engine.logits(QUESTION, TEXTS, policy=CacheBlend(RATIO))) < TOLERANCE


@dataclass(frozen=True)
class Behind(ReusePolicy):
    """Chooses everything behind the first chunk and is asked at every layer."""

    name: ClassVar[str] = "behind"

    @property
    def narrowing_layers(self) -> tuple[int, ...]:
        return (1, 2)

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        return candidates(prompt)


def test_all_of_it_is_a_full_prefill_and_nothing_is_reuse(engine: Engine) -> None:
    plain = plain_logits(engine, TEXTS)
    assert error(engine.logits(QUESTION, TEXTS, policy=Behind()), plain) < TOLERANCE
    whole = engine.logits(QUESTION, TEXTS, policy=CacheBlend(1, check_layers=(1, 2)))
    assert error(whole, plain) < TOLERANCE
    nothing = engine.logits(QUESTION, TEXTS, policy=CacheBlend(0, check_layers=(1, 2)))
    assert error(nothing, masked_logits(engine, TEXTS, "reordered")) < TOLERANCE


def _layers(engine: Engine) -> int:
    return len(access.adapter(engine).measured.kinds)


# ------------------------------------------------------------------------------- one family
@pytest.fixture(scope="module")
def llama() -> Engine:
    return make_engine("llama")


@dataclass(frozen=True)
class Growing(Behind):
    """Wants a token back."""

    def narrow(self, prompt: StitchedPrompt, check: LayerCheck) -> Tensor:
        return torch.ones_like(check.alive)


def test_what_cannot_be_is_refused(llama: Engine) -> None:
    with pytest.raises(InvalidInputError, match="among 1 to 3"):
        llama.logits(QUESTION, TEXTS, policy=CacheBlend(RATIO, check_layers=(1, 7)))
    with pytest.raises(InvalidInputError, match="can only drop more"):
        llama.logits(QUESTION, TEXTS, policy=Growing())


def test_each_layer_runs_on_what_is_left(llama: Engine) -> None:
    policy = CacheBlend(RATIO, check_layers=(1, 2, 3))
    llama.add(TEXTS)
    chunks = sum(map(len, llama.tokenize(QUESTION, TEXTS).chunks))
    query = len(llama.tokenize(QUESTION, TEXTS).query)
    seen: list[int] = []
    hooks = [
        layer.mlp.register_forward_hook(lambda _m, _i, out: seen.append(int(out.shape[-2])))
        for layer in llama.model.model.layers
    ]
    try:
        metrics = llama.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
    finally:
        for hook in hooks:
            hook.remove()
    first, second, _ = (round(share * chunks) for share in policy.shares(4))
    # The layer below the first check for the deviation; then the pass, which ends in the last
    # layer; then the last token of the query.
    context = chunks + len(llama.tokenize(QUESTION, TEXTS).prefix)
    assert seen == [context, first + query - 1, first + query - 1, second + query - 1, *[1] * 4]
    third = round(policy.shares(4)[2] * chunks)
    # Two layers of the first choice, one of the second and one, its keys and values, of the third.
    assert metrics.recomputed_tokens == round((2 * first + second + third) / 4)
    assert "check_layers=(1, 2, 3)" in metrics.policy


def test_rows_of_a_batch_and_a_budget_are_as_alone(llama: Engine) -> None:
    policy = CacheBlend(RATIO, check_layers=(1, 2))
    questions = [(QUESTION, TEXTS), ("What is it that they saw?", TEXTS[::-1]), ("x", TEXTS[:2])]
    singles = [llama.generate(*one, policy=policy, max_new_tokens=5) for one in questions]
    batch = llama.generate_batch(questions, policy=policy, max_new_tokens=5)
    assert [one.token_ids for one in batch] == [one.token_ids for one in singles]
    spent = llama.generate(QUESTION, TEXTS, policy=auto(1e-9, policy), max_new_tokens=5)
    assert spent.metrics.recomputed_tokens == 0
    ample = llama.generate(QUESTION, TEXTS, policy=auto(60, policy), max_new_tokens=1)
    assert ample.metrics.policy.startswith("CacheBlend(ratio=1.0")


def test_what_is_explained_is_what_is_done(llama: Engine) -> None:
    policy = CacheBlend(RATIO, check_layers=(1, 2))
    told = llama.explain(QUESTION, TEXTS, policy=policy)
    done = llama.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
    chunks = sum(map(len, llama.tokenize(QUESTION, TEXTS).chunks))
    assert told.recomputed_tokens == round(policy.shares(4)[0] * chunks)
    assert told.recomputed_tokens > done.recomputed_tokens == round(RATIO * chunks)


# ------------------------------------------------------------------------------- the shares
@pytest.mark.parametrize(
    ("ratio", "checks", "layers"),
    [(0.2, (1, 2, 3), 30), (0.15, (1, 5, 10, 20), 32), (0.9, (1, 2), 4), (0.2, (1, 29), 30)],
)
def test_their_mean_over_the_layers_is_the_ratio(
    ratio: float, checks: tuple[int, ...], layers: int
) -> None:
    shares = CacheBlend(ratio, check_layers=checks).shares(layers)
    stops = [*checks[1:], layers]
    spans = [stop - start for start, stop in zip([0, *checks[1:]], stops, strict=True)]
    mean = sum(span * share for span, share in zip(spans, shares, strict=True)) / layers
    assert mean == pytest.approx(ratio)
    assert list(shares) == sorted(shares, reverse=True)
    assert 1 >= shares[0] > ratio > shares[-1] >= ratio / 2 - 1e-9


def test_shares_by_hand() -> None:
    """30 layers: 0 and 1 at 1.5 x 0.2, layer 2 half-way down, 27 layers at the last."""
    first, second, last = CacheBlend(0.2, check_layers=(1, 2, 3)).shares(30)
    assert first == pytest.approx(0.3)
    assert 2 * first + second + 27 * last == pytest.approx(30 * 0.2)
    assert second == pytest.approx((first + last) / 2)
    assert CacheBlend(0.2).shares(30) == CacheBlend(0.2, check_layers=(1,)).shares(30) == (0.2,)
