"""LangChain keeps what every framework promises (`contracts_frameworks`)."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from contracts_frameworks import (
    AnswersContract,
    CopiesContract,
    ObjectsContract,
    RerankContract,
    RowsContract,
)
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough
from langchain_framework import LangChain, add
from sending import Row

import langchain_kvcache_rag
from kvcache_rag import InvalidInputError
from langchain_kvcache_rag import (
    ChatKVCache,
    HashEmbeddings,
    KVCacheChroma,
    KVCacheRAG,
    KVCacheRerank,
    create_kvcache_rag_chain,
    document_block,
)

if TYPE_CHECKING:
    from pathlib import Path
    from typing import ClassVar

    from kvcache_rag import Engine


class TestAnswers(AnswersContract):
    framework = LangChain()


class TestRows(RowsContract):
    framework = LangChain()


class TestRerank(RerankContract):
    framework = LangChain()


class TestObjects(ObjectsContract):
    framework = LangChain()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    texts = ["The Mobrit costs 412 euros.", "It is painted red."]
    question = "What does the Mobrit cost?"
    asked: Any = {"question": question, "context": [Document(text) for text in texts]}
    llm = ChatKVCache(model="tiny", max_tokens=4)
    folder = str(tmp_path_factory.mktemp("chroma"))
    store = KVCacheChroma("docs", HashEmbeddings(), persist_directory=folder, llm=llm)
    store.add_texts(texts)
    rag = KVCacheRAG(llm=llm)
    start: Any = {"context": store.as_retriever(), "question": RunnablePassthrough()}
    whole = create_kvcache_rag_chain(store.as_retriever(), llm)
    answered = rag.invoke(asked)
    says = f"value.invoke({question!r})"
    # Asked of an object that another process has read, it opens the database and loads the
    # model.
    return {
        "ChatKVCache": Row(lambda: llm, f"{says}.content"),
        "HashEmbeddings": Row(HashEmbeddings, f"value.embed_query({question!r})"),
        "KVCacheChroma": Row(lambda: store, "sorted(value.get()['documents'])"),
        "KVCacheRAG": Row(
            lambda: rag, f"value.invoke(pickle.loads({pickle.dumps(asked)!r})).content"
        ),
        "KVCacheRerank": Row(
            lambda: KVCacheRerank(llm=llm),
            "[one.page_content for one in value.compress_documents("
            f"pickle.loads({pickle.dumps(asked['context'])!r}), {question!r})]",
        ),
        "create_kvcache_rag_chain": Row(
            lambda: whole, f"value.invoke({{'input': {question!r}}})['answer']"
        ),
        "document_block": Row(lambda: document_block(Document(texts[0], id="a"))),
        "a chain": Row(lambda: start | rag | StrOutputParser(), says),
        "a bound model": Row(lambda: llm.bind(stop=["."]), f"{says}.content"),
        "a model with tools": Row(lambda: llm.bind_tools([add]), "value.kwargs"),
        "a retriever": Row(store.as_retriever, f"[one.page_content for one in {says}]"),
        "an answer": Row(lambda: answered),
        "a store in memory": Row(
            lambda: KVCacheChroma.from_texts(texts, HashEmbeddings(), llm=llm),
            "sorted(value.get()['documents'])",
            refused="in memory.*cannot be pickled",
        ),
    }


class TestCopies(CopiesContract):
    names: ClassVar[list[str]] = [
        *langchain_kvcache_rag.__all__,
        *("a bound model", "a chain", "a model with tools", "a retriever"),
        *("a store in memory", "an answer"),
    ]

    def test_a_deep_copy_of_pydantic_says_the_same(self, rows: dict[str, Row]) -> None:
        for row in rows.values():
            deep = getattr(row.made(), "model_copy", None)
            if deep is not None:
                assert row.says(deep(deep=True)) == row.says(row.made())

    def test_a_copy_of_a_chain_shares_the_engine(self) -> None:
        chain = KVCacheRAG(llm=ChatKVCache(model="tiny", stop=["a"]))
        other: Any = copy.deepcopy(chain)
        assert other.llm.engine is chain.llm.engine
        other.llm.stop.append("b")
        assert chain.llm.stop == ["a"]

    def test_what_holds_a_given_engine_says_so(self, engine: Engine, tmp_path: Path) -> None:
        folder = str(tmp_path)
        store = KVCacheChroma("docs", HashEmbeddings(), persist_directory=folder, engine=engine)
        for one in (KVCacheRAG(llm=ChatKVCache(engine=engine)), store.as_retriever()):
            assert copy.deepcopy(one) is not None
            with pytest.raises(InvalidInputError, match=r"engine.*cannot be pickled"):
                pickle.dumps(one)
