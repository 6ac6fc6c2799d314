"""How LlamaIndex is asked what `contracts_frameworks` asks every framework."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, ClassVar

import chromadb
from contracts_frameworks import Called, Framework, Rows, Said
from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, MessageRole, ThinkingBlock, ToolCallBlock
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import FunctionTool, QueryEngineTool, RetrieverTool, ToolMetadata

from kvcache_rag.integration import REFERENCE_KEYS
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheChatEngine,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheRerank,
    KVCacheSynthesizer,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Fixed(BaseRetriever):
    """Finds the same nodes for everything, in an order that says nothing."""

    def __init__(self, nodes: Sequence[NodeWithScore]) -> None:
        self._nodes = list(nodes)
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._nodes


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


ADD = FunctionTool.from_defaults(add)


def said(response: Any, text: str = "") -> Said:
    ids = [one.node.node_id for one in response.source_nodes]
    return Said(text or str(response), response.metadata["kv_cache"], ids)


def called(llm: KVCacheLLM, response: Any) -> Called:
    message = response.message
    calls = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    thoughts = [one.content for one in message.blocks if isinstance(one, ThinkingBlock)]
    return Called(
        message.content or "",
        [(one.tool_name, one.tool_kwargs) for one in calls],
        response.raw["kv_cache"],
        response.raw.get("tool_form", ""),
        "".join(str(one) for one in thoughts),
    )


class Chroma(Rows):
    """`KVCacheVectorStore`."""

    def __init__(self, llm: KVCacheLLM, folder: Path | None) -> None:
        place: Any = {"client": chromadb.EphemeralClient()}
        if folder is not None:
            place = {"persist_dir": str(folder)}
        name = "docs" if folder else f"c-{uuid.uuid4().hex}"
        self.store = KVCacheVectorStore.from_params(name, llm=llm, **place)
        self.index = VectorStoreIndex.from_vector_store(
            self.store, embed_model=HashEmbedding(dimensions=64)
        )

    def add(self, texts: Mapping[str, str], page: int | None = None) -> None:
        metadata = {} if page is None else {"page": page}
        self.index.insert_nodes(
            [TextNode(id_=id_, text=text, metadata=metadata) for id_, text in texts.items()]
        )

    def fill(self) -> int:
        return self.store.prefill_missing()

    def delete(self, ids: Sequence[str]) -> None:
        self.store.delete_nodes(list(ids))

    def find(self, count: int) -> list[NodeWithScore]:
        return self.index.as_retriever(similarity_top_k=count).retrieve("Who?")

    def texts(self) -> dict[str, str]:
        nodes: list[Any] = self.store.get_nodes()
        return {one.node_id: one.text for one in nodes}

    @property
    def raw(self) -> Any:
        return self.store.client


class LlamaIndex(Framework):
    """`KVCacheLLM` and the engines over it."""

    name, length = "KVCacheLLM", "max_new_tokens"
    agents, query = (False, True), "input"
    hot: ClassVar = {"generate_kwargs": {"temperature": 2.0}}

    def named(self, model: Any, most: int = 6, **fields: Any) -> KVCacheLLM:
        return self.made(**{"model_name": model, self.length: most, **fields})

    def made(self, **fields: Any) -> KVCacheLLM:
        return KVCacheLLM(**fields)

    def document(self, text: str, id_: str = "", score: Any = None) -> NodeWithScore:
        node = TextNode(text=text, **({"id_": id_} if id_ else {}))
        return NodeWithScore(node=node, score=score)

    def seen(self, document: NodeWithScore) -> tuple[str, Any]:
        metadata = document.node.metadata
        own = {name: metadata[name] for name in metadata if name not in REFERENCE_KEYS}
        return document.node.get_content(MetadataMode.LLM), own

    def ask(self, llm: Any, question: str, documents: Sequence[Any], **options: Any) -> Said:
        return said(KVCacheSynthesizer(llm, **options).synthesize(question, list(documents)))

    def now(self, llm: Any, question: str, documents: Sequence[Any], **options: Any) -> list[Said]:
        engine, streaming, chat = self._engines(llm, documents, options)
        stream = streaming.query(question)
        found = [
            self.ask(llm, question, documents, **options),
            said(engine.query(question)),
            said(stream, "".join(stream.response_gen)),
            said(QueryEngineTool.from_defaults(engine).call(question).raw_output),
            said(chat.chat(question)),
        ]
        chat.reset()
        spoken = chat.stream_chat(question)
        return [*found, said(spoken, "".join(spoken.response_gen))]

    async def later(
        self, llm: Any, question: str, documents: Sequence[Any], **options: Any
    ) -> list[Said]:
        engine, streaming, chat = self._engines(llm, documents, options)
        stream = await streaming.aquery(question)
        found = [
            said(await engine.aquery(question)),
            said(stream, "".join([piece async for piece in stream.async_response_gen()])),
            said(await chat.achat(question)),
        ]
        chat.reset()
        spoken = await chat.astream_chat(question)
        text = "".join([piece async for piece in spoken.async_response_gen()])
        return [*found, said(spoken, text)]

    def _engines(self, llm: Any, documents: Sequence[Any], options: dict[str, Any]) -> list[Any]:
        """What answers, what streams and what chats."""
        fixed = Fixed(documents)
        return [
            KVCacheQueryEngine.from_args(fixed, llm, **options),
            KVCacheQueryEngine.from_args(fixed, llm, streaming=True, **options),
            KVCacheChatEngine.from_defaults(fixed, llm=llm, skip_condense=True, **options),
        ]

    def plain(self, llm: Any, text: str) -> Said:
        response = llm.complete(text)
        return Said(response.text, response.raw["kv_cache"])

    def behind_tools(self, llm: Any, question: str, found: Sequence[Sequence[Any]]) -> list[Said]:
        every = {one.node.node_id: one for documents in found for one in documents}
        Fixed(list(every.values())).retrieve(question)
        messages = [ChatMessage(role=MessageRole.USER, content=question)]
        for number, documents in enumerate(found):
            call = ToolCallBlock(tool_call_id=str(number), tool_name="search", tool_kwargs={})
            text = "\n\n".join(one.node.get_content() for one in documents)
            of_call = {"tool_call_id": str(number)}
            messages += [
                ChatMessage(role=MessageRole.ASSISTANT, blocks=[call]),
                ChatMessage(role=MessageRole.TOOL, content=text, additional_kwargs=of_call),
            ]
        response = llm.chat(messages)
        return [Said(response.message.content or "", response.raw["kv_cache"])]

    def reranker(self, llm: Any, **options: Any) -> KVCacheRerank:
        return KVCacheRerank(llm=llm, **options)

    async def reranked(
        self, reranker: KVCacheRerank, question: str, documents: Sequence[Any]
    ) -> list[list[tuple[str, Any]]]:
        ways = [
            reranker.postprocess_nodes(list(documents), query_str=question),
            await reranker.apostprocess_nodes(list(documents), query_str=question),
        ]
        return [[(one.node.node_id, one.score) for one in way] for way in ways]

    def rows(self, llm: Any, folder: Path | None = None) -> Chroma:
        return Chroma(llm, folder)

    def object(self, llm: Any, kind: Any, question: str, documents: Sequence[Any] = ()) -> Any:
        if not documents:
            return llm.structured_predict(kind, PromptTemplate("{question}"), question=question)
        answers: Any = KVCacheSynthesizer(llm, output_cls=kind)
        return answers.synthesize(question, list(documents)).response

    async def tools(self, llm: Any, question: str) -> list[Called]:
        both: Any = {"allow_parallel_tool_calls": True}
        later = await llm.astream_chat_with_tools([ADD], question, **both)
        return [
            called(llm, llm.chat_with_tools([ADD], question, **both)),
            called(llm, await llm.achat_with_tools([ADD], question, **both)),
            called(llm, list(llm.stream_chat_with_tools([ADD], question, **both))[-1]),
            called(llm, [one async for one in later][-1]),
        ]

    async def thinking(self, llm: Any, question: str, **options: Any) -> list[Called]:
        asked = [ChatMessage(role=MessageRole.USER, content=question)]
        return [
            called(llm, llm.chat(asked, **options)),
            called(llm, await llm.achat(asked, **options)),
            called(llm, list(llm.stream_chat(asked, **options))[-1]),
            called(llm, [one async for one in await llm.astream_chat(asked, **options)][-1]),
        ]

    async def agent(
        self, llm: Any, question: str, facts: Mapping[str, str], kind: Any
    ) -> tuple[str, list[dict[str, Any]]]:
        class Facts(BaseRetriever):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                return [
                    NodeWithScore(node=TextNode(text=fact), score=1.0)
                    for name, fact in facts.items()
                    if name in query_bundle.query_str
                ]

        search = RetrieverTool(Facts(), ToolMetadata(name="search", description="Finds facts."))
        handler = FunctionAgent(tools=[search, ADD], llm=llm, streaming=kind).run(question)
        steps = [
            event.raw["kv_cache"]
            async for event in handler.stream_events()
            if type(event).__name__ == "AgentOutput"
        ]
        return str(await handler), steps
