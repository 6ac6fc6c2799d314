"""What stands in our messages survives whatever LangChain and LangGraph do with messages."""

from __future__ import annotations

import json
import operator
import pickle
from dataclasses import fields
from functools import reduce
from typing import TYPE_CHECKING, Any

import pytest
from chat_model_helpers import joined, over
from langchain_core.load import dumps, loads
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    merge_message_runs,
    message_to_dict,
    messages_from_dict,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk

from kvcache_rag import Answer, Metrics
from kvcache_rag.generation.question import Question
from kvcache_rag.integration.question import Source, SourcedQuestion
from kvcache_rag.metrics import Miss, Relevance
from langchain_kvcache_rag.responses import metadata, usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_kvcache_rag import ChatKVCache

_NEW = {
    "float": lambda at: at + 0.25,
    "int": lambda at: at,
    "str": lambda at: f"word {at}",
    "bool": lambda at: at % 2 == 0,
}


class _Call:
    """What `metadata` looks at of a call."""

    def __init__(self, at: int) -> None:
        self.model_name = "model"
        self.form: Any = self
        self.tool_form = ("", "json")[at % 2]
        sources = tuple(Source("", f"id {at}", place=place) for place in range(9))
        prompt: Any = ("reused", "pasted")[at % 2]
        self.asked = SourcedQuestion(Question(""), sources, prompt)


def filled(at: int) -> Metrics:
    """Metrics of which every field is another one than of another number."""
    values: dict[str, Any] = {
        one.name: _NEW[str(one.type)](at) for one in fields(Metrics) if str(one.type) in _NEW
    }
    others = {one.name for one in fields(Metrics)} - values.keys()
    assert others == {"hits", "missed", "answered_from", "relevance"}
    tier = ("disk", "memory")[at % 2]
    missed = (Miss(at, at, "evicted"),)
    read = (Relevance(at, at / 2),)
    return Metrics(**values, hits={tier: at}, missed=missed, answered_from=(at, 0), relevance=read)


def message_of(metrics: Metrics, at: int = 0) -> AIMessage:
    """An answer as a message."""
    answer = Answer(f"text {at}", metrics, finish_reason=("stop", "length")[at % 2])
    call: Any = _Call(at)
    return AIMessage(
        answer.text, usage_metadata=usage(answer), response_metadata=metadata(answer, call)
    )


# ---------------------------------------------------------------------- ways of a message
def by_msgpack(message: Any) -> Any:
    """As all savers of LangGraph write."""
    serde = pytest.importorskip("langgraph.checkpoint.serde.jsonplus").JsonPlusSerializer()
    return serde.loads_typed(serde.dumps_typed(message))


def by_dicts(message: Any) -> Any:
    return messages_from_dict(json.loads(json.dumps([message_to_dict(message)])))[0]


WAYS: dict[str, Callable[[Any], Any]] = {
    "none": lambda message: message,
    "dumps": lambda message: loads(dumps(message), allowed_objects="all"),
    "dicts": by_dicts,
    "pydantic": lambda message: type(message).model_validate_json(message.model_dump_json()),
    "msgpack": by_msgpack,
    "pickle": lambda message: pickle.loads(pickle.dumps(message)),
}


def summed(messages: list[AIMessage]) -> Any:
    kinds = [AIMessageChunk(**one.model_dump(exclude={"type"})) for one in messages]
    return reduce(operator.add, kinds)


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
@pytest.mark.parametrize("way", WAYS)
def test_answers_of_which_all_is_different_add_up(way: str) -> None:
    metrics = [filled(at) for at in (1, 2, 3)]
    messages = [WAYS[way](message_of(one, at)) for at, one in enumerate(metrics)]
    for message, one in zip(messages, metrics, strict=True):
        assert Metrics.from_dict(message.response_metadata["kv_cache"]) == one
    whole = WAYS[way](summed(messages))
    cost = whole.response_metadata["kv_cache"]
    assert [Metrics.from_dict(one) for one in cost["answers"]] == metrics
    assert whole.usage_metadata["output_tokens"] == sum(one.generated_tokens for one in metrics)
    total = Metrics.from_dict(cost)
    assert (total.load, total.total) == (6.75, 6.75)
    assert (total.misses, total.reused_tokens, total.hits) == (6, 6, {"memory": 4, "disk": 2})
    assert [miss.chunk for miss in total.missed] == [1, 2, 3]
    assert (total.prefix_mismatch, total.policy) == (True, "word 1, word 2, word 3")
    # LangChain keeps the metadata of the first.
    (one,) = merge_message_runs(messages)
    assert one.response_metadata == messages[0].response_metadata
    assert one.usage_metadata == whole.usage_metadata


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
@pytest.mark.filterwarnings("ignore:the system message is not the instruction")
def test_real_answers_of_all_kinds_add_up(llm: ChatKVCache, way: str) -> None:
    one = over("what?", "one")
    answers = [
        *(llm.invoke(one), llm.invoke(one), llm.invoke([("system", "Count."), *one])),
        *(llm.invoke("Hello"), llm.invoke(over("what?", "one", "three"), policy="full")),
        *llm.batch([one, over("who?", "two")]),
        joined(llm.stream(one)),
    ]
    kept = [WAYS[way](one) for one in answers]
    assert [one.response_metadata for one in kept] == [one.response_metadata for one in answers]
    whole = summed([AIMessage(**one.model_dump(exclude={"type"})) for one in kept])
    tokens = [one.usage_metadata["total_tokens"] for one in answers if one.usage_metadata]
    assert whole.usage_metadata["total_tokens"] == sum(tokens)
    assert len(whole.response_metadata["kv_cache"]["answers"]) == len(answers)


def test_generations_of_streams_add_up(llm: ChatKVCache) -> None:
    first, *others = llm._stream(over("what?", "one"))
    whole = reduce(operator.add, others, first)
    more = reduce(operator.add, llm._stream(over("who?", "two")), whole)
    assert isinstance(more, ChatGenerationChunk)
    assert len(more.message.response_metadata["kv_cache"]["answers"]) == 2
    assert ChatGeneration(message=more.message).text == more.text
