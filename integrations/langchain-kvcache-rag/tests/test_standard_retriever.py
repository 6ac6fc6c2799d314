"""LangChain's own tests of a retriever, over a store that prefills."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import chromadb
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_tests.integration_tests import RetrieversIntegrationTests

from langchain_kvcache_rag.vector_store import KVCacheChroma

if TYPE_CHECKING:
    from langchain_core.vectorstores import VectorStoreRetriever

    from langchain_kvcache_rag.chat_model import ChatKVCache


def retriever_over(store: KVCacheChroma, **options: Any) -> VectorStoreRetriever:
    """The store's own retriever, made by the argument names of the suite."""
    return store.as_retriever(search_kwargs=options)


class TestRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _filled(self, llm: ChatKVCache) -> None:
        name, client = f"c-{uuid.uuid4().hex}", chromadb.EphemeralClient()
        self.store = KVCacheChroma(name, DeterministicFakeEmbedding(size=8), client=client, llm=llm)
        self.store.add_texts([f"Fact {index}." for index in range(6)])

    @property
    def retriever_constructor(self) -> Any:
        return lambda **options: retriever_over(self.store, **options)

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"k": 4}

    @property
    def retriever_query_example(self) -> str:
        return "Fact 1."
