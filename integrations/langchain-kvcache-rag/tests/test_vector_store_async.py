"""Async forms that leave the event loop alone, and calls from many threads."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import access
import chromadb
import pytest
from langchain_core.documents import Document
from store_helpers import Geometry, library, memory_store, new_name, texts_of

from langchain_kvcache_rag.vector_store import KVCacheChroma

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from small import Loop

    from kvcache_rag import Engine
    from langchain_kvcache_rag.chat_model import ChatKVCache


@pytest.fixture
def store(llm: ChatKVCache) -> KVCacheChroma:
    return memory_store(llm=llm)


async def test_every_async_form(llm: ChatKVCache, prefilled: Callable[[], int]) -> None:
    of: dict[str, Any] = {"client": chromadb.EphemeralClient(), "collection_name": new_name()}
    store = await KVCacheChroma.afrom_documents(library(), Geometry(), llm=llm, **of)
    assert prefilled() == 6
    same = await KVCacheChroma.afrom_texts(["red fox"], Geometry(), ids=["h"], llm=llm, **of)
    assert isinstance(same, KVCacheChroma)
    assert prefilled() == 0
    assert await store.aadd_documents([Document("new", id="i")]) == ["i"]
    assert await store.aadd_texts(["newer"], [{"page": 1}], ids=["j"]) == ["j"]
    assert await store.aadd_texts([]) == await store.aadd_documents([]) == []
    assert prefilled() == 2
    found = await store.aget_by_ids(["j", "nope"])
    assert found == [Document("newer", id="j", metadata={"page": 1})]
    vector = Geometry().embed_query("newer")
    for one in (
        store.asimilarity_search("newer", k=1),
        store.asimilarity_search("red fox", k=9, filter={"page": 1}),
        store.asimilarity_search_by_vector(vector, k=1),
        store.amax_marginal_relevance_search("newer", k=1),
        store.amax_marginal_relevance_search_by_vector(vector, k=1),
        store.as_retriever(search_kwargs={"k": 1}).ainvoke("newer"),
    ):
        assert await one == found
    assert (await store.asimilarity_search_with_score("newer", k=1))[0][1] < 1e-6
    assert (await store.asimilarity_search_with_relevance_scores("newer", k=1))[0][0] == found[0]
    await store.aupdate_document("j", Document("newest"))
    await store.aupdate_documents(["i"], [Document("newest")])
    await store.aupdate_documents([], [])
    assert prefilled() == 1
    llm.engine.store.delete(llm.engine.keys(["newest"])[0])
    assert (await store.aprefill_missing(), prefilled()) == (0, 1)
    await store.adelete([])
    await store.adelete(["i"])
    await store.adelete(where={"colour": "red"})
    assert sorted(texts_of(same)) == [*"bdfhj"]
    await store.adelete()
    assert texts_of(same) == {}


WAITS: dict[str, Callable[[KVCacheChroma], Awaitable[Any]]] = {
    "documents": lambda store: store.aadd_documents([Document("one"), Document("two")]),
    "texts": lambda store: store.aadd_texts(["one", "two"]),
    "update": lambda store: store.aupdate_document("a", Document("one")),
    "prefill": lambda store: store.aprefill_missing(),
    "delete": lambda store: store.adelete(["a"]),
    "delete all": lambda store: store.adelete(),
    "search": lambda store: store.asimilarity_search("one"),
    "scores": lambda store: store.asimilarity_search_with_relevance_scores("one"),
    "mmr": lambda store: store.amax_marginal_relevance_search("one"),
    "get": lambda store: store.aget_by_ids(["a"]),
    "retriever": lambda store: store.as_retriever().ainvoke("one"),
}


@pytest.mark.parametrize("name", WAITS)
async def test_event_loop_keeps_ticking(
    name: str, store: KVCacheChroma, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_texts(["old"], ids=["a"])
    raw: Any = access.collection(store)
    loop.watch(monkeypatch, raw.collection, "get", "query", "upsert", "delete")
    await WAITS[name](store)
    assert loop.turns


async def test_prefilling_leaves_the_loop_alone(
    store: KVCacheChroma, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, started, go_on = engine.add, threading.Event(), threading.Event()

    def waits(*args: Any, **options: Any) -> Any:
        started.set()
        assert go_on.wait(30)
        return add(*args, **options)

    monkeypatch.setattr(engine, "add", waits)
    adding = asyncio.create_task(store.aadd_texts(["Text."], ids=["a"]))
    while not started.is_set():
        await asyncio.sleep(0.001)
    # Embedded, not prefilled: nothing is written yet, and the store can be read meanwhile.
    assert await store.asimilarity_search("Text.") == []
    go_on.set()
    assert await adding == ["a"]
    assert len(await store.asimilarity_search("Text.")) == 1
