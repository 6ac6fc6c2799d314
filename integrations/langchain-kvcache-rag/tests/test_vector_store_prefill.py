"""What ingestion prefills, what it notes beside the rows, and what deletion lets go of."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import access
import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index
from store_helpers import (
    Geometry,
    library,
    memory_store,
    metadata_of,
    new_name,
    survivors,
    texts_of,
)

from kvcache_rag import InvalidInputError
from kvcache_rag.generation import StoredChunk
from kvcache_rag.integration import REFERENCE_KEYS, References
from langchain_kvcache_rag.chat_model import ChatKVCache
from langchain_kvcache_rag.vector_store import KVCacheChroma

if TYPE_CHECKING:
    from collections.abc import Callable

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
    reader = memory_store(collection_name=access.collection(writer).name, llm=llm)
    assert llm.references.chunk("Text.", engine) == "Text."
    READS[name](reader)
    (key,) = engine.keys(["Text."])
    assert llm.references.chunk("Text.", engine) == StoredChunk(key, "Text.")
    assert llm.references.chunk("Text!", engine) == "Text!"
    assert prefilled() == 1


def test_without_engine_rows_have_no_reference(store: KVCacheChroma) -> None:
    store.add_texts(["Old."], [{"page": 1}], ids=["a"])
    bare = memory_store(collection_name=access.collection(store).name)
    assert bare.get_by_ids(["a"]) == [Document("Old.", id="a", metadata={"page": 1})]
    bare.add_texts(["New."], ids=["a"])
    assert metadata_of(bare, "a") == {}
    with pytest.raises(InvalidInputError, match="llm= or engine="):
        bare.prefill_missing()


def test_collection_without_references_needs_no_model() -> None:
    class Unloaded:
        references = References()

        @property
        def engine(self) -> Engine:
            raise AssertionError("the model was loaded")

    llm: Any = Unloaded()
    store = memory_store(llm=llm)
    name, client = access.collection(store).name, chromadb.EphemeralClient()
    Chroma(name, Geometry(), client=client).add_documents(library())
    assert len(store.similarity_search("red fox", k=9)) == 6
    store.delete(["a"])
    store.delete(where={"year": 2})
    store.delete()
    store.reset_collection()
    store.delete_collection()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"llm": ChatKVCache(model="x"), "engine": "y"}, "not both"),
        ({"llm": "gpt-7"}, "must be a ChatKVCache, not a str"),
        ({"engine": "Qwen/Qwen2.5-0.5B"}, r"must be a kvcache_rag.Engine, not a str"),
    ],
)
def test_what_prefills_is_said_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        memory_store(**options)


# ---------------------------------------------------------------------- progress
def test_progress_is_shown_where_it_is_wanted(
    engine: Engine, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache_rag.progress._PAUSE", 0.0)  # lines of what is soon over, too

    def shown() -> bool:
        return "prefill" in capfd.readouterr().err

    store, loud = memory_store(engine=engine), memory_store(engine=engine, show_progress=True)
    store.add_documents([Document("One.")])
    assert not shown()
    store.add_documents([Document("Two.")], show_progress=True)
    assert shown()
    store.add_texts(["Three."], show_progress=True)
    assert shown()
    loud.add_texts(["Four."])
    assert shown()
    loud.add_texts(["Five."], show_progress=False)
    assert not shown()
    engine.store.delete(engine.keys(["Four."])[0])
    assert (loud.prefill_missing(show_progress=False), shown()) == (0, False)
    engine.store.delete(engine.keys(["Four."])[0])
    assert (loud.prefill_missing(), shown()) == (0, True)


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


def test_an_indexing_run_prefills_what_is_new_and_deletes_the_old(
    store: KVCacheChroma, prefilled: Count
) -> None:
    manager = InMemoryRecordManager("kv")
    manager.create_schema()
    options: Any = {"cleanup": "incremental", "source_id_key": "source", "key_encoder": "sha256"}

    def run(*texts: str) -> list[int]:
        documents = [Document(text, metadata={"source": "file"}) for text in texts]
        done: Any = index(documents, manager, store, **options)
        return [done[f"num_{what}"] for what in ("added", "deleted", "skipped")] + [prefilled()]

    assert run("one", "two", "three") == [3, 0, 0, 3]
    assert run("one", "2", "three") == [1, 1, 2, 1]
    assert sorted(texts_of(store).values()) == ["2", "one", "three"]


# ---------------------------------------------------------------------- failures
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
        of: Any = {"client": chromadb.EphemeralClient(), "collection_name": new_name(), "llm": llm}
        store = await KVCacheChroma.afrom_documents(library(), Meeting(), **of)
    assert texts_of(store) == {one.id: one.page_content for one in library()}
    assert all(set(REFERENCE_KEYS) <= metadata_of(store, one).keys() for one in texts_of(store))


# ---------------------------------------------------------------------- filling up
def test_prefill_missing_fills_a_collection_of_the_stock_store(
    store: KVCacheChroma, llm: ChatKVCache, prefilled: Count
) -> None:
    name, client = access.collection(store).name, chromadb.EphemeralClient()
    Chroma(name, Geometry(), client=client).add_documents(library())
    before = store.similarity_search_with_score("red fox", k=9)
    assert (store.prefill_missing(), prefilled()) == (6, 6)
    assert store.similarity_search_with_score("red fox", k=9) == before
    assert all(set(REFERENCE_KEYS) <= set(metadata_of(store, id_)) for id_ in "abcdef")
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


# ---------------------------------------------------------------------- what went wrong once
def stock(store: KVCacheChroma) -> Chroma:
    """The stock store over the same collection."""
    return Chroma(access.collection(store).name, Geometry(), client=chromadb.EphemeralClient())


def test_threads_that_write_the_same_ids_leave_no_kv_behind(
    store: KVCacheChroma, engine: Engine
) -> None:
    def work(number: int) -> None:
        for turn in range(15):
            store.add_texts([f"{number} {turn % 4}", "shared"], ids=["1", "2"])
            if turn % 2:
                store.delete(["1", "2"])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    kept: Any = engine.store
    raw: Any = access.collection(store)
    texts = ["shared", *(f"{number} {turn}" for number in range(6) for turn in range(4))]
    held = {key.digest for key in engine.keys(texts) if kept.contains(key)}
    assert held <= {one["kv_key"] for one in raw.collection.get()["metadatas"]}


def test_delete_that_fails_midway_releases_what_is_gone(
    engine: Engine, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Any = access.client(access.collection(memory_store()))
    monkeypatch.setattr(server, "get_max_batch_size", lambda: 2)
    store = memory_store(engine=engine)
    store.add_texts([*"abcd"], ids=[*"1234"])
    raw: Any = access.collection(store)
    delete, calls = raw.collection.delete, []

    def second_fails(**which: Any) -> None:
        calls.append(which)
        if len(calls) == 2:
            raise chromadb.errors.InternalError("disk full")
        delete(**which)

    with monkeypatch.context() as patch:
        patch.setattr(raw.collection, "delete", second_fails)
        with pytest.raises(chromadb.errors.InternalError, match="disk full"):
            store.delete([*"1234"])
    assert (texts_of(store), held(*"abcd")) == ({"3": "c", "4": "d"}, "cd")
    store.delete([*"1234"])
    assert held(*"abcd") == ""


def test_row_deleted_while_its_update_is_prefilled_stays_deleted(
    store: KVCacheChroma, engine: Engine, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_texts([*"ab"], ids=["1", "2"])
    add = engine.add

    def deleting(*args: Any, **options: Any) -> Any:
        store.delete(["1"])
        return add(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "add", deleting)
        store.update_documents(["1", "2"], [Document("c"), Document("d")])
    assert texts_of(store) == {"2": "d"}
    assert held(*"abcd") == "d"


def test_vectors_of_another_size_write_nothing(store: KVCacheChroma, engine: Engine) -> None:
    stock(store).add_texts(["a"])
    other = memory_store(
        Geometry({"b": [1.0, 2.0]}), collection_name=access.collection(store).name, engine=engine
    )
    with pytest.raises(chromadb.errors.InvalidArgumentError, match="dimension"):
        other.add_texts(["b"])
    assert [*texts_of(store).values()] == ["a"]


def test_embedding_of_chroma_itself_fails_before_prefilling(
    engine: Engine, prefilled: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Offline:
        def embed_query(self, **_: Any) -> None:
            raise OSError("no download today")

        __call__ = embed_query

    store = KVCacheChroma("plain", client=chromadb.EphemeralClient(), engine=engine)
    raw: Any = access.collection(store)
    monkeypatch.setattr(raw.collection, "_embedding_function", Offline())
    with pytest.raises(OSError, match="no download today"):
        store.add_texts(["a"])
    assert prefilled() == 0


@pytest.mark.parametrize(
    ("text", "metadata", "id_", "message"),
    [
        ("a", {}, 1, "an id must be a text that is not empty, not 1"),
        ("a", {}, "", "an id must be a text"),
        ("a", {}, "\ud800", "the id .* is not valid Unicode"),
        ("\udfff a", {}, "1", "the document of '1' is not valid Unicode"),
        ("a", {"x": "\ud800"}, "1", "'x': .* in the metadata of '1' cannot be stored"),
        ("a", {"x": ["y", "\ud800"]}, "1", "cannot be stored"),
        ("a", {"": 1}, "1", "keys must not be empty"),
        ("a", [("x", 1)], "1", "the metadata of '1' must be a dictionary"),
        ("a", {"kv_key": "mine"}, "1", "'kv_key', which is where .* rename"),
        (None, {}, "1", "the document of '1' must be a text, not None"),
    ],
)
def test_what_chroma_cannot_store_is_known_before_prefilling(
    store: KVCacheChroma, prefilled: Count, text: Any, metadata: Any, id_: Any, message: str
) -> None:
    vectors, texts = [[1.0, 2.0]] * 2, ["first", text]
    with pytest.raises(InvalidInputError, match=message):
        access.collection(store).upsert(["0", id_], vectors, [{}, metadata], texts)
    assert (texts_of(store), prefilled()) == ({}, 0)


def test_metadata_like_that_of_references_is_not_lost(store: KVCacheChroma) -> None:
    store.add_texts(["a"], [{"kv_source": "mine"}], ["1"])
    stock(store).add_texts(["b"], [{"kv_text": "mine"}], ["2"])
    found = {one.id: one.metadata for one in store.get_by_ids(["1", "2"])}
    assert found == {"1": {"kv_source": "mine"}, "2": {"kv_text": "mine"}}
    # What the stock store read, references and all, can be added as it is.
    read = stock(store).get_by_ids(["1"])
    assert set(read[0].metadata) > {"kv_key"}
    store.add_documents(read)
    assert store.get_by_ids(["1"])[0].metadata == {"kv_source": "mine"}


def test_limit_of_a_delete(store: KVCacheChroma) -> None:
    store.add_texts([*"abc"], [{"x": 1}] * 3, [*"123"])
    with pytest.raises(InvalidInputError, match="limit= needs where="):
        store.delete(["1", "2"], limit=1)
    assert len(texts_of(store)) == 3
    store.delete(["1", "2"], where={"x": 1}, limit=1)
    assert len(texts_of(store)) == 2


def test_constructor_has_the_parameters_of_the_stock_store() -> None:
    ours, theirs = (inspect.signature(one).parameters for one in (KVCacheChroma, Chroma))
    defaults = {name: one.default for name, one in ours.items()}
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {name: (one.default, one.kind) for name, one in theirs.items()} == {
        name: (defaults[name], ours[name].kind) for name in theirs
    }
