"""An argument that nothing reads is refused, with the one that was probably meant."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core import PromptTemplate, Settings

from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheChatEngine,
    KVCacheLLM,
    KVCachePrefill,
    KVCacheQueryEngine,
    KVCacheSynthesizer,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from collections.abc import Callable


NONE: Any = None


@pytest.mark.parametrize(
    ("make", "name"),
    [(KVCacheLLM, "fields"), (KVCacheVectorStore, "fields"), (KVCacheSynthesizer, "options")],
)
def test_the_name_of_what_takes_the_rest_is_none(make: Callable[..., Any], name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} is no argument of "):
        make(**{name: 1})


def test_what_the_stock_llm_takes_is_taken() -> None:
    stock: dict[str, Any] = {
        "tokenizer_outputs_to_remove": ["token_type_ids"],
        "query_wrapper_prompt": PromptTemplate("{query_str}"),
        "system_prompt": "Answer.",
        "device_map": "cpu",
        "messages_to_prompt": None,
        "completion_to_prompt": None,
        "callback_manager": None,
        "output_parser": None,
    }
    assert KVCacheLLM(model_name="tiny", **stock).system_prompt == "Answer."


def of_llm(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **options: make(NONE, KVCacheLLM(model_name="tiny"), **options)


QUERY, CHAT = KVCacheQueryEngine, KVCacheChatEngine


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (KVCacheLLM, "model_nam", "KVCacheLLM; did you mean model_name"),
        (KVCacheLLM, "polcy", "KVCacheLLM; did you mean policy"),
        (KVCacheLLM, "engne", "KVCacheLLM; did you mean engine"),
        (lambda **given: KVCacheSynthesizer(NONE, **given), "overflw", "KVCacheSynthesizer; did y"),
        (of_llm(QUERY.from_args), "overflw", "KVCacheQueryEngine; did you mean overflow"),
        (of_llm(QUERY.from_index), "overflw", "KVCacheQueryEngine; did you mean overflow"),
        (of_llm(QUERY.from_documents), "overflw", "KVCacheQueryEngine; did you mean overflow"),
        (of_llm(CHAT.from_defaults), "overflw", "KVCacheChatEngine; did you mean overflow"),
        (of_llm(CHAT.from_index), "overflw", "KVCacheChatEngine; did you mean overflow"),
        (of_llm(QUERY.from_index), "similarity_topk", ".*; did you mean similarity_top_k"),
        (QUERY, "retriver", ".*; did you mean retriever"),
        (CHAT, "memry", ".*; did you mean memory"),
        (KVCachePrefill, "embed_modl", ".*; did you mean embed_model"),
        (HashEmbedding, "dimension", ".*; did you mean dimensions"),
        (KVCacheVectorStore, "persist_folder", "KVCacheVectorStore"),
        (partial(KVCacheVectorStore.from_params, "x"), "persist_folder", "KVCacheVectorStore"),
    ],
)
def test_it_is_refused_before_anything_is_done(
    make: Callable[..., Any], given: str, said: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"^{given} is no argument of {said}"):
        make(**{given: 3})


def test_what_was_written_down_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = KVCacheLLM(model_name="tiny", max_new_tokens=7)
    assert KVCacheLLM.from_dict(llm.to_dict()).max_new_tokens == 7
    assert KVCacheLLM.from_json(llm.to_json()).max_new_tokens == 7
    monkeypatch.setattr(Settings, "_llm", llm)
    written = KVCachePrefill(show_progress=True).to_dict()
    assert "chunks" in written
    assert KVCachePrefill.from_dict(written).show_progress
    assert HashEmbedding.from_dict(HashEmbedding(dimensions=9).to_dict()).dimensions == 9
