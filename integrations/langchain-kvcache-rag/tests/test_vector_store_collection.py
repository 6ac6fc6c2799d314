"""The collection behind the store, for those who reach through to it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import access
import chromadb
import pytest
from chromadb.api.types import SearchResult
from langchain_core.documents import Document
from store_helpers import Geometry, memory_store, metadata_of, new_name, survivors, texts_of

from kvcache_rag import InvalidInputError
from kvcache_rag.generation import StoredChunk
from langchain_kvcache_rag.chat_model import ChatKVCache
from langchain_kvcache_rag.client import PrefilledClient
from langchain_kvcache_rag.collection import DocumentCollection
from langchain_kvcache_rag.vector_store import KVCacheChroma

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcache_rag import Engine

    Count = Callable[[], int]


@pytest.fixture
def store(llm: ChatKVCache) -> KVCacheChroma:
    return memory_store(llm=llm)


def vectors(count: int) -> list[list[float]]:
    return [[1.0, float(at), 0.0, 0.0, 0.0] for at in range(count)]


def test_add_leaves_existing_rows_as_they_are(store: KVCacheChroma, prefilled: Count) -> None:
    collection: Any = access.collection(store)
    collection.add(ids=["a"], documents=["one"], embeddings=vectors(1), metadatas=[{"x": 1}])
    collection.add(ids=["a", "b"], documents=["two", "three"], embeddings=vectors(2))
    assert texts_of(store) == {"a": "one", "b": "three"}
    assert store.get(ids="a")["metadatas"] == [{"x": 1}]
    assert prefilled() == 2
    collection.add(ids="c", documents="four", embeddings=vectors(1), metadatas={"x": 2})
    assert store.get_by_ids(["c"]) == [Document("four", id="c", metadata={"x": 2})]
    assert "kv_key" in metadata_of(store, "c")


def test_what_has_no_text_is_chromas_own(store: KVCacheChroma, prefilled: Count) -> None:
    collection: Any = access.collection(store)
    collection.upsert(ids=["a"], embeddings=vectors(1), metadatas=[{"x": 1}])
    collection.add(ids=["b"], embeddings=vectors(1), metadatas=[{"x": 2}], uris=["file:b"])
    assert prefilled() == 0
    assert store.similarity_search_by_vector(vectors(1)[0]) == []
    store.add_texts(["text"], [{"x": 3}], ["c"])
    collection.update(ids=["c"], metadatas=[{"y": 4}])
    assert store.get(ids="c")["metadatas"] == [{"x": 3, "y": 4}]
    assert "kv_key" in metadata_of(store, "c")
    assert store.prefill_missing() == 0
    assert collection.delete(ids="a") == {"deleted": 1}
    assert collection.delete(where={"x": {"$gt": 1}}, limit=1) == {"deleted": 1}
    assert collection.count() == 1


def test_client_makes_collections_that_prefill(
    store: KVCacheChroma, engine: Engine, prefilled: Count
) -> None:
    held, client, name = survivors(engine), access.client(store), new_name()
    made: Any = client.create_collection(name, embedding_function=None)
    made.upsert(ids=["1"], documents=["a"], embeddings=vectors(1))
    assert prefilled() == 1
    same: Any = client.get_collection(name, embedding_function=None)
    assert same.get()["metadatas"] == [None]
    client.delete_collection(name)
    assert held("a") == ""
    with pytest.raises(chromadb.errors.NotFoundError):
        client.delete_collection(name)


def test_hybrid_search_shows_no_references(
    store: KVCacheChroma, llm: ChatKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_texts(["Text.", "Bare."], [{"page": 1}, {}], ["a", "b"])
    # What a hosted database answers; a local one has no hybrid search.
    answer = SearchResult(
        ids=[["a", "b"]],
        documents=[["Text.", "Bare."]],
        metadatas=[[metadata_of(store, id_) for id_ in "ab"]],
        embeddings=[None],
        scores=[[0.1, 0.2]],
        select=[[]],
    )
    raw: Any = access.collection(store)
    monkeypatch.setattr(raw.collection, "search", lambda *_: answer)
    found = [Document("Text.", id="a", metadata={"page": 1}), Document("Bare.", id="b")]
    assert store.hybrid_search(chromadb.Search()) == found
    assert isinstance(llm.references.chunk("Bare.", llm.engine), StoredChunk)
    answer["metadatas"] = [None]
    assert raw.search(chromadb.Search())["metadatas"] == [None]
    del answer["metadatas"]
    assert raw.search(chromadb.Search()).rows()[0][0]["document"] == "Text."


def test_fork_prefills_too(
    store: KVCacheChroma, engine: Engine, prefilled: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = survivors(engine)
    store.add_texts(["a"], ids=["1"])
    raw: Any = access.collection(store)

    def fork(new_name: str) -> Any:
        """What a hosted database does; a local one has no forks."""
        copied = chromadb.EphemeralClient().create_collection(new_name, embedding_function=None)
        rows = raw.collection.get(include=["embeddings", "documents", "metadatas"])
        copied.add(**{name: rows[name] for name in ("ids", *rows["included"])})
        return copied

    monkeypatch.setattr(raw.collection, "fork", fork)
    forked = store.fork(new_name())
    assert type(forked) is KVCacheChroma
    assert (forked.engine, forked.references) == (store.engine, store.references)
    forked.add_texts(["b"], ids=["2"])
    assert (forked.prefill_missing(), prefilled()) == (0, 2)
    store.delete()
    assert held(*"ab") == "b"  # what both had is computed again for the fork
    assert forked.prefill_missing() == 0
    assert (held(*"ab"), prefilled()) == ("ab", 1)
    forked.delete()
    assert held(*"ab") == ""


def test_model_that_cannot_be_loaded_is_known_before_rows_go(store: KVCacheChroma) -> None:
    store.add_texts(["a"], ids=["1"])
    llm = ChatKVCache(model="./no/such/model")
    broken = memory_store(collection_name=access.collection(store).name, llm=llm)
    for delete in (
        broken.delete,
        lambda: broken.delete(["1"]),
        broken.delete_collection,
        broken.reset_collection,
    ):
        with pytest.raises(InvalidInputError, match="no model folder"):
            delete()
    assert texts_of(broken) == {"1": "a"}


class Pictures(Geometry):
    def embed_image(self, uris: list[str]) -> list[list[float]]:
        return [[1.0, 0.0, 0.0, 0.0, 0.0] for _ in uris]


def test_pictures_are_not_prefilled(llm: ChatKVCache, prefilled: Count, tmp_path: Path) -> None:
    """One that takes the place of a text lets its chunk go."""
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"x" * 9000)
    held, store = survivors(llm.engine), memory_store(Pictures(), llm=llm)
    store.add_texts([*"ab"], ids=["1", "2"])
    made: list[Any] = ["1", None]
    assert store.add_images([str(picture)] * 2, [{"page": 1}], made)[0] == "1"
    assert (held(*"ab"), prefilled()) == ("b", 2)
    (found,) = store.similarity_search_by_image(str(picture), filter={"page": 1})
    assert (found.id, found.metadata) == ("1", {"page": 1})
    assert metadata_of(store, "1") == {"page": 1}


def test_client_and_collection_are_chromas_for_those_who_ask(store: KVCacheChroma) -> None:
    client, collection = access.client(store), access.collection(store)
    assert isinstance(client, chromadb.ClientCreator)
    assert isinstance(collection, chromadb.Collection)
    for one, kind in ((client, PrefilledClient), (collection, DocumentCollection)):
        twin = copy.copy(one)
        assert type(twin) is kind
        assert vars(twin) == vars(one)
        # Looking for what is not there comes to an end, in what is half made too.
        assert not hasattr(twin, "nothing_like_it")
        assert not hasattr(kind.__new__(kind), "anything")
