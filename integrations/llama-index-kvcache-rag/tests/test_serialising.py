"""What stands in our nodes, messages and responses survives being written down by LlamaIndex."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import TextNode
from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import FunctionTool
from llama_index_helpers import cost

from kvcache_rag import Metrics
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheChatEngine,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheReuseEvent,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["The cat sat on the mat.", "A dog ran."]
QUESTION = "Who sat?"


def index_of(llm: KVCacheLLM, folder: Path) -> VectorStoreIndex:
    store = KVCacheVectorStore.from_params("docs", persist_dir=str(folder / "chroma"), llm=llm)
    return VectorStoreIndex.from_documents(
        [Document(text=text) for text in TEXTS],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=HashEmbedding(),
    )


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_responses_are_json(llm: KVCacheLLM, tmp_path: Path) -> None:
    response = KVCacheQueryEngine.from_index(index_of(llm, tmp_path), llm).query(QUESTION)
    assert as_json(response.metadata) == response.metadata
    assert Metrics.from_dict(as_json(cost(response))).references == 2
    found = [one.node for one in response.source_nodes]
    assert [TextNode.from_dict(as_json(one.to_dict())) for one in found] == found
    docstore, file = SimpleDocumentStore(), str(tmp_path / "docstore.json")
    docstore.add_documents(found)
    docstore.persist(file)
    again = SimpleDocumentStore.from_persist_path(file)
    assert [again.get_document(one.node_id) for one in found] == found
    event = KVCacheReuseEvent(query_str="?", metrics=cost(response))
    for one in (
        llm.complete("Hello"),
        [*llm.stream_complete("Hello")][-1],
        llm.chat([ChatMessage("Hello")]),
    ):
        assert type(one).model_validate_json(one.model_dump_json()) == one
    assert KVCacheReuseEvent.model_validate_json(event.model_dump_json()).metrics == event.metrics


@pytest.mark.filterwarnings("ignore:chat template or tokenizer")
async def test_conversations_go_through_a_chat_store(llm: KVCacheLLM, tmp_path: Path) -> None:
    engine = KVCacheChatEngine.from_index(index_of(llm, tmp_path), llm, skip_condense=True)
    engine.chat(QUESTION)
    list(engine.stream_chat(QUESTION).response_gen)
    tool = FunctionTool.from_defaults(lambda city: city, name="weather", description="Weather.")
    called = llm.chat_with_tools([tool], "Paris?", tool_required=True).message
    said = [*engine.chat_history, called]
    store = SQLAlchemyChatStore("chats", f"sqlite+aiosqlite:///{tmp_path}/chats.db")
    await store.add_messages("a", said)
    kept = await store.get_messages("a")
    assert store._async_engine is not None
    await store._async_engine.dispose()  # its thread would outlive the event loop
    assert kept == said
    assert [ChatMessage.model_validate_json(one.model_dump_json()) for one in said] == said
    assert len(said) == 5
