"""Laws of partial recomputation, for every supported family, in float32.

A policy with a ratio spans the way from `Reuse` (0) to a plain prefill (1), and between these what
is computed again equals one forward pass that was written down independently.
"""

from __future__ import annotations

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
    looking,
    make_engine,
    plain_logits,
    refused,
    sequence_logits,
)
from torch import Tensor
from zoo import FAMILIES, SEVERAL

from kvcache_rag import Engine, ProphetKV, Reuse
from kvcache_rag.kv.mask import MaskedSequence, PositionScheme, block_mask, recompute_mask
from kvcache_rag.models.attention import packed
from kvcache_rag.models.cache import growing_cache, layer_tensors
from kvcache_rag.policies.cacheblend import CacheBlend
from kvcache_rag.policies.legolink import LegoLink
from kvcache_rag.stitching.stitch import StitchedPrompt

if TYPE_CHECKING:
    from collections.abc import Callable


SCHEMES: tuple[PositionScheme, ...] = ("reordered", "composite")


def random_third(prompt: StitchedPrompt, _: object = None) -> Tensor:
    """About 30 %, from prefix and first chunk too."""
    generator = torch.Generator().manual_seed(prompt.context_tokens)
    drawn = torch.rand(prompt.context_tokens, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device()) < 0.3


def all_behind_the_first_chunk(prompt: StitchedPrompt, _: object = None) -> Tensor:
    return torch.arange(prompt.context_tokens) >= prompt.chunks[0].stop


def reference(
    engine: Engine, texts: list[str], pick: Callable[[StitchedPrompt], Tensor], scheme: Any
) -> Tensor:
    """Logits of the query from one forward pass in which selected tokens have a second copy."""
    ids = engine.tokenize(QUESTION, texts)
    prompt = StitchedPrompt.from_sizes(len(ids.prefix), list(map(len, ids.chunks)), len(ids.query))
    sequence = recompute_mask(ids.prefix, ids.chunks, ids.query, pick(prompt), scheme)
    return sequence_logits(engine, sequence)


