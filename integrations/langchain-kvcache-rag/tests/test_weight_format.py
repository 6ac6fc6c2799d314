"""How linear layers keep their weights, as LangChain's users say it."""

from __future__ import annotations

import pickle

import pytest

from kvcache_rag import Engine, InvalidInputError
from langchain_kvcache_rag import ChatKVCache


def test_the_chat_model_takes_a_weight_format() -> None:
    plain, rounded = ChatKVCache(model="tiny"), ChatKVCache(model="tiny", weight_format="int8")
    assert rounded.engine.spec == Engine.from_pretrained("tiny", weight_format="int8").spec
    assert rounded.engine.spec != plain.engine.spec
    assert plain.weight_format == "auto"
    assert pickle.loads(pickle.dumps(rounded)).weight_format == "int8"
    # LangChain's cache of answers tells them apart, and finds those of before there were any.
    assert rounded._identifying_params["weight_format"] == "int8"
    assert "weight_format" not in plain._identifying_params
    other = rounded.model_copy(update={"weight_format": "int4"})
    assert other.engine.spec != rounded.engine.spec
    with pytest.raises(InvalidInputError, match="weight_format cannot be used"):
        ChatKVCache(model="tiny", weight_format="int2")


def test_beside_an_engine_it_is_refused() -> None:
    engine = Engine.from_pretrained("tiny")
    assert ChatKVCache(engine=engine, weight_format="auto").engine is engine
    with pytest.raises(InvalidInputError, match="weight_format belong"):
        ChatKVCache(engine=engine, weight_format="int8")
    copied = ChatKVCache(engine=engine).model_copy(update={"weight_format": "int8"})
    with pytest.raises(InvalidInputError, match="weight_format belong"):
        _ = copied.engine
