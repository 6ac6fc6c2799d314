"""An app moves from a model of its own to a server by `base_url=`, and loads no model then."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import tool
from llama_index.core import Document as IndexDocument
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from serve_fakes import running, settings, tiny_backend

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import MissingExtraError
from kvcache_rag.integration import engine as engine_module
from kvcache_rag_server.app import build_app
from langchain_kvcache_rag import (
    ChatKVCache,
    HashEmbeddings,
    KVCacheChroma,
    KVCacheRAG,
    document_block,
)
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheChatEngine,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXTS = [
    "Bralo keeps the red lamp in the hall. The blue cup belongs to Mira.",
    "Sorin keeps the old map in the cellar. The key belongs to Tano.",
]
QUESTION = "Where does Bralo keep the red lamp?"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        tiny_backend(tmp_path_factory.mktemp("kv")) as backend,
        running(build_app(backend, settings())) as found,
    ):
        yield found


def index_of(llm: KVCacheLLM, folder: Path) -> VectorStoreIndex:
    store = KVCacheVectorStore.from_params("docs", persist_dir=str(folder), llm=llm)
    index = VectorStoreIndex.from_vector_store(store, embed_model=HashEmbedding())
    for number, text in enumerate(TEXTS):
        index.insert(IndexDocument(text=text, id_=str(number)))
    return index


def test_a_query_engine_answers_from_what_the_server_prefilled(url: str, tmp_path: Path) -> None:
    texts = []
    for place, llm in {
        "here": KVCacheLLM(model_name="tiny", device_map="cpu", max_new_tokens=8),
        "there": KVCacheLLM(model_name="tiny", base_url=url, kv_dir="unused", max_new_tokens=8),
    }.items():
        index = index_of(llm, tmp_path / place)
        response = KVCacheQueryEngine.from_index(index, llm=llm, similarity_top_k=2).query(QUESTION)
        texts.append(str(response))
        cost = response.metadata["kv_cache"]
        assert (cost["misses"], sum(cost["hits"].values())) == (0, 2)
    assert texts[0] == texts[1]
    assert llm.metadata.is_chat_model
    assert llm.metadata.model_name == "tiny"
    assert not (tmp_path / "unused").exists()


async def test_rows_are_deleted_and_filled_again(url: str, tmp_path: Path) -> None:
    llm = KVCacheLLM(base_url=url, max_new_tokens=8)
    index = index_of(llm, tmp_path / "chroma")
    store: Any = index.vector_store
    assert store.prefill_missing() == 0  # a server knows its chunks by their texts
    store.delete("0")
    engine = KVCacheQueryEngine.from_index(index, llm=llm)
    response = await engine.aquery("Where is the map?")
    assert [node.text for node in response.source_nodes] == TEXTS[1:]


def test_llama_indexs_own_engines_and_chats(url: str, tmp_path: Path) -> None:
    llm = KVCacheLLM(base_url=url, max_new_tokens=8)
    index = index_of(llm, tmp_path / "chroma")
    own = index.as_query_engine(llm=llm, similarity_top_k=2).query(QUESTION)
    assert own.metadata["kv_cache"]["misses"] == 0
    said = [ChatMessage(role="user", content="Where is the lamp?")]
    whole = llm.chat(said).message.content
    assert whole == "".join(one.delta or "" for one in llm.stream_chat(said))
    assert llm.complete("The lamp").raw["usage"]["completion_tokens"] > 0
    chat = KVCacheChatEngine.from_defaults(retriever=index.as_retriever(), llm=llm)
    for question in (QUESTION, "And the map?"):
        assert chat.chat(question).metadata["kv_cache"]["misses"] == 0


def test_a_chain_answers_from_what_the_server_prefilled(url: str, tmp_path: Path) -> None:
    texts = []
    for place, llm in {
        "here": ChatKVCache(model="tiny", device="cpu", max_tokens=8),
        "there": ChatKVCache(model="tiny", base_url=f"{url}/v1", kv_dir="unused", max_tokens=8),
    }.items():
        store = KVCacheChroma(
            "docs", HashEmbeddings(), persist_directory=str(tmp_path / place), llm=llm
        )
        store.add_documents([Document(text) for text in TEXTS], ids=["a", "b"])
        retriever = store.as_retriever(search_kwargs={"k": 2})
        chain = {"context": retriever, "question": RunnablePassthrough()} | KVCacheRAG(llm=llm)
        answer = chain.invoke(QUESTION)
        texts.append(answer.content)
        message = llm.invoke([HumanMessage("Where is the lamp?")])
        assert message.usage_metadata["output_tokens"] > 0
        store.delete(["a"])
        assert store.get(["b"])["ids"] == ["b"]
    assert texts[0] == texts[1]


async def test_streams_batches_and_other_messages(url: str) -> None:
    llm = ChatKVCache(base_url=url, max_tokens=8, temperature=0.0)
    blocks = [document_block(Document(text)) for text in TEXTS]
    asked = [HumanMessage([*blocks, {"type": "text", "text": QUESTION}])]
    with get_usage_metadata_callback() as counted:
        whole = llm.invoke(asked)
        assert [one.content for one in llm.batch([asked, asked])] == [whole.content] * 2
        assert (await llm.ainvoke(asked)).content == whole.content
        for pieces in ([*llm.stream(asked)], [one async for one in llm.astream(asked)]):
            assert "".join(str(one.content) for one in pieces) == whole.content
            names = [one.response_metadata.get("model_name") for one in pieces]
            assert [name for name in names if name is not None] == ["tiny"]
    assert [*counted.usage_metadata] == ["tiny"]
    assert whole.response_metadata["kv_cache"]["prompt_tokens"] > 0
    with pytest.warns(UserWarning, match="the system message is not the instruction"):
        other = llm.invoke([SystemMessage("Answer in one word."), *asked])
    assert other.response_metadata["kv_cache"]["prefix_mismatch"]
    assert llm.get_num_tokens_from_messages([HumanMessage("lamp " * 300)]) > 300
    calls = [{"name": "find", "args": {}, "id": "1", "type": "tool_call"}]
    said = [AIMessage("", tool_calls=calls), ToolMessage("lamp", tool_call_id="1")]
    assert isinstance(llm.invoke([HumanMessage("?"), *said]).content, str)


@tool
def find(query: str) -> str:
    """Find something."""
    return query


def test_what_a_server_is_not_told_is_one_sentence(url: str) -> None:
    chat = ChatKVCache(base_url=url)
    with pytest.raises(InvalidInputError, match="tools are called"):
        chat.bind_tools([find]).invoke("?")
    with pytest.raises(InvalidInputError, match="needs model and tokenizer"):
        chat.with_structured_output({"title": "A", "type": "object", "properties": {}}).invoke("?")
    with pytest.raises(InvalidInputError, match="count by custom_get_token_ids"):
        chat.get_num_tokens("text")
    with pytest.raises(InvalidInputError, match="adapter and weight_format are the server's"):
        ChatKVCache(base_url=url, adapter="block", weight_format="int8").invoke("?")
    with pytest.raises(InvalidInputError, match="auxiliary is the server's to say; leave it out"):
        ChatKVCache(base_url=url, auxiliary="tiny").invoke("?")
    with pytest.raises(InvalidInputError, match="auxiliary is the server's to say; leave it out"):
        KVCacheLLM(base_url=url, auxiliary="tiny").complete("?")
    llm = KVCacheLLM(base_url=url, stopping_ids=[3], gate="gate.json")
    with pytest.raises(InvalidInputError, match="gate and stopping_ids are the server's"):
        llm.complete("?")
    with pytest.raises(InvalidInputError, match="messages_to_prompt or completion_to_prompt"):
        KVCacheLLM(base_url=url, messages_to_prompt=lambda said: "x").complete("?")
    with pytest.raises(InvalidInputError, match="with engine=, base_url"):
        KVCacheLLM(base_url=url, engine=object())
    with pytest.raises(InvalidInputError, match="with engine=, base_url"):
        ChatKVCache(base_url=url, engine=object())


def test_a_key_is_not_written_down_and_not_shared() -> None:
    llm = KVCacheLLM(base_url="http://server", api_key="kv-secret")
    chat = ChatKVCache(base_url="http://server", api_key="kv-secret")
    for told in (repr(llm), llm.to_json(), repr(chat), json.dumps(chat.model_dump(mode="json"))):
        assert "kv-secret" not in told
    other = chat.model_copy(update={"api_key": None})
    assert other.engine is not chat.engine
    assert chat.model_copy().engine is chat.engine


_APP = """
import sys
from langchain_core.documents import Document
from langchain_core.runnables import RunnablePassthrough
from langchain_kvcache_rag import ChatKVCache, HashEmbeddings, KVCacheChroma, KVCacheRAG
from llama_index.core import Document as IndexDocument, VectorStoreIndex
from llama_index.kvcache_rag import HashEmbedding, KVCacheLLM
from llama_index.kvcache_rag import KVCacheQueryEngine, KVCacheVectorStore

