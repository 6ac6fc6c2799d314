"""A model whose chunks cannot be stitched answers all the same, and says so once."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import chromadb
import pytest
from chat_model_helpers import over
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, PromptTemplate, Reuse
from kvcache_rag.errors import UnsupportedModelError
from langchain_kvcache_rag import ChatKVCache, KVCacheChroma, KVCacheRAG

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

FACTS = ["The lighthouse keeper is called Marlow.", "The harbour was built in 1911."]
SAID = "it answers by full prefill, as with policy=FullRecompute"


@pytest.mark.parametrize("name", ["gpt2", "recurrent_gemma"])
async def test_a_refused_model_answers_with_one_warning(name: str, embedding: Embeddings) -> None:
    engine = Engine(build(name), byte_tokenizer(), template=PromptTemplate(system="Read.\n"))
    llm = ChatKVCache(engine=engine, max_tokens=4)
    with pytest.warns(UserWarning, match=SAID) as said:
        store = KVCacheChroma.from_texts(
            FACTS,
            embedding,
            llm=llm,
            client=chromadb.EphemeralClient(),
            collection_name=f"c-{uuid.uuid4().hex}",
        )
    assert len(said) == 1
    assert engine.store.stats().puts == 0
    # From now on not a word: warnings are errors here.
    message = llm.invoke(over("who?", *FACTS))
    assert message.response_metadata["kv_cache"]["policy"] == "FullRecompute()"
    assert (await llm.ainvoke(over("who?", *FACTS))).text == message.text
    assert "".join(piece.text for piece in llm.stream(over("who?", *FACTS))) == message.text
    assert [one.text for one in llm.batch([over("who?", *FACTS)] * 2)] == [message.text] * 2
    asked = {"question": "who?", "context": store.similarity_search("who?", k=2)}
    assert KVCacheRAG(llm=llm).invoke(asked).text
    with pytest.raises(UnsupportedModelError, match=r"FullRecompute\(\)"):
        llm.invoke(over("who?", *FACTS), policy=Reuse())
