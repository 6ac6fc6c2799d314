"""The laws of models with recurrent layers: stitched states are those of tokens one by one."""

from __future__ import annotations

import pytest
import torch
from laws import LONG_QUESTION, QUESTION, TEXTS, Recorder, behind_system, error, make_engine, plain_logits
from recurrent_reference import reference_answer, reference_logits
from zoo import HYBRIDS

from kvcache_rag import Engine, FullRecompute, Reuse

TOLERANCE = 5e-4
# Shorter than every convolution; a single token; in any order, with repeats.
SHORT = ("q", "")
ORDERS = ((0, 1, 2), (2, 0, 2), (3, 1, 4, 0, 3))


@pytest.fixture(scope="module", params=list(HYBRIDS))
def engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(request.param)


def texts_of(order: tuple[int, ...]) -> list[str]:
    return [[*TEXTS, "q", "no"][number] for number in order]


def reference(engine: Engine, texts: list[str], question: str = QUESTION) -> torch.Tensor:
    ids = engine.tokenize(question, texts)
    return reference_logits(engine.model, ids.prefix, ids.chunks, ids.query)


def test_full_recompute_is_a_plain_prefill(engine: Engine) -> None:
    found = engine.logits(QUESTION, TEXTS, policy=FullRecompute())
    assert error(found, plain_logits(engine, TEXTS)) < TOLERANCE


def test_one_chunk_in_its_natural_place_is_a_plain_prefill(engine: Engine) -> None:
    found = engine.logits(QUESTION, TEXTS[1:2], policy=Reuse())
    assert error(found, plain_logits(engine, TEXTS[1:2])) < TOLERANCE


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_stitched_chunks_are_tokens_one_by_one(engine: Engine, order: tuple[int, ...]) -> None:
    found = engine.logits(QUESTION, texts_of(order), policy=Reuse())
    assert error(found, reference(engine, texts_of(order))) < TOLERANCE
    again = engine.logits(QUESTION, texts_of(order), policy=Reuse())
    assert torch.equal(found, again), "a stored chunk was changed by using it"