@pytest.fixture(scope="module", params=list(FAMILIES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(request.param)


# Of each kind one, for what is not the law itself.
several = pytest.mark.parametrize("engine", SEVERAL, indirect=True)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_random_third_is_one_forward_with_a_second_copy(engine: Engine, scheme: Any) -> None:
    if refused(engine, Picked(random_third, scheme)):
        return
    expected = reference(engine, TEXTS, random_third, scheme)
    found = engine.logits(QUESTION, TEXTS, policy=Picked(random_third, scheme))
    assert error(found, expected) < TOLERANCE
    # The law can fail: without recomputing, and with other tokens, logits are elsewhere.
    reused = engine.logits(QUESTION, TEXTS, policy=Reuse(positions=scheme))
    assert error(reused, expected) > 10 * TOLERANCE
    others = Picked(lambda prompt, _: ~random_third(prompt), scheme)
    assert error(engine.logits(QUESTION, TEXTS, policy=others), expected) > 10 * TOLERANCE


@several
def test_many_tokens_attend_in_blocks_to_the_same_effect(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(engine, TEXTS, random_third, "reordered")
    monkeypatch.setattr(packed, "BLOCK", 8)
    monkeypatch.setattr(packed, "FEWEST_BLOCKED", 16)
    found = engine.logits(QUESTION, TEXTS, policy=Picked(random_third))
    assert error(found, expected) < TOLERANCE


@several
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_but_prefix_and_first_chunk_is_a_plain_prefill(engine: Engine, scheme: Any) -> None:
    policy = Picked(all_behind_the_first_chunk, scheme)
    if refused(engine, policy):
        return
    found = engine.logits(QUESTION, TEXTS, policy=policy)
    assert error(found, plain_logits(engine, TEXTS)) < TOLERANCE


def test_law_5_a_ratio_goes_from_reuse_to_a_plain_prefill(engine: Engine) -> None:
    plain = plain_logits(engine, TEXTS)
    for scheme in SCHEMES:
        if refused(engine, Reuse(positions=scheme)):
            continue
        reused = engine.logits(QUESTION, TEXTS, policy=Reuse(positions=scheme))
        for nothing in (
            CacheBlend(0, positions=scheme),
            LegoLink(0, positions=scheme),
            ProphetKV(0, scheme),
            ProphetKV(1e-6, scheme),  # too little to be a token
        ):
            assert torch.equal(engine.logits(QUESTION, TEXTS, policy=nothing), reused)
        for everything in (
            CacheBlend(1, positions=scheme),
            CacheBlend(0.999, positions=scheme),  # as many as all but the first chunk's
            LegoLink(9999, positions=scheme),
            ProphetKV(1, scheme),
            ProphetKV(0.999, scheme),
        ):
            found = engine.logits(QUESTION, TEXTS, policy=everything)
            assert error(found, plain) < TOLERANCE
        assert error(reused, plain) > 10 * TOLERANCE


@several
def test_looking_at_the_signals_changes_nothing(engine: Engine) -> None:
    seen: list[Tensor] = []
    policy = looking(lambda signals: seen.extend([signals.deviation(1), signals.attention()]))
    reused = engine.logits(QUESTION, TEXTS, policy=Reuse())
    own = access.attention(engine.model.config)
    for _ in range(2):
        assert torch.equal(engine.logits(QUESTION, TEXTS, policy=policy), reused)
    assert torch.equal(engine.logits(QUESTION, TEXTS, policy=Reuse()), reused)
    assert access.attention(engine.model.config) == own
    assert all(one.max() > 0 for one in seen)
    assert all(map(torch.equal, seen[:2], seen[2:])), "the same question, the same"


@several
def test_a_stored_chunk_is_never_changed(engine: Engine) -> None:
    keys = engine.add(TEXTS)
    layout = access.chunk_layout(engine)

    def stored() -> list[Tensor]:
        chunks = [engine.store.get(key, layout).chunk for key in keys]
        return [tensor for chunk in chunks for group in chunk.tensors for tensor in group]

    before = [tensor.clone() for tensor in stored()]
    reused = engine.logits(QUESTION, TEXTS)
    for scheme in SCHEMES:
        if refused(engine, Picked(random_third, scheme)):
            continue
        engine.generate(QUESTION, TEXTS, policy=Picked(random_third, scheme), max_new_tokens=2)
    assert all(torch.equal(one, two) for one, two in zip(before, stored(), strict=True))
    assert torch.equal(engine.logits(QUESTION, TEXTS), reused)


def values(engine: Engine, sequence: MaskedSequence | Tensor, layer: int) -> Tensor:
    """What one layer keeps of each token apart from its position, `(heads, tokens, width)`."""
    cache = growing_cache(access.adapter(engine).measured.kinds)
    if isinstance(sequence, Tensor):
        access.adapter(engine).forward(sequence[None], cache, torch.arange(len(sequence)))
    else:
        sequence_logits(engine, sequence, cache)
    found = layer_tensors(cache)[layer]
    assert found is not None
    # Its V slot is the rotary part.
    is_mla = engine.model.config.model_type in ("deepseek_v2", "deepseek_v3")
    return found[0 if is_mla else 1][0]


@several
def test_deviation_is_that_of_the_values_of_a_plain_prefill(engine: Engine) -> None:
    found: list[Tensor] = []
    policy = looking(lambda signals: found.extend(map(signals.deviation, range(3))))
    engine.logits(QUESTION, TEXTS, policy=policy)
    ids = engine.tokenize(QUESTION, TEXTS)
    first = len(ids.prefix) + len(ids.chunks[0])
    masked = block_mask(ids.prefix, ids.chunks, ids.query)
    for layer in (1, 2):
        context = torch.tensor(ids.context)
        plain = values(engine, context, layer)
        stitched = values(engine, masked, layer)
        seen = masked.allowed[-1].nonzero()[: len(context), 0]
        expected = (plain - stitched[:, seen]).pow(2).sum((0, 2))
        scale = float(expected.max())
        torch.testing.assert_close(found[layer], expected, rtol=1e-3, atol=1e-6 * scale)
        assert float(found[layer][:first].max()) < 1e-6 * scale < 1e-3 * float(found[layer][first])
    assert float(found[0].max()) < 1e-6 * float(found[1].max())
