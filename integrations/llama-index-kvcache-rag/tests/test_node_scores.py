"""Scores of nodes reach the engine, wherever nodes become chunks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, MessageRole, ToolCallBlock
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode

from kvcache_rag import BestLast
from llama_index.kvcache_rag import KVCacheChatEngine, KVCacheQueryEngine, KVCacheSynthesizer

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


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        (SCORES, 2),
        ((0, 1, 0), 1),
        ((0.1, None, 0.9), 0),
        ((None,) * 3, 0),
        ((0.1, math.nan, 0.9), 0),
    ],
)
async def test_every_way_of_asking_hands_scores_on(
    llm: KVCacheLLM, fresh: list[int], scores: Sequence[Any], best: int
) -> None:
    synthesizer = KVCacheSynthesizer(llm, policy="bestlast")
    assert cost(synthesizer.synthesize(QUESTION, nodes(scores)))["fresh_tokens"] == fresh[best]
    found = await synthesizer.asynthesize(QUESTION, nodes(scores))
    assert cost(found)["fresh_tokens"] == fresh[best]
    engine = KVCacheQueryEngine.from_args(Fixed(scores), llm, policy="bestlast")
    assert cost(engine.query(QUESTION))["fresh_tokens"] == fresh[best]
    chat = KVCacheChatEngine.from_defaults(Fixed(scores), llm=llm, policy="bestlast")
    assert cost(chat.chat(QUESTION))["fresh_tokens"] == fresh[best]


def test_the_answer_is_that_of_the_engine(llm: KVCacheLLM, engine: Engine) -> None:
    found = KVCacheSynthesizer(llm, policy="bestlast").synthesize(QUESTION, nodes(SCORES))
    expected = engine.generate(QUESTION, TEXTS, scores=SCORES, policy=BestLast(), max_new_tokens=6)
    assert str(found) == expected.text


def test_a_node_without_text_has_no_say(llm: KVCacheLLM, fresh: list[int]) -> None:
    silent = NodeWithScore(node=TextNode(text=" "))
    synthesizer = KVCacheSynthesizer(llm, policy="bestlast")
    response = synthesizer.synthesize(QUESTION, [silent, *nodes(SCORES)])
    assert cost(response)["fresh_tokens"] == fresh[2]


def test_several_rounds_keep_them(llm: KVCacheLLM, engine: Engine) -> None:
    long = [f"{text}{end} " * 20 for end in ("", ";") for text in TEXTS]
    given = [
        NodeWithScore(node=TextNode(text=text), score=score)
        for text, score in zip(long, (*SCORES, *SCORES[::-1]), strict=True)
    ]
    response = KVCacheSynthesizer(llm, policy="bestlast").synthesize(QUESTION, given)
    expected = engine.generate(
        QUESTION,
        long,
        scores=(*SCORES, *SCORES[::-1]),
        policy=BestLast(),
        overflow="refine",
        max_new_tokens=6,
    )
    assert cost(response)["rounds"] == expected.metrics.rounds > 1
    assert cost(response)["fresh_tokens"] == expected.metrics.fresh_tokens
    assert str(response) == expected.text


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


@pytest.mark.filterwarnings("ignore:chat template or tokenizer")  # the reader writes JSON
@pytest.mark.parametrize(
    ("found", "scores", "best"),
    [
        (["012"], (None,) * 3, 0),
        (["012"], SCORES, 2),
        (["0", "21"], (None,) * 3, 2),
        (["2", "01"], SCORES, 1),
        (["2", "01"], (None, 0.2, 0.9), 0),
        (["012", "1"], SCORES, 1),
    ],
)
def test_the_best_of_the_last_call_is_computed_with_the_question(
    engine: Engine, fresh: list[int], found: Sequence[str], scores: Any, best: int
) -> None:
    from llama_index.kvcache_rag import KVCacheLLM

    llm = KVCacheLLM(engine=engine, max_new_tokens=2, policy="bestlast")
    every = [one.node.get_content() for one in Fixed(scores).retrieve(QUESTION)]
    messages = [ChatMessage(role=MessageRole.USER, content=QUESTION)]
    for number, places in enumerate(found):
        call = ToolCallBlock(tool_call_id=str(number), tool_name="search", tool_kwargs={})
        said = "\n\n".join(every[int(place)] for place in places)
        messages += [
            ChatMessage(role=MessageRole.ASSISTANT, blocks=[call]),
            ChatMessage(
                role=MessageRole.TOOL,
                content=said,
                additional_kwargs={"tool_call_id": str(number)},
            ),
        ]
    raw: Any = llm.chat(messages).raw
    assert len(set(fresh)) == len(fresh), "it must be able to fail"
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
