"""KVCacheSynthesizer and KVCacheQueryEngine inside LlamaIndex."""

from __future__ import annotations

import uuid
import warnings
from typing import TYPE_CHECKING, Any

import chromadb
import pytest
from llama_index.core import Document, Settings, StorageContext, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import PromptTemplate as LlamaPrompt
from llama_index.core.query_engine import RetrieverQueryEngine, TransformQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.core.tools import QueryEngineTool
from small import make_model, make_tokenizer, make_untrained

from kvcache_rag import Engine, InvalidInputError, Reuse
from kvcache_rag.errors import ContextTooLongError
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

FACTS = [
    "The lighthouse keeper is called Marlow.",
    "The bakery sells bread made of rye.",
    "The harbour was built in 1911.",
    "The ferry leaves every two hours.",
]
QUESTION = "Who keeps the lighthouse?"


@pytest.fixture
def store(llm: KVCacheLLM) -> KVCacheVectorStore:
    name = f"c-{uuid.uuid4().hex}"
    return KVCacheVectorStore.from_params(name, client=chromadb.EphemeralClient(), llm=llm)


@pytest.fixture
def index(store: KVCacheVectorStore, embedding: HashEmbedding) -> VectorStoreIndex:
    documents = [
        Document(text=text, id_=f"d{at}", metadata={"page": at, "window": f"{text} And more."})
        for at, text in enumerate(FACTS)
    ]
    for document in documents:
        document.excluded_llm_metadata_keys = ["window"]
        document.excluded_embed_metadata_keys = ["window"]
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex.from_documents(
        documents, storage_context=context, embed_model=embedding
    )


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


def nodes(*texts: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in texts]


# ---------------------------------------------------------------------- reuse
def test_chunks_are_loaded_by_reference(
    index: VectorStoreIndex, llm: KVCacheLLM, tokenised: list[str], prefilled: Callable[[], int]
) -> None:
    prefilled()
    engine = KVCacheQueryEngine.from_index(index, llm, similarity_top_k=3)
    response = engine.query(QUESTION)
    metrics = (response.metadata or {})["kv_cache"]
    assert metrics["references"] == 3
    assert metrics["hits"] == {"memory": 3}
    assert metrics["misses"] == metrics["prefilled_tokens"] == prefilled() == 0
    assert metrics["reused_tokens"] > 0
    assert not any(fact in text for fact in FACTS for text in tokenised)
    assert len(response.source_nodes) == 3
    assert response.source_nodes[0].node.get_content() == FACTS[0]


