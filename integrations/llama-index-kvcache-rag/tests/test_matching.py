"""Only the LLM is ours: LlamaIndex packs the nodes by itself, and they are chunks all the same."""

from __future__ import annotations

import warnings
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from chat_helpers import HISTORY, QUESTION, TURNS
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.evaluation import (
    ContextRelevancyEvaluator,
    FaithfulnessEvaluator,
    RelevancyEvaluator,
)
from llama_index.core.extractors import (
    KeywordExtractor,
    QuestionsAnsweredExtractor,
    SummaryExtractor,
    TitleExtractor,
)
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.prompts import PromptTemplate as LlamaPrompt
from llama_index.core.prompts.prompt_type import PromptType
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import SimpleSummarize, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index_framework import Fixed
from llama_index_helpers import cost, nodes
from pydantic import BaseModel, Field

from llama_index.kvcache_rag import KVCacheLLM, KVCacheQueryEngine
from llama_index.kvcache_rag.matching import KNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Count = Callable[[], int]

    from llama_index_helpers import Recorder

    from kvcache_rag import Engine
    from llama_index.kvcache_rag import HashEmbedding

KEEPER = "The lighthouse keeper is called Marlow, and he is old."
LAMP = "The lamp of the lighthouse burns oil of whales at night."
UNKNOWN = "Nothing of this was ever retrieved from anywhere. " * 10
JOINED = f"{KEEPER}\n\n{LAMP}"
QA = LlamaPrompt("{context_str}\nQ: {query_str}")


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    """Nothing is known of earlier tests."""
    type(KNOWN).__init__(KNOWN)
    yield
    type(KNOWN).__init__(KNOWN)


@pytest.fixture
def index(embedding: HashEmbedding) -> VectorStoreIndex:
    documents = [Document(text=text) for text in (KEEPER, LAMP)]
    return VectorStoreIndex.from_documents(documents, embed_model=embedding)


def know(*texts: str) -> None:
    for text in texts:
        KNOWN.note(text)


# ---------------------------------------------------------------------- nothing but the LLM
@pytest.mark.parametrize(
    ("mode", "streaming"),
    [
        *product(["compact", "refine", "tree_summarize", "simple_summarize"], [False, True]),
        *product(["accumulate", "compact_accumulate"], [False]),
    ],
)
async def test_every_question_but_the_first_reuses_every_chunk(
    index: VectorStoreIndex, llm: KVCacheLLM, mode: str, streaming: bool
) -> None:
    engine = index.as_query_engine(llm=llm, response_mode=mode, streaming=streaming)
    first = engine.query(QUESTION)
    assert str(first)
    again = engine.query(QUESTION)
    assert str(again)
    later: Any = await engine.aquery(QUESTION)
    if streaming:
        assert [piece async for piece in later.async_response_gen()]
    assert cost(first)["reused_tokens"] == 0 < cost(first)["prefilled_tokens"]
    for response in (again, later):
        assert cost(response)["prefilled_tokens"] == 0
        assert cost(response)["reused_tokens"] == cost(first)["prefilled_tokens"]
        assert cost(response)["prompt"] == "rearranged"


def test_short_texts_of_scripts_without_spaces_are_reused(
    llm: KVCacheLLM, embedding: HashEmbedding
) -> None:
    """A chunk of some twenty Chinese characters was taken for pasted text."""
    texts = ["白色的猫在红色的垫子上睡了一整天。", "灯塔的看守人每天晚上点亮那盏旧灯。"]
    index = VectorStoreIndex([TextNode(text=text) for text in texts], embed_model=embedding)
    engine = index.as_query_engine(llm=llm, similarity_top_k=2)
    costs = [cost(engine.query("猫在哪里?")) for _ in range(2)]
    assert [one["prompt"] for one in costs] == ["rearranged"] * 2
    assert costs[0]["prefilled_tokens"] > 0
    assert costs[1]["reused_tokens"] > 0 == costs[1]["prefilled_tokens"]


@pytest.mark.parametrize("mode", ["context", "condense_plus_context", "condense_question", "best"])
def test_chat_engines_reuse_in_every_turn(
    index: VectorStoreIndex, llm: KVCacheLLM, prefilled: Count, mode: str
) -> None:
    # LlamaIndex's default memory leaves its database open.
    memory = ChatMemoryBuffer.from_defaults(token_limit=500, tokenizer_fn=list)
    engine = index.as_chat_engine(ChatMode(mode), llm=llm, memory=memory)
    engine.chat(QUESTION)
    assert prefilled() == 2
    response = engine.chat("And the lamp?")
    assert prefilled() == 0
    assert cost(response)["reused_tokens"] > 0


