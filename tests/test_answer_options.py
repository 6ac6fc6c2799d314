"""Keywords of answers are declared once, and shown by every method that takes them."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import pytest
from small import make_model, make_tokenizer
from transformers import GenerationConfig

from kvcache_rag import Engine, FullRecompute, InvalidInputError, LegoLink
from kvcache_rag.errors import arguments_of
from kvcache_rag.generation import AnswerOptions, CompletionOptions
from kvcache_rag.generation.request import RequestBuilder

if TYPE_CHECKING:
    from collections.abc import Callable

TEXTS = ["The cat sat on the mat.", "A dog ran."]
GIVEN = {"self", "question", "chunks", "prompt", "streaming"}
CALLED = {"emit", "cancelled"}
OF_CALLS = {"generation_config", "logits_processor", "stopping_criteria"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(make_model(), make_tokenizer())


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (AnswerOptions, ("generate", "stream", "generate_batch", "agenerate", "astream")),
        (CompletionOptions, ("complete", "stream_complete", "acomplete", "astream_complete")),
    ],
)
def test_every_method_shows_them(options: Any, names: tuple[str, ...]) -> None:
    for name in names:
        shown = signature(getattr(Engine, name)).parameters.values()
        keywords = [one.name for one in shown if one.kind is Parameter.KEYWORD_ONLY]
        assert keywords == list(options.__annotations__)
        assert [one.name for one in shown if one.kind is Parameter.VAR_KEYWORD] == ["options"]


@pytest.mark.parametrize(
    ("options", "reader"),
    [(AnswerOptions, RequestBuilder.request), (CompletionOptions, RequestBuilder.completion)],
)
def test_they_are_what_the_engine_and_generate_read(
    options: Any, reader: Callable[..., Any]
) -> None:
    names = {*options.__annotations__}
    own = (arguments_of(reader) | CALLED) - GIVEN - {"options"}
    assert own <= names
    assert names - own <= {*vars(GenerationConfig())} | OF_CALLS


def test_a_model_by_its_name_takes_what_an_engine_takes() -> None:
    named, loaded = (arguments_of(each) for each in (Engine.from_pretrained, Engine))
    assert loaded - {"model"} <= named


@pytest.mark.parametrize("options", [AnswerOptions, CompletionOptions])
def test_each_is_explained(options: Any) -> None:
    told = "".join(str(one.__doc__) for one in (AnswerOptions, CompletionOptions))
    for name in options.__annotations__:
        assert f"\n        {name}: " in told, name


def test_a_policy_is_asked_for_by_its_name(engine: Engine) -> None:
    """Wherever an engine takes a policy."""
    made = Engine(engine.model, engine.tokenizer, policy="legolink:4")
    assert made.policy == LegoLink(4)
    stream = made.stream("Who?", TEXTS, policy="full", max_new_tokens=1)
    list(stream)
    for answer in (
        made.generate("Who?", TEXTS, policy="full", max_new_tokens=1),
        stream.answer,
        *made.generate_batch([("Who?", TEXTS)], policy="full", max_new_tokens=1),
    ):
        assert answer.metrics.policy == repr(FullRecompute())
    assert made.explain("Who?", TEXTS, policy="full").policy == repr(FullRecompute())
    assert made.needed(TEXTS, "full") == []
    assert made.logits("Who?", TEXTS, policy="full").shape == made.logits("Who?", TEXTS).shape


def test_a_policy_that_is_none_is_said(engine: Engine) -> None:
    asks: list[Callable[[Any], Any]] = [
        lambda policy: Engine(engine.model, engine.tokenizer, policy=policy),
        lambda policy: engine.generate("Who?", TEXTS, policy=policy),
        lambda policy: engine.explain("Who?", TEXTS, policy=policy),
        lambda policy: engine.logits("Who?", TEXTS, policy=policy),
        lambda policy: engine.needed(TEXTS, policy),
    ]
    for ask in asks:
        with pytest.raises(InvalidInputError, match="there is no policy 'fast'"):
            ask("fast")
        with pytest.raises(InvalidInputError, match="the policy 'reordered' is called 'reuse' now"):
            ask("reordered")
        with pytest.raises(InvalidInputError, match=r"policy must be such as .*write LegoLink\(\)"):
            ask(LegoLink)
