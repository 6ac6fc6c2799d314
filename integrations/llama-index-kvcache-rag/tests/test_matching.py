"""Only the LLM is ours: LlamaIndex packs the nodes by itself, and they are chunks all the same."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
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
from llama_index.core.response_synthesizers import SimpleSummarize
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import BaseModel, Field

from kvcache_rag import FullRecompute
from llama_index.kvcache_rag import KVCacheLLM
from llama_index.kvcache_rag.matching import KNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llama_index_helpers import Recorder

    from kvcache_rag import Engine
    from llama_index.kvcache_rag import HashEmbedding

KEEPER = "The lighthouse keeper is called Marlow, and he is old."
LAMP = "The lamp of the lighthouse burns oil of whales at night."
QUESTION = "Who keeps the lighthouse?"
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


def nodes(*texts: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in texts]


def know(*texts: str) -> None:
    for text in texts:
        KNOWN.note(text)


def cost(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response.metadata["kv_cache"]
    return found


# ---------------------------------------------------------------------- nothing but the LLM
@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "simple_summarize"])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_second_question_reuses_every_chunk(
    index: VectorStoreIndex, llm: KVCacheLLM, mode: str, streaming: bool
) -> None:
    engine = index.as_query_engine(llm=llm, response_mode=mode, streaming=streaming)
    costs = []
    for _ in range(2):
        response = engine.query(QUESTION)
        assert str(response)
        costs.append(cost(response))
    assert costs[0]["reused_tokens"] == 0 < costs[0]["prefilled_tokens"]
    assert costs[1]["prefilled_tokens"] == 0
    assert costs[1]["reused_tokens"] == costs[0]["prefilled_tokens"]
    assert costs[1]["prompt"] == "rearranged"


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


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "accumulate", "compact_accumulate"])
async def test_the_same_without_blocking(
    index: VectorStoreIndex, llm: KVCacheLLM, mode: str
) -> None:
    engine = index.as_query_engine(llm=llm, response_mode=mode)
    for _ in range(2):
        response = await engine.aquery(QUESTION)
    assert cost(response)["prefilled_tokens"] == 0 < cost(response)["reused_tokens"]


async def test_an_async_stream_tells_its_cost_at_its_end(
    index: VectorStoreIndex, llm: KVCacheLLM
) -> None:
    engine = index.as_query_engine(llm=llm, streaming=True)
    for _ in range(2):
        response: Any = await engine.aquery(QUESTION)
        assert [piece async for piece in response.async_response_gen()]
    assert cost(response)["prefilled_tokens"] == 0 < cost(response)["reused_tokens"]


@pytest.mark.parametrize("mode", ["context", "condense_plus_context", "condense_question", "best"])
def test_chat_engines_reuse_in_every_turn(
    index: VectorStoreIndex, llm: KVCacheLLM, prefilled: Callable[[], int], mode: str
) -> None:
    # LlamaIndex's default memory leaves its database open.
    memory = ChatMemoryBuffer.from_defaults(token_limit=500, tokenizer_fn=list)
    engine = index.as_chat_engine(ChatMode(mode), llm=llm, memory=memory)
    engine.chat(QUESTION)
    assert prefilled() == 2
    response = engine.chat("And the lamp?")
    assert prefilled() == 0
    assert cost(response)["reused_tokens"] > 0


def test_a_sub_question_does_not_take_the_cost_of_another(
    index: VectorStoreIndex, llm: KVCacheLLM
) -> None:
    engine = index.as_query_engine(llm=llm)
    first = engine.query(QUESTION)
    before = dict(cost(first))
    engine.query("Who else?")
    llm.complete("Once upon a time")
    assert cost(first) == before


@pytest.mark.parametrize("as_chat", [False, True])
async def test_a_stream_does_not_take_the_cost_of_what_is_asked_meanwhile(
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
        return {
            name: one
            for name, one in cost(response).items()
            if not isinstance(one, float) and name not in own
        }

    engine(False)[0](QUESTION)  # its chunks are there from now on
    expected = told(engine(False)[0](QUESTION))
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
    template = ChatPromptTemplate(
        [
            ChatMessage(role=MessageRole.SYSTEM, content="Use this.\n{context_str}\nBe brief."),
            ChatMessage(role=MessageRole.USER, content="Hello."),
            ChatMessage(role=MessageRole.ASSISTANT, content="Good day."),
            ChatMessage(role=MessageRole.USER, content="{query_str}"),
        ]
    )
    said = llm.predict(template, context_str=KEEPER, query_str=QUESTION)
    turns = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Good day."},
    ]
    question = f"Use this.\n\nBe brief.\n\n{QUESTION}"
    expected = engine.generate(question, [KEEPER], history=turns, max_new_tokens=6)
    assert said == expected.text


def test_messages_and_prompts_of_an_app_are_read(llm: KVCacheLLM, engine: Engine) -> None:
    know(KEEPER, LAMP)
    prompt = f"Facts:\n{KEEPER}\n\n{LAMP}\n\nAnswer this: {QUESTION}"
    asked = engine.generate(
        f"Facts:\n\n\n\n\nAnswer this: {QUESTION}", [KEEPER, LAMP], max_new_tokens=6
    )
    for response in (
        llm.chat([ChatMessage(role=MessageRole.USER, content=prompt)]).raw,
        llm.complete(prompt).raw,
    ):
        assert isinstance(response, dict)
        assert response["kv_cache"]["prompt"] == "rearranged"
        assert response["kv_cache"]["reused_tokens"] > 0
    assert llm.complete(prompt).text == asked.text
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


def test_the_policy_of_the_llm_applies(engine: Engine) -> None:
    know(KEEPER)
    llm = KVCacheLLM(engine=engine, max_new_tokens=2, policy=FullRecompute())
    raw = llm.complete(f"{KEEPER}\n\n{QUESTION}").raw
    assert raw["kv_cache"]["policy"] == "FullRecompute()"


def test_a_context_that_fits_only_as_one_text_is_pasted(
    make_engine: Callable[..., Engine],
) -> None:
    know(KEEPER, LAMP)
    question = "Q?"
    prompt = f"{KEEPER}\n{LAMP}\n{question}"
    plain = make_engine()
    size = len(plain.tokenize_text(prompt)) + 2
    tight = make_engine(context_window=size)
    for llm in (KVCacheLLM(engine=tight, max_new_tokens=2),):
        raw = llm.complete(prompt).raw
        assert raw["kv_cache"]["prompt"] == "pasted"
        last = list(llm.stream_complete(prompt))[-1]
        assert last.raw["kv_cache"]["prompt"] == "pasted"


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
    llm: KVCacheLLM, template: LlamaPrompt, prefilled: Callable[[], int], recorder: Recorder
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
    llm: KVCacheLLM, judge: Callable[..., Any], prefilled: Callable[[], int]
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
def test_it_can_be_switched_off(
    engine: Engine, options: dict[str, Any], prefilled: Callable[[], int]
) -> None:
    know(KEEPER)
    llm = KVCacheLLM(engine=engine, max_new_tokens=2, **options)
    llm.predict(QA, context_str=KEEPER, query_str=QUESTION)
    llm.complete(f"{KEEPER}\n{QUESTION}")
    assert prefilled() == 0


def test_a_context_of_unknown_texts_warns_once(llm: KVCacheLLM) -> None:
    other = "Nothing of this was ever retrieved from anywhere. " * 10
    synthesizer = SimpleSummarize(llm=llm)
    with pytest.warns(UserWarning, match="nothing in the context of this prompt"):
        llm.predict(QA, context_str=other, query_str=QUESTION)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.predict(QA, context_str=other, query_str=QUESTION)
        response = synthesizer.synthesize(QUESTION, nodes(other[:40]))
    assert cost(response)["prompt"] in ("reused", "rearranged")


def test_what_extractors_ask_at_ingestion_is_not_warned_of(llm: KVCacheLLM) -> None:
    extractors = (SummaryExtractor, KeywordExtractor, QuestionsAnsweredExtractor, TitleExtractor)
    node = TextNode(text="Nothing of this was ever retrieved from anywhere. " * 10)
    for extractor in extractors:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert extractor(llm=llm, show_progress=False).extract([node])


def test_another_tenant_computes_its_own(engine: Engine, index: VectorStoreIndex) -> None:
    ours = index.as_query_engine(llm=KVCacheLLM(engine=engine, max_new_tokens=2))
    theirs = index.as_query_engine(
        llm=KVCacheLLM(engine=engine.in_namespace("other"), max_new_tokens=2)
    )
    ours.query(QUESTION)
    cost_of_theirs = cost(theirs.query(QUESTION))
    assert cost_of_theirs["reused_tokens"] == 0 < cost_of_theirs["prefilled_tokens"]
