"""What ingestion prefills, what it notes beside the rows, and what deletion lets go of."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING, Any

import access
import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index
from store_helpers import Geometry, library, memory_store, metadata_of, survivors, texts_of

from kvcache_rag import DiskStore, InvalidInputError
from kvcache_rag.generation import StoredChunk
from kvcache_rag.integration import REFERENCE_KEYS, References
from langchain_kvcache_rag.chat_model import ChatKVCache
from langchain_kvcache_rag.vector_store import KVCacheChroma

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcache_rag import Engine

    Count = Callable[[], int]
    Held = Callable[..., str]


@pytest.fixture
def held(engine: Engine) -> Held:
    return survivors(engine)


@pytest.fixture
def store(llm: ChatKVCache) -> KVCacheChroma:
    return memory_store(llm=llm)


# ---------------------------------------------------------------------- references
READS: dict[str, Callable[[KVCacheChroma], Any]] = {
    "search": lambda store: store.similarity_search("Text."),
    "scores": lambda store: store.similarity_search_with_relevance_scores("Text."),
    "vectors": lambda store: store.similarity_search_with_vectors("Text."),
    "mmr": lambda store: store.max_marginal_relevance_search("Text."),
    "get": lambda store: store.get(),
    "get_by_ids": lambda store: store.get_by_ids(["a"]),
    "retriever": lambda store: store.as_retriever().invoke("Text."),
}


@pytest.mark.parametrize("name", READS)
def test_reading_tells_the_chat_model_where_the_kv_is(
    name: str, engine: Engine, prefilled: Count
) -> None:
    writer = memory_store(engine=engine)
    writer.add_texts(["Text."], ids=["a"])
    llm = ChatKVCache(engine=engine)
    options: dict[str, Any] = {"collection_name": access.collection(writer).name, "llm": llm}
    reader = memory_store(**options)
    assert reader.references is llm.references
    assert llm.references.chunk("Text.", engine) == "Text."
    READS[name](reader)
    (key,) = engine.keys(["Text."])
    assert llm.references.chunk("Text.", engine) == StoredChunk(key, "Text.")
    assert llm.references.chunk("Text!", engine) == "Text!"
    assert prefilled() == 1


def test_without_engine_rows_have_no_reference(store: KVCacheChroma) -> None:
    store.add_texts(["Old."], [{"page": 1}], ids=["a"])
    bare = memory_store(collection_name=access.collection(store).name)
    assert (bare.engine, bare.references) == (None, None)
    assert bare.get_by_ids(["a"]) == [Document("Old.", id="a", metadata={"page": 1})]
    bare.add_texts(["New."], ids=["a"])
    assert metadata_of(bare, "a") == {}
    with pytest.raises(InvalidInputError, match="llm= or engine="):
        bare.prefill_missing()


def test_collection_without_references_needs_no_model() -> None:
    llm: Any = Unloaded()
    store = memory_store(llm=llm)
    Chroma(
        access.collection(store).name, Geometry(), client=chromadb.EphemeralClient()
    ).add_documents(library())
    assert len(store.similarity_search("red fox", k=9)) == 6
    store.delete(["a"])
    store.delete(where={"year": 2})
    store.delete()
    store.reset_collection()
    store.delete_collection()


class Unloaded:
    """A chat model that must not be loaded."""

    references = References()

    @property
    def engine(self) -> Engine:
        raise AssertionError("the model was loaded")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"llm": ChatKVCache(model="x"), "engine": "y"}, "not both"),
        ({"llm": "gpt-7"}, "must be a ChatKVCache, not a str"),
    ],
)
def test_engine_is_said_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        memory_store(**options)


# ---------------------------------------------------------------------- progress
def test_bar(
    store: KVCacheChroma,
    engine: Engine,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcache_rag.progress._PAUSE", 0.0)  # lines of what is soon over, too

    def shown() -> bool:
        return "prefill" in capfd.readouterr().err

    store.add_documents([Document("One.")])
    assert not shown()
    store.add_documents([Document("Two.")], show_progress=True)
    assert shown()
    store.add_texts(["Three."], show_progress=True)
    assert shown()
    options: dict[str, Any] = {"client": chromadb.EphemeralClient(), "engine": engine}
    name = f"c-{uuid.uuid4().hex}"
    loud = KVCacheChroma.from_texts(
        ["Four."], Geometry(), collection_name=name, show_progress=True, **options
    )
    assert shown()
    loud.add_texts(["Five."])
    assert shown()
    loud.add_texts(["Six."], show_progress=False)
    assert not shown()
    engine.store.delete(engine.keys(["Four."])[0])
    assert loud.prefill_missing(show_progress=False) == 0
    assert not shown()
    engine.store.delete(engine.keys(["Four."])[0])
    assert loud.prefill_missing() == 0
    assert shown()


def test_from_documents_and_from_texts(llm: ChatKVCache, prefilled: Count) -> None:
    options: dict[str, Any] = {"client": chromadb.EphemeralClient(), "llm": llm}
    name = f"c-{uuid.uuid4().hex}"
    one = KVCacheChroma.from_documents(library(), Geometry(), collection_name=name, **options)
    assert isinstance(one, KVCacheChroma)
    assert prefilled() == 6
    two = KVCacheChroma.from_texts(
        ["New.", "red fox"], Geometry(), [{"page": 1}, {}], ["n", "m"], name, **options
    )
    assert prefilled() == 1
    assert len(texts_of(two)) == 8
    assert metadata_of(two, "n")["page"] == 1
    assert two.prefill_missing() == 0


# ---------------------------------------------------------------------- deleting and updating
def test_delete_releases_what_no_row_uses(store: KVCacheChroma, held: Held) -> None:
    store.add_texts([*"abcde", "a"], [{"at": at} for at in range(6)], [*"123456"])
    assert held(*"abcde") == "abcde"
    store.delete(["1", "nope"])
    assert held(*"abcde") == "abcde"  # row 6 has the text of row 1
    store.delete(["6"])
    assert held(*"abcde") == "bcde"
    store.delete(where={"at": 1})
    assert held(*"abcde") == "cde"
    store.delete(where_document={"$contains": "c"})
    assert held(*"abcde") == "de"
    store.delete(["4", "5"], where={"at": 3})
    assert held(*"abcde") == "e"
    store.delete()
    assert held(*"abcde") == ""
    assert texts_of(store) == {}


@pytest.mark.parametrize("way", ["add_texts", "add_documents", "update_document"])
def test_replaced_row_releases_its_old_text(store: KVCacheChroma, held: Held, way: str) -> None:
    store.add_texts(["a", "b", "b"], [{"old": 1}] * 3, ids=["1", "2", "3"])
    for id_ in ("1", "2"):
        if way == "add_texts":
            store.add_texts(["n"], ids=[id_])
        elif way == "add_documents":
            store.add_documents([Document("n", id=id_)])
        else:
            store.update_document(id_, Document("n"))
    assert held("a", "b", "n") == "bn"
    assert metadata_of(store, "1").keys() == {*REFERENCE_KEYS}
    assert metadata_of(store, "1")["kv_key"] == metadata_of(store, "2")["kv_key"]


@pytest.mark.parametrize("way", ["delete_collection", "reset_collection"])
def test_collection_that_goes_releases_everything(
    store: KVCacheChroma, held: Held, way: str
) -> None:
    store.add_texts([*"aab"])
    other = memory_store(engine=store.engine)
    other.add_texts([*"c"])
    getattr(store, way)()
    assert held(*"abc") == "c"
    if way == "reset_collection":
        store.add_texts(["d"])
        assert held(*"bcd") == "cd"


def test_what_another_engine_computed_is_left_to_it(store: KVCacheChroma, held: Held) -> None:
    store.add_texts(["a"], ids=["1"])
    raw: Any = access.collection(store)
    raw.collection.update(ids=["1"], metadatas=[{"kv_spec": "0" * 64}])
    store.delete(["1"])
    assert held("a") == "a"


# ---------------------------------------------------------------------- failures
def test_text_that_is_too_long_has_no_reference(
    store: KVCacheChroma, held: Held, prefilled: Count
) -> None:
    """So an indexing run that deletes old versions loses nothing by it."""
    long = "x" * 5000
    store.add_texts(["b"], [{"page": 1}], ["1"])
    with pytest.warns(UserWarning, match="row '1' written without a reference"):
        store.add_texts([long, "a"], [{}, {"page": 2}], ["1", "2"])
    with pytest.warns(UserWarning, match="row '2' written without a reference"):
        store.update_documents(["2"], [Document(long)])
    options: dict[str, Any] = {
        "collection_name": access.collection(store).name,
        "client": chromadb.EphemeralClient(),
        "engine": store.engine,
    }
    with pytest.warns(UserWarning, match="row '3' written without a reference"):
        KVCacheChroma.from_texts([long, "c"], Geometry(), ids=["3", "4"], **options)
    assert texts_of(store) == {"1": long, "2": long, "3": long, "4": "c"}
    assert [bool({*REFERENCE_KEYS} & {*metadata_of(store, id_)}) for id_ in "1234"] == [
        False, False, False, True
    ]  # fmt: skip
    assert (held("a", "b", "c"), prefilled()) == ("c", 3)


@pytest.mark.parametrize("cleanup", ["incremental", "full", "scoped_full"])
@pytest.mark.parametrize("why", ["too long", "no model"])
def test_law_an_indexing_run_keeps_what_cannot_be_prefilled(
    llm: ChatKVCache, cleanup: Any, why: str
) -> None:
    bare = memory_store()
    manager = InMemoryRecordManager("kv")
    manager.create_schema()
    options = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
    index([Document("old", metadata={"source": "s"})], manager, bare, **options)
    lost = ChatKVCache(model="nowhere/nothing")
    given: Any = {"llm": llm if why == "too long" else lost}
    store = memory_store(collection_name=access.collection(bare).name, **given)
    text = "x" * 5000 if why == "too long" else "new"
    with pytest.warns(UserWarning, match="written without a reference"):
        index([Document(text, metadata={"source": "s"})], manager, store, **options)
    assert [*texts_of(bare).values()] == [text]


@pytest.mark.parametrize("way", ["add_documents", "aadd_documents", "afrom_documents"])
async def test_documents_are_embedded_while_they_are_prefilled(
    llm: ChatKVCache, engine: Engine, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    meeting, compute = threading.Barrier(2), access.prefiller(engine).compute

    class Meeting(Geometry):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            meeting.wait(20)
            return super().embed_documents(texts)

    def computing(ids: Any) -> Any:
        meeting.wait(20)
        return compute(ids)

    monkeypatch.setattr(access.prefiller(engine), "compute", computing)
    store = memory_store(Meeting(), llm=llm)
    if way == "add_documents":
        store.add_documents(library())
    elif way == "aadd_documents":
        await store.aadd_documents(library())
    else:
        client = chromadb.EphemeralClient()
        store = await KVCacheChroma.afrom_documents(
            library(), Meeting(), client=client, collection_name=f"c-{uuid.uuid4().hex}", llm=llm
        )
    assert texts_of(store) == {one.id: one.page_content for one in library()}
    assert all(set(REFERENCE_KEYS) <= metadata_of(store, one).keys() for one in texts_of(store))


# ---------------------------------------------------------------------- filling up
def test_prefill_missing_fills_a_collection_of_the_stock_store(
    store: KVCacheChroma, llm: ChatKVCache, prefilled: Count
) -> None:
    name, client = access.collection(store).name, chromadb.EphemeralClient()
    Chroma(name, Geometry(), client=client).add_documents(library())
    before = store.similarity_search_with_score("red fox", k=9)
    store.add_texts(["added here"], ids=["g"])
    assert prefilled() == 1
    assert store.prefill_missing() == 6
    assert prefilled() == 6
    found = store.similarity_search_with_score("red fox", k=9)
    assert [one for one in found if one[0].id != "g"] == before
    assert all(set(REFERENCE_KEYS) <= set(metadata_of(store, id_)) for id_ in "abcdefg")
    (key,) = llm.engine.keys(["red fox"])
    assert llm.references.chunk("red fox", llm.engine) == StoredChunk(key, "red fox")
    assert (store.prefill_missing(), prefilled()) == (0, 0)


# ---------------------------------------------------------------------- several stores
def test_two_stores_over_one_collection(store: KVCacheChroma, engine: Engine, held: Held) -> None:
    other = memory_store(collection_name=access.collection(store).name, engine=engine)
    store.add_texts([*"ab"], ids=["1", "2"])
    other.add_texts(["a"], ids=["3"])
    store.delete(["1"])
    assert held(*"ab") == "ab"
    other.delete(["2", "3"])
    assert held(*"ab") == ""
    assert texts_of(store) == {}
    # A store made from another one's client prefills by its own engine.
    third = KVCacheChroma(access.collection(store).name, Geometry(), client=access.client(store))
    third.add_texts(["c"], ids=["4"])
    assert metadata_of(third, "4") == {}


def test_text_of_two_collections_is_a_miss_for_the_other(
    engine: Engine, held: Held, prefilled: Count
) -> None:
    one, two = memory_store(engine=engine), memory_store(engine=engine)
    one.add_texts([*"ab"])
    two.add_texts([*"bc"])
    one.delete()
    assert (held(*"abc"), prefilled()) == ("c", 3)
    assert two.prefill_missing() == 0, "its references are right"
    assert (held(*"abc"), prefilled()) == ("bc", 1)


def test_rows_of_the_other_framework(store: KVCacheChroma, prefilled: Count) -> None:
    sibling = pytest.importorskip("llama_index.kvcache_rag").KVCacheVectorStore
    schema = pytest.importorskip("llama_index.core.schema")
    raw: Any = access.collection(store)
    theirs = sibling(raw.collection, engine=store.engine)
    vector = Geometry().embed_query("Text.")
    theirs.add([schema.TextNode(id_="a", text="Text.", embedding=vector)])
    assert prefilled() == 1
    (found,) = store.similarity_search("Text.")
    assert found.page_content == "Text."
    assert not set(REFERENCE_KEYS) & set(found.metadata)
    store.add_texts(["Text.", "Mine."], ids=["b", "c"])
    assert prefilled() == 1
    assert sorted(node.get_content() for node in theirs.get_nodes()) == ["Mine.", "Text.", "Text."]


def test_folder_of_kv_outlives_the_process(
    tmp_path: Path, make_engine: Callable[..., Engine]
) -> None:
    def engine_of_today() -> Engine:
        return make_engine(store=DiskStore(tmp_path / "kv"))

    place = {"persist_directory": str(tmp_path / "chroma"), "embedding_function": Geometry()}
    one = KVCacheChroma("docs", engine=engine_of_today(), **place)
    one.add_texts(["First.", "Second."], ids=["a", "b"])
    engine = engine_of_today()
    two = KVCacheChroma("docs", engine=engine, **place)
    assert two.prefill_missing() == 0
    two.delete(["a"])
    engine.store.sweep()
    assert [engine.store.contains(key) for key in engine.keys(["First.", "Second."])] == [
        False,
        True,
    ]
