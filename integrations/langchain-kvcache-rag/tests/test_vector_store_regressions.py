"""What once went wrong: KV that outlived its rows, and calls that failed too late."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

import access
import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document
from store_helpers import Geometry, memory_store, metadata_of, survivors, texts_of

from kvcache_rag import InvalidInputError
from langchain_kvcache_rag.vector_store import KVCacheChroma

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcache_rag import Engine
    from langchain_kvcache_rag.chat_model import ChatKVCache

    Count = Callable[[], int]
    Held = Callable[..., str]


@pytest.fixture
def held(engine: Engine) -> Held:
    return survivors(engine)


@pytest.fixture
def store(llm: ChatKVCache) -> KVCacheChroma:
    return memory_store(llm=llm)


def stock(store: KVCacheChroma) -> Chroma:
    """The stock store over the same collection."""
    return Chroma(access.collection(store).name, Geometry(), client=chromadb.EphemeralClient())


# ---------------------------------------------------------------------- KV without rows
def test_threads_that_write_the_same_ids_leave_no_kv_behind(
    store: KVCacheChroma, engine: Engine
) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(15):
                store.add_texts([f"{number} {turn % 4}", "shared"], ids=["1", "2"])
                if turn % 2:
                    store.delete(["1", "2"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
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


@pytest.mark.parametrize("has_references", [True, False])
def test_row_deleted_while_missing_ones_are_prefilled(
    store: KVCacheChroma,
    engine: Engine,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
    has_references: bool,
) -> None:
    (store if has_references else stock(store)).add_texts([*"ab"], ids=["1", "2"])
    add = engine.add

    def deleting(*args: Any, **options: Any) -> Any:
        store.delete(["1"])
        return add(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "add", deleting)
        store.prefill_missing()
    assert (texts_of(store), held(*"ab")) == ({"2": "b"}, "b")


def test_prefill_missing_that_cannot_write_is_tried_again(
    store: KVCacheChroma, held: Held, prefilled: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock(store).add_texts([*"ab"])

    def fails(**_: Any) -> None:
        raise chromadb.errors.InternalError("disk full")

    raw: Any = access.collection(store)
    with monkeypatch.context() as patch:
        patch.setattr(raw.collection, "update", fails)
        with pytest.raises(chromadb.errors.InternalError, match="disk full"):
            store.prefill_missing()
    assert store.prefill_missing() == 2
    assert (held(*"ab"), prefilled()) == ("ab", 2)


def test_picture_in_the_place_of_a_text_releases_it(
    llm: ChatKVCache, held: Held, prefilled: Count, tmp_path: Path
) -> None:
    class Pictures(Geometry):
        def embed_image(self, uris: list[str]) -> list[list[float]]:
            return [[1.0, 0.0, 0.0, 0.0, 0.0] for _ in uris]

    picture = tmp_path / "picture.png"
    picture.write_bytes(b"x")
    store = memory_store(Pictures(), llm=llm)
    store.add_texts([*"ab"], ids=["1", "2"])
    made: list[Any] = ["1", None]
    assert store.add_images([str(picture)] * 2, ids=made)[0] == "1"
    assert (held(*"ab"), prefilled()) == ("b", 2)
    assert metadata_of(store, "1") == {}


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


# ---------------------------------------------------------------------- too late
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
    ],
)
def test_what_chroma_cannot_store_is_known_before_prefilling(
    store: KVCacheChroma, prefilled: Count, text: str, metadata: Any, id_: Any, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        store.add_texts(["first", text], [{}, metadata], ["0", id_])
    assert (texts_of(store), prefilled()) == ({}, 0)


def test_document_that_is_no_text(store: KVCacheChroma, prefilled: Count) -> None:
    documents: list[Any] = ["a", None]
    with pytest.raises(InvalidInputError, match="the document of '2' must be a text, not None"):
        access.collection(store).upsert(["1", "2"], [[1.0, 2.0]] * 2, documents=documents)
    assert prefilled() == 0


def test_row_that_is_too_long_is_named(store: KVCacheChroma) -> None:
    stock(store).add_texts(["", "a", "x" * 5000], ids=["first", "second", "third"])
    with pytest.warns(UserWarning, match=r"row 'third' written without .* 50.. tokens"):
        assert store.prefill_missing() == 1
    with pytest.warns(UserWarning, match="row 'fourth' written without"):
        store.add_texts(["", "y" * 5000], ids=["0", "fourth"])


# ---------------------------------------------------------------------- surprises
def test_metadata_under_the_names_of_references_is_not_lost(store: KVCacheChroma) -> None:
    with pytest.raises(InvalidInputError, match=r"'kv_key', which is where .* rename"):
        store.add_texts(["a"], [{"kv_key": "mine"}])
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


def test_engine_must_be_one() -> None:
    wrong: Any = "Qwen/Qwen2.5-0.5B-Instruct"
    with pytest.raises(InvalidInputError, match=r"must be a kvcache_rag.Engine, not a str"):
        memory_store(engine=wrong)


def test_constructor_has_the_parameters_of_the_stock_store() -> None:
    ours, theirs = (inspect.signature(one).parameters for one in (KVCacheChroma, Chroma))
    defaults = {name: one.default for name, one in ours.items()}
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {name: (one.default, one.kind) for name, one in theirs.items()} == {
        name: (defaults[name], ours[name].kind) for name in theirs
    }
