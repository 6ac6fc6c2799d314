"""Which nodes an answer was computed from is told wherever it is told what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from contracts_frameworks import JSON_FORM, NOTES, QUESTION
from llama_index.core.base.llms.types import ChatMessage, MessageRole, ToolCallBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index_framework import Fixed, LlamaIndex

from llama_index.kvcache_rag import KVCacheLLM, KVCacheSynthesizer

if TYPE_CHECKING:
    from llama_index_helpers import Recorder

    from kvcache_rag import Engine

TEXTS = {id_: text for id_, (text, _) in NOTES.items()}


def nodes() -> list[NodeWithScore]:
    return [LlamaIndex().document(text, id_, score) for id_, (text, score) in NOTES.items()]


@pytest.fixture
def few(engine: Engine) -> KVCacheLLM:
    """It answers from one node."""
    return KVCacheLLM(engine=engine, max_new_tokens=4, policy="bestfew:1")


def told(response: Any) -> tuple[list[int], list[Any], int]:
    """What a response says, after what it says was compared with its nodes."""
    found = response.metadata["kv_cache"]
    places, ids = found["answered_from"], found["answered_from_ids"]
    assert [response.source_nodes[place].node.node_id for place in places] == ids
    assert {one["chunk"] for one in found["missed"]} <= {*places}
    for one in response.source_nodes:
        assert one.node.metadata == {}, "it would be part of the chunk's text"
        assert one.node.get_content(MetadataMode.LLM) == TEXTS[one.node.node_id]
    return places, ids, found["unused_chunks"]


def test_the_event_and_what_else_was_retrieved(few: KVCacheLLM, recorder: Recorder) -> None:
    """Further nodes stand behind those that were retrieved, so these keep their numbers."""
    more = [LlamaIndex().document(TEXTS["bakery"], "bakery")]
    response = KVCacheSynthesizer(few).synthesize(QUESTION, nodes(), more)
    assert told(response)[0] == [3]
    (event,) = recorder.named("KVCacheReuseEvent")
    assert event.metrics == response.metadata["kv_cache"]  # type: ignore[index]  # it has some


def test_texts_without_nodes_have_numbers_alone(few: KVCacheLLM) -> None:
    report: dict[str, Any] = {}
    texts = [" ", TEXTS["bakery"], TEXTS["keeper"]]
    KVCacheSynthesizer(few).get_response(QUESTION, texts, kv_report=report)
    assert (report["answered_from"], report["answered_from_ids"]) == ([2], [None])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("compact", ([3], ["keeper"], 2)),
        # A call for each node, the last of which improve the answer of those before.
        ("refine", ([1, 3, 4], ["bakery", "keeper", "harbour"], 0)),
    ],
)
def test_where_llama_index_packs_the_nodes_too(
    few: KVCacheLLM, mode: Any, expected: Any, streaming: bool
) -> None:
    packs = get_response_synthesizer(llm=few, response_mode=mode, streaming=streaming)
    response = RetrieverQueryEngine(Fixed(nodes()), response_synthesizer=packs).query(QUESTION)
    assert str(response)
    assert told(response) == expected


def test_messages_of_an_app_tell_it_in_raw(few: KVCacheLLM) -> None:
    found = "\n\n".join(one.node.get_content() for one in Fixed(nodes()).retrieve(QUESTION))
    said: Any = few.chat([ChatMessage(role="user", content=f"{found}\n\n{QUESTION}")]).raw
    cost = said["kv_cache"]
    # Of the chunks that were found in the prompt.
    assert (cost["answered_from"], cost["answered_from_ids"]) == ([1], ["keeper"])


@JSON_FORM
@pytest.mark.filterwarnings("ignore:a system message differs")
@pytest.mark.filterwarnings("ignore:text_qa_template has other text")
def test_nodes_are_chosen_by_the_question_alone(few: KVCacheLLM) -> None:
    """Neither by an instruction, nor a template around it, nor what a tool said."""
    bakery = "Sell bread of rye in a bakery every day, rye bread of the bakery."
    unscored = [one.model_copy(update={"score": None}) for one in nodes()]
    template = PromptTemplate(f"{bakery}\n{{context_str}}\n{bakery}\n{{query_str}}")
    system = ChatMessage(role=MessageRole.SYSTEM, content=bakery)
    for synthesizer in (
        KVCacheSynthesizer(few, text_qa_template=template),
        KVCacheSynthesizer(few, chat_history=[system]),
        get_response_synthesizer(llm=few, text_qa_template=template),
    ):
        assert told(synthesizer.synthesize(QUESTION, unscored))[1] == ["keeper"]
    found = "\n\n".join(one.node.get_content() for one in nodes())
    call = ToolCallBlock(tool_call_id="0", tool_name="search", tool_kwargs={})
    result = {"tool_call_id": "0"}
    asks = ChatMessage(role=MessageRole.USER, content=QUESTION)
    tools = [
        ChatMessage(role=MessageRole.ASSISTANT, blocks=[call]),
        ChatMessage(role=MessageRole.TOOL, content=found, additional_kwargs=result),
    ]
    apps = ChatMessage(role=MessageRole.USER, content=f"{found}\n\n{QUESTION}")
    for messages in ([system, asks, *tools], [system, apps]):
        raw: Any = few.chat(messages).raw
        assert raw["kv_cache"]["answered_from"] == [1]
