"""Scores of nodes reach the engine, wherever nodes become chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index.kvcache_rag import KVCacheQueryEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.schema import QueryBundle

    from kvcache_rag import Engine
    from llama_index.kvcache_rag import HashEmbedding, KVCacheLLM

TEXTS = [
    "The lighthouse keeper is called Marlow.",
    "The bakery sells bread made of rye flour every day.",
    "The harbour was built in 1911, and rebuilt in 1934 by the town.",
]
QUESTION = "Who keeps the lighthouse?"
SCORES = (0.1, 0.2, 0.9)


def nodes(scores: Sequence[Any]) -> list[NodeWithScore]:
    """Nodes in the order of the texts; pydantic lets every number be a score."""
    return [
        NodeWithScore(node=TextNode(text=text), score=score)
        for text, score in zip(TEXTS, scores, strict=True)
    ]


class Fixed(BaseRetriever):
    """Finds the same nodes for everything, in an order that says nothing."""

    def __init__(self, scores: Sequence[Any]) -> None:
        self._scores = scores
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return nodes(self._scores)


@pytest.fixture
def fresh(engine: Engine) -> list[int]:
    """Fresh tokens where each of the texts is the best."""
    return [len(chunk) for chunk in engine.tokenize("?", TEXTS).chunks]


def cost(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response.metadata["kv_cache"]
    return found


@pytest.mark.parametrize(("scores", "best"), [(SCORES, 2), ((0.1, None, 0.9), 0)])
@pytest.mark.parametrize("streaming", [False, True])
def test_where_llama_index_packs_the_nodes_too(
    engine: Engine, fresh: list[int], scores: Any, best: int, streaming: bool
) -> None:
    from llama_index.kvcache_rag import KVCacheLLM

    llm = KVCacheLLM(engine=engine, max_new_tokens=6, policy="bestlast")
    packs = get_response_synthesizer(llm=llm, response_mode="compact", streaming=streaming)  # type: ignore[arg-type]  # its names are an enum of texts
    response = RetrieverQueryEngine(Fixed(scores), response_synthesizer=packs).query(QUESTION)
    assert str(response)
    assert cost(response)["fresh_tokens"] == fresh[best]


@pytest.mark.parametrize(("scores", "best"), [(SCORES, 2), ((0.1, None, 0.9), 0)])
def test_in_messages_that_an_app_wrote_too(
    engine: Engine, fresh: list[int], scores: Any, best: int
) -> None:
    from llama_index.kvcache_rag import KVCacheLLM

    llm = KVCacheLLM(engine=engine, max_new_tokens=6, policy="bestlast")
    found = "\n\n".join(one.node.get_content() for one in Fixed(scores).retrieve(QUESTION))
    response = llm.chat([ChatMessage(role="user", content=f"{found}\n\n{QUESTION}")])
    raw: Any = response.raw
    assert raw["kv_cache"]["fresh_tokens"] == fresh[best]


def test_what_a_vector_store_found_is_best_first(
    llm: KVCacheLLM, embedding: HashEmbedding, engine: Engine
) -> None:
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in TEXTS], embed_model=embedding
    )
    asking = KVCacheQueryEngine.from_index(index, llm, similarity_top_k=3, policy="bestlast")
    response = asking.query(QUESTION)
    best = response.source_nodes[0].node.get_content()
    assert cost(response)["fresh_tokens"] == len(engine.tokenize("?", [best]).chunks[0])
