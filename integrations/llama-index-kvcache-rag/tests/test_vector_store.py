"""KVCacheVectorStore over Chroma's three kinds of client."""

from __future__ import annotations

import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chromadb
import pytest
from chroma_server import chroma_server
from llama_index.core.schema import (
    ImageNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from llama_index.vector_stores.chroma import ChromaVectorStore

from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag import KVCacheLLM, KVCacheVectorStore
from llama_index.kvcache_rag.commands import report

if TYPE_CHECKING:
    from collections.abc import Iterator


def node(id_: str, text: str = "", document: str = "doc", **metadata: Any) -> TextNode:
    return TextNode(
        id_=id_,
        text=text or f"text of {id_}",
        metadata=metadata,
        embedding=[1.0, float(len(id_)), float(ord(id_[-1]) % 7)],
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)},
    )


def ids(store: KVCacheVectorStore, **conditions: Any) -> list[str]:
    return sorted(found.node_id for found in store.get_nodes(**conditions))


def year(value: int) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key="year", value=value)])


def query(store: KVCacheVectorStore, count: int = 10, **values: Any) -> list[str]:
    wanted = VectorStoreQuery(query_embedding=[1.0, 1.0, 1.0], similarity_top_k=count, **values)
    return list(store.query(wanted).ids or [])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with chroma_server(tmp_path_factory.mktemp("chroma-server")) as address:
        yield address


