"""Engines are copied and sent: every public object, opened and used before."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_index.core
import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import NodeWithScore, TextNode
from sending import Row, check_elsewhere, check_here

import llama_index.kvcache_rag
from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheChatEngine,
    KVCacheLLM,
    KVCachePrefill,
    KVCacheQueryEngine,
    KVCacheReuseEvent,
    KVCacheSynthesizer,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from kvcache_rag import Engine

TEXTS = ["The Mobrit costs 412 euros.", "It is painted red."]
QUESTION = "What does the Mobrit cost?"
NODES = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
NAMES = llama_index.kvcache_rag.__all__
OTHERS = ("a response", "a retriever", "an index")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    llm = KVCacheLLM(model_name="tiny", max_new_tokens=4)
    store = KVCacheVectorStore.from_params(
        "docs", persist_dir=str(tmp_path_factory.mktemp("chroma")), llm=llm
    )
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in TEXTS],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=HashEmbedding(),
    )
    synthesizer = KVCacheSynthesizer(llm=llm)
    response = synthesizer.synthesize(QUESTION, NODES)
    query_engine = KVCacheQueryEngine.from_index(index, llm)
    query_engine.query(QUESTION)

    def chat() -> KVCacheChatEngine:
        engine = KVCacheChatEngine.from_defaults(index.as_retriever(), llm, skip_condense=True)
        engine.chat(QUESTION)
        return engine

    def streamed() -> Any:
        answer = chat().stream_chat(QUESTION)
        list(answer.response_gen)
        return answer

    return {
        "HashEmbedding": Row(HashEmbedding, f"value.get_text_embedding({QUESTION!r})"),
        "KVCacheChatEngine": Row(chat, "[one.content for one in value.chat_history]"),
        "KVCacheChatResponse": Row(streamed, refused="neither copied nor pickled", is_copied=False),
        "KVCacheLLM": Row(lambda: llm, f"value.complete({QUESTION!r}).text"),
        "KVCachePrefill": Row(
            lambda: KVCachePrefill(llm=llm, embed_model=HashEmbedding()),
            f"value([pickle.loads({pickle.dumps(NODES[0].node)!r})])[0].embedding",
        ),
        "KVCacheQueryEngine": Row(lambda: query_engine, f"str(value.query({QUESTION!r}))"),
        "KVCacheReuseEvent": Row(
            lambda: KVCacheReuseEvent(query_str="?", metrics=response.metadata["kv_cache"])
        ),
        "KVCacheSynthesizer": Row(
            lambda: synthesizer,
            f"str(value.synthesize({QUESTION!r}, pickle.loads({pickle.dumps(NODES)!r})))",
        ),
        "KVCacheVectorStore": Row(
            lambda: store, "sorted(one.get_content() for one in value.get_nodes())"
        ),
        "a response": Row(lambda: response),
        "a retriever": Row(
            index.as_retriever, f"[one.get_content() for one in value.retrieve({QUESTION!r})]"
        ),
        "an index": Row(
            lambda: index,
            f"[one.get_content() for one in value.as_retriever().retrieve({QUESTION!r})]",
        ),
    }


def test_every_public_name_has_a_row(rows: dict[str, Row]) -> None:
    assert sorted(rows) == sorted([*NAMES, *OTHERS])


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_it_is_copied_and_pickled_or_says_why_not(name: str, rows: dict[str, Row]) -> None:
    check_here(rows[name])


def test_in_another_process_it_answers_the_same(
    rows: dict[str, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    # LlamaIndex's own tokenizer, of a memory, is looked up by its name.
    kept = Path(llama_index.core.__file__).parent / "_static" / "tiktoken_cache"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(kept))
    check_elsewhere(rows)


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
    llm = KVCacheLLM(model_name="tiny", kv_dir=str(tmp_path))
    pipeline = IngestionPipeline(transformations=[KVCachePrefill(llm=llm)], disable_cache=True)
    pipeline.run(nodes=[TextNode(text=text) for text in TEXTS], num_workers=2)
    assert all(llm.engine.store.contains(key) for key in llm.engine.keys(TEXTS))