# ---------------------------------------------------------------------- streams
def test_stream_fills_its_metrics_when_it_ends(index: VectorStoreIndex, llm: KVCacheLLM) -> None:
    plain = KVCacheQueryEngine.from_index(index, llm).query(QUESTION)
    streamed = KVCacheQueryEngine.from_index(index, llm, streaming=True).query(QUESTION)
    metadata = streamed.metadata or {}
    assert metadata["kv_cache"] == {}
    pieces = list(streamed.response_gen)  # type: ignore[union-attr, arg-type]  # it streams
    assert len(pieces) > 1
    assert "".join(pieces) == str(plain)
    assert metadata["kv_cache"]["generated_tokens"] == 6
    assert metadata["kv_cache"]["references"] == 2
    assert [found.node_id for found in streamed.source_nodes] == [
        found.node_id for found in plain.source_nodes
    ]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fails at the third token."""
    forward = make_model().forward
    calls = [0]

    def fail(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > 2:
            raise RuntimeError("out of memory")
        return forward(*args, **options)

    monkeypatch.setattr(make_model(), "forward", fail)


@pytest.mark.timeout(60)
def test_failure_while_streaming_reaches_the_consumer(
    index: VectorStoreIndex, llm: KVCacheLLM, request: pytest.FixtureRequest
) -> None:
    engine = KVCacheQueryEngine.from_index(index, llm, streaming=True)
    request.getfixturevalue("failing")
    response: Any = engine.query(QUESTION)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(response.response_gen)
    assert response.metadata["kv_cache"] == {}


@pytest.mark.timeout(60)
async def test_failure_while_streaming_reaches_the_async_consumer(
    index: VectorStoreIndex, llm: KVCacheLLM, request: pytest.FixtureRequest
) -> None:
    engine = KVCacheQueryEngine.from_index(index, llm, streaming=True)
    request.getfixturevalue("failing")
    response: Any = await engine.aquery(QUESTION)
    with pytest.raises(RuntimeError, match="out of memory"):
        async for _ in response.async_response_gen():
            pass


# ---------------------------------------------------------------------- events
def event_names(recorder: Recorder) -> list[str]:
    """Names without those of the embedding and of the pieces, of which there are any number."""
    ignored = ("EmbeddingStartEvent", "EmbeddingEndEvent", "LLMCompletionInProgressEvent")
    return [name for name in recorder.names() if name not in ignored]


@pytest.mark.parametrize("streaming", [False, True])
async def test_events_are_those_of_a_stock_engine(
    index: VectorStoreIndex, llm: KVCacheLLM, recorder: Recorder, streaming: bool
) -> None:
    retriever = index.as_retriever(similarity_top_k=2)
    stock = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=streaming)
    ours = KVCacheQueryEngine.from_args(retriever, llm, streaming=streaming)

    def names() -> list[str]:
        found = sorted(event_names(recorder))
        recorder.events.clear()
        return found

    async def awaited(engine: Any) -> list[str]:
        response = await engine.aquery(QUESTION)
        if streaming:
            async for _ in response.async_response_gen():
                pass
        return names()

    str(stock.query(QUESTION))
    theirs = names()
    str(ours.query(QUESTION))
    assert (own := names()) == sorted([*theirs, "KVCacheReuseEvent"])
    assert len(set(own)) == len(own)
    theirs = await awaited(stock)
    assert await awaited(ours) == sorted([*theirs, "KVCacheReuseEvent"])


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
    (reuse,) = recorder.of("KVCacheReuseEvent")
    assert reuse.query_str == QUESTION
    assert reuse.metrics == (response.metadata or {})["kv_cache"]
    (start,) = recorder.of("GetResponseStartEvent")
    assert start.text_chunks == [
        one.node.get_content(MetadataMode.LLM) for one in response.source_nodes
    ]
    (call,) = recorder.of("LLMCompletionStartEvent")
    assert all(text in call.prompt for text in (*start.text_chunks, QUESTION, "Read."))
    assert call.additional_kwargs == {}
    (end,) = recorder.of("LLMPredictEndEvent")
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
    assert synthesizer.get_response(QUESTION, FACTS[:1])
    response = synthesizer.synthesize(QUESTION, nodes(FACTS[0], " "))
    assert str(response) == synthesizer.get_response(QUESTION, FACTS[:1])
    assert len(response.source_nodes) == 2


def test_additional_sources_are_listed(llm: KVCacheLLM) -> None:
    response = KVCacheSynthesizer(llm).synthesize(QUESTION, nodes("a"), nodes("b"))
    assert [source.node.get_content() for source in response.source_nodes] == ["a", "b"]


def test_overflow(make_engine: Callable[..., Engine]) -> None:
    llm = KVCacheLLM(engine=make_engine(context_window=420), max_new_tokens=4)
    found = nodes(*(f"{index} {'x' * 90}" for index in range(4)))
    refined = KVCacheSynthesizer(llm).synthesize("q?", found).metadata or {}
    assert refined["kv_cache"]["rounds"] > 1
    dropped = KVCacheSynthesizer(llm, overflow="drop_lowest").synthesize("q?", found).metadata or {}
    assert dropped["kv_cache"]["dropped_chunks"] > 0
    with pytest.raises(ContextTooLongError):
        KVCacheSynthesizer(llm, overflow="error").synthesize("q?", found)


# ---------------------------------------------------------------------- construction
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_cls": "Document"}, "output_cls must be a pydantic class"),
        ({"multimodal": True}, "multimodal"),
        ({"llm": MockLLM()}, "KVCacheLLM, not a MockLLM"),
    ],
)
def test_synthesizer_says_what_it_cannot_do(
    llm: KVCacheLLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        KVCacheSynthesizer(**{"llm": llm, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_mode": "tree_summarize"}, "response_mode"),
        ({"refine_template": LlamaPrompt("x")}, "refine_template"),
        ({"output_cls": 3}, "output_cls must be a pydantic class"),
    ],
)
def test_query_engine_says_what_it_cannot_do(
    index: VectorStoreIndex, llm: KVCacheLLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        KVCacheQueryEngine.from_index(index, llm, **options)


def test_synthesizer_does_not_load_the_model() -> None:
    KVCacheSynthesizer(KVCacheLLM(model_name="never loaded"))


def test_settings_are_left_alone(
    index: VectorStoreIndex, llm: KVCacheLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any) -> None:
        raise AssertionError("Settings.llm was read")

    monkeypatch.setattr(type(Settings), "llm", property(refuse))
    assert str(KVCacheQueryEngine.from_index(index, llm).query(QUESTION))
    engine = index.as_query_engine(llm=llm, response_synthesizer=KVCacheSynthesizer(llm))
    assert str(engine.query(QUESTION))


def test_no_llm_at_all_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Any) -> None:
        raise ImportError("llama-index-llms-openai")

    monkeypatch.setattr(type(Settings), "llm", property(missing))
    with pytest.raises(InvalidInputError, match=r"Settings\.llm"):
        KVCacheSynthesizer()


def test_llm_of_the_settings(
    index: VectorStoreIndex, llm: KVCacheLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    def build(
        text: str, id_: str = "d", embedding: HashEmbedding = embedding
    ) -> KVCacheQueryEngine:
        return KVCacheQueryEngine.from_documents(
            [Document(text=text, id_=id_)],
            llm,
            embed_model=embedding,
            persist_dir=str(tmp_path),
            transformations=[SentenceSplitter(chunk_size=9000, id_func=lambda *_: f"node-{id_}")],
        )

    build(FACTS[0])
    with pytest.raises(ConnectionError):
        build("x" * 500, embedding=Failing(dimensions=embedding.dimensions))
    (found,) = build(FACTS[1], "other").retriever.retrieve(FACTS[0])[:1]
    assert found.node.get_content() == FACTS[0]
    (found,) = build(FACTS[2]).retriever.retrieve(FACTS[2])[:1]  # under the same node id
    assert found.node.get_content() == FACTS[2]


# ---------------------------------------------------------------------- what is built on engines
def test_query_transform(index: VectorStoreIndex, llm: KVCacheLLM) -> None:
    engine = TransformQueryEngine(
        KVCacheQueryEngine.from_index(index, llm), HyDEQueryTransform(llm, include_original=True)
    )
    assert (engine.query(QUESTION).metadata or {})["kv_cache"]["references"] == 2


def test_tool_and_chat_engine(index: VectorStoreIndex, llm: KVCacheLLM) -> None:
    engine = KVCacheQueryEngine.from_index(index, llm)
    assert str(QueryEngineTool.from_defaults(engine).call(QUESTION))
    # Not the default memory, which leaves a database connection open.
    options: dict[str, Any] = {"llm": llm, "memory": ChatMemoryBuffer.from_defaults(llm=llm)}
    chat = CondenseQuestionChatEngine.from_defaults(query_engine=engine, **options)
    assert chat.chat(QUESTION).source_nodes
    streaming = KVCacheQueryEngine.from_index(index, llm, streaming=True)
    chat = CondenseQuestionChatEngine.from_defaults(query_engine=streaming, **options)
    assert "".join(chat.stream_chat(QUESTION).response_gen)


# ---------------------------------------------------------------------- plain reuse
@pytest.mark.parametrize("told", ["llm", "synthesizer"])
def test_who_asks_an_untrained_model_for_plain_reuse_is_told_once(told: str) -> None:
    engine = Engine(make_untrained(), make_tokenizer())
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in FACTS]
    llm = KVCacheLLM(engine=engine, max_new_tokens=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        KVCacheSynthesizer(llm).synthesize(QUESTION, nodes)
        assert not found, "the default"
        if told == "llm":
            llm = KVCacheLLM(engine=engine, max_new_tokens=2, policy="reuse")
        synthesizer = KVCacheSynthesizer(llm, policy="reuse" if told == "synthesizer" else None)
        for _ in range(2):
            synthesizer.synthesize(QUESTION, nodes)
    assert [repr(Reuse()) in str(one.message) for one in found] == [True]
