"""One KV folder under both frameworks: equal text is computed once, and nobody deletes another's.

Every application has an engine of its own, as two processes would have.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import chromadb
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import TextNode
from small import make_model, make_tokenizer

from kvcache_rag import DiskStore, Engine, PromptTemplate
from langchain_kvcache_rag import ChatKVCache, KVCacheChroma, KVCacheRAG
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["The cat sat on the mat.", "A dog ran away from home.", "It rained for three days."]
QUESTION = "Who sat on the mat?"


def make_engine(folder: Path) -> Engine:
    template = PromptTemplate(system="Read.\n")
    store = DiskStore(folder)
    return Engine(make_model(), make_tokenizer(), store=store, template=template)


class OfLangChain:
    """A LangChain application."""

    def __init__(self, folder: Path) -> None:
        self.engine = make_engine(folder)
        self.llm = ChatKVCache(engine=self.engine, max_tokens=6)
        self.store = KVCacheChroma(
            f"c{uuid.uuid4().hex}",
            DeterministicFakeEmbedding(size=16),
            client=chromadb.EphemeralClient(),
            llm=self.llm,
        )

    def ingest(self, texts: list[str]) -> None:
        self.store.add_texts(texts, ids=texts)

    def delete(self, text: str) -> None:
        self.store.delete([text])
        self.engine.store.sweep()

    def ask(self, texts: list[str]) -> tuple[str, dict[str, Any]]:
        context = [Document(text) for text in texts]
        message = KVCacheRAG(self.llm).invoke({"question": QUESTION, "context": context})
        return str(message.content), message.response_metadata["kv_cache"]


class OfLlamaIndex:
    """A LlamaIndex application."""

    def __init__(self, folder: Path) -> None:
        self.engine = make_engine(folder)
        self.llm = KVCacheLLM(engine=self.engine, max_new_tokens=6)
        self.store = KVCacheVectorStore.from_params(
            f"c{uuid.uuid4().hex}", client=chromadb.EphemeralClient(), llm=self.llm
        )

    def ingest(self, texts: list[str]) -> None:
        VectorStoreIndex(
            [TextNode(id_=text, text=text) for text in texts],
            storage_context=StorageContext.from_defaults(vector_store=self.store),
            embed_model=HashEmbedding(),
        )

    def delete(self, text: str) -> None:
        self.store.delete_nodes([text])
        self.engine.store.sweep()

    def ask(self, texts: list[str]) -> tuple[str, dict[str, Any]]:
        index = VectorStoreIndex(
            [TextNode(text=text) for text in texts], embed_model=HashEmbedding()
        )
        engine = KVCacheQueryEngine.from_index(index, self.llm, similarity_top_k=len(texts))
        response = engine.query(QUESTION)
        metadata = response.metadata
        if metadata is None:
            raise AssertionError("no metrics")
        order = [one.node.get_content() for one in response.source_nodes]
        assert sorted(order) == sorted(texts)
        return str(response), metadata["kv_cache"]


APPLICATIONS = [(OfLangChain, OfLlamaIndex), (OfLlamaIndex, OfLangChain)]


@pytest.mark.parametrize(("first", "second"), APPLICATIONS)
def test_what_one_framework_ingests_is_a_hit_for_the_other(
    tmp_path: Path, first: Any, second: Any
) -> None:
    ingesting, asking = first(tmp_path), second(tmp_path)
    ingesting.ingest(TEXTS)
    _, cost = asking.ask(TEXTS)
    chunks = sum(map(len, asking.engine.tokenize("?", TEXTS).chunks))
    assert (cost["reused_tokens"], cost["prefilled_tokens"], cost["misses"]) == (chunks, 0, 0)
    asking.ingest(TEXTS)
    assert asking.engine.store.stats().puts == 0, "nothing is computed twice"


@pytest.mark.parametrize(("first", "second"), APPLICATIONS)
def test_deleting_in_one_framework_is_a_miss_in_the_other(
    tmp_path: Path, first: Any, second: Any
) -> None:
    leaving, staying = first(tmp_path), second(tmp_path)
    leaving.ingest(TEXTS)
    staying.ingest(TEXTS[:1])
    answer, _ = staying.ask(TEXTS[:1])
    for text in TEXTS:
        leaving.delete(text)
    keys = staying.engine.keys(TEXTS)
    assert [staying.engine.store.contains(key) for key in keys] == [False, False, False]
    again, cost = staying.ask(TEXTS[:1])
    assert again == answer, "without its KV it is only slower"
    assert cost["misses"] == 1
    assert staying.ask(TEXTS[:1])[1]["misses"] == 0
    staying.delete(TEXTS[0])
    assert not staying.engine.store.contains(keys[0])
    assert staying.ask(TEXTS[:1])[0] == answer, "without its KV it is only slower"


def test_one_collection_may_be_opened_by_both(tmp_path: Path) -> None:
    index, chain = OfLlamaIndex(tmp_path), OfLangChain(tmp_path)
    index.ingest(TEXTS)
    embedding, client = DeterministicFakeEmbedding(size=384), chromadb.EphemeralClient()
    same = KVCacheChroma(index.store.client.name, embedding, client=client, llm=chain.llm)
    found = same.get_by_ids([TEXTS[0]])
    assert [one.page_content for one in found] == TEXTS[:1]
    assert not any(key.startswith("kv_") for key in found[0].metadata)
    assert chain.ask(TEXTS[:1])[1]["misses"] == 0
    same.add_texts(["Mine."], ids=["mine"])
    same.delete([TEXTS[0]])
    assert sorted(one.get_content() for one in index.store.get_nodes()) == [
        TEXTS[1],
        TEXTS[2],
        "Mine.",
    ]
    chain.engine.store.sweep()
    assert not chain.engine.store.contains(chain.engine.keys(TEXTS)[0])
    assert index.ask(TEXTS[1:])[1]["misses"] == 0
