"""What cannot be used is told to whoever said it, also where LlamaIndex stands between."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import chromadb
import pytest
from contracts_frameworks import QUESTION, Keeper
from llama_index.core import Document, PromptTemplate, Settings, VectorStoreIndex
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import NodeWithScore, TextNode

from kvcache_rag import InvalidInputError, KVCacheRagError, Reuse
from kvcache_rag.policies import policy_by_name
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheChatEngine,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheSynthesizer,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag import Engine


@pytest.fixture
def index() -> VectorStoreIndex:
    document = Document(text="The lighthouse keeper is called Marlow.")
    return VectorStoreIndex.from_documents([document], embed_model=HashEmbedding())


# ---------------------------------------------------------------------- when the LLM is made
def test_without_an_embedding_it_is_said_which_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IS_TESTING", raising=False)
    monkeypatch.setattr(Settings, "_embed_model", None)
    monkeypatch.setitem(sys.modules, "llama_index.embeddings.openai", None)
    with pytest.raises(InvalidInputError, match=r"say embed_model=, such as HashEmbedding\(\)"):
        KVCacheQueryEngine.from_documents([Document(text="x")], llm=KVCacheLLM(model_name="tiny"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generate_kwargs": {"foo": 1}}, r"^foo is no option of generate\(\)"),
        (
            {"generate_kwargs": {"temperature": -1, "do_sample": True}},
            "^temperature must be a number from 0 up, not -1",
        ),
        (
            {"temperature": 1},
            '^temperature is no argument of KVCacheLLM; say it by generate_kwargs={"temperature"',
        ),
        (
            {"overflow": 1},
            r"^overflow is no argument of KVCacheLLM; say it by KVCacheSynthesizer\(overflow=...\)",
        ),
    ],
)
def test_of_the_llm(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        KVCacheLLM(model_name="tiny", **options)


def test_what_is_no_argument_of_generate_is_taken_where_the_engine_knows_it() -> None:
    KVCacheLLM(model_name="tiny", generate_kwargs={"stop": ["."], "max_new_tokens": 3, "top_k": 5})


def test_a_policy_by_name(engine: Engine, index: VectorStoreIndex) -> None:
    """Every place that takes a policy takes its name, and refuses alike what is none."""
    llm = KVCacheLLM(engine=engine, max_new_tokens=2, policy="full")
    made: list[Callable[..., Any]] = [
        lambda policy: KVCacheQueryEngine.from_index(index, llm, policy=policy),
        lambda policy: KVCacheChatEngine.from_index(index, llm, policy=policy),
        lambda policy: KVCacheSynthesizer(llm, policy=policy),
    ]
    for make in made:
        with pytest.raises(InvalidInputError, match="there is no policy 'fast'"):
            make("fast")
        with pytest.raises(InvalidInputError, match=r"write Reuse\(\)"):
            make(Reuse)
    response = made[0]("cacheblend:0.5").query(QUESTION)
    assert response.metadata["kv_cache"]["policy"].startswith("CacheBlend(ratio=0.5")


# ---------------------------------------------------------------------- in engines of LlamaIndex
@pytest.fixture
def refusing(engine: Engine) -> KVCacheLLM:
    """What it wants is known when it is asked."""
    return KVCacheLLM(engine=engine, max_new_tokens=4, policy=policy_by_name("cacheclip"))


async def test_a_stock_engine_gives_no_empty_response(
    index: VectorStoreIndex, refusing: KVCacheLLM
) -> None:
    stock = index.as_query_engine(llm=refusing)
    streaming: Any = index.as_query_engine(llm=refusing, streaming=True)
    memory = ChatMemoryBuffer.from_defaults(token_limit=99, tokenizer_fn=str.split)
    chat = index.as_chat_engine(chat_mode="context", llm=refusing, memory=memory)
    with pytest.raises(KVCacheRagError, match="auxiliary") as told:
        stock.query(QUESTION)
    assert not isinstance(told.value, ValueError)
    assert isinstance(told.value.__cause__, InvalidInputError)
    with pytest.raises(KVCacheRagError, match="auxiliary"):
        await stock.aquery(QUESTION)
    for ask in (chat.chat, lambda text: list(streaming.query(text).response_gen)):
        with pytest.raises(KVCacheRagError, match="auxiliary"):
            ask(QUESTION)


async def test_nor_for_an_object_that_is_cut(index: VectorStoreIndex, engine: Engine) -> None:
    llm = KVCacheLLM(engine=engine, max_new_tokens=2)
    stock = index.as_query_engine(llm=llm, output_cls=Keeper)
    with pytest.raises(KVCacheRagError, match="raise max_new_tokens"):
        stock.query(QUESTION)
    with pytest.raises(KVCacheRagError, match="raise max_new_tokens"):
        await stock.aquery(QUESTION)
    if version("llama-index-core") == "0.14.19":
        return  # it ends a stream of objects at the first error, without a word
    streaming: Any = index.as_query_engine(llm=llm, output_cls=Keeper, streaming=True)
    with pytest.raises(KVCacheRagError, match="raise max_new_tokens"):
        list(streaming.query(QUESTION).response_gen)


def test_who_asks_the_llm_himself_gets_the_error_as_it_is(
    index: VectorStoreIndex, engine: Engine
) -> None:
    llm = KVCacheLLM(engine=engine, max_new_tokens=2)
    list(index.as_query_engine(llm=llm, streaming=True).query(QUESTION).response_gen)
    with pytest.raises(InvalidInputError, match="raise max_new_tokens"):
        llm.structured_predict(Keeper, PromptTemplate("Who?"))
    with pytest.raises(InvalidInputError, match="foo is no option"):
        llm.complete("Who?", foo=1)


# ---------------------------------------------------------------------- what is asked
@pytest.mark.parametrize("message", ["", "   ", None])
async def test_an_empty_message_is_told_before_anything_is_searched_for(
    index: VectorStoreIndex, llm: KVCacheLLM, message: Any
) -> None:
    made = KVCacheChatEngine.from_index(index, llm)
    for ask in (made.chat, made.stream_chat):
        with pytest.raises(InvalidInputError, match="the question is empty; ask something"):
            ask(message)
    for later in (made.achat, made.astream_chat):
        with pytest.raises(InvalidInputError, match="the question is empty; ask something"):
            await later(message)
    assert made.chat_history == []


# ---------------------------------------------------------------------- what is no Unicode
LONE = "A \ud800 cat."


@pytest.fixture
def store(llm: KVCacheLLM) -> KVCacheVectorStore:
    return KVCacheVectorStore.from_params("odd", client=chromadb.EphemeralClient(), llm=llm)


def test_a_node_of_which_metadata_are_not_unicode_is_named(
    llm: KVCacheLLM, store: KVCacheVectorStore
) -> None:
    odd = TextNode(id_="odd", text="A cat.", metadata={"title": LONE}, embedding=[0.0, 1.0])
    nodes = [TextNode(id_="fine", text="A dog.", embedding=[1.0, 0.0]), odd]
    given = [NodeWithScore(node=one, score=1.0) for one in nodes]
    said = "^the text of node 'odd' is not valid Unicode .*; clean it"
    for call in (
        lambda: store.add(nodes),
        lambda: llm.prefill(nodes),
        lambda: KVCacheSynthesizer(llm).synthesize(QUESTION, given),
    ):
        with pytest.raises(InvalidInputError, match=said):
            call()
    assert store.client.count() == 0


def test_an_id_that_is_not_unicode_is_told(store: KVCacheVectorStore) -> None:
    for call in (store.delete_documents, store.get_nodes):
        with pytest.raises(InvalidInputError, match="is not valid Unicode"):
            call([LONE])
