"""KVCacheChroma reads and writes what the stock Chroma store does, and where that one fails too."""

from __future__ import annotations

import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import access
import chromadb
import numpy as np
import pytest
from chroma_server import chroma_server
from chromadb.utils.embedding_functions import register_embedding_function
from langchain_chroma import Chroma
from langchain_core.documents import Document
from store_helpers import (
    Geometry,
    library,
    memory_store,
    metadata_of,
    plain,
    texts_of,
)

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import REFERENCE_KEYS
from langchain_kvcache_rag.vector_store import KVCacheChroma

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from langchain_core.embeddings import Embeddings

    from langchain_kvcache_rag.chat_model import ChatKVCache

NEAR = [0.9, 0.1, 0.0, 0.2, 0.1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with chroma_server(tmp_path_factory.mktemp("chroma-server")) as address:
        yield address


@pytest.fixture(params=["memory", "persistent", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """How the stock constructor is told where the collections are."""
    if request.param == "memory":
        return {}
    if request.param == "persistent":
        return {"persist_directory": str(tmp_path / "chroma")}
    host, port = request.getfixturevalue("server")
    return {"host": host, "port": port}


def pair(
    llm: ChatKVCache, embedding: Embeddings | None = None, **options: Any
) -> tuple[Chroma, KVCacheChroma]:
    """A stock store and one of ours over collections of the same content."""
    embedding = embedding or Geometry()
    stock = Chroma(f"c-{uuid.uuid4().hex}", embedding, **options)
    ours = KVCacheChroma(f"c-{uuid.uuid4().hex}", embedding, llm=llm, **options)
    for store in (stock, ours):
        store.add_documents(library())
    return stock, ours


@register_embedding_function
class Lengths(chromadb.EmbeddingFunction[Any]):
    """Chroma's own kind of embedding function, which a collection remembers."""

    def __init__(self) -> None:
        pass

    def __call__(self, input: Any) -> Any:
        return [np.array([float(len(text)), 1.0]) for text in input]

    @staticmethod
    def name() -> str:
        return "lengths"

    def get_config(self) -> dict[str, Any]:
        return {}

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> Lengths:
        return Lengths()


def rows_of(store: Chroma) -> dict[str, tuple[str, Any]]:
    """Text and metadata by id."""
    found = store.get()
    values = zip(found["documents"], found["metadatas"], strict=True)
    return dict(zip(found["ids"], values, strict=True))


# ---------------------------------------------------------------------- equal to the stock store
READS: dict[str, Callable[[Chroma], Any]] = {
    "get": lambda store: store.get(),
    "get page": lambda store: store.get(limit=2, offset=1),
    "get where": lambda store: store.get(where={"colour": "red"}),
    "get where document": lambda store: store.get(where_document={"$contains": "fox"}),
    "get vectors": lambda store: store.get(include=["embeddings"]),
    "get documents": lambda store: store.get(ids=["a", "nope"], include=["documents"]),
    "get metadatas": lambda store: store.get(ids="f", include=["metadatas"]),
    "ids": lambda store: sorted(store.get_by_ids(["c", "a", "nope"]), key=lambda one: one.id or ""),
    "search": lambda store: store.similarity_search("red fox"),
    "search all": lambda store: store.similarity_search("blue", k=50),
    "search, filter": lambda store: store.similarity_search("red fox", filter={"year": {"$gt": 2}}),
    "mmr, filter": lambda store: store.max_marginal_relevance_search(
        "red fox", k=2, filter={"$or": [{"year": 2}, {"colour": "red"}]}
    ),
    "by vector": lambda store: store.similarity_search_by_vector(NEAR, k=3),
    "by vector, scores": lambda store: store.similarity_search_by_vector_with_relevance_scores(
        NEAR, k=6
    ),
    "scores": lambda store: store.similarity_search_with_score("red fox", k=6),
    "relevance": lambda store: store.similarity_search_with_relevance_scores("red fox", k=6),
    "threshold": lambda store: store.similarity_search_with_relevance_scores(
        "red fox", k=6, score_threshold=0.5
    ),
    "vectors": lambda store: store.similarity_search_with_vectors("red fox", k=6),
    "mmr": lambda store: store.max_marginal_relevance_search("red fox", k=3, fetch_k=5),
    "mmr by vector": lambda store: store.max_marginal_relevance_search_by_vector(
        NEAR, k=2, lambda_mult=0.1
    ),
    "retriever, mmr": lambda store: store.as_retriever(
        search_type="mmr", search_kwargs={"k": 2, "fetch_k": 4}
    ).invoke("red fox"),
}


@pytest.mark.filterwarnings("ignore:Relevance scores must be between:UserWarning")
@pytest.mark.filterwarnings("ignore:legacy embedding function config:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:No relevant docs were retrieved:UserWarning")
@pytest.mark.parametrize("space", ["l2", "cosine", "ip"])
def test_every_way_to_read_gives_what_the_stock_store_gives(llm: ChatKVCache, space: Any) -> None:
    stock, ours = pair(llm, collection_configuration={"hnsw": {"space": space}})
    assert set(REFERENCE_KEYS) <= set(metadata_of(ours, "a"))
    for name, read in READS.items():
        theirs = plain(read(stock))
        assert plain(read(ours)) == theirs, name
        assert theirs or "threshold" in name, name


def test_what_is_written_is_what_the_stock_store_writes(
    llm: ChatKVCache, place: dict[str, Any]
) -> None:
    stock, ours = pair(llm, **place)
    for store in (stock, ours):
        store.add_texts(["plain", "with metadata"], [{}, {"page": 1}], ["g", "h"])
        store.add_texts(["short of metadata", "none"], [{"page": 2}], ["i", "j"])
        store.update_document("a", Document("grey fox", metadata={"year": 9, "colour": "grey"}))
        store.update_documents(["b", "nope"], [Document("x", metadata={"year": 8})] * 2)
        store.delete(["c", "nope"])
        store.delete(where={"year": {"$gt": 8}})
        store.delete(["d", "e"], where_document={"$contains": "lake"})
    theirs, mine = rows_of(stock), rows_of(ours)
    # Except for metadata, which the stock store merges.
    assert theirs["b"] == ("x", {"year": 8, "colour": "blue", "rare": True})
    assert mine == {**theirs, "b": ("x", {"year": 8})}
    assert sorted(mine) == [*"befghij"]
    for store in (stock, ours):
        store.reset_collection()
        assert store.get()["ids"] == []
        store.delete_collection()
        with pytest.raises(ValueError, match="not initialized"):
            store.get()


def test_arguments_of_the_stock_store_are_heard(llm: ChatKVCache) -> None:
    ours = memory_store(llm=llm, collection_metadata={"made": "here"})
    assert access.collection(ours).metadata == {"made": "here"}
    with pytest.raises(ValueError, match="Only one of"):
        KVCacheChroma("docs", persist_directory="x", host="h", llm=llm)
    with pytest.raises(chromadb.errors.NotFoundError):
        memory_store(llm=llm, create_collection_if_not_exists=False)
    with pytest.raises(NotImplementedError):
        ours.hybrid_search(chromadb.Search())
    assert memory_store(relevance_score_fn=lambda _: 0.5, llm=llm).override_relevance_score_fn


def test_stock_store_reads_what_was_written_here(llm: ChatKVCache) -> None:
    ours = memory_store(llm=llm)
    ours.add_documents(library())
    stock = Chroma(access.collection(ours).name, Geometry(), client=chromadb.EphemeralClient())
    found = stock.similarity_search("red fox", k=9)
    assert {one.id: one.page_content for one in found} == texts_of(ours)
    # And what it hands on can be added again, without the references of those rows.
    again = memory_store()
    again.add_documents(found)
    assert plain(again.get_by_ids(["a"])) == plain(ours.get_by_ids(["a"]))
    assert not set(REFERENCE_KEYS) & set(metadata_of(again, "a"))


# ---------------------------------------------------------------------- where the stock store fails
def test_empty_lists(llm: ChatKVCache) -> None:
    ours = memory_store(llm=llm)
    ours.add_texts(["kept"], ids=["a"])
    assert ours.add_texts([]) == ours.add_texts([], [], []) == ours.add_documents([]) == []
    ours.delete([])
    ours.delete([], where={"x": 1})
    ours.delete([], where_document={"$contains": "kept"})
    ours.update_documents([], [])
    assert ours.get_by_ids([]) == []
    assert ours.get(ids=[])["ids"] == []
    assert ours.get(ids=[], include=["documents"])["documents"] == []
    with pytest.raises(InvalidInputError, match="1 ids, 0 documents"):
        ours.add_texts([], ids=["b"])
    assert texts_of(ours) == {"a": "kept"}
    where: Any = {"client": chromadb.EphemeralClient(), "collection_name": uuid.uuid4().hex}
    for empty in (
        KVCacheChroma.from_documents([], Geometry(), llm=llm, **where),
        KVCacheChroma.from_texts([], Geometry(), llm=llm, **where),
    ):
        assert empty.get()["ids"] == []


def test_delete_of_nothing_in_particular_deletes_all(llm: ChatKVCache) -> None:
    ours = memory_store(llm=llm)
    ours.add_documents(library())
    with pytest.raises(InvalidInputError, match="say which"):
        access.collection(ours).delete()
    ours.delete()
    ours.delete(None, where=None)
    assert texts_of(ours) == {}


def test_the_last_text_of_an_id_stands_alone(llm: ChatKVCache) -> None:
    ours = memory_store(llm=llm)
    ours.add_texts(["old", "stays"], [{"year": 1, "colour": "red"}, {"year": 1}], ["a", "b"])
    ours.add_texts(["new"], [{"year": 2}], ["a"])
    assert ours.get(ids="a")["metadatas"] == [{"year": 2}]
    ours.update_documents(["b", "a"], [Document("x", metadata={"z": 1}), Document("y")])
    assert ours.get()["metadatas"] == [None, {"z": 1}]
    assert ours.get_by_ids(["a"]) == [Document("y", id="a")]
    assert "year" not in metadata_of(ours, "a")
    ours.add_texts(["bare"], ids=["b"])
    assert ours.get(ids="b")["metadatas"] == [None]
    assert ours.add_texts(["first", "b", "last"], ids=["a", "b", "a"]) == ["a", "b", "a"]
    assert texts_of(ours) == {"a": "last", "b": "b"}
    ours.update_documents(["b", "b"], [Document("one"), Document("two")])
    assert texts_of(ours) == {"a": "last", "b": "two"}


def test_ids_are_made_up_where_they_are_missing() -> None:
    ours = memory_store()
    one, two = ours.add_texts(text for text in ("first", "second"))
    missing: Any = [None, "b"]
    three, four = ours.add_texts(["third", "fourth"], ids=missing)
    assert (four, len({one, two, three, four})) == ("b", 4)
    assert sorted(texts_of(ours).values()) == ["first", "fourth", "second", "third"]
    assert ours.add_documents([Document("fifth", id="e"), Document("sixth")])[0] == "e"


@pytest.mark.parametrize(
    ("metadatas", "ids", "message"),
    [
        ([{"x": {"y": 1}}], None, "Expected metadata value to be.*filter_complex_metadata"),
        ([{"x": [1, "a"]}], None, "filter_complex_metadata"),
        ([{1: "a"}], None, "metadata key to be a str"),
        ([{}, {}, {}], None, "2 documents.*3 metadatas"),
        (None, ["a"], "1 ids, 2 documents"),
        (None, [], "0 ids, 2 documents"),
    ],
)
def test_what_cannot_be_written_is_told(
    metadatas: Any, ids: Any, message: str, llm: ChatKVCache, prefilled: Callable[[], int]
) -> None:
    ours = memory_store(llm=llm)
    with pytest.raises(InvalidInputError, match=message):
        ours.add_texts(["one", "two"], metadatas, ids)
    assert texts_of(ours) == {}
    assert prefilled() == 0


def test_more_texts_than_chroma_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local database takes 5461 rows, a hosted one far fewer."""
    server, calls = type(access.collection(memory_store())._client), list[int]()
    upsert = server._upsert

    def noted(self: Any, collection_id: Any, ids: list[str], *args: Any, **options: Any) -> bool:
        calls.append(len(ids))
        done: bool = upsert(self, collection_id, ids, *args, **options)
        return done

    monkeypatch.setattr(server, "get_max_batch_size", lambda _: 50)
    monkeypatch.setattr(server, "_upsert", noted)
    count, ours = 120, memory_store()
    ids = [str(at) for at in range(count)]
    assert ours.add_texts(["text"] * count, ids=ids) == ids
    assert len(ours.get_by_ids(ids)) == access.collection(ours).count() == count
    ours.update_documents(ids, [Document("new", metadata={"page": 1})] * count)
    assert len(ours.get(where={"page": 1})["ids"]) == count
    ours.delete(ids[:110])
    assert access.collection(ours).count() == 10
    ours.delete()
    assert access.collection(ours).count() == 0
    copied = KVCacheChroma.from_documents(
        [Document("text", metadata={"page": 1})] * count,
        Geometry(),
        client=chromadb.EphemeralClient(),
        collection_name=uuid.uuid4().hex,
    )
    assert access.collection(copied).count() == count
    assert calls == [50, 50, 20] * 3


def test_rows_deleted_by_another_process_are_dropped(tmp_path: Path, llm: ChatKVCache) -> None:
    ours = KVCacheChroma("docs", Geometry(), persist_directory=str(tmp_path), llm=llm)
    ours.add_documents(library())
    assert len(ours.similarity_search("red fox", k=9)) == 6
    other = (
        "import sys, chromadb; client = chromadb.PersistentClient(sys.argv[1]); "
        "client.get_collection('docs', embedding_function=None).delete(ids=['a', 'f'])"
    )
    subprocess.run([sys.executable, "-c", other, str(tmp_path)], check=True)
    # This process's index still has them, without document and metadata.
    raw: Any = access.collection(ours)
    hits = raw.collection.query(query_embeddings=[NEAR], n_results=9)
    assert (None, None) in list(zip(hits["documents"][0], hits["metadatas"][0], strict=True))
    for search in (ours.similarity_search, ours.max_marginal_relevance_search):
        assert sorted(one.id or "" for one in search("red fox", k=9)) == [*"bcde"]
    assert len(ours.similarity_search_with_vectors("red fox", k=9)) == 4
    # The nearest two are alive, though the nearest of all is not.
    assert len(ours.max_marginal_relevance_search("red fox", k=2)) == 2
    bare = access.collection(ours).query(
        query_embeddings=[NEAR], n_results=9, include=["distances"]
    )
    assert len(bare["ids"][0]) == 6


# ---------------------------------------------------------------------- others' ways to write
def test_collection_that_embeds_by_itself(llm: ChatKVCache) -> None:
    client, found = chromadb.EphemeralClient(), []
    for kind, options in ((Chroma, {}), (KVCacheChroma, {"llm": llm})):
        name, embeds = f"c-{uuid.uuid4().hex}", Lengths()
        client.create_collection(name, embedding_function=embeds)
        store = kind(name, client=client, **options)
        store.add_texts(["aaaa", "bb"], [{"page": 1}, {}], ["a", "b"])
        found.append(store.similarity_search_with_score("cc"))
        with pytest.raises(ValueError, match="specify an embedding function"):
            store.update_document("a", Document("x"))
        with pytest.raises(ValueError, match="specify an embedding function"):
            store.max_marginal_relevance_search("x")
    assert found[0] == found[1]
    assert [document.page_content for document, _ in found[0]] == ["bb", "aaaa"]