@pytest.mark.parametrize("as_chat", [False, True])
async def test_an_answer_does_not_take_the_cost_of_what_is_asked_meanwhile(
    index: VectorStoreIndex, llm: KVCacheLLM, as_chat: bool
) -> None:
    def engine(streaming: bool) -> tuple[Any, Any]:
        """What asks, and what asks without blocking."""
        if as_chat:
            memory = ChatMemoryBuffer.from_defaults(token_limit=500, tokenizer_fn=list)
            chat = index.as_chat_engine(ChatMode.CONTEXT, llm=llm, memory=memory)
            if streaming:
                return chat.stream_chat, chat.astream_chat
            return chat.chat, chat.achat
        query = index.as_query_engine(llm=llm, streaming=streaming)
        return query.query, query.aquery

    def told(response: Any) -> dict[str, Any]:
        own = {"computed_tokens", "continued_tokens"}  # by what was asked before
        found = cost(response).items()
        return {name: one for name, one in found if not isinstance(one, float) and name not in own}

    engine(False)[0](QUESTION)  # its chunks are there from now on
    whole = engine(False)[0](QUESTION)
    expected, before = told(whole), dict(cost(whole))
    response = engine(True)[0](QUESTION)
    llm.complete("Once upon a time")
    pieces = response.response_gen
    assert next(pieces)
    llm.complete("Once upon a time")
    assert [*pieces]
    llm.complete("Once upon a time")
    assert told(response) == expected
    response = await engine(True)[1](QUESTION)
    await llm.acomplete("Once upon a time")
    pieces = response.async_response_gen()
    assert await anext(pieces)
    await llm.acomplete("Once upon a time")
    assert [piece async for piece in pieces]
    await llm.acomplete("Once upon a time")
    assert told(response) == expected
    assert cost(whole) == before


# ---------------------------------------------------------------------- what is asked
def test_law_the_rest_of_the_prompt_is_the_question(llm: KVCacheLLM, engine: Engine) -> None:
    know(KEEPER, LAMP)
    template = LlamaPrompt("Read well.\n{context_str}\nAsk: {query_str}\nSay:")
    said = llm.predict(template, context_str=JOINED, query_str=QUESTION)
    question = f"Read well.\n\nAsk: {QUESTION}\nSay:"
    assert said == engine.generate(question, [KEEPER, LAMP], max_new_tokens=6).text


def test_what_of_a_context_is_unknown_stays_where_it_was(llm: KVCacheLLM, engine: Engine) -> None:
    know(KEEPER)
    said = llm.predict(QA, context_str=f"{KEEPER}\nA remark of nobody.", query_str=QUESTION)
    question = f"A remark of nobody.\nQ: {QUESTION}"
    assert said == engine.generate(question, [KEEPER], max_new_tokens=6).text


def test_a_conversation_stands_behind_the_chunks(llm: KVCacheLLM, engine: Engine) -> None:
    know(KEEPER)
    system = ChatMessage(role=MessageRole.SYSTEM, content="Use this.\n{context_str}\nBe brief.")
    asks = ChatMessage(role=MessageRole.USER, content="{query_str}")
    template = ChatPromptTemplate([system, *HISTORY, asks])
    said = llm.predict(template, context_str=KEEPER, query_str=QUESTION)
    question = f"Use this.\n\nBe brief.\n\n{QUESTION}"
    expected = engine.generate(question, [KEEPER], history=TURNS, max_new_tokens=6)
    assert said == expected.text


def test_messages_and_prompts_of_an_app_are_read(llm: KVCacheLLM, engine: Engine) -> None:
    know(KEEPER, LAMP)
    prompt = f"Facts:\n{KEEPER}\n\n{LAMP}\n\nAnswer this: {QUESTION}"
    question = f"Facts:\n\n\n\n\nAnswer this: {QUESTION}"
    asked = engine.generate(question, [KEEPER, LAMP], max_new_tokens=6)
    assert llm.complete(prompt).text == asked.text
    spoken = [ChatMessage(role=MessageRole.USER, content=prompt)]
    for raw in (llm.chat(spoken).raw, llm.complete(prompt).raw):
        assert raw["kv_cache"]["prompt"] == "rearranged"
        assert raw["kv_cache"]["reused_tokens"] > 0
    alone = f"{KEEPER}\n\n{LAMP}\n\n{QUESTION}"
    assert llm.complete(alone).raw["kv_cache"]["prompt"] == "reused"


def test_a_quoted_sentence_is_no_chunk(llm: KVCacheLLM) -> None:
    know(KEEPER)
    condense = f"assistant: {KEEPER}\nuser: And?\nStandalone question:"
    assert llm.complete(condense).raw["kv_cache"]["prompt"] == "plain"
    said = [
        ChatMessage(role=MessageRole.USER, content=QUESTION),
        ChatMessage(role=MessageRole.ASSISTANT, content=KEEPER),
        ChatMessage(role=MessageRole.USER, content="And?"),
    ]
    assert llm.chat(said).raw["kv_cache"]["prompt"] == "plain"


def test_a_context_that_fits_only_as_one_text_is_pasted(make_engine: Callable[..., Engine]) -> None:
    know(KEEPER, LAMP)
    prompt = f"{KEEPER}\n{LAMP}\nQ?"
    tight = make_engine(context_window=len(make_engine().tokenize_text(prompt)) + 2)
    llm = KVCacheLLM(engine=tight, max_new_tokens=2)
    for answer in (llm.complete(prompt), list(llm.stream_complete(prompt))[-1]):
        assert answer.raw["kv_cache"]["prompt"] == "pasted"