@pytest.fixture(params=["memory", "persistent", "http"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KVCacheVectorStore:
    place: dict[str, Any]
    if request.param == "memory":
        place = {"client": chromadb.EphemeralClient()}
    elif request.param == "persistent":
        place = {"persist_dir": str(tmp_path / "chroma")}
    else:
        host, port = request.getfixturevalue("server")
        place = {"host": host, "port": port}
    return KVCacheVectorStore.from_params(f"c-{uuid.uuid4().hex}", **place)


@pytest.fixture
def memory() -> KVCacheVectorStore:
    return KVCacheVectorStore.from_params(
        f"c-{uuid.uuid4().hex}", client=chromadb.EphemeralClient()
    )


# ---------------------------------------------------------------------- every kind of client
def test_round_of_all_operations(store: KVCacheVectorStore) -> None:
    assert store.add([node("a", year=1), node("b", year=2, document="other"), node("c")]) == [
        *"abc"
    ]
    assert ids(store) == ["a", "b", "c"]
    assert ids(store, node_ids=["a", "nope"]) == ["a"]
    assert ids(store, filters=year(2)) == ["b"]
    assert sorted(query(store)) == ["a", "b", "c"]
    assert query(store, node_ids=["c", "nope"]) == ["c"]
    assert query(store, doc_ids=["other"]) == ["b"]
    assert query(store, filters=year(1)) == ["a"]
    store.delete("other")
    store.delete("missing document")
    assert ids(store) == ["a", "c"]
    store.delete_nodes(["a", "nope"])
    assert ids(store) == ["c"]
    store.add([node("d", document="x"), node("e", document="x"), node("f", document="y")])
    store.delete_documents(["x", "y"], keep=["e"])
    assert ids(store) == ["c", "e"]
    store.clear()
    store.clear()
    assert ids(store) == []
    assert query(store) == []


async def test_async_forms(memory: KVCacheVectorStore) -> None:
    assert await memory.async_add([node("a", year=1), node("b", year=2)]) == ["a", "b"]
    found = await memory.aget_nodes(filters=year(1))
    assert [one.node_id for one in found] == ["a"]
    wanted = VectorStoreQuery(query_embedding=[1.0, 1.0, 1.0], similarity_top_k=5)
    assert sorted((await memory.aquery(wanted)).ids or []) == ["a", "b"]
    await memory.adelete_nodes(filters=year(1), whatever=1)
    await memory.adelete("missing")
    assert [one.node_id for one in await memory.aget_nodes()] == ["b"]
    await memory.aclear()
    assert await memory.aget_nodes() == []


async def test_writing_does_not_block_the_event_loop(
    memory: KVCacheVectorStore, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.watch(monkeypatch, memory.client, "upsert")
    await memory.async_add([node("a")])
    assert loop.turns


# ---------------------------------------------------------------------- faults of the stock store
def test_same_id_twice_in_one_call_keeps_the_last(
    memory: KVCacheVectorStore, llm: KVCacheLLM
) -> None:
    store = KVCacheVectorStore(memory.client, llm=llm)
    assert store.add([node("a", "first"), node("a", "second")]) == ["a", "a"]
    assert [found.get_content() for found in memory.get_nodes()] == ["second"]
    first, second = llm.engine.keys(["first", "second"])
    assert not llm.engine.store.contains(first)
    assert llm.engine.store.contains(second)


def test_delete_nodes_by_filters_and_by_both(memory: KVCacheVectorStore) -> None:
    memory.add([node("a", year=1), node("b", year=1), node("c", year=2)])
    memory.delete_nodes(["a", "c"], filters=year(1))
    assert ids(memory) == ["b", "c"]
    memory.delete_nodes(filters=year(1), reason="tests")
    assert ids(memory) == ["c"]
    memory.delete_nodes()
    memory.delete_nodes([])
    assert ids(memory) == ["c"]


def test_rows_deleted_by_another_process_are_dropped(tmp_path: Path) -> None:
    store = KVCacheVectorStore.from_params("docs", persist_dir=tmp_path)
    store.add([node(one) for one in "abcdef"])
    assert len(query(store)) == 6
    other = (
        "import sys, chromadb; client = chromadb.PersistentClient(sys.argv[1]); "
        "client.get_collection('docs', embedding_function=None).delete(ids=['a', 'b'])"
    )
    subprocess.run([sys.executable, "-c", other, str(tmp_path)], check=True)
    # This process's index still has them, without document and metadata.
    assert sorted(query(store)) == [*"cdef"]
    assert query(store, node_ids=["a", "c"]) == ["c"]


def test_questions_get_what_the_stock_store_gives(
    memory: KVCacheVectorStore, llm: KVCacheLLM
) -> None:
    ours = KVCacheVectorStore(memory.client, llm=llm)
    vectors = {"near": [1.0, 0.0, 0.0], "twin": [0.99, 0.01, 0.0], "other": [0.6, 0.8, 0.0]}
    ours.add(
        [
            TextNode(id_=id_, text=id_, metadata={"at": at}, embedding=vector)
            for at, (id_, vector) in enumerate(vectors.items())
        ]
    )
    stock, wanted = ChromaVectorStore(memory.client), VectorStoreQuery([1.0, 0.0, 0.0], 2)
    both = MetadataFilters(
        filters=[
            MetadataFilter(key="at", value=0, operator=FilterOperator.GT),
            MetadataFilter(key="at", value=[0, 1], operator=FilterOperator.IN),
        ],
        condition=FilterCondition.OR,
    )
    mmr = replace(wanted, mode=VectorStoreQueryMode.MMR)
    for question, options in (
        (wanted, {}),
        (replace(wanted, filters=both), {}),
        (wanted, {"where": {"at": 2}}),
        (wanted, {"where_document": {"$contains": "tw"}}),
        (VectorStoreQuery(similarity_top_k=1, filters=both), {}),
        (mmr, {"mmr_threshold": 0.3}),
        (mmr, {"mmr_threshold": 1.0, "mmr_prefetch_k": 3}),
    ):
        found, expected = ours.query(question, **options), stock.query(question, **options)
        assert (found.ids, found.similarities) == (expected.ids, expected.similarities)
        for mode in (MetadataMode.LLM, MetadataMode.EMBED, MetadataMode.NONE):
            texts = [
                [one.get_content(mode) for one in each.nodes or []] for each in (found, expected)
            ]
            assert texts[0] == texts[1] != []


def test_ids_and_documents_of_a_query_meet_its_filters(memory: KVCacheVectorStore) -> None:
    memory.add([node("a", year=1), node("b", year=2), node("c", document="other", year=2)])
    assert query(memory, node_ids=["a"], filters=year(2)) == []
    assert query(memory, node_ids=["nope"]) == []
    assert query(memory, doc_ids=["doc"], filters=year(2)) == ["b"]
    assert query(memory, doc_ids=["doc"], node_ids=["a", "c"]) == ["a"]


# ---------------------------------------------------------------------- rows of others
def test_reads_rows_of_the_stock_store_and_of_no_framework(memory: KVCacheVectorStore) -> None:
    stock = ChromaVectorStore(memory.client)
    stock.add([node("a", "from the stock store", year=1)])
    vectors: Any = [[1.0, 1.0, 1.0]]
    memory.client.add(ids=["b"], embeddings=vectors, documents=["bare"], metadatas=[{"page": 3}])
    found = {one.node_id: one for one in memory.get_nodes()}
    assert found["a"].get_content() == "from the stock store"
    assert found["a"].metadata == {"year": 1}
    assert (found["b"].get_content(), found["b"].metadata) == ("bare", {"page": 3})
    memory.add([node("c", "ours", tags=["x"])])
    listed = stock.query(VectorStoreQuery([1.0, 1.0, 1.0], similarity_top_k=3)).nodes or []
    assert sorted(one.get_content() for one in listed) == ["bare", "from the stock store", "ours"]


def test_nodes_without_text_are_rows_too(memory: KVCacheVectorStore, llm: KVCacheLLM) -> None:
    store = KVCacheVectorStore(memory.client, llm=llm)
    image = ImageNode(id_="i", image_url="x.png", embedding=[0.0, 1.0, 0.0])
    store.add([image, node("a")])
    found = {one.node_id: one for one in store.get_nodes()}
    assert isinstance(found["i"], ImageNode)
    assert "kv_key" not in found["i"].metadata
    assert "kv_key" in found["a"].metadata


# ---------------------------------------------------------------------- construction and copies
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({}, "exactly one"),
        ({"persist_dir": "x", "host": "h"}, "exactly one"),
        ({"client": None, "host": "h"}, "exactly one"),
        ({"client": None}, "cannot open the collection 'x'"),
        ({"host": "127.0.0.1", "port": 9}, "cannot open the collection 'x'"),
    ],
)
def test_a_place_of_no_use_is_told(place: dict[str, Any], message: str) -> None:
    if "client" in place:
        place = {**place, "client": chromadb.EphemeralClient()}
    with pytest.raises(InvalidInputError, match=message):
        KVCacheVectorStore.from_params("x", **place)


def test_engine_and_kv_dir_are_said_once(memory: KVCacheVectorStore, llm: KVCacheLLM) -> None:
    lazy = KVCacheLLM(model_name="never loaded")
    for _ in range(2):
        KVCacheVectorStore(memory.client, llm=lazy, kv_dir=Path("kv"))
    assert lazy.kv_dir == "kv"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"llm": llm, "engine": llm.engine}, "not both"),
        ({"kv_dir": "kv"}, "kv_dir= needs llm="),
        ({"llm": llm, "kv_dir": "kv"}, "elsewhere already"),
        ({"llm": lazy, "kv_dir": "other"}, "in kv already"),
    ]
    for options, message in wrong:
        with pytest.raises(InvalidInputError, match=message):
            KVCacheVectorStore(memory.client, **options)


