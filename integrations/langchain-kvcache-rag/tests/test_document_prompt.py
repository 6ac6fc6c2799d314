"""`document_prompt`: what of a document's metadata the model reads, and prefilling under it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import access
import chromadb
import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from store_helpers import Geometry, memory_store, metadata_of, new_name, survivors

from kvcache_rag import InvalidInputError
from langchain_kvcache_rag import (
    ChatKVCache,
    KVCacheChroma,
    KVCacheRAG,
    create_kvcache_rag_chain,
    document_block,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag import Engine

    Count = Callable[[], int]

PROMPT = PromptTemplate.from_template("{source}, page {page}: {page_content}")
DOCUMENTS = [
    Document("The cat sat.", id="a", metadata={"source": "cats", "page": 3}),
    Document("The dog ran.", id="b", metadata={"source": "dogs", "page": 1}),
]
TEXTS = ["cats, page 3: The cat sat.", "dogs, page 1: The dog ran."]
ASKED: Any = {"question": "Who sat?", "context": DOCUMENTS}


def cost(message: Any) -> tuple[int, int]:
    """Chunks that were found, and those that were not."""
    said = message.response_metadata["kv_cache"]
    return sum(said["hits"].values()), said["misses"]


# ---------------------------------------------------------------------- the question
def test_metadata_reaches_the_model(
    llm: ChatKVCache, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    real = engine.generate

    def generate(question: str, chunks: Any = (), **options: Any) -> Any:
        seen.append([getattr(chunk, "text", chunk) for chunk in chunks])
        return real(question, chunks, **options)

    monkeypatch.setattr(engine, "generate", generate)
    texts = [one.page_content for one in DOCUMENTS]
    plain = PromptTemplate.from_template("{page_content}")
    KVCacheRAG(llm, document_prompt=PROMPT).invoke(ASKED)
    KVCacheRAG(llm, document_prompt=plain).invoke(ASKED)
    KVCacheRAG(llm, document_prompt=PROMPT).invoke({**ASKED, "context": []})
    assert seen == [TEXTS, texts, []]
    assert document_block(DOCUMENTS[0], plain) == document_block(DOCUMENTS[0])


def test_a_document_without_its_metadata_is_named(llm: ChatKVCache) -> None:
    rag = KVCacheRAG(llm, document_prompt=PROMPT)
    bare: Any = {**ASKED, "context": [DOCUMENTS[0], Document("Text.", metadata={"page": 2})]}
    answered, refused = rag.batch([ASKED, bare], return_exceptions=True)
    assert answered.content
    with pytest.raises(InvalidInputError, match=r"'Text\.'.* no 'source' in its metadata"):
        raise refused


@pytest.mark.parametrize("wrong", ["{page_content}", ChatPromptTemplate([("human", "{page}")])])
def test_only_a_prompt_that_gives_a_text_will_do(llm: ChatKVCache, wrong: Any) -> None:
    for make in (
        lambda: KVCacheRAG(llm, document_prompt=wrong),
        lambda: memory_store(llm=llm, document_prompt=wrong),
        lambda: document_block(DOCUMENTS[0], wrong),
    ):
        with pytest.raises(InvalidInputError, match=r"document_prompt.*PromptTemplate"):
            make()


# ---------------------------------------------------------------------- ingestion
@pytest.fixture
def store(llm: ChatKVCache) -> KVCacheChroma:
    return memory_store(llm=llm, document_prompt=PROMPT)


def test_what_ingestion_prefilled_is_found(
    store: KVCacheChroma, llm: ChatKVCache, engine: Engine, prefilled: Count
) -> None:
    store.add_documents(DOCUMENTS)
    assert prefilled() == 2
    assert store.get()["documents"] == [one.page_content for one in DOCUMENTS]
    found = store.similarity_search("cat", k=2)
    assert {one.id: one.metadata for one in found} == {one.id: one.metadata for one in DOCUMENTS}
    start: Any = {"context": store.as_retriever(), "question": RunnablePassthrough()}
    message = (start | KVCacheRAG(llm, document_prompt=PROMPT)).invoke("Who sat?")
    assert cost(message) == (2, 0)
    chain = create_kvcache_rag_chain(store.as_retriever(), llm, document_prompt=PROMPT)
    told = chain.invoke({"input": "Who sat?"})
    assert told["answer"] == message.content
    assert sorted(told["context"], key=lambda one: one.id) == DOCUMENTS
    assert prefilled() == 0
    moved = Document("The cat sat.", metadata={"source": "cats", "page": 4})
    asked: Any = {**ASKED, "context": [moved, DOCUMENTS[1]]}
    assert cost(KVCacheRAG(llm, document_prompt=PROMPT).invoke(asked)) == (1, 1)


def test_every_way_of_writing_prefills_what_the_model_reads(
    store: KVCacheChroma, engine: Engine
) -> None:
    held = survivors(engine)
    store.add_documents(DOCUMENTS[:1])
    store.update_document("a", Document("New.", metadata={"source": "x", "page": 1}))
    assert held("x, page 1: New.", *TEXTS, "New.") == "x, page 1: New."
    vectors = Geometry().embed_documents(["Newer."])
    access.collection(store).update("a", vectors, documents=["Newer."])  # keeps its metadata
    assert held("x, page 1: New.", "x, page 1: Newer.") == "x, page 1: Newer."
    store.delete(["a"])
    assert held("x, page 1: Newer.") == ""


def test_rows_of_before_are_filled_under_it(
    llm: ChatKVCache, engine: Engine, prefilled: Count
) -> None:
    plain = memory_store(llm=llm)
    plain.add_documents(DOCUMENTS)
    before = metadata_of(plain, "a")
    name = access.collection(plain).name
    store = memory_store(llm=llm, collection_name=name, document_prompt=PROMPT)
    prefilled()
    assert store.prefill_missing() == 2
    assert prefilled() == 2
    (key, _) = engine.keys(TEXTS)
    assert metadata_of(store, "a")["kv_key"] == key.digest != before["kv_key"]


def test_a_row_without_its_metadata_is_refused_before_anything_is_written(
    store: KVCacheChroma, prefilled: Count
) -> None:
    with pytest.raises(InvalidInputError, match="'c' has no 'page' and no 'source'"):
        store.add_documents([DOCUMENTS[0], Document("Bare.", id="c")])
    assert (prefilled(), store.get()["ids"]) == (0, [])


def test_it_goes_along_to_other_stores(
    llm: ChatKVCache, prefilled: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"client": chromadb.EphemeralClient(), "llm": llm}
    made = KVCacheChroma.from_documents(
        DOCUMENTS, Geometry(), collection_name=new_name(), document_prompt=PROMPT, **options
    )
    assert prefilled() == 2
    made.reset_collection()
    made.add_documents(DOCUMENTS)
    assert prefilled() == 2
    raw: Any = access.collection(made).collection
    # A local database has no forks.
    monkeypatch.setattr(raw, "fork", lambda new_name: options["client"].create_collection(new_name))
    forked = made.fork(new_name())
    forked.add_documents(DOCUMENTS)
    for store in (made, forked):
        assert metadata_of(store, "a")["kv_key"] == llm.engine.keys(TEXTS)[0].digest
    assert prefilled() == 0


def test_metadata_that_changes_while_it_is_prefilled_gets_no_reference(
    store: KVCacheChroma, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw: Any = access.collection(store).collection
    vectors = Geometry().embed_documents(["The cat sat."])
    raw.add(["a"], vectors, [DOCUMENTS[0].metadata], ["The cat sat."])
    real = engine.add

    def add(*arguments: Any, **options: Any) -> Any:
        keys = real(*arguments, **options)
        raw.update(["a"], metadatas=[{"page": 9}])
        return keys

    with monkeypatch.context() as patch:
        patch.setattr(engine, "add", add)
        assert store.prefill_missing() == 0
    assert metadata_of(store, "a") == {"source": "cats", "page": 9}
    assert store.prefill_missing() == 1


# ---------------------------------------------------------------------- what changes
def told(rag: KVCacheRAG, *rounds: list[Document]) -> list[str]:
    """Warnings of one question per round."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for documents in rounds:
            rag.invoke({"question": "Who sat?", "context": documents})
    return [str(one.message) for one in found if "changes while the text" in str(one.message)]


def of_page(page: int, id_: str | None = "a", **metadata: Any) -> list[Document]:
    return [Document("The cat sat.", id=id_, metadata={"source": "cats", "page": page, **metadata})]


def test_a_field_that_changes_is_named_once(llm: ChatKVCache) -> None:
    rag = KVCacheRAG(llm, document_prompt=PROMPT)
    (message,) = told(rag, *(of_page(page) for page in range(4)))
    assert "field 'page'" in message
    assert "leave {page} out of document_prompt" in message
    assert told(rag, *(of_page(1, score=score) for score in range(4))) == [], "it is not written"
    assert told(rag, *(of_page(page, None) for page in range(4))) == []
    assert told(KVCacheRAG(llm), *(of_page(page) for page in range(4))) == []
