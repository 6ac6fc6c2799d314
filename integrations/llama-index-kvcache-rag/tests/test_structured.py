"""Structured output: whatever the model would say, its answer is what LlamaIndex parses."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Literal

import pytest
from contracts_frameworks import Finding
from llama_index.core import Document, PromptTemplate, PropertyGraphIndex
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.indices.property_graph import SchemaLLMPathExtractor
from llama_index.core.indices.vector_store.retrievers import VectorIndexAutoRetriever
from llama_index.core.llms import ChatMessage
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.selectors import LLMMultiSelector, LLMSingleSelector
from llama_index.core.selectors.utils import get_selector_from_llm
from llama_index.core.tools import ToolMetadata
from llama_index.core.vector_stores import MetadataInfo, VectorStoreInfo
from llama_index.core.vector_stores.types import VectorStoreQuerySpec
from llama_index_framework import LlamaIndex
from scripted import scripted_engine

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import MissingExtraError
from kvcache_rag.integration import ConversationForms, JsonGrammars
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheSynthesizer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_index.core import VectorStoreIndex
    from llama_index_helpers import Recorder

    from kvcache_rag import Engine


FACTS = ["The lighthouse keeper is called Marlow.", "The harbour was built in 1911."]
PROMPT = PromptTemplate("Describe {thing}.")
CHOICES = [
    ToolMetadata(name="ships", description="Answers about ships."),
    ToolMetadata(name="bread", description="Answers about bread."),
]
BUNDLE = QueryBundle("what about ships?")


@pytest.fixture
def patient(engine: Engine) -> KVCacheLLM:
    return KVCacheLLM(engine=engine, max_new_tokens=400)


@pytest.fixture
def wild(engine: Engine) -> KVCacheLLM:
    """It says something else each time."""
    return KVCacheLLM(engine=engine, max_new_tokens=2000, generate_kwargs={"temperature": 2.0})


@pytest.fixture
def index(patient: KVCacheLLM) -> VectorStoreIndex:
    rows = LlamaIndex().rows(patient)
    rows.add(dict(zip("ab", FACTS, strict=True)))
    return rows.index


def whole(found: Any) -> bool:
    return isinstance(found, Finding) and Finding.model_validate(found.model_dump()) == found


# ---------------------------------------------------------------------- objects
@pytest.mark.parametrize("is_chat", [False, True])
async def test_objects_fit_their_class(engine: Engine, is_chat: bool) -> None:
    llm = KVCacheLLM(
        engine=engine,
        max_new_tokens=400,
        is_chat_model=is_chat,
        messages_to_prompt=lambda messages: "\n".join(one.content or "" for one in messages),
    )
    found = llm.structured_predict(Finding, PROMPT, thing="a lamp")
    assert whole(found)
    assert await llm.astructured_predict(Finding, PROMPT, thing="a lamp") == found
    grown = [*llm.stream_structured_predict(Finding, PROMPT, thing="a lamp")]
    assert len(grown) > 3
    assert grown[-1] == found
    stream = await llm.astream_structured_predict(Finding, PROMPT, thing="a lamp")
    assert [one async for one in stream][-1] == found


@pytest.mark.filterwarnings("ignore:The `json` method is deprecated")  # LlamaIndex calls it
def test_a_structured_llm_answers_with_objects(patient: KVCacheLLM) -> None:
    structured = patient.as_structured_llm(Finding)
    response = structured.complete("Describe {a lamp}.")
    assert whole(response.raw)
    assert Finding.model_validate_json(response.text) == response.raw
    assert whole(structured.chat([ChatMessage("Describe a lamp.")]).raw)
    assert whole([*structured.stream_chat([ChatMessage("Describe a lamp.")])][-1].raw)


def test_llama_index_is_told_as_ever(patient: KVCacheLLM, recorder: Recorder) -> None:
    patient.structured_predict(Finding, PROMPT, thing="a lamp")
    assert recorder.names().count("LLMStructuredPredictStartEvent") == 1
    assert recorder.names().count("LLMStructuredPredictEndEvent") == 1
    (start,) = recorder.named("LLMCompletionStartEvent") or recorder.named("LLMChatStartEvent")
    assert "Finding" in str(start)  # the schema stands in the prompt


def test_a_call_takes_a_schema(patient: KVCacheLLM) -> None:
    assert json.loads(patient.complete("x", json_schema={"enum": [3, 5]}).text) in (3, 5)
    with pytest.raises(InvalidInputError, match="json_schema must be a JSON schema, a dict"):
        patient.complete("x", json_schema=Finding)
    with pytest.raises(InvalidInputError, match="beam search"):
        patient.complete("x", json_schema={"enum": [3]}, num_beams=2)


def test_a_schema_is_compiled_once(
    engine: Engine, patient: KVCacheLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ConversationForms.known.pop(engine, None)
    made, create = list[Any](), JsonGrammars.__init__
    monkeypatch.setattr(
        JsonGrammars, "__init__", lambda self, *of: made.append(of) or create(self, *of)
    )
    for _ in range(2):
        patient.structured_predict(Finding, PROMPT, thing="a lamp")
        LLMSingleSelector.from_defaults(llm=patient).select(CHOICES, BUNDLE)
    assert len(made) == 1


async def test_what_is_cut_is_an_error(engine: Engine) -> None:
    llm, thing = KVCacheLLM(engine=engine, max_new_tokens=9), {"thing": "a lamp"}
    nodes = [NodeWithScore(node=TextNode(text="x"))]
    answers = KVCacheSynthesizer(llm, output_cls=Finding)
    streaming: Any = KVCacheSynthesizer(llm, output_cls=Finding, streaming=True)
    doors: list[Callable[[], Any]] = [
        lambda: llm.structured_predict(Finding, PROMPT, **thing),
        lambda: list(llm.stream_structured_predict(Finding, PROMPT, **thing)),
        lambda: answers.synthesize("q?", nodes),
        lambda: list(streaming.synthesize("q?", nodes).response_gen),
        lambda: LLMSingleSelector.from_defaults(llm=llm).select(CHOICES, BUNDLE),
    ]
    sentence = "did not end within max_new_tokens=9; raise max_new_tokens"
    for door in doors:
        with pytest.raises(InvalidInputError, match=sentence):
            door()
    with pytest.raises(InvalidInputError, match=sentence):
        await llm.astructured_predict(Finding, PROMPT, **thing)
    stream = await llm.astream_structured_predict(Finding, PROMPT, **thing)
    with pytest.raises(InvalidInputError, match=sentence):
        assert [one async for one in stream]
    with pytest.raises(InvalidInputError, match="a stop string or a time limit"):
        llm.structured_predict(Finding, PROMPT, {"stop": [":"]}, **thing)


# ---------------------------------------------------------------------- over chunks
@pytest.mark.parametrize("told", ["output_cls", "structured_llm", "template"])
async def test_chunks_are_reused(
    index: VectorStoreIndex, patient: KVCacheLLM, prefilled: Callable[[], int], told: str
) -> None:
    options: dict[str, Any] = {"llm": patient, "output_cls": Finding}
    if told == "structured_llm":
        options = {"llm": patient.as_structured_llm(Finding)}
    if told == "template":
        template = PromptTemplate("Read.\n{context_str}\nQuestion: {query_str}\nAnswer:")
        options["text_qa_template"] = template
    query_engine = KVCacheQueryEngine.from_index(index, **options)
    prefilled()
    response = query_engine.query("what?")
    assert isinstance(response, PydanticResponse)
    assert whole(response.response)
    metrics = (response.metadata or {})["kv_cache"]
    assert metrics["references"] == 2
    assert metrics["misses"] == prefilled() == 0
    assert metrics["reused_tokens"] > 0
    assert len(response.source_nodes) == 2
    again = await query_engine.aquery("what?")
    assert again.response == response.response


def test_a_stream_is_the_json(index: VectorStoreIndex, patient: KVCacheLLM) -> None:
    options: dict[str, Any] = {"output_cls": Finding}
    plain = KVCacheQueryEngine.from_index(index, patient, **options).query("what?")
    stream: Any = KVCacheQueryEngine.from_index(index, patient, streaming=True, **options).query(
        "what?"
    )
    pieces = [*stream.response_gen]
    assert len(pieces) > 3
    assert Finding.model_validate_json("".join(pieces)) == plain.response


@pytest.mark.parametrize("told", ["output_cls", "structured_llm", "tree_summarize"])
def test_stock_query_engines_answer_with_objects(
    index: VectorStoreIndex, patient: KVCacheLLM, engine: Engine, told: str
) -> None:
    options: dict[str, Any] = {"llm": patient, "output_cls": Finding}
    if told == "structured_llm":
        options = {"llm": patient.as_structured_llm(Finding)}
    if told == "tree_summarize":
        options["response_mode"] = told
    assert whole(index.as_query_engine(**options).query("what?").response)
    assert sum(engine.store.stats().hits.values()) == 0  # what asks for objects stays as it is


# ---------------------------------------------------------------------- selectors and generators
def test_selectors_choose_what_there_is(wild: KVCacheLLM) -> None:
    single = LLMSingleSelector.from_defaults(llm=wild).select(CHOICES, BUNDLE)
    assert single.ind in (0, 1)
    multi = LLMMultiSelector.from_defaults(llm=wild, max_outputs=2).select(CHOICES, BUNDLE)
    assert 1 <= len(multi.inds) <= 2
    assert {*multi.inds} <= {0, 1}
    chosen = get_selector_from_llm(wild).select(CHOICES, BUNDLE)
    assert chosen.ind in (0, 1)


def test_sub_questions_are_for_tools_that_there_are(wild: KVCacheLLM) -> None:
    found = LLMQuestionGenerator.from_defaults(llm=wild).generate(CHOICES, BUNDLE)
    assert found
    assert {one.tool_name for one in found} <= {"ships", "bread"}


def test_a_retriever_gets_filters_that_it_can_read(
    index: VectorStoreIndex, wild: KVCacheLLM, caplog: pytest.LogCaptureFixture
) -> None:
    info = VectorStoreInfo(
        content_info="facts", metadata_info=[MetadataInfo(name="page", type="int", description="p")]
    )
    retriever = VectorIndexAutoRetriever(
        index, vector_store_info=info, llm=wild, prompt_template_str="{query_str}"
    )
    with caplog.at_level("WARNING"):
        spec = retriever.generate_retrieval_spec(BUNDLE)
    assert isinstance(spec, VectorStoreQuerySpec)
    assert not caplog.records  # else its defaults: what came could not be parsed


def test_a_parser_of_the_prompt_is_known(patient: KVCacheLLM) -> None:
    parser = PydanticOutputParser(output_cls=Finding)
    template = PromptTemplate("Describe {thing}.", output_parser=parser)
    assert whole(parser.parse(patient.predict(template, thing="a lamp")))
    messages = ChatPromptTemplate([ChatMessage("Describe {thing}.")], output_parser=parser)
    assert whole(parser.parse(patient.predict(messages, thing="a lamp")))
    plain = patient.predict(PROMPT, thing="a lamp")
    with pytest.raises(ValueError):  # noqa: PT011  # this model says no JSON by itself
        parser.parse(plain)


def test_a_parser_of_ones_own_reads_what_the_model_says(patient: KVCacheLLM) -> None:
    from llama_index.core.output_parsers import SelectionOutputParser

    class Own(SelectionOutputParser):
        pass

    free = patient.predict(PROMPT, thing="a lamp")
    assert patient.predict(PromptTemplate("Describe {thing}."), thing="a lamp") == free
    template = PromptTemplate("Describe {thing}.", output_parser=Own())
    with pytest.raises(json.JSONDecodeError):
        json.loads(patient.predict(template, thing="a lamp"))


# ---------------------------------------------------------------------- without llguidance
def test_the_extra_is_named(
    engine: Engine, patient: KVCacheLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ConversationForms.known.pop(engine, None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    sentence = r"llguidance is not installed: pip install 'kvcache-rag\[structured\]'"
    with pytest.raises(MissingExtraError, match=sentence):
        KVCacheSynthesizer(patient, output_cls=Finding)
    template = PromptTemplate("x", output_parser=PydanticOutputParser(output_cls=Finding))
    with pytest.warns(UserWarning, match=f"decoding is not held to the JSON asked for: {sentence}"):
        assert patient.predict(template)


def test_a_graph_of_what_texts_say_is_held_to_its_schema() -> None:
    """LlamaIndex's PropertyGraphIndex: triplets of allowed kinds, out of one text each."""
    kinds = {"subject": ("PERSON", "Marlow"), "object": ("LOCATION", "the lighthouse")}
    ends = {end: {"type": kind, "name": name} for end, (kind, name) in kinds.items()}
    triplet = {"subject": ends["subject"], "relation": {"type": "KEEPS"}, "object": ends["object"]}
    wrong = {**triplet, "relation": {"type": "KEENS"}}  # of which "KEE" may stand
    for said in (triplet, wrong):
        answers = (json.dumps({"triplets": [said]}), "Marlow", "Marlow.")
        engine, seen = scripted_engine(*answers)
        llm = KVCacheLLM(engine=engine, max_new_tokens=400)
        extractor = SchemaLLMPathExtractor(
            llm,
            possible_entities=Literal["PERSON", "LOCATION"],
            possible_relations=Literal["KEEPS"],
            kg_validation_schema=[("PERSON", "KEEPS", "LOCATION")],
            num_workers=1,
        )
        index = PropertyGraphIndex.from_documents(
            [Document(text=FACTS[0])],
            llm=llm,
            kg_extractors=[extractor],
            embed_model=HashEmbedding(),
        )
        assert FACTS[0] in seen[0]
        found = index.property_graph_store.get_triplets(ids=["Marlow"])
        relations = [(one.id, two.label, three.id) for one, two, three in found]
        assert ("Marlow", "KEEPS", "the lighthouse") in relations
        answer = index.as_query_engine(llm=llm, include_text=True).query("Who is Marlow?")
        assert str(answer) == "Marlow."