url, folder = sys.argv[1:]
chat = ChatKVCache(base_url=url, max_tokens=4)
store = KVCacheChroma("docs", HashEmbeddings(), persist_directory=folder, llm=chat)
store.add_documents([Document("The lamp is red.")])
chain = {"context": store.as_retriever(), "question": RunnablePassthrough()} | KVCacheRAG(llm=chat)
print(chain.invoke("What is red?"))
llm = KVCacheLLM(base_url=url, max_new_tokens=4)
nodes = KVCacheVectorStore.from_params("docs", persist_dir=folder + "2", llm=llm)
index = VectorStoreIndex.from_vector_store(nodes, embed_model=HashEmbedding())
index.insert(IndexDocument(text="The lamp is red."))
print(KVCacheQueryEngine.from_index(index, llm=llm).query("What is red?"))
loaded = sorted({"torch", "transformers", "tokenizers", "safetensors"} & sys.modules.keys())
print(loaded)
"""


def test_neither_torch_nor_a_tokenizer_is_loaded(url: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _APP, url, str(tmp_path / "chroma")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


class Broken:
    """An entry point of a package of which a part is missing."""

    def load(self) -> None:
        raise ImportError("no module named 'fastapi'")


@pytest.mark.parametrize("found", [(), (Broken(),)], ids=["none", "one that fails"])
def test_without_the_servers_package_one_sentence_says_so(
    found: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def entry_points(*, group: str) -> tuple[Any, ...]:
        asked.append(group)
        return found

    monkeypatch.setattr(engine_module, "entry_points", entry_points)
    with pytest.raises(MissingExtraError) as error:
        engine_module.remote_engine("http://localhost:8000")
    said = "kvcache-rag-server is not installed: pip install 'kvcache-rag[server]'"
    assert (str(error.value), asked) == (said, ["kvcache_rag.remote_engines"])
