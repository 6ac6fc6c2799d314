"""Question templates of LlamaIndex around a prompt whose beginning is fixed."""

from __future__ import annotations

import uuid
import warnings
from typing import TYPE_CHECKING

import chromadb
import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.prompts import PromptTemplate as LlamaPrompt
from llama_index.core.schema import NodeWithScore, TextNode

from kvcache_rag import PromptTemplate
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheSynthesizer,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_index_helpers import Recorder

    from kvcache_rag import Engine

FACT = "The lighthouse keeper is called Marlow."
QUESTION = "Who keeps the lighthouse?"


def nodes(*texts: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in texts]


def test_template_behind_the_context_is_the_question(
    llm: KVCacheLLM, recorder: Recorder, engine: Engine
) -> None:
    template = LlamaPrompt("Read.\n{context_str}\n--\nAsk {style}: {query_str}!\nSay: ")
    synthesizer = KVCacheSynthesizer(llm, text_qa_template=template.partial_format(style="x"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        response = synthesizer.synthesize(QUESTION, nodes(FACT))
    (start,) = recorder.of("LLMCompletionStartEvent")
    assert start.prompt.endswith(f"--\nAsk x: {QUESTION}!\nSay:")
    assert (response.metadata or {})["kv_cache"]["prefix_mismatch"] is False
    asked = f"--\nAsk x: {QUESTION}!\nSay:"
    assert str(response) == engine.generate(asked, [FACT], max_new_tokens=6).text


def test_other_text_before_the_context_warns_once_and_counts(
    llm: KVCacheLLM, engine: Engine
) -> None:
    template = LlamaPrompt("Other words.\n{context_str}\nQuery: {query_str}")
    synthesizer = KVCacheSynthesizer(llm, text_qa_template=template)
    with pytest.warns(UserWarning, match="at the beginning of the question"):
        response = synthesizer.synthesize(QUESTION, nodes(FACT))
    asked = f"Other words.\n\nQuery: {QUESTION}"
    assert str(response) == engine.generate(asked, [FACT], max_new_tokens=6).text
    assert (response.metadata or {})["kv_cache"]["prefix_mismatch"] is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        synthesizer.synthesize(QUESTION, nodes(FACT))
    assert synthesizer.prefix_mismatches == 2


def test_chat_template_is_cut_too(llm: KVCacheLLM) -> None:
    template = ChatPromptTemplate(
        [
            ChatMessage(role=MessageRole.SYSTEM, content="Read."),
            ChatMessage(role=MessageRole.USER, content="{context_str}\nQuery: {query_str}"),
        ]
    )
    synthesizer = KVCacheSynthesizer(llm, text_qa_template=template)
    response = synthesizer.synthesize(QUESTION, nodes(FACT))
    assert (response.metadata or {})["kv_cache"]["prefix_mismatch"] is False


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(
    "text",
    ["{query_str}\n{context_str}", "Only {query_str}", "{context_str}{context_str}{query_str}"],
)
def test_template_that_cannot_be_cut_is_prefilled_plainly(
    engine: Engine, text: str, is_chat: bool
) -> None:
    llm = KVCacheLLM(engine=engine, max_new_tokens=6, is_chat_model=is_chat, match_chunks=False)
    synthesizer = KVCacheSynthesizer(llm, text_qa_template=LlamaPrompt(text))
    response = synthesizer.synthesize(QUESTION, nodes(FACT))
    prompt = text.format(query_str=QUESTION, context_str=FACT)
    message = ChatMessage(role=MessageRole.USER, content=prompt)
    expected = llm.complete(llm.chat_prompt([message]) if is_chat else prompt)
    assert str(response) == expected.text
    assert (response.metadata or {})["kv_cache"]["reused_tokens"] == 0


def test_prompts_are_read_and_replaced(llm: KVCacheLLM, embedding: HashEmbedding) -> None:
    name = f"c-{uuid.uuid4().hex}"
    store = KVCacheVectorStore.from_params(name, client=chromadb.EphemeralClient(), llm=llm)
    index = VectorStoreIndex.from_documents(
        [Document(text=FACT)],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=embedding,
    )
    engine = KVCacheQueryEngine.from_index(index, llm)
    own = engine.get_prompts()["response_synthesizer:text_qa_template"]
    assert own.format(context_str="C", query_str="Q") == "Read.\nC\nQ"
    mine = LlamaPrompt("Read.\n{context_str}\nQuery: {query_str}")
    engine.update_prompts({"response_synthesizer:text_qa_template": mine})
    assert engine.get_prompts()["response_synthesizer:text_qa_template"] == mine
    assert str(engine.query(QUESTION))


def test_braces_of_the_instruction_are_left_alone(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(template=PromptTemplate(system='Reply as {"a": 1}.\n'))
    synthesizer = KVCacheSynthesizer(KVCacheLLM(engine=engine, max_new_tokens=2))
    own = synthesizer.get_prompts()["text_qa_template"]
    assert own.format(context_str="C", query_str="Q") == 'Reply as {"a": 1}.\nC\nQ'
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        synthesizer.update_prompts({"text_qa_template": own})
        response = synthesizer.synthesize(QUESTION, nodes(FACT))
    assert (response.metadata or {})["kv_cache"]["prefix_mismatch"] is False
