"""Laws of partial recomputation, for every supported family, in float32.

A policy with a ratio spans the way from `Reuse` (0) to a plain prefill (1), and between these what
is computed again equals one forward pass that was written down independently.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    sequence_logits,
)
from torch import Tensor
from zoo import BY_PLACE, FAMILIES, SEVERAL, build, byte_tokenizer

from kvcache_rag import Engine, FullRecompute, MemoryStore, PromptTemplate, Reuse
from kvcache_rag.kv.mask import MaskedSequence, PositionScheme, block_mask, recompute_mask
from kvcache_rag.models.attention import packed
from kvcache_rag.models.cache import growing_cache, layer_tensors
from kvcache_rag.policies import ReusePolicy
from kvcache_rag.policies.cacheblend import CacheBlend
from kvcache_rag.policies.legolink import LegoLink
from kvcache_rag.stitching.stitch import StitchedPrompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.policies.base import Signals

SCHEMES: tuple[PositionScheme, ...] = ("reordered", "composite")
LONG_QUESTION = "What is it that they saw there?"


@dataclass(frozen=True)
class Picked(ReusePolicy):
    """Selects what a function of the prompt says."""

    name: ClassVar[str] = "picked"
    pick: Callable[[StitchedPrompt], Tensor]
    positions: PositionScheme = "reordered"

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        return self.pick(prompt)


def random_third(prompt: StitchedPrompt) -> Tensor:
    """About 30 %, from prefix and first chunk too."""
    generator = torch.Generator().manual_seed(prompt.context_tokens)
    drawn = torch.rand(prompt.context_tokens, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device()) < 0.3


def all_behind_the_first_chunk(prompt: StitchedPrompt) -> Tensor:
    return torch.arange(prompt.context_tokens) >= prompt.chunks[0].stop


def reference(
    engine: Engine, texts: list[str], pick: Callable[[StitchedPrompt], Tensor], scheme: Any
) -> Tensor:
    """Logits of the query from one forward pass in which selected tokens have a second copy."""
    ids = engine.tokenize(QUESTION, texts)
    prompt = StitchedPrompt.of(len(ids.prefix), list(map(len, ids.chunks)), len(ids.query))
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
    others = Picked(lambda prompt: ~random_third(prompt), scheme)
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
        for nothing in (CacheBlend(0, positions=scheme), LegoLink(0, positions=scheme)):
            assert nothing.is_reuse
            assert torch.equal(engine.logits(QUESTION, TEXTS, policy=nothing), reused)
        everything = engine.logits(QUESTION, TEXTS, policy=CacheBlend(1, positions=scheme))
        assert error(everything, plain) < TOLERANCE
        long_heads = engine.logits(QUESTION, TEXTS, policy=LegoLink(9999, positions=scheme))
        assert error(long_heads, plain) < TOLERANCE
        # As many as all chunk tokens but the first chunk's.
        most = engine.logits(QUESTION, TEXTS, policy=CacheBlend(0.999, positions=scheme))
        assert error(most, plain) < TOLERANCE
        assert error(reused, plain) > 10 * TOLERANCE


@several
def test_looking_at_the_signals_changes_nothing(engine: Engine) -> None:
    class Looking(ReusePolicy):
        name = "looking"
        seen: ClassVar[list[Tensor]] = []

        def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
            self.seen.append(signals.deviation(1))
            return torch.zeros(prompt.context_tokens, dtype=torch.bool)

    reused = engine.logits(QUESTION, TEXTS, policy=Reuse())
    assert torch.equal(engine.logits(QUESTION, TEXTS, policy=Looking()), reused)
    assert Looking.seen[-1].max() > 0


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


@several
@pytest.mark.parametrize("scheme", SCHEMES)
def test_generating_is_choosing_by_these_logits(engine: Engine, scheme: Any) -> None:
    policy = Picked(random_third, scheme)
    if refused(engine, policy):
        return
    access.runner(engine).memory.forget()  # a buffer that holds nothing of this prompt yet
    answer = engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=5)
    told = engine.logits(QUESTION, TEXTS, policy=policy, answer_ids=answer.token_ids[:-1])
    assert told[-len(answer.token_ids) :].argmax(-1).tolist() == list(answer.token_ids)
    stream = engine.stream(QUESTION, TEXTS, policy=policy, max_new_tokens=5)
    assert "".join(stream) == answer.text
    assert stream.answer.token_ids == answer.token_ids


@several
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_batch_equals_its_singles(engine: Engine, scheme: Any) -> None:
    """Rows with and without selected tokens, of several lengths, in one padded batch."""

    def some(prompt: StitchedPrompt) -> Tensor:
        picked = random_third(prompt)
        return picked if len(prompt.chunks) > 1 else torch.zeros_like(picked)

    policy = Picked(some, scheme)
    if refused(engine, policy):
        return
    questions = [
        (QUESTION, TEXTS),
        (LONG_QUESTION, TEXTS[:1]),
        ("x", []),
        (LONG_QUESTION, TEXTS[::-1]),
    ]
    for asked in (questions, questions[::3]):
        singles = [engine.generate(q, c, policy=policy, max_new_tokens=6) for q, c in asked]
        access.runner(engine).memory.forget()
        batch = engine.generate_batch(asked, policy=policy, max_new_tokens=6)
        assert [one.token_ids for one in batch] == [one.token_ids for one in singles]
        recomputed = [one.metrics.recomputed_tokens for one in singles]
        assert [one.metrics.recomputed_tokens for one in batch] == recomputed
        assert recomputed[0] > 0


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
    found: dict[int, Tensor] = {}

    class Deviating(ReusePolicy):
        name = "deviating"

        def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
            found.update({layer: signals.deviation(layer) for layer in (0, 1, 2)})
            return torch.zeros(prompt.context_tokens, dtype=torch.bool)

    engine.logits(QUESTION, TEXTS, policy=Deviating())
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


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "gpt_oss", *BY_PLACE])
def test_without_a_prefix_too(name: str, scheme: Any) -> None:
    template = PromptTemplate(system="")
    engine = Engine(build(name), byte_tokenizer(), template=template, store=MemoryStore())
    assert engine.prefix_text == ""
    if refused(engine, Picked(random_third, scheme)):
        return
    expected = reference(engine, TEXTS, random_third, scheme)
    found = engine.logits(QUESTION, TEXTS, policy=Picked(random_third, scheme))
    assert error(found, expected) < TOLERANCE
    assert error(masked_logits(engine, TEXTS, scheme), expected) > 10 * TOLERANCE
    behind = engine.logits(QUESTION, TEXTS, policy=Picked(all_behind_the_first_chunk, scheme))
    assert error(behind, plain_logits(engine, TEXTS)) < TOLERANCE
    full = engine.logits(QUESTION, TEXTS, policy=FullRecompute())
    assert error(behind, full) < TOLERANCE
