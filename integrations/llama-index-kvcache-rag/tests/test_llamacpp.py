"""LlamaIndex over a GGUF file in llama.cpp: the engine's own answers, reused after a restart."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import llama_smollm2 as llama
import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.schema import MetadataMode
from pydantic import BaseModel, Field
from small import make_model, make_tokenizer

from kvcache_rag import DiskStore, Engine, InvalidInputError, Message
from kvcache_rag.cli import main
from kvcache_rag.policies import policy_by_name
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheChatEngine,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from pathlib import Path

llama.needed()

POLICY = policy_by_name("legolink:4")
MOST = 16


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llamacpp")


@pytest.fixture(scope="module")
def llm(place: Path) -> KVCacheLLM:
    """By its name, as an app says it."""
    return KVCacheLLM(
        model_name=llama.NAME, kv_dir=str(place / "kv"), max_new_tokens=MOST, **llama.HOW
    )


@pytest.fixture(scope="module")
def alone() -> Engine:
    """What answers are held against; its chunks are its own."""
    return llama.engine()


def store_of(place: Path, llm: KVCacheLLM) -> KVCacheVectorStore:
    return KVCacheVectorStore.from_params("docs", persist_dir=str(place / "chroma"), llm=llm)


@pytest.fixture(scope="module")
def index(place: Path, llm: KVCacheLLM) -> VectorStoreIndex:
    made = VectorStoreIndex.from_vector_store(store_of(place, llm), embed_model=HashEmbedding())
    for number, text in enumerate(llama.TEXTS):
        made.insert(Document(text=text, id_=f"d{number}"))
    return made


def texts(response: Any) -> list[str]:
    return [node.get_content(MetadataMode.LLM) for node in response.source_nodes]


def test_a_query_engine_says_what_the_engine_says(
    index: VectorStoreIndex, llm: KVCacheLLM, alone: Engine
) -> None:
    made = {
        streams: KVCacheQueryEngine.from_index(
            index, llm, policy=POLICY, similarity_top_k=3, streaming=streams
        )
        for streams in (False, True)
    }
    response: Any = made[False].query(llama.QUESTION)
    streamed: Any = made[True].query(llama.QUESTION)
    found = texts(response)
    assert {*found} == {*llama.TEXTS}
    expected = alone.generate(llama.QUESTION, found, policy=POLICY, max_new_tokens=MOST).text
    assert expected
    assert (str(response), "".join(streamed.response_gen)) == (expected, expected)
    assert response.metadata["kv_cache"]["misses"] == 0  # prefilled at ingestion


def test_rows_refer_to_chunks_and_a_restart_reuses_every_token(
    index: VectorStoreIndex, llm: KVCacheLLM, place: Path
) -> None:
    engine = KVCacheQueryEngine.from_index(index, llm, policy=POLICY, similarity_top_k=3)
    expected: Any = engine.query(llama.QUESTION)
    again = KVCacheLLM(engine=llama.engine(store=DiskStore(place / "kv")), max_new_tokens=MOST)
    store = store_of(place, again)
    rows = store.client.get(include=["metadatas"])["metadatas"]
    keys = {key.digest for key in again.engine.keys(llama.TEXTS)}
    assert {row["kv_key"] for row in rows} == keys
    second = VectorStoreIndex.from_vector_store(store, embed_model=HashEmbedding())
    found: Any = KVCacheQueryEngine.from_index(
        second, again, policy=POLICY, similarity_top_k=3
    ).query(llama.QUESTION)
    assert str(found) == str(expected)
    metrics = found.metadata["kv_cache"]
    tokens = sum(map(len, again.engine.tokenize("?", llama.TEXTS).chunks))
    assert (metrics["misses"], metrics["hits"]) == (0, {"disk": 3})
    assert metrics["reused_tokens"] == tokens


def test_the_history_stands_behind_the_chunks(
    index: VectorStoreIndex, llm: KVCacheLLM, alone: Engine
) -> None:
    chat = KVCacheChatEngine.from_index(
        index, llm, policy=POLICY, similarity_top_k=3, skip_condense=True
    )
    told = [
        ChatMessage(role=MessageRole.USER, content="Who sells rye bread?"),
        ChatMessage(role=MessageRole.ASSISTANT, content="The bakery."),
    ]
    response = chat.chat(llama.QUESTION, told)
    history = [Message("user", "Who sells rye bread?"), Message("assistant", "The bakery.")]
    expected = alone.generate(
        llama.QUESTION, texts(response), history=history, policy=POLICY, max_new_tokens=MOST
    )
    assert str(response) == expected.text
    chat.reset()
    streamed = chat.stream_chat(llama.QUESTION, told)
    assert "".join(streamed.response_gen) == expected.text


class Place(BaseModel):
    """A building."""

    keeper: str = Field(max_length=12)
    year: int = Field(ge=1000, le=2000)


def test_an_answer_is_held_to_a_schema(llm: KVCacheLLM) -> None:
    schema = Place.model_json_schema()
    said = llm.complete("Ann came in 1987.", json_schema=schema, max_new_tokens=60).text
    Place.model_validate_json(said)


def test_the_backend_is_one_of_the_settings(llm: KVCacheLLM) -> None:
    written = json.loads(llm.to_json())
    assert written["backend"] == "llama.cpp"
    assert KVCacheLLM.from_dict(written).backend == "llama.cpp"
    for options, said in (
        ({"engine": llm.engine}, "with engine=, backend belong to the engine"),
        ({"base_url": "http://a"}, "with base_url=, backend is the server's to say"),
        (
            {"model": make_model(), "tokenizer": make_tokenizer()},
            "a loaded model of transformers was given",
        ),
        ({"model_name": "tiny"}, "runs GGUF files, and 'tiny' is none"),
        (
            {"model_name": llama.NAME, "model_kwargs": {"n_gpu_layer": 0}},
            "n_gpu_layer is no option of backend=.*did you mean n_gpu_layers",
        ),
    ):
        with pytest.raises(InvalidInputError, match=said):
            _ = KVCacheLLM(backend="llama.cpp", **options).engine


def test_ask_and_chat_know_the_backend_of_ingest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for number, text in enumerate(llama.TEXTS):
        (tmp_path / "docs" / f"{number}.txt").write_text(text)
    how = ("--model", llama.NAME, "--backend", "llama.cpp", "--adapter", "none")
    assert main(["ingest", "docs", "--embed", "hash", *how]) == 0
    assert "3 chunks prefilled" in capsys.readouterr().out
    words = ["--policy", "reuse", "--max-new-tokens", "8"]
    assert main(["ask", llama.QUESTION, "--json", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["answer"]
    assert said["model"] == f"{llama.NAME}, adapter none, by llama.cpp"
    assert (said["metrics"]["misses"], said["metrics"]["hits"]) == (0, 3)
    assert main(["ask", llama.QUESTION, "--policy", "prophetkv"]) == 2
    printed = capsys.readouterr().err
    assert "llama.cpp gives neither attention nor keys of single layers" in printed
    assert printed.count("\n") == 1
