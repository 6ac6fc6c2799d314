"""LlamaIndex keeps what every framework promises (`contracts_frameworks`)."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chromadb
import llama_index.core
import pytest
from contracts_frameworks import (
    AnswersContract,
    CopiesContract,
    ObjectsContract,
    RerankContract,
    RowsContract,
)
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index_framework import LlamaIndex
from sending import Row

import llama_index.kvcache_rag
from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheChatEngine,
    KVCacheLLM,
    KVCachePrefill,
    KVCacheQueryEngine,
    KVCacheRerank,
    KVCacheReuseEvent,
    KVCacheSynthesizer,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from typing import ClassVar

    from kvcache_rag import Engine


class TestAnswers(AnswersContract):
    framework = LlamaIndex()


class TestRows(RowsContract):
    framework = LlamaIndex()


class TestRerank(RerankContract):
    framework = LlamaIndex()


class TestObjects(ObjectsContract):
    framework = LlamaIndex()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    texts = ["The Mobrit costs 412 euros.", "It is painted red."]
    question = "What does the Mobrit cost?"
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
    llm = KVCacheLLM(model_name="tiny", max_new_tokens=4)
    folder = str(tmp_path_factory.mktemp("chroma"))
    store = KVCacheVectorStore.from_params("docs", persist_dir=folder, llm=llm)
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in texts],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=HashEmbedding(),
    )
    synthesizer = KVCacheSynthesizer(llm=llm)
    response = synthesizer.synthesize(question, nodes)
    query_engine = KVCacheQueryEngine.from_index(index, llm)
    query_engine.query(question)

    def chat() -> KVCacheChatEngine:
        engine = KVCacheChatEngine.from_defaults(index.as_retriever(), llm, skip_condense=True)
        engine.chat(question)
        return engine

    def streamed() -> Any:
        answer = chat().stream_chat(question)
        list(answer.response_gen)
        return answer

    return {
        "HashEmbedding": Row(HashEmbedding, f"value.get_text_embedding({question!r})"),
        "KVCacheChatEngine": Row(chat, "[one.content for one in value.chat_history]"),
        "KVCacheChatResponse": Row(streamed, refused="neither copied nor pickled", is_copied=False),
        "KVCacheLLM": Row(lambda: llm, f"value.complete({question!r}).text"),
        "KVCachePrefill": Row(
            lambda: KVCachePrefill(llm=llm, embed_model=HashEmbedding()),
            f"value([pickle.loads({pickle.dumps(nodes[0].node)!r})])[0].embedding",
        ),
        "KVCacheQueryEngine": Row(lambda: query_engine, f"str(value.query({question!r}))"),
        "KVCacheRerank": Row(
            lambda: KVCacheRerank(llm=llm),
            "[one.score for one in value.postprocess_nodes("
            f"pickle.loads({pickle.dumps(nodes)!r}), query_str={question!r})]",
        ),
        "KVCacheReuseEvent": Row(
            lambda: KVCacheReuseEvent(query_str="?", metrics=response.metadata["kv_cache"])
        ),
        "KVCacheSynthesizer": Row(
            lambda: synthesizer,
            f"str(value.synthesize({question!r}, pickle.loads({pickle.dumps(nodes)!r})))",
        ),
        "KVCacheVectorStore": Row(
            lambda: store, "sorted(one.get_content() for one in value.get_nodes())"
        ),
        "a store in memory": Row(
            lambda: KVCacheVectorStore.from_params("docs", client=chromadb.EphemeralClient()),
            "value.client.id",
            refused="cannot be pickled",
        ),
        "a store with an engine": Row(
            lambda: KVCacheVectorStore.from_params("docs", persist_dir=folder, engine=llm.engine),
            "(value.client.id, id(value.engine))",
            refused="and llm=",
        ),
        "a response": Row(lambda: response),
        "a retriever": Row(
            index.as_retriever, f"[one.get_content() for one in value.retrieve({question!r})]"
        ),
        "an index": Row(
            lambda: index,
            f"[one.get_content() for one in value.as_retriever().retrieve({question!r})]",
        ),
    }


class TestCopies(CopiesContract):
    names: ClassVar[list[str]] = [
        *llama_index.kvcache_rag.__all__,
        *("a response", "a retriever", "an index", "a store in memory", "a store with an engine"),
    ]

    @pytest.fixture(autouse=True)
    def tokens_of_a_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """LlamaIndex's own tokenizer, of a memory, is looked up by its name."""
        kept = Path(llama_index.core.__file__).parent / "_static" / "tiktoken_cache"
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(kept))

    def test_workers_of_a_pipeline_are_sent_the_settings(self, tmp_path: Path) -> None:
        """LlamaIndex pickles the step for each of them."""
        llm, texts = KVCacheLLM(model_name="tiny", kv_dir=str(tmp_path)), ["A cat.", "A dog."]
        sent = pickle.loads(pickle.dumps(KVCachePrefill(llm=llm)))
        sent([TextNode(text=text) for text in texts])
        assert sent.llm.engine is not llm.engine
        assert all(llm.engine.store.contains(key) for key in llm.engine.keys(texts))

    def test_what_holds_a_given_engine_says_so(self, engine: Engine) -> None:
        # Loaded by its name alone, it would be another model: no adapter, template, store of it.
        given = KVCacheLLM(engine=engine)
        loaded = KVCacheLLM(model=engine.model, tokenizer=engine.tokenizer)
        for one in (given, loaded, KVCacheSynthesizer(llm=given), KVCachePrefill(llm=given)):
            assert copy.deepcopy(one) is not None
            with pytest.raises(InvalidInputError, match=r"engine=.*cannot be pickled"):
                pickle.dumps(one)
