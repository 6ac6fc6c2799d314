"""A mean change of some tokens, added to the others: its laws, against tokens one by one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import (
    QUESTION,
    TEXTS,
    TOLERANCE,
    Picked,
    error,
    make_engine,
    plain_logits,
    sequence_logits,
)
from torch import Tensor
from zoo import SEVERAL

from benchmarks.kvshift import KVShift, Shift
from kvcache_rag import Engine, InvalidInputError, Reuse
from kvcache_rag.kv.mask import block_mask
from kvcache_rag.models.cache import growing_cache, layer_tensors
from kvcache_rag.stitching.stitch import StitchedPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence


RATIO = 0.1


@pytest.fixture(scope="module", params=SEVERAL)
def engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(request.param)


# ---------------------------------------------------------------- the sum


def shift(weight: float) -> Shift:
    probes, others = torch.tensor([4, 9]), torch.tensor([3, 5, 6, 7, 8])
    return Shift(probes, others, torch.full((5,), weight))


def cached(seed: int = 0) -> Tensor:
    return torch.randn(1, 2, 12, 6, generator=torch.Generator().manual_seed(seed))


def test_a_change_that_is_the_same_for_all_makes_the_cache_that_of_a_full_prefill() -> None:
    held, change = cached(), torch.randn(1, 2, 1, 6)
    full = held + change
    before = held.clone()
    places = torch.tensor([4, 9, 10])  # one of another chunk, too
    shift(1.0).apply(held, full[:, :, places], places)
    for place in range(12):
        expected = full if place in (3, 5, 6, 7, 8) else before
        assert torch.allclose(held[:, :, place], expected[:, :, place], atol=1e-6), place


def test_no_change_leaves_the_cache_as_it_was() -> None:
    held = cached()
    before = held.clone()
    shift(1.0).apply(held, held[:, :, [4, 9]].clone(), torch.tensor([4, 9]))
    assert held.equal(before)
    shift(0.0).apply(held, cached(1)[:, :, [4, 9]], torch.tensor([4, 9]))
    assert held.equal(before)


def test_the_mean_is_that_of_the_probes_and_weights_are_those_of_the_others() -> None:
    held, fresh = cached(), cached(1)
    before = held.clone()
    weights = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    some = Shift(torch.tensor([4, 9]), torch.tensor([3, 5, 6, 7, 8]), weights)
    some.apply(held, fresh[:, :, [4, 9]], torch.tensor([4, 9]))
    mean = sum(fresh[0, :, place] - before[0, :, place] for place in (4, 9)) / 2
    for place, weight in zip((3, 5, 6, 7, 8), weights.tolist(), strict=True):
        expected = before[0, :, place] + weight * mean
        assert torch.allclose(held[0, :, place], expected, atol=1e-6)


# ---------------------------------------------------------------- whole answers


def context_of(engine: Engine) -> tuple[Any, StitchedPrompt]:
    ids = engine.tokenize(QUESTION, TEXTS)
    sizes = len(ids.prefix), list(map(len, ids.chunks)), len(ids.query)
    return ids, StitchedPrompt.from_sizes(*sizes)


def farthest(distances: Tensor, chunk: range, ratio: float) -> list[int]:
    """The places of a chunk with the largest distances."""
    count = math.ceil(ratio * len(chunk))
    return sorted(chunk, key=lambda place: (-float(distances[place]), place))[:count]


def held_tensors(cache: Any, columns: Tensor) -> dict[int, list[Tensor]]:
    """Copies of K and V of each layer that has them, `(1, heads, columns, width)`."""
    return {
        layer: [one[:, :, columns].clone() for one in pair]
        for layer, pair in enumerate(layer_tensors(cache))
        if pair is not None
    }


def cache_behind(engine: Engine, held: dict[int, list[Tensor]], tokens: int) -> Any:
    """A stock cache of so many tokens."""
    cache = growing_cache(access.adapter(engine).measured.kinds)
    for layer, pair in held.items():
        cache.layers[layer].update(*(one[:, :, :tokens] for one in pair))
    return cache


def token_by_token(engine: Engine, policy: KVShift) -> Tensor:
    """Logits of the query over a cache that is corrected layer by layer, a token at a time."""
    adapter = access.adapter(engine)
    ids, shape = context_of(engine)
    context, tokens = shape.context_tokens, torch.tensor(ids.all)
    kinds = adapter.measured.kinds
    stitched, plain = growing_cache(kinds), growing_cache(kinds)
    sequence = block_mask(ids.prefix, ids.chunks, ids.query)
    sequence_logits(engine, sequence, stitched)
    seen = sequence.allowed[-1, : -len(ids.query)].nonzero()[:, 0]  # one copy of the prefix
    adapter.forward(tokens[None, :context], plain, torch.arange(context))
    held, full = held_tensors(stitched, seen), held_tensors(plain, torch.arange(context))
    pairs = zip(full[policy.check_layer], held[policy.check_layer], strict=True)
    distances = [(new - old)[0].pow(2).sum((0, 2)).sqrt() for new, old in pairs]
    chunks = [range(span.start, span.stop) for span in shape.chunks[1:]]
    probes = [[farthest(one, chunk, policy.ratio) for chunk in chunks] for one in distances]
    chosen = sorted({place for slot in probes for some in slot for place in some})
    for layer in held:
        fresh: dict[int, Sequence[Tensor]] = {}
        for place in chosen:
            cache = cache_behind(engine, held, place)
            adapter.forward(tokens[None, place : place + 1], cache, torch.tensor([place]))
            fresh[place] = [
                one[:, :, 0] for one in held_tensors(cache, torch.tensor([place]))[layer]
            ]
        for slot, own in enumerate(held[layer]):
            before = own.clone()
            for chunk, some in zip(chunks, probes[slot], strict=True):
                mean = sum(fresh[place][slot] - before[:, :, place] for place in some) / len(some)
                for place in set(chunk) - set(chosen):
                    weight = min(max(float(distances[slot][place]), policy.least), 1)
                    own[:, :, place] += weight * mean
            for place in chosen:
                own[:, :, place] = fresh[place][slot]
    query = torch.arange(context, len(tokens))
    return adapter.forward(tokens[None, context:], cache_behind(engine, held, context), query)[0]


@pytest.mark.parametrize("least", [0.0, 1.0])
def test_the_cache_is_that_of_tokens_one_by_one(engine: Engine, least: float) -> None:
    policy = KVShift(RATIO, least)
    with torch.no_grad():
        expected = token_by_token(engine, policy).float()
    found = engine.logits(QUESTION, TEXTS, policy=policy)
    assert error(found, expected) < TOLERANCE
    # The law can fail: where nothing is computed again, and where nothing is shifted.
    assert error(engine.logits(QUESTION, TEXTS, policy=Reuse()), expected) > 10 * TOLERANCE
    bare = Picked(lambda prompt, signals: policy.parts(prompt, signals).chosen(prompt))
    assert error(engine.logits(QUESTION, TEXTS, policy=bare), expected) > 10 * TOLERANCE


def test_all_tokens_as_probes_are_a_plain_prefill_and_none_are_reuse(engine: Engine) -> None:
    everything = engine.logits(QUESTION, TEXTS, policy=KVShift(1))
    assert error(everything, plain_logits(engine, TEXTS)) < TOLERANCE
    reused = engine.logits(QUESTION, TEXTS, policy=Reuse())
    assert engine.logits(QUESTION, TEXTS, policy=KVShift(0)).equal(reused)


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_what_is_computed_again_is_counted_and_a_batch_answers_as_each_alone(
    engine: Engine,
) -> None:
    policy = KVShift(RATIO)
    asked = [("Who?", TEXTS), ("What is it?", TEXTS[::-1])]
    singles = [engine.generate(*one, policy=policy, max_new_tokens=6) for one in asked]
    batch = engine.generate_batch(asked, policy=policy, max_new_tokens=6)
    assert [one.text for one in batch] == [one.text for one in singles]
    _, shape = context_of(engine)
    fewest = sum(math.ceil(RATIO * len(chunk)) for chunk in shape.chunks[1:])
    assert fewest <= singles[0].metrics.recomputed_tokens <= 2 * fewest
    alone = [engine.generate("Who?", TEXTS[:1], policy=one) for one in (policy, Reuse())]
    assert alone[0].text == alone[1].text
    assert alone[0].metrics.recomputed_tokens == 0


def test_a_number_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="ratio must be a number from 0"):
        KVShift(1.5)
    with pytest.raises(InvalidInputError, match="least must be a number from 0"):
        KVShift(0.1, -1)
    with pytest.raises(InvalidInputError, match="check_layer must be a whole number from 1 up"):
        KVShift(check_layer=0)
    with pytest.raises(InvalidInputError, match="layer 99 keeps no keys"):
        make_engine("llama").logits(QUESTION, TEXTS, policy=KVShift(check_layer=99))