def test_a_collection_without_a_name_will_do(memory: KVCacheVectorStore) -> None:
    """As tests hand in what they made up."""

    class Nameless:
        id = memory.client.id
        count = staticmethod(memory.client.count)

    stand_in: Any = Nameless()
    store = KVCacheVectorStore(stand_in)
    assert (store.client, store.collection_name) == (stand_in, None)
    assert KVCacheVectorStore(stand_in, collection_name="mine").collection_name == "mine"


def test_settings_without_secrets(memory: KVCacheVectorStore) -> None:
    store = KVCacheVectorStore.from_collection(memory.client, headers={"token": "secret"})
    assert "secret" not in store.to_json()
    assert "secret" not in repr(store)
    assert store.to_dict()["class_name"] == "KVCacheVectorStore"


def test_a_dict_keeps_the_llm(tmp_path: Path) -> None:
    llm = KVCacheLLM(model_name="tiny", kv_dir=tmp_path / "kv", max_new_tokens=4)
    store = KVCacheVectorStore.from_params("docs", persist_dir=str(tmp_path / "rows"), llm=llm)
    again = KVCacheVectorStore.from_json(store.to_json())
    again.add([node("a")])
    assert again.get_nodes()[0].metadata["kv_key"]
    assert again._llm is not None
    assert (again._llm.kv_dir, again._llm.max_new_tokens) == (str(tmp_path / "kv"), 4)


