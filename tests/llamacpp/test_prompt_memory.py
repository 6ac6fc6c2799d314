"""A prompt that begins like the last one starts behind that in llama.cpp's cells, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from laws import QUESTION, TEXTS, Recorder, error
from llamacpp.asking import opened, rounding

from kvcache_rag import BestLast, Engine, FullRecompute, Reuse

if TYPE_CHECKING:
    import torch
    from llamacpp.conftest import Files

OTHER = "Who was it, and when?"
POLICIES = [FullRecompute(), Reuse(), BestLast(0.5)]


@pytest.fixture(scope="module", params=["llama", "cohere2"])
def engine(request: pytest.FixtureRequest, files: Files) -> Engine:
    made: Engine = opened(files(request.param))
    made.add(TEXTS)
    return made


def asked(engine: Engine, question: str, texts: list[str] = TEXTS, **options: Any) -> Any:
    options = {"policy": Reuse(), "max_new_tokens": 4, **options}
    return engine.generate(question, texts, **options).metrics


def first_logits(engine: Engine, question: str, **options: Any) -> torch.Tensor:
    seen = Recorder()
    asked(engine, question, logits_processor=[seen], **options)
    return seen.steps[0].float()


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_law_what_begins_alike_goes_on_alike(engine: Engine, policy: Any) -> None:
    engine.forget_buffer()
    reference = first_logits(engine, OTHER, policy=policy)
    engine.forget_buffer()
    asked(engine, QUESTION, policy=policy)
    assert error(first_logits(engine, OTHER, policy=policy), reference) < rounding("llama")
    again = asked(engine, OTHER, policy=policy)
    whole = again.prompt_tokens - (0 if policy.is_full else again.prefix_tokens)
    assert again.continued_tokens == whole - again.reused_tokens - 1


def test_it_would_notice_other_cells(engine: Engine) -> None:
    engine.forget_buffer()
    reference = first_logits(engine, OTHER)
    asked(engine, QUESTION, TEXTS[::-1])
    kept = engine._bound.runner.filler._kept
    texts_there = kept._beginning
    asked(engine, QUESTION)
    right = kept._beginning
    asked(engine, QUESTION, TEXTS[::-1])
    assert kept._beginning == texts_there
    kept._beginning = right  # as if chunks in another order were the same
    assert error(first_logits(engine, OTHER), reference) > rounding("llama")


def test_what_is_left_is_not_gone_on_from_where_it_is_something_else(engine: Engine) -> None:
    def continued(between: Any = None, texts: list[str] = TEXTS, **options: Any) -> int:
        asked(engine, QUESTION)
        if between is not None:
            between()
        tokens: int = asked(engine, QUESTION, texts, **options).continued_tokens
        return tokens

    assert continued() > 0
    assert continued(texts=TEXTS[::-1]) == 0
    assert continued(policy=FullRecompute()) == 0
    assert continued(num_beams=2) == 0
    assert continued(lambda: engine.add(["Something new."])) == 0  # computed in the same cells
    assert continued(lambda: engine.logits(OTHER, TEXTS, policy=Reuse())) == 0
    assert continued(lambda: asked(engine.in_namespace("other"), QUESTION)) == 0
    assert continued(lambda: engine.generate_batch([(OTHER, TEXTS)] * 2, policy=Reuse())) == 0
    assert continued(engine.forget_buffer) == 0


def test_none_goes_on_where_there_shall_be_no_memory(files: Files) -> None:
    engine = opened(files("llama"), prompt_memory=0)
    asked(engine, QUESTION)
    assert asked(engine, QUESTION).continued_tokens == 0
