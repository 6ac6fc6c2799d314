"""The retriever's best chunk, computed with the question behind the cached others.

Law: it equals the plain path, which loads every chunk in that order and computes the last ones
again where they stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from laws import QUESTION, TEXTS, TOLERANCE, error, make_engine, plain_logits, refused
from zoo import FAMILIES

from kvcache_rag import BestLast, Engine, Reuse, ReusePolicy, StoredChunk

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitching.stitch import StitchedPrompt

SCHEMES: tuple[PositionScheme, ...] = ("reordered", "composite")


@dataclass(frozen=True)
class Again(ReusePolicy):
    """Computes the last chunks again where they stand: the slow, plain path."""

    name: ClassVar[str] = "again"
    ratio: float = 0.2
    positions: PositionScheme = "reordered"

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        return BestLast(self.ratio).select(prompt, signals)


@pytest.fixture(scope="module", params=list(FAMILIES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(request.param)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("ratio", "chunks"), [(0.0, 1), (0.6, 2)])
def test_law_the_best_last_is_the_same_chunks_computed_again(
    engine: Engine, ratio: float, chunks: int, scheme: Any
) -> None:
    policy = BestLast(ratio, scheme)
    if refused(engine, policy):
        return
    # TEXTS stand best first.
    best = TEXTS[:chunks][::-1]
    moved = [*TEXTS[chunks:], *best]
    expected = engine.logits(QUESTION, moved, policy=Again(ratio, scheme))
    found = engine.logits(QUESTION, TEXTS, policy=policy)
    assert found.shape == expected.shape
    assert error(found, expected) < TOLERANCE
    if chunks == len(TEXTS) - 1:
        assert error(found, plain_logits(engine, moved)) < TOLERANCE
    reused = engine.logits(QUESTION, moved, policy=Reuse(scheme))
    assert error(reused, expected) > 10 * TOLERANCE, "it must be able to fail"


@pytest.mark.parametrize(
    ("ratio", "chunks", "fresh"),
    [(0, 20, 1), (0.2, 1, 0), (0.2, 2, 1), (0.2, 5, 1), (0.2, 10, 2), (0.2, 20, 4), (1, 5, 4)],
)
def test_how_many_are_computed(ratio: float, chunks: int, fresh: int) -> None:
    arranged = BestLast(ratio).arranged([float(number) for number in range(chunks)])
    assert arranged.fresh == fresh
    assert arranged.order == tuple(range(chunks)), "the best stand last, whatever their number"


def test_a_reference_about_another_text_is_what_its_text_is() -> None:
    engine = make_engine("llama", policy=BestLast())
    engine.add(TEXTS)
    (other,) = engine.keys([TEXTS[1]])
    wrong = StoredChunk(other, TEXTS[0])  # the best chunk
    assert other.tokens != engine.keys([TEXTS[0]])[0].tokens
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    found = engine.generate(QUESTION, [wrong, *TEXTS[1:]], max_new_tokens=4)
    assert found.token_ids == expected.token_ids
    counts = ("fresh_tokens", "reused_tokens", "query_tokens", "prompt_tokens")
    for name in counts:
        assert getattr(found.metrics, name) == getattr(expected.metrics, name), name
    logits = engine.logits(QUESTION, TEXTS)
    assert torch.equal(engine.logits(QUESTION, [wrong, *TEXTS[1:]]), logits)
    explained = engine.explain(QUESTION, TEXTS)
    assert engine.explain(QUESTION, [wrong, *TEXTS[1:]]).tokens == explained.tokens
