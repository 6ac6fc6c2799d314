"""Laws of every policy: from reuse to a full prefill, and one answer however it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from laws import (
    LONG_QUESTION,
    QUESTION,
    TEXTS,
    TOLERANCE,
    TURNS,
    error,
    make_engine,
    masked_logits,
    plain_logits,
    refused,
)
from torch import Tensor
from zoo import FAMILIES, OWN_ATTENTION, SEVERAL

from kvcache_rag import (
    Ape,
    CacheBlend,
    CacheClip,
    Engine,
    FullRecompute,
    LegoLink,
    Reuse,
)

if TYPE_CHECKING:
    from kvcache_rag.policies import ReusePolicy

# Of plain reuse law 8 is in `test_equivalence`, of those that rank chunks or tokens by the question
# in their own files.
POLICIES: list[ReusePolicy] = [
    Reuse("composite"),
    FullRecompute(),
    LegoLink(5),
    CacheBlend(0.3, positions="composite"),
    CacheClip(ratio=0.4, threshold=3),
    Ape(0.6, 1.2),
]
ASKED: list[tuple[str, list[str], Any]] = [
    (QUESTION, TEXTS, TURNS),
    (LONG_QUESTION, TEXTS[:1], ()),
    ("x", [], ()),
    ("Why?", [TEXTS[2], TEXTS[0], TEXTS[2]], TURNS[:1]),
]


class Letters:
    """Finds the letters a to d important, at no cost."""

    def scores(self, question: str, chunks: Any) -> list[Tensor]:
        return [torch.tensor([float(c in "abcd") for c in chunk]) for chunk in chunks]


@pytest.fixture(scope="module", params=list(FAMILIES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(request.param, auxiliary=Letters())


def test_law_5_from_reuse_to_a_full_prefill_by_scores_of_another_model(engine: Engine) -> None:
    """Those that need no scorer are in `test_equivalence_recompute`."""
    reuse, full = masked_logits(engine, TEXTS, "reordered"), plain_logits(engine, TEXTS)
    for ratio, expected in ((0, reuse), (0.001, reuse), (0.999, full), (1, full)):
        found = engine.logits(QUESTION, TEXTS, policy=CacheClip(ratio=ratio))
        assert error(found, expected) < TOLERANCE
    assert error(reuse, full) > 10 * TOLERANCE


@pytest.mark.parametrize("engine", SEVERAL, indirect=True)  # of each kind one
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_law_8_single_answers_streams_batches_and_logits_are_one(
    engine: Engine, policy: ReusePolicy
) -> None:
    """Rows with and without chunks, turns and tokens to compute again, in one padded batch."""
    if refused(engine, policy):
        return
    if isinstance(policy, Ape) and engine.model.config.model_type in OWN_ATTENTION:
        return  # refused by name (test_ape.py)
    options: dict[str, Any] = {"policy": policy, "max_new_tokens": 6}
    engine.forget_buffer()  # one that holds nothing of these prompts yet
    singles = [engine.generate(q, c, history=h, **options) for q, c, h in ASKED]
    engine.forget_buffer()
    batch = engine.generate_batch(ASKED, **options)
    for (question, texts, turns), single, row in zip(ASKED, singles, batch, strict=True):
        assert row.token_ids == single.token_ids
        assert row.metrics.recomputed_tokens == single.metrics.recomputed_tokens
        stream = engine.stream(question, texts, history=turns, **options)
        assert "".join(stream) == single.text
        assert stream.answer.token_ids == single.token_ids
        assert stream.metrics.policy == single.metrics.policy
    answer = engine.generate(QUESTION, TEXTS, **options).token_ids
    told = engine.logits(QUESTION, TEXTS, policy=policy, answer_ids=answer[:-1])
    assert told[-len(answer) :].argmax(-1).tolist() == list(answer)
