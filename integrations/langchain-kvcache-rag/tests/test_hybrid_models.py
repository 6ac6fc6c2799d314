"""Models with recurrent layers, as LangChain's users ask them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import chromadb
import pytest
from chat_model_helpers import over
from hybrid_reader import DOCUMENTS, FOLDER, IS_READ, asked
from zoo import HYBRIDS, build, byte_tokenizer

from kvcache_rag import DiskStore, Engine, LegoLink, MemoryStore, PromptTemplate, Reuse
from langchain_kvcache_rag import ChatKVCache, KVCacheChroma, KVCacheRAG

if TYPE_CHECKING:
    from pathlib import Path

    from langchain_core.embeddings import Embeddings

FACTS = ["The lighthouse keeper is called Marlow.", "The harbour was built in 1911.", "It is wet."]
KINDS = [name for name in ("qwen3_5", "lfm2", "mamba2") if name in HYBRIDS]


@pytest.mark.parametrize("name", KINDS)
async def test_answers_come_from_stored_chunks_in_any_order(
    name: str, embedding: Embeddings, tmp_path: Path
) -> None:
    template = PromptTemplate(system="Read.\n")
    model, tokenizer = build(name), byte_tokenizer()

    def opened() -> ChatKVCache:
        store = DiskStore(tmp_path / "kv", durable=False)
        engine = Engine(model, tokenizer, template=template, store=store)
        return ChatKVCache(engine=engine, max_tokens=6)

    llm = opened()
    client, collection = chromadb.PersistentClient(str(tmp_path / "db")), f"c-{uuid.uuid4().hex}"
    settings: dict[str, Any] = {"client": client, "collection_name": collection}
    KVCacheChroma.from_texts(FACTS, embedding, llm=llm, **settings)
    again = opened()  # as after a restart
    store = KVCacheChroma(embedding_function=embedding, llm=again, **settings)
    found = store.similarity_search("who?", k=3)
    reference = Engine(model, tokenizer, template=template, store=MemoryStore())
    for documents in (found, found[::-1], [found[1], found[0]]):
        answer = KVCacheRAG(llm=again).invoke({"question": "who?", "context": documents})
        cost = answer.response_metadata["kv_cache"]
        assert cost["hits"] == {"disk": len(documents)}
        assert cost["references"] == len(documents)
        texts = [one.page_content for one in documents]
        expected = reference.generate("who?", texts, policy=Reuse(), max_new_tokens=6)
        assert answer.text == expected.text
    asked = over("who?", *FACTS)
    message = again.invoke(asked)
    assert (await again.ainvoke(asked)).text == message.text
    assert "".join(piece.text for piece in again.stream(asked)) == message.text
    assert [one.text for one in again.batch([asked] * 2)] == [message.text] * 2


@pytest.mark.skipif(not IS_READ, reason="this transformers keeps no states as 5.23")
def test_a_trained_one_answers_right_in_any_order_after_a_restart(
    embedding: Embeddings, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "client": chromadb.PersistentClient(str(tmp_path / "db")),
        "collection_name": "facts",
    }

    def opened() -> ChatKVCache:
        store = DiskStore(tmp_path / "kv", durable=False)
        return ChatKVCache(engine=Engine.from_pretrained(FOLDER, store=store), max_tokens=1)

    KVCacheChroma.from_texts([*DOCUMENTS], embedding, llm=opened(), **settings)
    llm = opened()
    found = KVCacheChroma(embedding_function=embedding, llm=llm, **settings).similarity_search(
        "which?", k=len(DOCUMENTS)
    )
    by_text = {one.page_content: one for one in found}
    for documents, entity, value in asked():
        context = [by_text[text] for text in documents]
        answer = KVCacheRAG(llm=llm).invoke(
            {"question": entity, "context": context}, policy="bestlast"
        )
        assert answer.text.strip() == value
        # The best one is computed with the question.
        assert answer.response_metadata["kv_cache"]["hits"] == {"disk": len(documents) - 1}


@pytest.mark.skipif(not IS_READ, reason="this transformers keeps no states as 5.23")
def test_heads_are_cut_for_the_policy_of_the_llm() -> None:
    llm = ChatKVCache(model=str(FOLDER), policy=LegoLink(4))
    documents, entity, value = asked()[0]
    assert llm.engine.policy == LegoLink(4)
    answer = llm.engine.generate(entity, documents, max_new_tokens=1)
    assert answer.text.strip() == value
    assert answer.metrics.recomputed_tokens == 4 * (len(documents) - 1)
