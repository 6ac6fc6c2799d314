"""An argument that nothing reads is refused, with the one that was probably meant."""

from __future__ import annotations

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

    from kvcache_rag import Engine


NONE: Any = None
QUERY, CHAT = "KVCacheQueryEngine", "KVCacheChatEngine"


@pytest.mark.parametrize(
    ("given", "meant"),
    [("model_nam", "model_name"), ("kvdir", "kv_dir"), ("polcy", "policy"), ("engne", "engine")],
)
def test_of_the_llm(given: str, meant: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{given} is no argument of KVCacheLLM; did you"):
        KVCacheLLM(**{given: "x"})
    with pytest.raises(InvalidInputError, match=f"did you mean {meant}\\?$"):
        KVCacheLLM(model_name="tiny", **{given: None})


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
    ("make", "kind"),
    [
        (KVCacheSynthesizer, "KVCacheSynthesizer"),
        (lambda llm, **options: KVCacheQueryEngine.from_args(NONE, llm, **options), QUERY),
        (lambda llm, **options: KVCacheQueryEngine.from_index(NONE, llm, **options), QUERY),
        (lambda llm, **options: KVCacheQueryEngine.from_documents(NONE, llm, **options), QUERY),
        (lambda llm, **options: KVCacheChatEngine.from_defaults(NONE, llm, **options), CHAT),
        (lambda llm, **options: KVCacheChatEngine.from_index(NONE, llm, **options), CHAT),
    ],
)
def test_of_what_answers(engine: Engine, make: Callable[..., Any], kind: str) -> None:
    """Before anything is done."""
    sentence = f"^overflw is no argument of {kind}; did you mean overflow\\?$"
    with pytest.raises(InvalidInputError, match=sentence):
        make(KVCacheLLM(engine=engine), overflw="error")


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (KVCacheQueryEngine, "retriver", "did you mean retriever"),
        (KVCacheChatEngine, "memry", "did you mean memory"),
        (KVCachePrefill, "embed_modl", "did you mean embed_model"),
        (HashEmbedding, "dimension", "did you mean dimensions"),
        (
            lambda **options: KVCacheQueryEngine.from_index(NONE, **options),
            "similarity_topk",
            "did you mean similarity_top_k",
        ),
    ],
)
def test_of_the_others(make: Callable[..., Any], given: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{given} is no argument of .*; {said}\\?$"):
        make(**{given: 3})


def test_what_was_written_down_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "_llm", KVCacheLLM(model_name="tiny"))
    written = KVCachePrefill(show_progress=True).to_dict()
    assert "chunks" in written
    assert KVCachePrefill.from_dict(written).show_progress
    assert HashEmbedding.from_dict(HashEmbedding(dimensions=9).to_dict()).dimensions == 9
