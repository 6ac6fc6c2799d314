"""Scores of rerankers reach the engine, in single answers as in batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage

from langchain_kvcache_rag import KVCacheRAG, document_block
from langchain_kvcache_rag.messages import Grounded, read_messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag import Engine
    from langchain_kvcache_rag import ChatKVCache

TEXTS = ["The cat sat.", "A dog ran away from home.", "It rained for three long days."]
SCORES = (0.1, 0.2, 0.9)


def documents(scores: Sequence[Any], name: str = "relevance_score") -> list[Document]:
    return [
        Document(text, metadata={} if score is None else {name: score})
        for text, score in zip(TEXTS, scores, strict=True)
    ]


def asked(scores: Sequence[Any], question: str = "Who sat?") -> Any:
    return {"question": question, "context": documents(scores)}


def read(found: Sequence[Document]) -> Any:
    blocks: list[Any] = [document_block(document) for document in found]
    asks = read_messages([HumanMessage([*blocks, {"type": "text", "text": "Who?"}])], "")
    assert isinstance(asks, Grounded)
    return asks.scores


@pytest.mark.parametrize(
    "scores",
    [(0.1, None, 0.9), (0.1, math.nan, 0.9), (0.1, "0.2", 0.9), (0.1, True, 0.9), (None,) * 3],
)
def test_scores_count_where_every_document_has_one(scores: Sequence[Any]) -> None:
    assert read(documents(scores)) is None
    assert read(documents(SCORES)) == SCORES
    assert read(documents((1, 2, 3))) == (1.0, 2.0, 3.0)


def test_what_may_be_a_distance_is_no_score() -> None:
    assert read(documents(SCORES, "score")) is None


def test_of_equal_documents_the_highest_counts_and_empty_ones_do_not() -> None:
    empty = Document(" ", metadata={"relevance_score": 3.0})
    assert read([*documents(SCORES), empty, *documents((0.5, 0.1, 0.1))]) == (0.5, 0.2, 0.9)
    assert read([*documents(SCORES), Document(" ")]) == SCORES


async def test_a_batch_has_scores_of_each_question(llm: ChatKVCache) -> None:
    rag = KVCacheRAG(llm=llm)
    every = [asked(SCORES), asked((None,) * 3), asked((0.1, 0.9, 0.2), "Who ran?")]
    singles = [rag.invoke(one, policy="bestlast") for one in every]
    fresh = [one.response_metadata["kv_cache"]["fresh_tokens"] for one in singles]
    assert len(set(fresh)) == 3, "it must be able to fail"
    for batch in (rag.batch(every, policy="bestlast"), await rag.abatch(every, policy="bestlast")):
        assert [one.content for one in batch] == [one.content for one in singles]
        assert [one.response_metadata["kv_cache"]["fresh_tokens"] for one in batch] == fresh


def test_with_another_policy_nothing_moves(llm: ChatKVCache, engine: Engine) -> None:
    found = KVCacheRAG(llm=llm).invoke(asked(SCORES))
    assert found.content == engine.generate("Who sat?", TEXTS, max_new_tokens=6).text


@pytest.mark.filterwarnings("ignore:chat template or tokenizer")  # the reader writes JSON
def test_scores_of_documents_count_beside_tools_too(llm: ChatKVCache) -> None:
    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}

    def fresh(scores: Sequence[Any]) -> int:
        blocks: list[Any] = [document_block(document) for document in documents(scores)]
        asks = [HumanMessage([*blocks, {"type": "text", "text": "Who sat?"}])]
        said = llm.bind_tools([tool]).invoke(asks, policy="bestlast", max_new_tokens=2)
        return int(said.response_metadata["kv_cache"]["fresh_tokens"])

    first, last = fresh((0.9, 0.2, 0.1)), fresh((0.1, 0.2, 0.9))
    assert first < last, (
        "the best document is computed with the question: the shortest, the longest"
    )
    assert fresh((None,) * 3) == first, "the first is the best where nothing says so"


def test_documents_of_the_last_question_are_the_best(llm: ChatKVCache, engine: Engine) -> None:
    first, *found = documents((None,) * 3)
    asked_before = [HumanMessage([document_block(first), {"type": "text", "text": "Who sat?"}])]
    history = [*asked_before, AIMessage("The cat.")]
    given = {"question": "Who ran?", "context": found, "chat_history": history}
    said = KVCacheRAG(llm=llm).invoke(given, policy="bestlast")
    fresh = [len(chunk) for chunk in engine.tokenize("?", TEXTS).chunks]
    assert said.response_metadata["kv_cache"]["fresh_tokens"] == fresh[1]
