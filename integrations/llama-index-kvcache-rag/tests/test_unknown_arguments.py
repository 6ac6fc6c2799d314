"""An argument that nothing reads is refused, with the one that was probably meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core import Document, PromptTemplate, VectorStoreIndex

from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheChatEngine,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheSynthesizer,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag import Engine


@pytest.fixture
def index() -> VectorStoreIndex:
    return VectorStoreIndex.from_documents([Document(text="a")], embed_model=HashEmbedding())


@pytest.mark.parametrize(
    ("given", "meant"),
    [("model_nam", "model_name"), ("kvdir", "kv_dir"), ("polcy", "policy"), ("engne", "engine")],
)
def test_of_the_llm(given: str, meant: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{given} is no argument of KVCacheLLM; did you"):
        KVCacheLLM(**{given: "x"})
    with pytest.raises(InvalidInputError, match=f"did you mean {meant}\\?$"):
        KVCacheLLM(model_name="tiny", **{given: None})


def test_of_the_llm_without_a_like_one() -> None:
    sentence = r"^zzz is no argument of KVCacheLLM; leave it out$"
    with pytest.raises(InvalidInputError, match=sentence):
        KVCacheLLM(zzz=1)


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


def test_settings_that_were_written_down_are_read() -> None:
    llm = KVCacheLLM(model_name="tiny", max_new_tokens=7)
    assert KVCacheLLM.from_dict(llm.to_dict()).max_new_tokens == 7
    assert KVCacheLLM.from_json(llm.to_json()).max_new_tokens == 7


@pytest.mark.parametrize("make", [KVCacheVectorStore, KVCacheVectorStore.from_params])
def test_of_the_store(make: Callable[..., Any]) -> None:
    with pytest.raises(InvalidInputError, match="persist_folder is no argument of KVCacheVectorSt"):
        make(collection_name="x", persist_folder="y")


@pytest.mark.parametrize(
    "make",
    [
        lambda llm, index, **options: KVCacheSynthesizer(llm, **options),
        lambda llm, index, **options: KVCacheQueryEngine.from_index(index, llm, **options),
        lambda llm, index, **options: KVCacheChatEngine.from_index(index, llm, **options),
    ],
)
def test_of_what_answers(engine: Engine, index: VectorStoreIndex, make: Callable[..., Any]) -> None:
    sentence = "overflw is no argument of KVCacheSynthesizer; did you mean overflow"
    with pytest.raises(InvalidInputError, match=sentence):
        make(KVCacheLLM(engine=engine), index, overflw="error")
