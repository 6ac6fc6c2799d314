"""How LangChain is asked what `contracts_frameworks` asks every framework."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, ClassVar

import access
import chromadb
from chat_model_helpers import joined
from contracts_frameworks import Called, Framework, Rows, Said
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from store_helpers import Geometry, texts_of

from langchain_kvcache_rag import (
    ChatKVCache,
    KVCacheChroma,
    KVCacheRAG,
    KVCacheRerank,
    create_kvcache_rag_chain,
    document_block,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def cost_of(kv_cache: dict[str, Any]) -> dict[str, Any]:
    """That of the one answer, which sums of several keep too."""
    (answer,) = kv_cache["answers"]
    assert {*kv_cache} - {"answers"} < {*answer}
    for name in ("answered_from", "answered_from_ids", "unused_chunks"):
        assert kv_cache[name] == answer[name]
    return dict(answer)


def said(message: Any, sources: list[Any] | None = None) -> Said:
    ids = None if sources is None else [one.id for one in sources]
    return Said(message.text, cost_of(message.response_metadata["kv_cache"]), ids)


def called(message: Any) -> Called:
    found = message.response_metadata
    return Called(
        message.text,
        [(one["name"], one["args"]) for one in message.tool_calls],
        cost_of(found["kv_cache"]),
        found.get("tool_form", ""),
        message.additional_kwargs.get("reasoning_content", ""),
    )


class Chroma(Rows):
    """`KVCacheChroma`."""

    def __init__(self, llm: ChatKVCache, folder: Path | None) -> None:
        place: Any = {"client": chromadb.EphemeralClient()}
        if folder is not None:
            place = {"persist_directory": str(folder)}
        name = "docs" if folder else f"c-{uuid.uuid4().hex}"
        self._store = KVCacheChroma(name, Geometry(), llm=llm, **place)

    def add(self, texts: Mapping[str, str], page: int | None = None) -> None:
        metadata: Any = None if page is None else [{"page": page} for _ in texts]
        self._store.add_texts(list(texts.values()), metadata, list(texts))

    def fill(self) -> int:
        return self._store.prefill_missing()

    def delete(self, ids: Sequence[str]) -> None:
        self._store.delete(list(ids))

    def find(self, count: int) -> list[Document]:
        return self._store.as_retriever(search_kwargs={"k": count}).invoke("Who?")

    def texts(self) -> dict[str, str]:
        return texts_of(self._store)

    @property
    def raw(self) -> Any:
        return access.collection(self._store).collection


class LangChain(Framework):
    """`ChatKVCache`, `KVCacheRAG` and the chain of both."""

    name, length = "ChatKVCache", "max_tokens"
    agents, query = ("content", "content_and_artifact"), "query"
    hot: ClassVar = {"temperature": 2.0}

    def named(self, model: Any, most: int = 6, **fields: Any) -> ChatKVCache:
        return self.made(**{"model": model, self.length: most, **fields})

    def made(self, **fields: Any) -> ChatKVCache:
        return ChatKVCache(**fields)

    def document(self, text: str, id_: str = "", score: Any = None) -> Document:
        metadata = {} if score is None else {"relevance_score": score}
        return Document(text, id=id_ or None, metadata=metadata)

    def seen(self, document: Document) -> tuple[str, Any]:
        return document.page_content, document.metadata

    def ask(self, llm: Any, question: str, documents: Sequence[Any], **options: Any) -> Said:
        asked: Any = {"question": question, "context": list(documents)}
        return said(KVCacheRAG(llm=llm).invoke(asked, **options), list(documents))

    def now(self, llm: Any, question: str, documents: Sequence[Any], **options: Any) -> list[Said]:
        rag, given = KVCacheRAG(llm=llm), list(documents)
        asked: Any = {"question": question, "context": given}
        whole = self._chain(llm, given, options).invoke({"input": question})
        return [
            said(rag.invoke(asked, **options), given),
            said(joined(rag.stream(asked, **options))),
            *map(said, rag.batch([asked, asked], **options)),
            Said(whole["answer"], cost_of(whole["kv_cache"]), [one.id for one in whole["context"]]),
        ]

    async def later(
        self, llm: Any, question: str, documents: Sequence[Any], **options: Any
    ) -> list[Said]:
        rag, given = KVCacheRAG(llm=llm), list(documents)
        asked: Any = {"question": question, "context": given}
        chain = self._chain(llm, given, options)
        pieces = [piece async for piece in chain.astream({"input": question})]
        text = "".join(one["answer"] for one in pieces if "answer" in one)
        (cost,) = (one["kv_cache"] for one in pieces if "kv_cache" in one)
        return [
            said(await rag.ainvoke(asked, **options)),
            said(joined([one async for one in rag.astream(asked, **options)])),
            *map(said, await rag.abatch([asked, asked], **options)),
            Said(text, cost_of(cost)),
        ]

    def _chain(self, llm: Any, given: list[Any], options: dict[str, Any]) -> Any:
        return create_kvcache_rag_chain(RunnableLambda(lambda _: given), llm.bind(**options))

    def plain(self, llm: Any, text: str) -> Said:
        return said(llm.invoke(text))

    def behind_tools(self, llm: Any, question: str, found: Sequence[Sequence[Any]]) -> list[Said]:
        forms: tuple[list[Any], list[Any]] = ([HumanMessage(question)], [HumanMessage(question)])
        for number, documents in enumerate(found):
            calls: Any = [{"name": "search", "args": {}, "id": str(number)}]
            blocks: Any = [document_block(one) for one in documents]
            text = "\n\n".join(one.page_content for one in documents)
            for messages, answer in zip(
                forms,
                (
                    ToolMessage(blocks, tool_call_id=str(number)),
                    ToolMessage(text, tool_call_id=str(number), artifact=list(documents)),
                ),
                strict=True,
            ):
                messages += [AIMessage("", tool_calls=calls), answer]
        return [said(llm.invoke(messages)) for messages in forms]

    def reranker(self, llm: Any, **options: Any) -> KVCacheRerank:
        return KVCacheRerank(llm=llm, **options)

    async def reranked(
        self, reranker: KVCacheRerank, question: str, documents: Sequence[Any]
    ) -> list[list[tuple[str, Any]]]:
        ways = [
            reranker.compress_documents(documents, question),
            await reranker.acompress_documents(documents, question),
        ]
        return [[(str(one.id), one.metadata.get("relevance_score")) for one in way] for way in ways]

    def rows(self, llm: Any, folder: Path | None = None) -> Chroma:
        return Chroma(llm, folder)

    def object(self, llm: Any, kind: Any, question: str, documents: Sequence[Any] = ()) -> Any:
        blocks: Any = [*map(document_block, documents), {"type": "text", "text": question}]
        return llm.with_structured_output(kind).invoke([HumanMessage(blocks)])

    async def tools(self, llm: Any, question: str) -> list[Called]:
        return await self._asked(llm.bind_tools([add]), question)

    async def thinking(self, llm: Any, question: str, **options: Any) -> list[Called]:
        return await self._asked(llm.bind(**options), question)

    async def _asked(self, llm: Any, question: str) -> list[Called]:
        return [
            called(llm.invoke(question)),
            called(await llm.ainvoke(question)),
            called(joined(llm.stream(question))),
            called(joined([one async for one in llm.astream(question)])),
        ]

    async def agent(
        self, llm: Any, question: str, facts: Mapping[str, str], kind: Any
    ) -> tuple[str, list[dict[str, Any]]]:
        # What an application has beside us: asked for only by who has an agent.
        from langchain_core.tools import create_retriever_tool

        try:
            from langchain.agents import create_agent
        except ImportError:  # LangGraph's own is what it grew out of
            from langgraph.prebuilt import create_react_agent as create_agent

        class Facts(BaseRetriever):
            def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
                return [Document(fact) for name, fact in facts.items() if name in query]

        search = create_retriever_tool(Facts(), "search", "Finds facts.", response_format=kind)
        given: Any = {"messages": [HumanMessage(question)]}
        messages = create_agent(llm, [search, add]).invoke(given)["messages"]
        steps = [one for one in messages if isinstance(one, AIMessage)]
        return steps[-1].text, [cost_of(one.response_metadata["kv_cache"]) for one in steps]
