"""LangChain over a GGUF file in llama.cpp: the engine's own answers, reused after a restart."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import access
import llama_smollm2 as llama
import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from pydantic import BaseModel, Field
from small import make_model, make_tokenizer

from kvcache_rag import DiskStore, Engine, InvalidInputError, Message
from kvcache_rag.integration import answer_state, open_engine
from kvcache_rag.policies import policy_by_name
from langchain_kvcache_rag import (
    ChatKVCache,
    HashEmbeddings,
    KVCacheChroma,
    KVCacheRAG,
    create_kvcache_rag_chain,
)

if TYPE_CHECKING:
    from pathlib import Path

llama.needed()

POLICY = policy_by_name("legolink:4")
MOST = 16
SAID = [HumanMessage("Who sells rye bread?"), AIMessage("The bakery.")]
HISTORY = [Message("user", "Who sells rye bread?"), Message("assistant", "The bakery.")]
ASKED: Any = {
    "question": llama.QUESTION,
    "context": [Document(text) for text in llama.TEXTS],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llamacpp")


@pytest.fixture(scope="module")
def llm(place: Path) -> ChatKVCache:
    """By its name, as an app says it."""
    how: dict[str, Any] = {**llama.HOW, "policy": POLICY, "max_tokens": MOST}
    return ChatKVCache(model=llama.NAME, kv_dir=str(place / "kv"), **how)


@pytest.fixture(scope="module")
def expected() -> str:
    """What an engine says whose chunks are its own."""
    answer = llama.engine().generate(
        llama.QUESTION, llama.TEXTS, policy=POLICY, max_new_tokens=MOST
    )
    assert answer.text
    return answer.text


async def test_every_way_of_asking_gives_what_the_engine_says(
    llm: ChatKVCache, expected: str
) -> None:
    rag = KVCacheRAG(llm=llm)
    assert rag.invoke(ASKED).content == expected
    assert (await rag.ainvoke(ASKED)).content == expected
    assert "".join(str(piece.content) for piece in rag.stream(ASKED)) == expected
    # In other cells llama.cpp rounds otherwise, which a question with clear answers can stand.
    clear = f"Repeat: {llama.TEXTS[2]}"
    said = [one.content for one in rag.batch([{**ASKED, "question": clear}] * 2)]
    assert said == [llama.TEXTS[2]] * 2


def test_a_history_stands_behind_the_chunks(llm: ChatKVCache) -> None:
    found = KVCacheRAG(llm=llm).invoke({**ASKED, "chat_history": SAID})
    answer = llama.engine().generate(
        llama.QUESTION, llama.TEXTS, history=HISTORY, policy=POLICY, max_new_tokens=MOST
    )
    assert found.content == answer.text


def chroma(place: Path, llm: ChatKVCache) -> KVCacheChroma:
    return KVCacheChroma("docs", HashEmbeddings(), persist_directory=str(place / "c"), llm=llm)


def test_rows_refer_to_chunks_and_a_restart_reuses_every_token(
    llm: ChatKVCache, place: Path
) -> None:
    chroma(place, llm).add_texts(list(llama.TEXTS))
    engine = llama.engine(store=DiskStore(place / "kv"))
    again = ChatKVCache(engine=engine, policy=POLICY, max_tokens=MOST)
    store = chroma(place, again)
    rows: Any = access.collection(store).collection.get(include=["metadatas"])["metadatas"]
    assert {row["kv_key"] for row in rows} == {key.digest for key in engine.keys(llama.TEXTS)}
    asked = {"input": llama.QUESTION}
    first, second = (
        create_kvcache_rag_chain(chroma(place, one).as_retriever(search_kwargs={"k": 3}), one)
        for one in (llm, again)
    )
    found: Any = second.invoke(asked)
    assert found["answer"] == first.invoke(asked)["answer"] != ""
    seen = KVCacheRAG(llm=again).invoke({**ASKED, "context": found["context"]})
    cost = seen.response_metadata["kv_cache"]
    tokens = sum(map(len, engine.tokenize("?", llama.TEXTS).chunks))
    assert (cost["misses"], cost["reused_tokens"]) == (0, tokens)


class Keeper(BaseModel):
    """Who keeps a building."""

    name: str = Field(max_length=12)
    year: int = Field(ge=1000, le=2000)


def test_an_answer_is_held_to_a_schema(llm: ChatKVCache) -> None:
    found = llm.with_structured_output(Keeper).invoke("Ann came in 1987.", max_tokens=60)
    assert isinstance(found, Keeper)


def test_the_backend_is_part_of_what_answers_are_kept_by(llm: ChatKVCache) -> None:
    string = llm._get_llm_string()
    assert string == llm._get_llm_string()
    other = ChatKVCache(model=llama.NAME, engine=llm.engine)
    assert string != other._get_llm_string()  # its own engine
    same, another = (
        answer_state(llama.engine(store=llm.engine.store, policy=policy))
        for policy in (POLICY, policy_by_name("reuse"))
    )
    assert answer_state(llm.engine) == same != another
    assert llm._identifying_params["backend"] == "llama.cpp"
    assert "backend" not in ChatKVCache(model="tiny")._identifying_params
    assert pickle.loads(pickle.dumps(llm)).backend == "llama.cpp"


def test_what_does_not_go_together_is_one_sentence(llm: ChatKVCache) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"engine": llm.engine}, "with engine=, backend belong to the engine"),
        ({"base_url": "http://a"}, "with base_url=, backend is the server's to say"),
        ({"model": "tiny"}, "runs GGUF files, and 'tiny' is none"),
        ({"model": llama.NAME, "weight_format": "int4"}, "weights as the file has them, not int4"),
        ({"model": llama.NAME, "device": "nowhere"}, "'nowhere' is no device"),
    )
    for options, said in cases:
        with pytest.raises(InvalidInputError, match=said):
            _ = ChatKVCache(backend="llama.cpp", **options).engine
    with pytest.raises(InvalidInputError, match="a loaded model of transformers was given"):
        open_engine(make_model(), make_tokenizer(), backend="llama.cpp")
    model, tokenizer, _ = llama.loaded()
    with pytest.raises(InvalidInputError, match="takes an adapter while it loads a model"):
        open_engine(model, tokenizer, adapter="block")
    assert isinstance(open_engine(model, tokenizer, backend="llama.cpp"), Engine)
