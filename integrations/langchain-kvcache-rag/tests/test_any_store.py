"""Vector stores of other kinds: Qdrant, and LangChain's own in memory."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from kv_cache_fields import FIELDS
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_qdrant import QdrantVectorStore
from store_helpers import Geometry, memory_store

from kvcache_rag import ContextTooLongError, DiskStore, InvalidInputError, Metrics, PromptTemplate
from kvcache_rag.integration import Reference
from langchain_kvcache_rag import ChatKVCache, KVCacheRAG, KVCacheVectorStore, prefill

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
    """Over a folder in which what is released is dropped by the next sweep."""
    store = DiskStore(tmp_path / "kv", release_grace=0.0, durable=False)
    return ChatKVCache(engine=make_engine(store=store), max_tokens=4)


def documents() -> list[Document]:
    pairs = zip(IDS, TEXTS, strict=True)
    return [Document(text, id=id_, metadata={"page": at}) for at, (id_, text) in enumerate(pairs)]


def held(llm: ChatKVCache) -> list[int]:
    """Which of the texts are stored after a sweep."""
    llm.engine.store.sweep()
    keys = llm.engine.keys(TEXTS)
    return [at for at, key in enumerate(keys) if llm.engine.store.contains(key)]


def ask(store: VectorStore, llm: ChatKVCache) -> dict[str, Any]:
    context = store.as_retriever(search_kwargs={"k": 2}).invoke("A cat?")
    message = KVCacheRAG(llm).invoke({"question": "A cat?", "context": context})
    found: dict[str, Any] = message.response_metadata["kv_cache"]
    return found


# ---------------------------------------------------------------------- wrap
def test_the_first_question_reuses_what_was_added(
    inner: VectorStore, llm: ChatKVCache, prefilled: Count
) -> None:
    store = KVCacheVectorStore.wrap(inner, llm=llm)
    assert store.add_documents(documents()) == IDS
    assert prefilled() == 3
    found = ask(store, llm)
    assert found["misses"] == 0
    assert found["reused_tokens"] > 0
    assert prefilled() == 0


def test_questions_get_what_the_store_itself_gives(inner: VectorStore, llm: ChatKVCache) -> None:
    store = KVCacheVectorStore.wrap(inner, llm=llm)
    store.add_documents(documents())
    vector = Geometry().embed_query("A cat?")
    assert store.embeddings is inner.embeddings
    ways: list[Callable[[VectorStore], Any]] = [
        lambda one: sorted(found.page_content for found in one.get_by_ids(IDS[:2])),
        lambda one: one.similarity_search("A cat?", 2),
        lambda one: one.similarity_search_by_vector(vector, 2),
        lambda one: one.similarity_search_with_score("A cat?", k=2),
        lambda one: one.max_marginal_relevance_search("A cat?", 2, fetch_k=3, lambda_mult=0.3),
        lambda one: one.search("A cat?", "similarity", k=1),
        lambda one: one.as_retriever(search_type="mmr").invoke("A cat?"),
    ]
    for way in ways:
        assert way(store) == way(inner)
    if not isinstance(inner, InMemoryVectorStore):  # it has neither
        for way in (
            lambda one: one.similarity_search_with_relevance_scores("A cat?", 2),
            lambda one: one.max_marginal_relevance_search_by_vector(vector, 2),
        ):
            assert way(store) == way(inner)


def test_deleting_releases(inner: VectorStore, disk_llm: ChatKVCache) -> None:
    store = KVCacheVectorStore.wrap(inner, llm=disk_llm, name="docs")
    store.add_texts(TEXTS, [{"page": at} for at in range(3)], ids=IDS)
    assert held(disk_llm) == [0, 1, 2]
    store.delete([IDS[1]])
    assert held(disk_llm) == [0, 2]
    assert [one.page_content for one in store.similarity_search("A", 5)] != []


def test_ids_that_the_store_makes_up_are_deleted_by(
    inner: VectorStore, disk_llm: ChatKVCache
) -> None:
    store = KVCacheVectorStore.wrap(inner, llm=disk_llm, name="docs")
    ids = store.add_texts(TEXTS)
    store.delete(ids[:2])
    assert held(disk_llm) == [2]


def test_what_another_row_or_another_store_wants_stays(disk_llm: ChatKVCache) -> None:
    first = KVCacheVectorStore.wrap(memory_only(), llm=disk_llm, name="first")
    second = KVCacheVectorStore.wrap(qdrant_store(), llm=disk_llm, name="second")
    first.add_texts([TEXTS[0], TEXTS[0], TEXTS[1]], ids=IDS)
    first.delete([IDS[0]])
    assert held(disk_llm) == [0, 1]
    second.add_texts([TEXTS[0]], ids=[IDS[0]])
    first.delete(IDS[1:])
    assert held(disk_llm) == [0]


def test_replacing_a_row_releases_what_it_said(disk_llm: ChatKVCache) -> None:
    store = KVCacheVectorStore.wrap(qdrant_store(), llm=disk_llm, name="docs")
    store.add_texts([TEXTS[0]], ids=[IDS[0]])
    store.add_texts([TEXTS[1]], ids=[IDS[0]])
    assert held(disk_llm) == [1]


def test_a_store_that_deletes_nothing_releases_nothing(disk_llm: ChatKVCache) -> None:
    class Keeping(InMemoryVectorStore):
        def delete(self, ids: Any = None, **kwargs: Any) -> bool:
            return False

    store = KVCacheVectorStore.wrap(Keeping(Geometry()), llm=disk_llm, name="docs")
    store.add_texts(TEXTS, ids=IDS)
    assert store.delete(IDS) is False
    assert held(disk_llm) == [0, 1, 2]


def test_without_a_name_nothing_is_claimed(disk_llm: ChatKVCache, tmp_path: Path) -> None:
    store = KVCacheVectorStore.wrap(memory_only(), llm=disk_llm)
    store.delete(store.add_texts(TEXTS))
    assert held(disk_llm) == [0, 1, 2]
    assert not [*tmp_path.glob("kv/*/records"), *tmp_path.rglob("*.owner-*")]


def test_a_text_that_is_too_long_is_refused_before_anything_is_added(llm: ChatKVCache) -> None:
    store = KVCacheVectorStore.wrap(InMemoryVectorStore(Geometry()), llm=llm)
    with pytest.raises(ContextTooLongError, match="row '1'"):
        store.add_texts(["A cat.", "cat " * 9999])
    assert not store.store.store  # type: ignore[attr-defined]


async def test_async_ways_do_the_same(inner: VectorStore, disk_llm: ChatKVCache) -> None:
    store = KVCacheVectorStore.wrap(inner, llm=disk_llm, name="docs")
    assert await store.aadd_documents(documents()[:2]) == IDS[:2]
    assert await store.aadd_texts([TEXTS[2]], ids=[IDS[2]]) == IDS[2:]
    assert held(disk_llm) == [0, 1, 2]
    vector = Geometry().embed_query("A cat?")
    assert await store.asimilarity_search("A cat?", 2) == store.similarity_search("A cat?", 2)
    assert await store.asimilarity_search_by_vector(vector, 1) == store.similarity_search(
        "A cat?", 1
    )
    assert len(await store.asimilarity_search_with_score("A cat?", 2)) == 2
    assert len(await store.amax_marginal_relevance_search("A cat?", 2)) == 2
    await store.adelete([IDS[0]])
    assert held(disk_llm) == [1, 2]


def test_the_rest_is_the_stores_own(llm: ChatKVCache, tmp_path: Path) -> None:
    store = KVCacheVectorStore.wrap(memory_only(), llm=llm)
    store.add_texts(TEXTS)
    store.dump(str(tmp_path / "rows.json"))
    assert (tmp_path / "rows.json").is_file()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = store.no_such_thing
    assert copy.copy(store).store is store.store


def test_what_cannot_be_wrapped_says_so(llm: ChatKVCache, engine: Engine) -> None:
    store = InMemoryVectorStore(Geometry())
    with pytest.raises(InvalidInputError, match="a vector store of LangChain, not a dict"):
        KVCacheVectorStore.wrap({}, llm=llm)  # type: ignore[arg-type]
    for one in KVCacheVectorStore.wrap(store, llm=llm), memory_store(llm=llm):
        with pytest.raises(InvalidInputError, match="prefills already"):
            KVCacheVectorStore.wrap(one, llm=llm)
    with pytest.raises(InvalidInputError, match="not both"):
        KVCacheVectorStore.wrap(store, llm=llm, engine=engine)
    with pytest.raises(InvalidInputError, match="say what prefills"):
        KVCacheVectorStore.wrap(store)
    with pytest.raises(InvalidInputError, match="make the store first"):
        KVCacheVectorStore.from_texts(TEXTS, Geometry())


# ---------------------------------------------------------------------- prefill
def test_prefilled_documents_are_reused_from_any_store(
    inner: VectorStore, llm: ChatKVCache, prefilled: Count
) -> None:
    assert prefill([*documents(), TEXTS[0], " "], llm) == 3
    assert prefilled() == 3
    inner.add_documents(documents())
    assert (ask(inner, llm)["misses"], prefilled()) == (0, 0)


def test_prefill_claims_documents_with_ids(disk_llm: ChatKVCache) -> None:
    prefill([*documents()[:2], TEXTS[2]], disk_llm, name="docs")
    store = KVCacheVectorStore.wrap(InMemoryVectorStore(Geometry()), llm=disk_llm, name="docs")
    store.delete([IDS[0]])
    assert held(disk_llm) == [1, 2]


def test_an_engine_can_prefill_without_a_chat_model(engine: Engine, prefilled: Count) -> None:
    assert prefill(TEXTS, engine=engine) == 3
    assert KVCacheVectorStore.wrap(memory_only(), engine=engine).add_texts(TEXTS)
    assert prefilled() == 3
    with pytest.raises(InvalidInputError, match="say what prefills"):
        prefill(TEXTS)


# ---------------------------------------------------------------------- what an answer says
def test_kv_cache_has_the_documented_fields_and_reasons(disk_llm: ChatKVCache) -> None:
    store = KVCacheVectorStore.wrap(qdrant_store(), llm=disk_llm)
    store.add_documents(documents())
    first = ask(store, disk_llm)
    assert ({*first}, first["missed"], first["references"]) == (FIELDS, [], 2)
    for key in disk_llm.engine.keys(TEXTS):
        disk_llm.engine.store.delete(key)
    second = ask(store, disk_llm)
    assert [one["reason"] for one in second["missed"]] == ["evicted", "evicted"]
    assert {**Metrics.from_dict(second).to_dict(), "prompt": second["prompt"]} == second
    assert {*disk_llm.invoke("Hello").response_metadata["kv_cache"]} == FIELDS


def test_a_row_of_another_model_says_so(
    make_engine: Callable[..., Engine], llm: ChatKVCache
) -> None:
    other = make_engine(template=PromptTemplate(system="Another instruction.\n"))
    reference = Reference.of(other.add(TEXTS[:1])[0], TEXTS[0], other)
    llm.references.note(reference)
    message = KVCacheRAG(llm).invoke({"question": "A?", "context": [Document(TEXTS[0])]})
    (missed,) = message.response_metadata["kv_cache"]["missed"]
    assert (missed["chunk"], missed["reason"]) == (0, "other model")
