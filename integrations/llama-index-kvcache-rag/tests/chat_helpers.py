"""An index to chat about, and one way to ask for all four."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import chromadb
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.schema import MetadataMode

from llama_index.kvcache_rag import KVCacheVectorStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.kvcache_rag import HashEmbedding, KVCacheLLM

FACTS = [
    "The lighthouse keeper is called Marlow.",
    "The bakery sells bread made of rye.",
    "The harbour was built in 1911.",
]
QUESTION = "Who keeps the lighthouse?"
NEXT = "Since when?"
HISTORY = [
    ChatMessage(role=MessageRole.USER, content="Hello."),
    ChatMessage(role=MessageRole.ASSISTANT, content="Good day."),
]
TURNS = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}]
WAYS = ["chat", "achat", "stream_chat", "astream_chat"]


def make_index(llm: KVCacheLLM, embedding: HashEmbedding) -> VectorStoreIndex:
    name = f"c-{uuid.uuid4().hex}"
    store = KVCacheVectorStore.from_params(name, client=chromadb.EphemeralClient(), llm=llm)
    documents = [
        Document(
            text=text,
            id_=f"d{at}",
            metadata={"window": f"{text} And more."},
            excluded_llm_metadata_keys=["window"],
            excluded_embed_metadata_keys=["window"],
        )
        for at, text in enumerate(FACTS)
    ]
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex.from_documents(
        documents, storage_context=context, embed_model=embedding
    )


def texts(response: Any) -> list[str]:
    return [one.node.get_content(MetadataMode.LLM) for one in response.source_nodes]


def said(messages: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    return [(one.role.value, one.content or "") for one in messages]


async def ask(engine: Any, way: str, message: str, history: Any = None) -> tuple[str, Any]:
    """The whole answer, by one of the four ways."""
    if way == "chat":
        response = await asyncio.to_thread(engine.chat, message, history)
    elif way == "achat":
        response = await engine.achat(message, history)
    elif way == "stream_chat":
        response = await asyncio.to_thread(engine.stream_chat, message, history)
        return "".join(await asyncio.to_thread(list, response.response_gen)), response
    else:
        response = await engine.astream_chat(message, history)
        return "".join([piece async for piece in response.async_response_gen()]), response
    return str(response), response