@pytest.mark.parametrize("name", ["llm", "engine"])
def test_a_dict_says_that_it_has_no_engine(tmp_path: Path, llm: KVCacheLLM, name: str) -> None:
    given: dict[str, Any] = {name: llm if name == "llm" else llm.engine}
    store = KVCacheVectorStore.from_params("docs", persist_dir=str(tmp_path), **given)
    again = KVCacheVectorStore.from_dict(store.to_dict())
    for lost in (again, KVCacheVectorStore.from_dict(again.to_dict())):
        for write in (lambda lost=lost: lost.add([node("a")]), lost.prefill_missing):
            with pytest.raises(InvalidInputError, match="give llm= or engine= to from_dict"):
                write()
        assert ids(lost) == []
    KVCacheVectorStore.from_dict(store.to_dict(), **given).add([node("a")])
    KVCacheVectorStore.from_dict(store.to_dict()).delete_nodes(["a"])


def test_a_store_without_an_engine_is_one_again_from_its_dict(tmp_path: Path) -> None:
    store = KVCacheVectorStore.from_params("docs", persist_dir=str(tmp_path))
    assert KVCacheVectorStore.from_dict(store.to_dict()).add([node("a")]) == ["a"]


def test_collections_of_any_size_are_read_and_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    # Chroma answers 32,766 rows at a time; a tenth of that is sooner written.
    client = chromadb.EphemeralClient()
    collection = client.create_collection(f"c-{uuid.uuid4().hex}", embedding_function=None)
    count, get = 3333, chromadb.Collection.get
    names = [f"i{index}" for index in range(count)]
    embeddings = [[1.0, float(index)] for index in range(count)]
    metadatas: Any = [{"year": index % 2, "kv_key": name} for index, name in enumerate(names)]
    collection.add(names, embeddings, metadatas, names)  # type: ignore[arg-type]

    def limited(*arguments: Any, **options: Any) -> Any:
        found = get(*arguments, **options)
        if len(found["ids"]) > 1000:
            raise RuntimeError("too many SQL variables")
        return found

    monkeypatch.setattr(chromadb.Collection, "get", limited)
    monkeypatch.setattr(collection._client, "get_max_batch_size", lambda: 1000)
    store = KVCacheVectorStore(collection)
    assert sorted(ids(store)) == sorted(names)
    assert report.stored_chunks(store) == {*names}
    assert report.whole_documents(store) == {}
    assert len(store.get_nodes(names[5:])) == count - 5
    of_rows = store._collection.get(include=["embeddings"], offset=3, limit=2000)
    assert of_rows["embeddings"].shape == (2000, 2)
    asked = VectorStoreQuery([1.0, 3.0], node_ids=names[3:], similarity_top_k=1)
    assert store.query(asked).ids == ["i3"]
    store.delete_nodes(filters=year(1))
    assert store.client.count() == (count + 1) // 2
    store.delete_nodes(names)
    assert store.client.count() == 0