# ---------------------------------------------------------------------- where nothing is matched
class Name(BaseModel):
    name: str = Field(max_length=8)


@pytest.mark.parametrize(
    "template",
    [
        LlamaPrompt("{context_str}\n{query_str}", prompt_type=PromptType.CHOICE_SELECT),
        LlamaPrompt(
            "{context_str}\n{query_str}", output_parser=PydanticOutputParser(output_cls=Name)
        ),
    ],
)
def test_structured_prompts_stay_as_they_are(
    llm: KVCacheLLM, template: LlamaPrompt, prefilled: Count, recorder: Recorder
) -> None:
    know(KEEPER)
    llm.max_new_tokens = 60  # of an answer that is held to JSON, its end
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.predict(template, context_str=KEEPER, query_str=QUESTION)
    assert prefilled() == 0


@pytest.mark.parametrize(
    "judge", [FaithfulnessEvaluator, RelevancyEvaluator, ContextRelevancyEvaluator]
)
async def test_evaluators_are_asked_as_they_ask(
    llm: KVCacheLLM, judge: Callable[..., Any], prefilled: Count
) -> None:
    """Fails if LlamaIndex's evaluators ask by a template that is not found any more."""
    know(KEEPER, LAMP)
    await judge(llm=llm).aevaluate(query=QUESTION, response="Marlow.", contexts=[KEEPER, LAMP])
    assert prefilled() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"match_chunks": False},
        {"completion_to_prompt": lambda text: f"[{text}]"},
        {"messages_to_prompt": lambda messages: f"[{messages[-1].content}]"},
    ],
)
def test_it_can_be_switched_off(engine: Engine, options: dict[str, Any], prefilled: Count) -> None:
    know(KEEPER)
    llm = KVCacheLLM(engine=engine, max_new_tokens=2, **options)
    llm.predict(QA, context_str=KEEPER, query_str=QUESTION)
    llm.complete(f"{KEEPER}\n{QUESTION}")
    assert prefilled() == 0


def test_a_context_of_unknown_texts_warns_once(llm: KVCacheLLM) -> None:
    with pytest.warns(UserWarning, match="nothing in the context of this prompt"):
        llm.predict(QA, context_str=UNKNOWN, query_str=QUESTION)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.predict(QA, context_str=UNKNOWN, query_str=QUESTION)
        response = SimpleSummarize(llm=llm).synthesize(QUESTION, nodes(UNKNOWN[:40]))
    assert cost(response)["prompt"] in ("reused", "rearranged")


@pytest.mark.parametrize(
    "extractor", [SummaryExtractor, KeywordExtractor, QuestionsAnsweredExtractor, TitleExtractor]
)
def test_what_extractors_ask_at_ingestion_is_not_warned_of(llm: KVCacheLLM, extractor: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extractor(llm=llm, show_progress=False).extract([TextNode(text=UNKNOWN)])


def test_another_tenant_computes_its_own(engine: Engine, index: VectorStoreIndex) -> None:
    for one in (engine, engine.in_namespace("other")):
        asking = index.as_query_engine(llm=KVCacheLLM(engine=one, max_new_tokens=2))
        found = cost(asking.query(QUESTION))
        assert found["reused_tokens"] == 0 < found["prefilled_tokens"]


# ---------------------------------------------------------------------- scores
TEXTS = [
    "The lighthouse keeper is called Marlow.",
    "The bakery sells bread made of rye flour every day.",
    "The harbour was built in 1911, and rebuilt in 1934 by the town.",
]
SCORES = (0.1, 0.2, 0.9)


@pytest.mark.parametrize(("scores", "best"), [(SCORES, 2), ((0.1, None, 0.9), 0)])
@pytest.mark.parametrize("way", ["query", "stream", "messages of an app"])
def test_scores_of_nodes_that_stand_in_a_prompt_count(
    engine: Engine, scores: Sequence[Any], best: int, way: str
) -> None:
    llm = KVCacheLLM(engine=engine, max_new_tokens=6, policy="bestlast")
    given = [
        NodeWithScore(node=TextNode(text=text), score=score)
        for text, score in zip(TEXTS, scores, strict=True)
    ]
    if way == "messages of an app":
        found = "\n\n".join(one.node.get_content() for one in Fixed(given).retrieve(QUESTION))
        raw: Any = llm.chat([ChatMessage(role="user", content=f"{found}\n\n{QUESTION}")]).raw
        fresh = raw["kv_cache"]["fresh_tokens"]
    else:
        packs = get_response_synthesizer(llm=llm, streaming=way == "stream")
        response = RetrieverQueryEngine(Fixed(given), response_synthesizer=packs).query(QUESTION)
        assert str(response)
        fresh = cost(response)["fresh_tokens"]
    assert fresh == len(engine.tokenize("?", TEXTS).chunks[best])


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
