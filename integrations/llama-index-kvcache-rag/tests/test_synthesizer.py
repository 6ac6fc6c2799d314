"""KVCacheSynthesizer and KVCacheQueryEngine inside LlamaIndex."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from chat_helpers import FACTS, QUESTION, make_index, texts
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import PromptTemplate as LlamaPrompt
from llama_index.core.query_engine import RetrieverQueryEngine, TransformQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index_helpers import cost, failing_at_the_third_token, nodes

from kvcache_rag import Engine, InvalidInputError
from kvcache_rag.errors import ContextTooLongError
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheSynthesizer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_index_helpers import Recorder


@pytest.fixture
def index(llm: KVCacheLLM, embedding: HashEmbedding) -> VectorStoreIndex:
    return make_index(llm, embedding)


@pytest.fixture
def tokenised(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text the engine tokenises from now on."""
    texts: list[str] = []
    tokenizer = type(engine.tokenizer)
    encode = tokenizer.__call__

    def note(self: Any, text: str, *arguments: Any, **options: Any) -> Any:
        texts.append(text)
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(tokenizer, "__call__", note)
    return texts


# ---------------------------------------------------------------------- reuse
def test_chunks_are_loaded_by_reference(
    index: VectorStoreIndex, llm: KVCacheLLM, tokenised: list[str], prefilled: Callable[[], int]
) -> None:
    prefilled()
    response = KVCacheQueryEngine.from_index(index, llm, similarity_top_k=3).query(QUESTION)
    found = cost(response)
    assert (found["references"], found["hits"]) == (3, {"memory": 3})
    assert found["misses"] == found["prefilled_tokens"] == prefilled() == 0
    assert found["reused_tokens"] > 0
    assert not any(fact in text for fact in FACTS for text in tokenised)
    assert len(response.source_nodes) == 3
    assert response.source_nodes[0].node.get_content() == FACTS[0]


# ---------------------------------------------------------------------- streams


@pytest.mark.timeout(60)
async def test_failure_while_streaming_reaches_the_consumer(
    index: VectorStoreIndex, llm: KVCacheLLM
) -> None:
    engine = KVCacheQueryEngine.from_index(index, llm, streaming=True)
    with failing_at_the_third_token():
        response: Any = engine.query(QUESTION)
        with pytest.raises(RuntimeError, match="out of memory"):
            list(response.response_gen)
    assert cost(response) == {}
    with failing_at_the_third_token():
        response = await engine.aquery(QUESTION)
        with pytest.raises(RuntimeError, match="out of memory"):
            _ = [piece async for piece in response.async_response_gen()]


# ---------------------------------------------------------------------- events


@pytest.mark.parametrize("streaming", [False, True])
async def test_events_are_those_of_a_stock_engine(
    index: VectorStoreIndex, llm: KVCacheLLM, recorder: Recorder, streaming: bool
) -> None:
    retriever = index.as_retriever(similarity_top_k=2)
    # Of pieces there are any number.
    ignored = ("EmbeddingStartEvent", "EmbeddingEndEvent", "LLMCompletionInProgressEvent")

    def names() -> list[str]:
        found = sorted(name for name in recorder.names() if name not in ignored)
        recorder.events.clear()
        return found

    async def told(engine: Any) -> tuple[list[str], list[str]]:
        str(engine.query(QUESTION))
        at_once = names()
        response = await engine.aquery(QUESTION)
        if streaming:
            _ = [piece async for piece in response.async_response_gen()]
        return at_once, names()

    theirs = await told(RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=streaming))
    ours = await told(KVCacheQueryEngine.from_args(retriever, llm, streaming=streaming))
    for own, stock in zip(ours, theirs, strict=True):
        assert own == sorted([*stock, "KVCacheReuseEvent"])
        assert len(set(own)) == len(own)


