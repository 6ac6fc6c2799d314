"""A model whose chunks cannot be stitched answers all the same, and says so once."""

from __future__ import annotations

import uuid

import chromadb
import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, PromptTemplate, Reuse
from kvcache_rag.errors import UnsupportedModelError
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheVectorStore,
)

FACTS = ["The lighthouse keeper is called Marlow.", "The harbour was built in 1911."]
SAID = "it answers by full prefill, as with policy=FullRecompute"


@pytest.mark.parametrize("name", ["gpt2", "recurrent_gemma"])
async def test_a_refused_model_answers_with_one_warning(
    name: str, embedding: HashEmbedding
) -> None:
    engine = Engine(build(name), byte_tokenizer(), template=PromptTemplate(system="Read.\n"))
    llm = KVCacheLLM(engine=engine, max_new_tokens=4)
    collection = f"c-{uuid.uuid4().hex}"
    store = KVCacheVectorStore.from_params(collection, client=chromadb.EphemeralClient(), llm=llm)
    with pytest.warns(UserWarning, match=SAID) as said:
        index = VectorStoreIndex.from_documents(
            [Document(text=fact) for fact in FACTS],
            storage_context=StorageContext.from_defaults(vector_store=store),
            embed_model=embedding,
        )
    assert len(said) == 1
    assert not any("kv_key" in found.metadata for found in store.get_nodes())
    # From now on not a word: warnings are errors here.
    query_engine = KVCacheQueryEngine.from_index(index, llm)
    response = query_engine.query("who?")
    assert (response.metadata or {})["kv_cache"]["policy"] == "FullRecompute()"
    assert str(await query_engine.aquery("who?")) == str(response)
    streaming = KVCacheQueryEngine.from_index(index, llm, streaming=True)
    assert str(streaming.query("who?")) == str(response)
    assert llm.complete("x").raw["finish_reason"]
    with pytest.raises(UnsupportedModelError, match=r"FullRecompute\(\)"):
        KVCacheQueryEngine.from_index(index, llm, policy=Reuse()).query("who?")
    store.delete_nodes([found.node_id for found in store.get_nodes()])
    assert store.get_nodes() == []
