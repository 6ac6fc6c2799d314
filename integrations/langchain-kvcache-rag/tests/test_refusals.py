"""What cannot be used is told in one sentence, and what is not read is not taken silently."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from store_helpers import memory_store

from kvcache_rag import CacheBlend, InvalidInputError
from kvcache_rag.policies import policy_by_name
from langchain_kvcache_rag import (
    ChatKVCache,
    HashEmbeddings,
    KVCacheChroma,
    KVCacheRAG,
    document_block,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcache_rag import Engine

NONE: Any = RunnableLambda(lambda messages: messages)
QUESTION = "Who sat?"
DOCUMENTS = [Document("The cat sat on the mat."), Document("A dog ran away.")]
TURNS = [("human", "Hello."), ("ai", "Good day.")]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"policy": CacheBlend}, r"^policy must be such as Reuse\(\) .*; write CacheBlend\(\)$"),
        ({"policy": 3}, "^policy must be such as .*, not 3$"),
        ({"kv_codec": "int2"}, "^kv_codec cannot be used: "),
        ({"kv_dir": 3}, "^kv_dir cannot be used: must be a path"),
        ({"ttl": 3}, "^ttl is no argument of ChatKVCache; say it by kv_ttl=$"),
        ({"codec": "int8"}, "^codec is no argument of ChatKVCache; say it by kv_codec=$"),
    ],
)
def test_of_the_chat_model(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        ChatKVCache(model="tiny", **fields)


def test_a_misspelt_model_is_told_before_it_is_needed() -> None:
    with pytest.raises(InvalidInputError, match="no model 'smolm2'; did you mean 'smollm2'"):
        ChatKVCache(model="smolm2")
    ChatKVCache(model="smolm2", base_url="http://127.0.0.1:9")  # a server's own name


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (KVCacheChroma, "persist_dirctory", "did you mean persist_directory?"),
        (KVCacheChroma, "options", "leave it out"),
        (HashEmbeddings, "dimension", "did you mean dimensions?"),
        (
            lambda **fields: KVCacheRAG(NONE, **fields),
            "doc_prompt",
            "did you mean document_prompt?",
        ),
        (
            lambda **fields: KVCacheRAG(NONE, **fields),
            "policy",
            "say it by ChatKVCache(policy=...)",
        ),
    ],
)
def test_of_the_others(make: Callable[..., Any], given: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{given} is no argument of ") as told:
        make(**{given: 3})
    assert str(told.value).endswith(f"; {said}")


def test_a_policy_by_name(engine: Engine) -> None:
    llm = ChatKVCache(engine=engine, max_tokens=2, policy="cacheblend:0.5")
    assert llm.policy == policy_by_name("cacheblend:0.5")
    asked: Any = {"question": QUESTION, "context": DOCUMENTS}
    cost = KVCacheRAG(llm).invoke(asked).response_metadata["kv_cache"]
    assert cost["policy"].startswith("CacheBlend(ratio=0.5")
    cost = KVCacheRAG(llm).invoke(asked, policy="full").response_metadata["kv_cache"]
    assert cost["policy"] == "FullRecompute()"


def test_the_form_of_the_chunks_and_their_time_to_live(tmp_path: Path) -> None:
    llm = ChatKVCache(model="tiny", device="cpu", kv_dir=tmp_path, kv_codec="int8", kv_ttl=60)
    memory, disk = llm.engine.store.tiers
    assert (memory.codec.name, disk.codec.name) == ("int8-kc-vt", "int8-kc-vt")
    assert (memory.ttl, disk.ttl) == (60, 60)


# ---------------------------------------------------------------------- documents
def test_what_is_no_document(llm: ChatKVCache) -> None:
    with pytest.raises(InvalidInputError, match=r"not a str; give Document\(text\)$"):
        document_block("a text")
    for one in (DOCUMENTS[0], "a text"):
        with pytest.raises(InvalidInputError, match="takes a list of documents"):
            llm.prefill(one)  # type: ignore[arg-type]  # what is refused
    with pytest.raises(InvalidInputError, match=r"not a int; give one such as a retriever gives$"):
        llm.prefill([3])  # type: ignore[list-item]  # likewise


def test_without_documents_nothing_is_reused(llm: ChatKVCache) -> None:
    cost = KVCacheRAG(llm).invoke({"question": QUESTION, "context": []}).response_metadata
    assert (cost["kv_cache"]["prompt"], cost["kv_cache"]["reused_tokens"]) == ("plain", 0)


# ---------------------------------------------------------------------- earlier turns
def test_earlier_turns_under_another_name_are_told(llm: ChatKVCache) -> None:
    rag, asked = KVCacheRAG(llm), {"question": QUESTION, "context": DOCUMENTS}
    with pytest.warns(UserWarning, match="does not read 'history'; give .* \"chat_history\"$"):
        rag.invoke({**asked, "history": TURNS})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        more: list[dict[str, Any]] = [
            {"history": []},
            {"history_id": "7", "chat_id": 3, "output": "?"},
            {"history": TURNS, "chat_history": TURNS},
        ]
        for one in more:
            rag.invoke({**asked, **one})


# ---------------------------------------------------------------------- what is no Unicode
LONE = "A \ud800 cat."


def test_a_document_that_is_not_unicode_is_named(llm: ChatKVCache) -> None:
    store = memory_store(llm=llm)
    documents = [DOCUMENTS[0], Document(LONE, id="odd")]
    for call in (
        lambda: store.add_documents(documents),
        lambda: llm.prefill(documents),
        lambda: KVCacheRAG(llm).invoke({"question": QUESTION, "context": documents}),
        lambda: document_block(documents[1]),
    ):
        with pytest.raises(InvalidInputError, match=r"^the document .*'odd' is not valid Unicode"):
            call()
    assert store.get()["ids"] == []


def test_an_id_that_is_not_unicode_is_told(llm: ChatKVCache) -> None:
    store = memory_store(llm=llm)
    for call in (
        lambda: store.add_texts(["A cat."], ids=[LONE]),
        lambda: store.delete([LONE]),
        lambda: store.get_by_ids([LONE]),
    ):
        with pytest.raises(InvalidInputError, match="is not valid Unicode"):
            call()