def test_legacy_callbacks_are_those_of_a_stock_engine(
    index: VectorStoreIndex, engine: Engine
) -> None:
    seen = []
    for stock in (True, False):
        debug = LlamaDebugHandler(print_trace_on_end=False)
        manager = CallbackManager([debug])
        llm = KVCacheLLM(engine=engine, max_new_tokens=6, callback_manager=manager)
        retriever = index.as_retriever()
        made = (
            RetrieverQueryEngine(retriever, get_response_synthesizer(llm, callback_manager=manager))
            if stock
            else KVCacheQueryEngine(retriever, KVCacheSynthesizer(llm, callback_manager=manager))
        )
        made.query(QUESTION)
        seen.append(sorted(pair[0].event_type for pair in debug.get_event_pairs()))
    assert seen[0] == seen[1]
    assert CBEventType.TEMPLATING in seen[1]


def test_what_events_say(index: VectorStoreIndex, llm: KVCacheLLM, recorder: Recorder) -> None:
    response = KVCacheQueryEngine.from_index(index, llm).query(QUESTION)
    (reuse,) = recorder.named("KVCacheReuseEvent")
    assert (reuse.query_str, reuse.metrics) == (QUESTION, cost(response))
    (start,) = recorder.named("GetResponseStartEvent")
    assert start.text_chunks == texts(response)
    (call,) = recorder.named("LLMCompletionStartEvent")
    assert all(text in call.prompt for text in (*start.text_chunks, QUESTION, "Read."))
    assert call.additional_kwargs == {}
    (end,) = recorder.named("LLMPredictEndEvent")
    assert end.output == str(response)


# ---------------------------------------------------------------------- no hits, too many
@pytest.mark.parametrize("streaming", [False, True])
def test_no_nodes_give_the_empty_response(llm: KVCacheLLM, streaming: bool) -> None:
    synthesizer = KVCacheSynthesizer(llm, streaming=streaming)
    assert str(synthesizer.synthesize(QUESTION, [])) == "Empty Response"
    own = KVCacheSynthesizer(llm, streaming=streaming, empty_response="Nothing found.")
    assert str(own.synthesize(QUESTION, [])) == "Nothing found."


def test_texts_without_nodes_and_nodes_without_text(llm: KVCacheLLM) -> None:
    synthesizer = KVCacheSynthesizer(llm)
    alone = synthesizer.get_response(QUESTION, FACTS[:1])
    response = synthesizer.synthesize(QUESTION, nodes(FACTS[0], " "), nodes("additional"))
    assert str(response) == alone
    assert texts(response) == [FACTS[0], " ", "additional"]


def test_what_does_not_fit_is_read_in_rounds_or_refused(make_engine: Callable[..., Engine]) -> None:
    llm = KVCacheLLM(engine=make_engine(context_window=420), max_new_tokens=4)
    found = nodes(*(f"{at} {'x' * 90}" for at in range(4)))
    assert cost(KVCacheSynthesizer(llm).synthesize("q?", found))["rounds"] > 1
    with pytest.raises(ContextTooLongError):
        KVCacheSynthesizer(llm, overflow="error").synthesize("q?", found)


# ---------------------------------------------------------------------- construction
@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (KVCacheSynthesizer, {"output_cls": "Document"}, "output_cls must be a pydantic class"),
        (KVCacheSynthesizer, {"multimodal": True}, "multimodal"),
        (KVCacheSynthesizer, {"llm": MockLLM()}, "KVCacheLLM, not a MockLLM"),
        (KVCacheQueryEngine.from_index, {"response_mode": "tree_summarize"}, "response_mode"),
        (KVCacheQueryEngine.from_index, {"refine_template": LlamaPrompt("x")}, "refine_template"),
        (KVCacheQueryEngine.from_index, {"output_cls": 3}, "output_cls must be a pydantic class"),
    ],
)
def test_what_it_cannot_do_is_said(
    index: VectorStoreIndex, make: Any, options: dict[str, Any], message: str
) -> None:
    given = {"llm": KVCacheLLM(model_name="never loaded"), **options}
    with pytest.raises(InvalidInputError, match=message):
        make(**given) if make is KVCacheSynthesizer else make(index, **given)


