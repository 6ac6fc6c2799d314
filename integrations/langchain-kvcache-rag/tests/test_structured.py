"""Structured output: whatever the model would say, its answer fits the schema."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from chat_model_helpers import details, over
from contracts_frameworks import Finding
from langchain_core.exceptions import OutputParserException
from typing_extensions import TypedDict

from kvcache_rag import Engine, InvalidInputError
from langchain_kvcache_rag.chat_model import ChatKVCache


class FindingDict(TypedDict):
    """What was found."""

    mood: Annotated[Literal["good", "bad"], ..., "how it is"]
    sure: Annotated[bool, ..., "whether it is certain"]


@pytest.fixture
def patient(engine: Engine) -> ChatKVCache:
    return ChatKVCache(engine=engine, max_tokens=200)


SCHEMA = {"type": "object", "properties": {"n": {"enum": [3, 5]}}, "required": ["n"]}


def test_dictionaries_fit_their_schemas(patient: ChatKVCache) -> None:
    found = patient.with_structured_output(FindingDict).invoke("what?")
    assert found.keys() == {"mood", "sure"}
    assert found["mood"] in ("good", "bad")
    assert isinstance(found["sure"], bool)
    for schema in (SCHEMA, {"name": "f", "description": "d", "parameters": SCHEMA}):
        assert patient.with_structured_output(schema).invoke("what?")["n"] in (3, 5)


def test_a_response_format_is_held_to(patient: ChatKVCache) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
    bound = patient.bind(response_format=named)
    batch = bound.batch([over("what?", "one"), over("why?", "one")])
    for message in (bound.invoke("what?"), *batch):
        assert json.loads(message.text)["n"] in (3, 5)


def test_an_agents_strategies_fit_the_class(patient: ChatKVCache) -> None:
    agents = pytest.importorskip("langchain.agents")
    from langchain.agents.structured_output import ProviderStrategy, ToolStrategy

    def nothing() -> str:
        """Says nothing."""
        return ""

    for strategy in (Finding, ToolStrategy(Finding), ProviderStrategy(Finding)):
        agent = agents.create_agent(patient, [], response_format=strategy)
        found = agent.invoke({"messages": [("human", "what?")]})["structured_response"]
        assert isinstance(found, Finding)
    agent = agents.create_agent(patient, [nothing], response_format=ProviderStrategy(Finding))
    with pytest.raises(InvalidInputError, match=r"response_format=ToolStrategy\(\.\.\.\)"):
        agent.invoke({"messages": [("human", "what?")]})


def test_the_message_is_there_beside_the_object(patient: ChatKVCache) -> None:
    question = over("what?", "one")
    patient.invoke(question, max_tokens=1)
    found = patient.with_structured_output(Finding, include_raw=True).invoke(question)
    assert details(found["raw"])["cache_read"] > 0
    assert found["parsed"] == Finding.model_validate_json(found["raw"].text)
    assert found["parsing_error"] is None
    assert found["raw"].response_metadata["finish_reason"] == "stop"


async def test_it_works_on_an_event_loop_and_in_batches(patient: ChatKVCache) -> None:
    chain = patient.with_structured_output(Finding)
    questions = [over(f"what {index}?", "one") for index in range(3)]
    single = [chain.invoke(question) for question in questions]
    assert [await chain.ainvoke(question) for question in questions] == single
    assert chain.batch(questions) == await chain.abatch(questions) == single


async def test_a_stream_grows_to_the_whole(patient: ChatKVCache) -> None:
    chain = patient.with_structured_output(FindingDict)
    whole = chain.invoke("what?")
    pieces = list(chain.stream("what?"))
    assert pieces[-1] == whole
    assert len(pieces) > 1
    assert [piece async for piece in chain.astream("what?")] == pieces
    objects = list(patient.with_structured_output(Finding).stream("what?"))
    assert objects[-1] == patient.with_structured_output(Finding).invoke("what?")


def test_what_is_cut_is_an_error(patient: ChatKVCache) -> None:
    chain = patient.with_structured_output(Finding, max_tokens=9)
    for door in (chain.invoke, lambda text: list(chain.stream(text))):
        with pytest.raises(OutputParserException, match="raise max_tokens"):
            door("what?")
    raw = patient.with_structured_output(FindingDict, include_raw=True, max_tokens=9)
    found = raw.invoke("what?")
    assert found["parsed"] is None
    assert "raise max_tokens" in str(found["parsing_error"])
    stopped = patient.with_structured_output(FindingDict, stop=[":"])
    with pytest.raises(OutputParserException, match="a stop string or the timeout"):
        stopped.invoke("what?")


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (3, "a schema is a pydantic class"),
        ({"type": "nothing"}, "cannot be held to this schema"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "cannot be held to this schema"),
    ],
)
def test_a_schema_of_no_use_is_said(patient: ChatKVCache, schema: Any, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        patient.with_structured_output(schema)


def test_options_of_no_use_are_said(patient: ChatKVCache) -> None:
    with pytest.raises(InvalidInputError, match="method must be one of"):
        patient.with_structured_output(Finding, method="prayer")
    for sentence, options in (
        ("json_schema must be", {"json_schema": Finding}),
        ("beam search", {"json_schema": SCHEMA, "num_beams": 2}),
        ("^response_format must be .* not {'type'", {"response_format": {"type": "json_object"}}),
    ):
        with pytest.raises(InvalidInputError, match=sentence):
            patient.invoke("what?", **options)
