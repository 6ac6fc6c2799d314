"""Law 5 for policies made of others or of scores: from reuse to a full prefill, every family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from zoo import FAMILIES, SEVERAL

from kvcache_rag import CacheClip, Engine, FullRecompute, Reuse

if TYPE_CHECKING:
    from kvcache_rag.policies import ReusePolicy


class Letters:
    """Finds the letters a to d important, at no cost."""

    def scores(self, question: str, chunks: Any) -> list[Tensor]:
        return [torch.tensor([float(c in "abcd") for c in chunk]) for chunk in chunks]


@pytest.fixture(scope="module", params=list(FAMILIES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(request.param, auxiliary=Letters())


# Of each kind one, for what is not the law itself.
several = pytest.mark.parametrize("engine", SEVERAL, indirect=True)


@pytest.mark.parametrize(
    ("none", "everything"),
    [
        (CacheClip(ratio=0), CacheClip(ratio=1)),
        (CacheClip(ratio=0.001), CacheClip(ratio=0.999)),
    ],
    ids=repr,
)
def test_law_5_from_reuse_to_a_full_prefill(
    engine: Engine, none: ReusePolicy, everything: ReusePolicy
) -> None:
    reuse = masked_logits(engine, TEXTS, "reordered")
    assert error(engine.logits(QUESTION, TEXTS, policy=none), reuse) < TOLERANCE
    full = plain_logits(engine, TEXTS)
    assert error(engine.logits(QUESTION, TEXTS, policy=everything), full) < TOLERANCE
    assert error(reuse, full) > 10 * TOLERANCE


@several
@pytest.mark.parametrize("positions", ["reordered", "composite"])
def test_in_between_is_neither(engine: Engine, positions: Any) -> None:
    middle = CacheClip(ratio=0.5, window=4, threshold=2, positions=positions)
    if refused(engine, middle):
        return
    found = engine.logits(QUESTION, TEXTS, policy=middle)
    for policy in (Reuse(positions), FullRecompute()):
        assert error(found, engine.logits(QUESTION, TEXTS, policy=policy)) > TOLERANCE


@several
def test_a_batch_equals_its_singles(engine: Engine) -> None:
    policy = CacheClip(ratio=0.4, threshold=3)
    asked = [(QUESTION, TEXTS[:2]), (QUESTION * 3, TEXTS)]
    batch = engine.generate_batch(asked, policy=policy, max_new_tokens=4)
    for found, (question, texts) in zip(batch, asked, strict=True):
        single = engine.generate(question, texts, policy=policy, max_new_tokens=4)
        assert found.token_ids == single.token_ids
        assert found.metrics.recomputed_tokens == single.metrics.recomputed_tokens > 0
