"""Chains are copied and sent: every public object, opened and used before."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough
from sending import Row, check_elsewhere, check_here

import langchain_kvcache_rag
from kvcache_rag import InvalidInputError
from langchain_kvcache_rag import (
    ChatKVCache,
    HashEmbeddings,
    KVCacheChroma,
    KVCacheRAG,
    create_kvcache_rag_chain,
    document_block,
)

if TYPE_CHECKING:
    from kvcache_rag import Engine

TEXTS = ["The Mobrit costs 412 euros.", "It is painted red."]
QUESTION = "What does the Mobrit cost?"
ASKED = {"question": QUESTION, "context": [Document(text) for text in TEXTS]}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    llm = ChatKVCache(model="tiny", max_tokens=4)
    store = KVCacheChroma(
        "docs",
        HashEmbeddings(),
        persist_directory=str(tmp_path_factory.mktemp("chroma")),
        llm=llm,
    )
    store.add_texts(TEXTS)
    rag = KVCacheRAG(llm=llm)
    start: Any = {"context": store.as_retriever(), "question": RunnablePassthrough()}
    whole = create_kvcache_rag_chain(store.as_retriever(), llm)
    answered = rag.invoke(ASKED)
    asked = f"value.invoke({QUESTION!r})"
    # Asked of an object that another process has read, it opens the database and loads the model.
    return {
        "ChatKVCache": Row(lambda: llm, f"{asked}.content"),
        "HashEmbeddings": Row(HashEmbeddings, f"value.embed_query({QUESTION!r})"),
        "KVCacheChroma": Row(lambda: store, "sorted(value.get()['documents'])"),
        "KVCacheRAG": Row(
            lambda: rag, f"value.invoke(pickle.loads({pickle.dumps(ASKED)!r})).content"
        ),
        "create_kvcache_rag_chain": Row(
            lambda: whole, f"value.invoke({{'input': {QUESTION!r}}})['answer']"
        ),
        "document_block": Row(lambda: document_block(Document(TEXTS[0], id="a"))),
        "a chain": Row(lambda: start | rag | StrOutputParser(), asked),
        "a bound model": Row(lambda: llm.bind(stop=["."]), f"{asked}.content"),
        "a model with tools": Row(lambda: llm.bind_tools([_find]), "value.kwargs"),
        "a retriever": Row(store.as_retriever, f"[one.page_content for one in {asked}]"),
        "an answer": Row(lambda: answered),
        "a store in memory": Row(
            lambda: KVCacheChroma.from_texts(TEXTS, HashEmbeddings(), llm=llm),
            "sorted(value.get()['documents'])",
            refused="in memory.*cannot be pickled",
        ),
    }


def _find(name: str) -> str:
    """Find something by its name."""
    return name


OTHERS = (
    *("a bound model", "a chain", "a model with tools", "a retriever"),
    *("a store in memory", "an answer"),
)


def test_every_public_name_has_a_row(rows: dict[str, Row]) -> None:
    assert sorted(rows) == sorted([*langchain_kvcache_rag.__all__, *OTHERS])


@pytest.mark.parametrize("name", [*langchain_kvcache_rag.__all__, *OTHERS])
def test_it_is_copied_and_pickled_or_says_why_not(name: str, rows: dict[str, Row]) -> None:
    check_here(rows[name])
    deep = getattr(rows[name].made(), "model_copy", None)
    if deep is not None:
        assert rows[name].says(deep(deep=True)) == rows[name].says(rows[name].made())


def test_in_another_process_it_answers_the_same(rows: dict[str, Row]) -> None:
    check_elsewhere(rows)


def test_a_copy_shares_the_engine_and_no_settings() -> None:
    llm = ChatKVCache(model="tiny", generate_kwargs={"num_beams": 1}, stop=["a"])
    chain = KVCacheRAG(llm=llm)
    other: Any = copy.deepcopy(chain)
    assert other.llm.engine is llm.engine
    other.llm.generate_kwargs["num_beams"] = 2
    other.llm.stop.append("b")
    assert (llm.generate_kwargs, llm.stop) == ({"num_beams": 1}, ["a"])


@pytest.mark.parametrize("what", ["chat model", "store"])
def test_what_holds_a_given_engine_says_so(what: str, engine: Engine, tmp_path: Any) -> None:
    given: Any = KVCacheRAG(llm=ChatKVCache(engine=engine))
    if what == "store":
        given = KVCacheChroma(
            "docs", HashEmbeddings(), persist_directory=str(tmp_path), engine=engine
        ).as_retriever()
    assert copy.deepcopy(given) is not None
    with pytest.raises(InvalidInputError, match=r"engine.*cannot be pickled"):
        pickle.dumps(given)
