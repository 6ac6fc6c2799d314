"""LangChain's own tests of a vector store, with an engine that really prefills."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import chromadb
import pytest
from langchain_core.documents import Document
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from langchain_kvcache_rag.vector_store import KVCacheChroma

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from langchain_core.embeddings import Embeddings

    from langchain_kvcache_rag.chat_model import ChatKVCache


@pytest.fixture
def in_folder(tmp_path: Path, llm: ChatKVCache) -> Iterator[Callable[[Embeddings], KVCacheChroma]]:
    stores = []

    def make(embedding: Embeddings) -> KVCacheChroma:
        stores.append(
            KVCacheChroma("test-coll", embedding, persist_directory=str(tmp_path), llm=llm)
        )
        return stores[-1]

    yield make
    for store in stores:
        store.delete_collection()


@pytest.fixture
def in_memory(llm: ChatKVCache) -> Iterator[Callable[[Embeddings], KVCacheChroma]]:
    stores = []

    def make(embedding: Embeddings) -> KVCacheChroma:
        name, client = f"c-{uuid.uuid4().hex}", chromadb.EphemeralClient()
        stores.append(KVCacheChroma(name, embedding, client=client, llm=llm))
        return stores[-1]

    yield make
    for store in stores:
        store.delete_collection()


class TestPersistent(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, in_folder: Callable[[Embeddings], KVCacheChroma]) -> KVCacheChroma:
        return in_folder(self.get_embeddings())


class TestInMemory(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, in_memory: Callable[[Embeddings], KVCacheChroma]) -> KVCacheChroma:
        return in_memory(self.get_embeddings())


@pytest.mark.parametrize("place", ["in_folder", "in_memory"])
def test_stores_of_these_suites_prefill(
    place: str,
    request: pytest.FixtureRequest,
    embedding: Embeddings,
    prefilled: Callable[[], int],
    llm: ChatKVCache,
) -> None:
    store = request.getfixturevalue(place)(embedding)
    store.add_documents([Document("foo", id="1"), Document("bar", id="2")])
    assert prefilled() == 2
    assert all(llm.engine.store.contains(key) for key in llm.engine.keys(["foo", "bar"]))
