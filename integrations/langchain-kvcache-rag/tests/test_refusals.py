"""What cannot be used is told in one sentence, and what is not read is not taken silently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from store_helpers import memory_store

from kvcache_rag import InvalidInputError
from langchain_kvcache_rag import (
    ChatKVCache,
    HashEmbeddings,
    KVCacheChroma,
    KVCacheRAG,
    document_block,
)

if TYPE_CHECKING:
    from collections.abc import Callable


NONE: Any = RunnableLambda(lambda messages: messages)
DOCUMENTS = [Document("The cat sat on the mat."), Document("A dog ran away.")]
TURNS = [("human", "Hello."), ("ai", "Good day.")]


def rag(**fields: Any) -> KVCacheRAG:
    return KVCacheRAG(NONE, **fields)


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (KVCacheChroma, "persist_dirctory", "did you mean persist_directory?"),
        (KVCacheChroma, "options", "leave it out"),
        (HashEmbeddings, "dimension", "did you mean dimensions?"),
        (rag, "doc_prompt", "did you mean document_prompt?"),
        (rag, "policy", "say it by ChatKVCache(policy=...)"),
    ],
)
def test_of_the_others(make: Callable[..., Any], given: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{given} is no argument of ") as told:
        make(**{given: 3})
    assert str(told.value).endswith(f"; {said}")


def test_what_is_no_document(llm: ChatKVCache) -> None:
    with pytest.raises(InvalidInputError, match=r"not a str; give Document\(text\)$"):
        document_block("a text")
    for one in (DOCUMENTS[0], "a text"):
        with pytest.raises(InvalidInputError, match="takes a list of documents"):
            llm.prefill(one)  # type: ignore[arg-type]  # what is refused
    with pytest.raises(InvalidInputError, match=r"not a int; give one such as a retriever gives$"):
        llm.prefill([3])  # type: ignore[list-item]  # likewise


def test_earlier_turns_under_another_name_are_told(llm: ChatKVCache) -> None:
    chain, asked = KVCacheRAG(llm), {"question": "Who sat?", "context": DOCUMENTS}
    with pytest.warns(UserWarning, match="does not read 'history'; give .* \"chat_history\"$"):
        chain.invoke({**asked, "history": TURNS})
    # Else not a word: warnings are errors here.
    more: list[dict[str, Any]] = [
        {"history": []},
        {"history_id": "7", "chat_id": 3, "output": "?"},
        {"history": TURNS, "chat_history": TURNS},
    ]
    for one in more:
        chain.invoke({**asked, **one})


def test_an_id_that_is_not_unicode_is_told(llm: ChatKVCache) -> None:
    with pytest.raises(InvalidInputError, match="is not valid Unicode"):
        memory_store(llm=llm).get_by_ids(["A \ud800 cat."])