def test_the_llm_of_the_settings_is_read_where_none_is_given(
    index: VectorStoreIndex, llm: KVCacheLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: Any) -> None:
        raise ImportError("llama-index-llms-openai")

    with monkeypatch.context() as patch:
        patch.setattr(type(Settings), "llm", property(missing))
        engine = index.as_query_engine(llm=llm, response_synthesizer=KVCacheSynthesizer(llm))
        for one in (engine, KVCacheQueryEngine.from_index(index, llm)):
            assert str(one.query(QUESTION))
        with pytest.raises(InvalidInputError, match=r"Settings\.llm"):
            KVCacheSynthesizer()
    monkeypatch.setattr(Settings, "_llm", llm)
    assert str(KVCacheQueryEngine.from_index(index).query(QUESTION))


def test_from_documents(
    llm: KVCacheLLM, embedding: HashEmbedding, tmp_path: Any, prefilled: Callable[[], int]
) -> None:
    documents = [Document(text=text, id_=f"d{at}") for at, text in enumerate(FACTS)]
    for _ in range(2):
        engine = KVCacheQueryEngine.from_documents(
            documents, llm, embed_model=embedding, persist_dir=str(tmp_path), similarity_top_k=9
        )
        response = engine.query(QUESTION)
        assert len(response.source_nodes) == len(FACTS)
    assert prefilled() == len(FACTS)
    apart = KVCacheQueryEngine.from_documents(documents[:1], llm, embed_model=embedding)
    assert len(apart.query(QUESTION).source_nodes) == 1


def test_from_documents_that_fails_loses_nothing(
    llm: KVCacheLLM, embedding: HashEmbedding, tmp_path: Any
) -> None:
    class Failing(HashEmbedding):
        def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            raise ConnectionError("no embedding")

    def build(text: str, id_: str = "d", embed_model: Any = embedding) -> KVCacheQueryEngine:
        split = SentenceSplitter(chunk_size=9000, id_func=lambda *_: f"node-{id_}")
        options: dict[str, Any] = {"persist_dir": str(tmp_path), "transformations": [split]}
        documents = [Document(text=text, id_=id_)]
        return KVCacheQueryEngine.from_documents(documents, llm, embed_model=embed_model, **options)

    build(FACTS[0])
    with pytest.raises(ConnectionError):
        build("x" * 500, embed_model=Failing(dimensions=embedding.dimensions))
    (found,) = build(FACTS[1], "other").retriever.retrieve(FACTS[0])[:1]
    assert found.node.get_content() == FACTS[0]
    (found,) = build(FACTS[2]).retriever.retrieve(FACTS[2])[:1]  # under the same node id
    assert found.node.get_content() == FACTS[2]


# ---------------------------------------------------------------------- what is built on engines


def test_what_is_built_on_query_engines(index: VectorStoreIndex, llm: KVCacheLLM) -> None:
    engine = KVCacheQueryEngine.from_index(index, llm)
    transformed = TransformQueryEngine(engine, HyDEQueryTransform(llm, include_original=True))
    assert cost(transformed.query(QUESTION))["references"] == 2
    # Not the default memory, which leaves a database connection open.
    options: dict[str, Any] = {"llm": llm, "memory": ChatMemoryBuffer.from_defaults(llm=llm)}
    chat = CondenseQuestionChatEngine.from_defaults(query_engine=engine, **options)
    assert chat.chat(QUESTION).source_nodes
    streaming = KVCacheQueryEngine.from_index(index, llm, streaming=True)
    chat = CondenseQuestionChatEngine.from_defaults(query_engine=streaming, **options)
    assert "".join(chat.stream_chat(QUESTION).response_gen)
