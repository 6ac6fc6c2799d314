"""Models whose attention counts places (ALiBi): what is seen of them, and what is refused."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import QUESTION, TEXTS, TOLERANCE, error, make_engine, masked_logits, plain_logits
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from zoo import BY_PLACE, build

from kvcache_rag import Ape, CacheBlend, Combination, LegoLink, Reuse
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.models.attention.placed import PlacedMask
from kvcache_rag.models.cache import CACHE_NAME
from kvcache_rag.models.hf import TransformersModel

if TYPE_CHECKING:
    from kvcache_rag.policies import ReusePolicy


@pytest.mark.parametrize("name", BY_PLACE)
@pytest.mark.parametrize(
    "policy",
    [Ape(), Reuse(positions="composite"), LegoLink(4, positions="composite")],
    ids=repr,
)
def test_chunks_that_overlap_are_refused_in_one_sentence(name: str, policy: ReusePolicy) -> None:
    engine = make_engine(name)
    with pytest.raises(UnsupportedModelError) as caught:
        engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1)
    said = str(caught.value)
    assert said.startswith(f"{name.split()[0]}: attention counts a token's place in the prompt")
    assert said.count("; use Reuse(), or positions=") == 1
    assert repr(policy) in said
    with pytest.raises(UnsupportedModelError, match="counts a token's place"):
        engine.explain(QUESTION, TEXTS, policy=policy)
    assert engine.generate(QUESTION, [], policy=policy, max_new_tokens=1).token_ids
    # One chunk has no other position than its places.
    if isinstance(policy, Ape):
        with pytest.raises(UnsupportedModelError, match=f"^{name.split()[0]}: its attention"):
            engine.logits(QUESTION, TEXTS[:1], policy=policy)
    else:
        found = engine.logits(QUESTION, TEXTS[:1], policy=policy)
        assert torch.equal(found, engine.logits(QUESTION, TEXTS[:1], policy=Reuse()))


@pytest.mark.parametrize("name", BY_PLACE)
def test_a_combination_and_few_tokens_computed_again(name: str) -> None:
    engine = make_engine(name)
    plain = plain_logits(engine, TEXTS)
    assert error(engine.logits(QUESTION, TEXTS, policy=Combination()), plain) < TOLERANCE
    distances = [
        error(engine.logits(QUESTION, TEXTS, policy=CacheBlend(ratio)), plain)
        for ratio in (0, 0.5, 1)
    ]
    assert distances[0] > 10 * TOLERANCE
    assert distances[1] > TOLERANCE > distances[2]


def test_rounding_of_a_bias_stays_below_what_it_costs_a_full_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Falcon rounds its bias by place to bfloat16: beyond 256 places no two distances are alike."""
    texts = [text * 8 for text in TEXTS]  # some 1,200 tokens
    engine = make_engine("falcon alibi")
    found = engine.logits(QUESTION, texts, policy=Reuse())
    off = rms(found, masked_logits(engine, texts, "reordered"))
    rounded = plain_logits(engine, texts)

    def exact(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        places = (mask.cumsum(-1) - 1) * mask  # (rows, tokens)
        table: Tensor = slopes(heads)[None, :, None] * places[:, None]
        return table.reshape(-1, 1, mask.shape[1]).to(dtype)

    own = modeling_falcon.build_alibi_tensor

    def slopes(heads: int) -> Tensor:
        two = torch.ones(1, 2, dtype=torch.long)
        return own(two, heads, torch.float32)[:, 0, 1]

    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", exact)
    own_cost = rms(rounded, plain_logits(engine, texts))
    assert TOLERANCE < off < own_cost
    assert own_cost > 10 * TOLERANCE
    engine = make_engine("falcon alibi")
    found = engine.logits(QUESTION, texts, policy=Reuse())
    assert error(found, masked_logits(engine, texts, "reordered")) < TOLERANCE


def rms(found: Tensor, reference: Tensor) -> float:
    """Root mean square difference in standard deviations of the reference."""
    return float((found - reference).pow(2).mean().sqrt() / reference.std())


def test_a_bias_that_is_no_function_of_the_distance_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = modeling_bloom.build_alibi_tensor

    def squared(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        return own(mask, heads, dtype) ** 2 * torch.linspace(0, 1, mask.shape[1])

    monkeypatch.setattr(modeling_bloom, "build_alibi_tensor", squared)
    monkeypatch.setattr(
        modeling_bloom.BloomModel,
        "forward",
        _with_ones(modeling_bloom.BloomModel.forward),
    )
    refusal = TransformersModel(build("bloom")).abilities.cannot_stitch
    assert refusal.startswith("bloom: layer 1 counts places (ALiBi) in a way of its own")


def _with_ones(forward: Any) -> Any:
    """A forward pass that is given a mask argument where there is none."""

    def passed(self: Any, input_ids: Tensor, **arguments: Any) -> Any:
        cache, mask = arguments.get(CACHE_NAME), arguments.get("attention_mask")
        tokens = input_ids.shape[1] + (cache.get_seq_length() if cache is not None else 0)
        if mask is None:
            arguments["attention_mask"] = torch.ones(len(input_ids), tokens, dtype=torch.long)
        return forward(self, input_ids, **arguments)

    return passed


def test_a_model_that_takes_no_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make = modeling_bloom.create_causal_mask

    def stubborn(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            raise TypeError("no mask")
        return make(*args, attention_mask=None, **kwargs)

    monkeypatch.setattr(modeling_bloom, "create_causal_mask", stubborn)
    refusal = TransformersModel(build("bloom")).abilities.cannot_stitch
    assert refusal.startswith("bloom: layer 0 counts places (ALiBi), and the model takes no mask")


def test_a_mask_is_that_of_its_own_thread() -> None:
    engine = make_engine("bloom")
    plain = plain_logits(engine, TEXTS)
    ids = engine.tokenize(QUESTION, TEXTS)
    nothing = torch.zeros(1, 1, len(ids.all), len(ids.all))  # later tokens are seen, too
    found: list[Tensor] = []
    with PlacedMask(nothing).given(engine.model, 1) as ones, torch.no_grad():
        other = threading.Thread(target=lambda: found.append(plain_logits(engine, TEXTS)))
        other.start()
        other.join()
        seeing = engine.model(torch.tensor([ids.all]), attention_mask=ones).logits[0]
    assert torch.equal(found[0], plain)
    assert error(seeing[-len(ids.query) :], plain) > 10 * TOLERANCE
    assert torch.equal(plain_logits(engine, TEXTS), plain)


@pytest.mark.parametrize("name", BY_PLACE)
def test_positions_cannot_be_told_under_a_mask(name: str) -> None:
    model = access.adapter(make_engine(name))
    places = torch.arange(4)
    with pytest.raises(UnsupportedModelError, match="takes no mask for each row"):
        model.mask_argument(torch.ones(4, 4, dtype=torch.bool).tril(), places)
