"""A question read behind each chunk in llama.cpp: as by its full prefill of that chunk alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import access
import pytest
from laws import LONG_QUESTION, QUESTION, TEXTS
from llamacpp.asking import opened

from kvcache_rag import BestFew, BestRead, Engine, FullRecompute

if TYPE_CHECKING:
    from llamacpp.conftest import Files

NATS = 5e-3


@pytest.fixture(scope="module", params=["llama", "cohere2", "gemma3"])
def engine(request: pytest.FixtureRequest, files: Files) -> Engine:
    made: Engine = opened(files(request.param))
    return made


def plainly(engine: Engine, question: str, texts: list[str]) -> float:
    asked = access.renderer(engine).asked_ids(question)
    logits = engine.logits(question, texts, policy=FullRecompute()).log_softmax(-1)
    own = range(len(asked.ids) - asked.count, len(asked.ids))
    return sum(float(logits[place - 1, asked.ids[place]]) for place in own)


@pytest.mark.parametrize("question", [QUESTION, LONG_QUESTION], ids=["short", "long"])
def test_law_each_is_a_full_prefill_of_that_chunk_alone(engine: Engine, question: str) -> None:
    expected = [plainly(engine, question, [text]) for text in TEXTS]
    without = plainly(engine, question, [])
    for _ in range(2):
        reading = engine.read(question, TEXTS)
        assert reading.likelihoods == pytest.approx(expected, abs=NATS)
        assert reading.without == pytest.approx(without, abs=NATS)


def test_more_chunks_are_read_than_there_are_sequences(engine: Engine) -> None:
    many = [f"{number}." for number in range(70)]
    found = engine.read(QUESTION, many).likelihoods
    assert found[:2] == pytest.approx(
        [plainly(engine, QUESTION, [one]) for one in many[:2]], abs=NATS
    )


def test_the_answer_is_that_of_the_chunk_that_was_chosen(engine: Engine) -> None:
    texts = [f"{text * 3}!" for text in TEXTS]
    best = max(range(3), key=lambda number: engine.read(QUESTION, texts).likelihoods[number])
    options: Any = {"max_new_tokens": 6}
    answer = engine.generate(QUESTION, texts, policy=BestRead(1), **options)
    assert answer.metrics.answered_from == (best,)
    alone = engine.generate(QUESTION, [texts[best]], policy=BestFew(1), **options)
    assert answer.token_ids == alone.token_ids
