"""Models with recurrent layers, as LlamaIndex's users ask them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, ClassVar

import chromadb
import pytest
from hybrid_reader import DOCUMENTS, FOLDER, IS_READ, asked
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from zoo import HYBRIDS, build, byte_tokenizer

from kvcache_rag import DiskStore, Engine, LegoLink, MemoryStore, PromptTemplate, Reuse
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from pathlib import Path

FACTS = ["The lighthouse keeper is called Marlow.", "The harbour was built in 1911.", "It is wet."]
KINDS = [name for name in ("qwen3_5", "lfm2", "mamba2") if name in HYBRIDS]


@pytest.mark.parametrize("name", KINDS)
async def test_answers_come_from_stored_chunks_in_any_order(
    name: str, embedding: HashEmbedding, tmp_path: Path
) -> None:
    template = PromptTemplate(system="Read.\n")
    model, tokenizer = build(name), byte_tokenizer()
    client, collection = chromadb.PersistentClient(str(tmp_path / "db")), f"c-{uuid.uuid4().hex}"

    def opened() -> tuple[KVCacheLLM, KVCacheVectorStore]:
        store = DiskStore(tmp_path / "kv", durable=False)
        engine = Engine(model, tokenizer, template=template, store=store)
        llm = KVCacheLLM(engine=engine, max_new_tokens=6)
        return llm, KVCacheVectorStore.from_params(collection, client=client, llm=llm)

    _, first = opened()
    VectorStoreIndex.from_documents(
        [Document(text=fact) for fact in FACTS],
        storage_context=StorageContext.from_defaults(vector_store=first),
        embed_model=embedding,
    )
    llm, store = opened()  # as after a restart
    index = VectorStoreIndex.from_vector_store(store, embed_model=embedding)
    reference = Engine(model, tokenizer, template=template, store=MemoryStore())
    for question in ("who is the keeper?", "when was the harbour built?", "is it wet?"):
        query_engine = KVCacheQueryEngine.from_index(index, llm, similarity_top_k=3)
        response = query_engine.query(question)
        cost = (response.metadata or {})["kv_cache"]
        assert (cost["misses"], cost["hits"]) == (0, {"disk": 3})
        texts = [one.node.get_content(MetadataMode.LLM) for one in response.source_nodes]
        expected = reference.generate(question, texts, policy=Reuse(), max_new_tokens=6)
        assert str(response) == expected.text
        assert str(await query_engine.aquery(question)) == expected.text
        streaming = KVCacheQueryEngine.from_index(index, llm, similarity_top_k=3, streaming=True)
        assert str(streaming.query(question)) == expected.text


@pytest.mark.skipif(not IS_READ, reason="this transformers keeps no states as 5.23")
def test_a_trained_one_answers_right_in_any_order_after_a_restart(
    embedding: HashEmbedding, tmp_path: Path
) -> None:
    client = chromadb.PersistentClient(str(tmp_path / "db"))

    def opened() -> tuple[KVCacheLLM, KVCacheVectorStore]:
        store = DiskStore(tmp_path / "kv", durable=False)
        llm = KVCacheLLM(engine=Engine.from_pretrained(FOLDER, store=store), max_new_tokens=1)
        return llm, KVCacheVectorStore.from_params("facts", client=client, llm=llm)

    VectorStoreIndex.from_documents(
        [Document(text=text) for text in DOCUMENTS],
        storage_context=StorageContext.from_defaults(vector_store=opened()[1]),
        embed_model=embedding,
    )
    llm, store = opened()
    index = VectorStoreIndex.from_vector_store(store, embed_model=embedding)
    found = index.as_retriever(similarity_top_k=len(DOCUMENTS)).retrieve("which?")
    by_text = {one.node.get_content(): one for one in found}

    class Given(BaseRetriever):
        nodes: ClassVar[list[NodeWithScore]] = []

        def _retrieve(self, _: QueryBundle) -> list[NodeWithScore]:
            return self.nodes

    query_engine = KVCacheQueryEngine.from_args(Given(), llm=llm, policy="bestlast")
    for documents, entity, value in asked():
        Given.nodes = [by_text[text] for text in documents]
        response = query_engine.query(entity)
        assert str(response).strip() == value
        # The best one is computed with the question.
        assert (response.metadata or {})["kv_cache"]["hits"] == {"disk": len(documents) - 1}


@pytest.mark.skipif(not IS_READ, reason="this transformers keeps no states as 5.23")
def test_heads_are_cut_for_the_policy_of_the_llm() -> None:
    llm = KVCacheLLM(model_name=str(FOLDER), policy=LegoLink(4))
    documents, entity, value = asked()[0]
    assert llm.engine.policy == LegoLink(4)
    answer = llm.engine.generate(entity, documents, max_new_tokens=1)
    assert answer.text.strip() == value
    assert answer.metrics.recomputed_tokens == 4 * (len(documents) - 1)
