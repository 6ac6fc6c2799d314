"""Vector stores of other kinds: Qdrant, and LangChain's own in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_framework import LangChain
from langchain_qdrant import QdrantVectorStore
from store_helpers import Geometry

from langchain_kvcache_rag import KVCacheRAG

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.vectorstores import VectorStore

    from langchain_kvcache_rag import ChatKVCache


TEXTS = ["The tower is tall.", "A cat sleeps on the mat.", "Green lakes are deep."]
DOCUMENTS = [
    Document(text, id=str(UUID(int=at)), metadata={"page": at})  # an id as Qdrant wants it
    for at, text in enumerate(TEXTS, 1)
]


def memory_store() -> InMemoryVectorStore:
    return InMemoryVectorStore(Geometry())


def qdrant_store() -> QdrantVectorStore:
    return QdrantVectorStore.from_texts(
        [], Geometry(), location=":memory:", collection_name="docs", force_recreate=True
    )


@pytest.mark.parametrize("opened", [memory_store, qdrant_store])
def test_prefilled_documents_are_reused_from_any_store(
    opened: Callable[[], VectorStore], llm: ChatKVCache, prefilled: Callable[[], int]
) -> None:
    assert llm.prefill([*DOCUMENTS, TEXTS[0], " "])[3:] == [*llm.engine.keys(TEXTS[:1]), None]
    assert prefilled() == 3
    store = opened()
    store.add_documents(DOCUMENTS)
    context = store.as_retriever(search_kwargs={"k": 2}).invoke("A cat?")
    found = LangChain().ask(llm, "A cat?", context).cost
    assert (found["misses"], found["references"], prefilled()) == (0, 2, 0)


def test_prefill_writes_documents_as_the_chain_does(llm: ChatKVCache, prefilled: Any) -> None:
    prompt = PromptTemplate.from_template("Page {page}: {page_content}")
    llm.prefill(DOCUMENTS, document_prompt=prompt)
    assert prefilled() == 3
    rag = KVCacheRAG(llm, document_prompt=prompt)
    message = rag.invoke({"question": "A cat?", "context": DOCUMENTS})
    assert (message.response_metadata["kv_cache"]["misses"], prefilled()) == (0, 0)
