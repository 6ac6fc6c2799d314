"""Vector stores of other kinds: Qdrant, and LangChain's own in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from kv_cache_fields import FIELDS
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_qdrant import QdrantVectorStore
from small import make_model
from store_helpers import Geometry

from kvcache_rag import DiskStore, Metrics
from kvcache_rag import PromptTemplate as Template
from kvcache_rag.integration import Reference
from langchain_kvcache_rag import ChatKVCache, KVCacheRAG

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcache_rag import Engine

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


@pytest.fixture
def disk_llm(make_engine: Callable[..., Engine], tmp_path: Path) -> ChatKVCache:
    """Over a folder."""
    store = DiskStore(tmp_path / "kv", durable=False)
    return ChatKVCache(engine=make_engine(store=store), max_tokens=4)


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


async def test_prefill_does_not_block(llm: ChatKVCache, loop: Any, monkeypatch: Any) -> None:
    loop.watch(monkeypatch, type(make_model()), "forward")
    assert await llm.aprefill(TEXTS) == llm.prefill(TEXTS)
    assert loop.turns


def test_prefill_writes_documents_as_the_chain_does(llm: ChatKVCache, prefilled: Count) -> None:
    prompt = PromptTemplate.from_template("Page {page}: {page_content}")
    llm.prefill(documents(), document_prompt=prompt)
    assert prefilled() == 3
    rag = KVCacheRAG(llm, document_prompt=prompt)
    message = rag.invoke({"question": "A cat?", "context": documents()})
    assert (message.response_metadata["kv_cache"]["misses"], prefilled()) == (0, 0)


def test_prefill_says_what_it_cannot_use(llm: ChatKVCache, prefilled: Count) -> None:
    with pytest.warns(UserWarning, match="row 'long'"):
        keys = llm.prefill(["A cat.", Document("cat " * 9999, id="long")])
    assert (keys, prefilled()) == ([*llm.engine.keys(["A cat."]), None], 1)


# ---------------------------------------------------------------------- what an answer says
def named(cost: dict[str, Any]) -> set[str]:
    (answer,) = cost["answers"]
    assert {*cost} - {"answers"} < {*answer}
    return {*answer}


def test_kv_cache_has_the_documented_fields_and_reasons(disk_llm: ChatKVCache) -> None:
    store = memory_only()
    store.add_documents(documents())
    disk_llm.prefill(documents())
    first = ask(store, disk_llm)
    assert (named(first), first["missed"], first["references"]) == (FIELDS, [], 2)
    for key in disk_llm.engine.keys(TEXTS):
        disk_llm.engine.store.delete(key)
    second = ask(store, disk_llm)
    assert [one["reason"] for one in second["missed"]] == ["evicted", "evicted"]
    own = {name: second[name] for name in ("answered_from_ids", "prompt")}
    assert {**Metrics.from_dict(second).to_dict(), **own} == second["answers"][0]
    assert named(disk_llm.invoke("Hello").response_metadata["kv_cache"]) == FIELDS


def test_a_row_of_another_model_says_so(
    make_engine: Callable[..., Engine], llm: ChatKVCache
) -> None:
    other = make_engine(template=Template(system="Another instruction.\n"))
    reference = Reference.of(other.add(TEXTS[:1])[0], TEXTS[0], other)
    llm.references.note(reference)
    message = KVCacheRAG(llm).invoke({"question": "A?", "context": [Document(TEXTS[0])]})
    (missed,) = message.response_metadata["kv_cache"]["missed"]
    assert (missed["chunk"], missed["reason"]) == (0, "other model")
