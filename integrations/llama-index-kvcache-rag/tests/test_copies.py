"""Engines are copied and sent: every public object, opened and used before."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.schema import TextNode

from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag import (
    KVCacheLLM,
    KVCachePrefill,
    KVCacheSynthesizer,
)

if TYPE_CHECKING:
    from kvcache_rag import Engine

TEXTS = ["The Mobrit costs 412 euros.", "It is painted red."]


def test_a_copy_has_settings_of_its_own() -> None:
    llm = KVCacheLLM(model_name="tiny", generate_kwargs={"num_beams": 1}, stopping_ids=[1])
    other = copy.deepcopy(llm)
    other.generate_kwargs["num_beams"] = 2
    other.stopping_ids.append(2)
    assert (llm.generate_kwargs, llm.stopping_ids) == ({"num_beams": 1}, [1])


def test_what_holds_a_given_engine_says_so(engine: Engine) -> None:
    # Loaded by its name alone, it would be another model: no adapter, template, store of it.
    given = KVCacheLLM(engine=engine)
    loaded = KVCacheLLM(model=engine.model, tokenizer=engine.tokenizer)
    for one in (given, loaded, KVCacheSynthesizer(llm=given), KVCachePrefill(llm=given)):
        assert copy.deepcopy(one) is not None
        with pytest.raises(InvalidInputError, match=r"engine=.*cannot be pickled"):
            pickle.dumps(one)


def test_workers_of_a_pipeline_are_sent_the_settings(tmp_path: Any) -> None:
    """LlamaIndex pickles the step for each of them."""
    llm = KVCacheLLM(model_name="tiny", kv_dir=str(tmp_path))
    sent = pickle.loads(pickle.dumps(KVCachePrefill(llm=llm)))
    sent([TextNode(text=text) for text in TEXTS])
    assert sent.llm.engine is not llm.engine
    assert all(llm.engine.store.contains(key) for key in llm.engine.keys(TEXTS))
