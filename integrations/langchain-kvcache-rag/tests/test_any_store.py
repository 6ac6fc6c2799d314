"""Vector stores of other kinds: Qdrant, and LangChain's own in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_qdrant import QdrantVectorStore
from store_helpers import Geometry

from langchain_kvcache_rag import ChatKVCache, KVCacheRAG

if TYPE_CHECKING:
    from collections.abc import Callable

    Count = Callable[[], int]

TEXTS = ["The tower is tall.", "A cat sleeps on the mat.", "Green lakes are deep."]
IDS = [str(UUID(int=number)) for number in range(1, 4)]  # the form that Qdrant wants


def memory_only() -> InMemoryVectorStore:
    return InMemoryVectorStore(Geometry())


def qdrant_store() -> QdrantVectorStore:
    return QdrantVectorStore.from_texts(
        [], Geometry(), location=":memory:", collection_name="docs", force_recreate=True
    )


STORES: dict[str, Callable[[], VectorStore]] = {
    "qdrant": qdrant_store,
    "memory": memory_only,
}


@pytest.fixture(params=STORES)
def inner(request: pytest.FixtureRequest) -> VectorStore:
    return STORES[request.param]()


def documents() -> list[Document]:
    pairs = zip(IDS, TEXTS, strict=True)
    return [Document(text, id=id_, metadata={"page": at}) for at, (id_, text) in enumerate(pairs)]


def ask(store: VectorStore, llm: ChatKVCache) -> dict[str, Any]:
    context = store.as_retriever(search_kwargs={"k": 2}).invoke("A cat?")
    message = KVCacheRAG(llm).invoke({"question": "A cat?", "context": context})
    found: dict[str, Any] = message.response_metadata["kv_cache"]
    return found


# ---------------------------------------------------------------------- prefill
def test_prefilled_documents_are_reused_from_any_store(
    inner: VectorStore, llm: ChatKVCache, prefilled: Count
) -> None:
    keys = llm.prefill([*documents(), TEXTS[0], " "])
    assert keys == [*llm.engine.keys([*TEXTS, TEXTS[0]]), None]
    assert prefilled() == 3
    inner.add_documents(documents())
    found = ask(inner, llm)
    assert (found["misses"], found["references"], prefilled()) == (0, 2, 0)


def test_prefill_writes_documents_as_the_chain_does(llm: ChatKVCache, prefilled: Count) -> None:
    prompt = PromptTemplate.from_template("Page {page}: {page_content}")
    llm.prefill(documents(), document_prompt=prompt)
    assert prefilled() == 3
    rag = KVCacheRAG(llm, document_prompt=prompt)
    message = rag.invoke({"question": "A cat?", "context": documents()})
    assert (message.response_metadata["kv_cache"]["misses"], prefilled()) == (0, 0)
