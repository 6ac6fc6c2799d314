"""Apps of LangChain, as its documentation writes them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import chromadb
from apps.catalogue import NONE, PART, QUESTION, TEXTS, app
from langchain.agents import create_agent
from langchain_classic.chains import (
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MultiQueryRetriever,
    ParentDocumentRetriever,
)
from langchain_classic.retrievers.document_compressors import LLMChainExtractor
from langchain_classic.storage import InMemoryStore
from langchain_core.caches import InMemoryCache
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_qdrant import QdrantVectorStore
from langchain_text_splitters import CharacterTextSplitter
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from scripted import native_call

from kvcache_rag import FullRecompute
from langchain_kvcache_rag import (
    ChatKVCache,
    HashEmbeddings,
    KVCacheChroma,
    KVCacheRAG,
    document_block,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

    Asking = Callable[[], Any]

FRAMEWORK = "LangChain"
langchain = partial(app, FRAMEWORK)


@dataclass(frozen=True)
class Kit:
    """What an app of LangChain begins with.

    Attributes:
        llm: Ours.
        collection: Name of a collection that nobody has.
        scripted: Makes a chat model that says what it is told to.
    """

    llm: ChatKVCache
    collection: str
    scripted: Callable[..., ChatKVCache]

    def documents(self) -> list[Document]:
        return [
            Document(page_content=text, metadata={"part": number % 2})
            for number, text in enumerate(TEXTS)
        ]

    def store(self) -> VectorStore:
        return InMemoryVectorStore.from_documents(self.documents(), HashEmbeddings(dimensions=64))

    def retriever(self, **options: Any) -> VectorStoreRetriever:
        return self.store().as_retriever(search_kwargs={"k": 2, **options})

    def piped(self, rag: Any = None, retriever: Any = None) -> Any:
        """A chain that answers a question from what a retriever finds."""
        given = {"context": retriever or self.retriever(), "question": RunnablePassthrough()}
        return given | (rag or KVCacheRAG(llm=self.llm)) | StrOutputParser()

    def chain(self, retriever: Any = None, rag: Any = None) -> Asking:
        chain = self.piped(rag, retriever)
        return lambda: chain.invoke(QUESTION)


# ---------------------------------------------------------------------- our classes
@langchain("`KVCacheRAG` over any vector store")
def two_lines(kit: Kit) -> Asking:
    return kit.chain()


@langchain("`KVCacheChroma`: prefilled at ingestion")
def vector_store(kit: Kit) -> Asking:
    store = KVCacheChroma(
        kit.collection,
        HashEmbeddings(dimensions=64),
        client=chromadb.EphemeralClient(),
        llm=kit.llm,
    )
    store.add_documents(kit.documents())
    return kit.chain(store.as_retriever(search_kwargs={"k": 2}))


@langchain("Qdrant with `ChatKVCache.prefill`: prefilled at ingestion")
def qdrant_store(kit: Kit) -> Asking:
    store = QdrantVectorStore.from_texts(
        [], HashEmbeddings(dimensions=64), location=":memory:", collection_name=kit.collection
    )
    store.add_documents(kit.documents())
    kit.llm.prefill(kit.documents())
    return kit.chain(store.as_retriever(search_kwargs={"k": 2}))


@langchain("`document_prompt=`", remark="metadata is part of the chunk")
def document_prompt(kit: Kit) -> Asking:
    prompt = PromptTemplate.from_template("Part {part}: {page_content}")
    return kit.chain(rag=KVCacheRAG(llm=kit.llm, document_prompt=prompt))


@langchain('`config={"configurable": {"policy": ...}}` of a chain', NONE, "as it was asked for")
def policy_of_a_call(kit: Kit) -> Asking:
    chain = kit.piped()
    return lambda: chain.invoke(QUESTION, {"configurable": {"policy": FullRecompute()}})


@langchain("`create_retrieval_chain(retriever, KVCacheRAG(llm=llm))`")
def retrieval_chain(kit: Kit) -> Asking:
    chain = create_retrieval_chain(kit.retriever(), KVCacheRAG(llm=kit.llm))
    return lambda: chain.invoke({"input": QUESTION})["answer"].content


@langchain("streaming")
def streaming(kit: Kit) -> Asking:
    chain = kit.piped()
    return lambda: "".join(chain.stream(QUESTION))


@langchain("`ainvoke`")
def asynchronous(kit: Kit) -> Asking:
    chain = kit.piped()
    return lambda: asyncio.run(chain.ainvoke(QUESTION))


@langchain("`batch`")
def batch(kit: Kit) -> Asking:
    chain = kit.piped()
    return lambda: chain.batch([QUESTION, "What does the lamp burn?"])


# ---------------------------------------------------------------------- retrievers
@langchain("`MultiQueryRetriever`")
def multi_query(kit: Kit) -> Asking:
    prompt = PromptTemplate.from_template("Say it in other words: {question}")
    return kit.chain(
        MultiQueryRetriever.from_llm(kit.retriever(), kit.llm, prompt=prompt, include_original=True)
    )


@langchain("`ParentDocumentRetriever`", remark="parents are what is prefilled and reused")
def parent_document(kit: Kit) -> Asking:
    retriever = ParentDocumentRetriever(
        vectorstore=InMemoryVectorStore(HashEmbeddings(dimensions=64)),
        docstore=InMemoryStore(),
        child_splitter=CharacterTextSplitter(separator=". ", chunk_size=40, chunk_overlap=0),
    )
    retriever.add_documents(kit.documents())
    return kit.chain(retriever)


class Longest(BaseDocumentCompressor):
    """Keeps the longest document, as `EmbeddingsFilter` keeps the nearest ones."""

    def compress_documents(self, documents: Any, query: str, callbacks: Any = None) -> Any:
        return [max(documents, key=lambda one: len(one.page_content))]


@langchain("`ContextualCompressionRetriever` with a filter")
def compression(kit: Kit) -> Asking:
    return kit.chain(
        ContextualCompressionRetriever(base_compressor=Longest(), base_retriever=kit.retriever())
    )


@langchain("`EnsembleRetriever`")
def ensemble(kit: Kit) -> Asking:
    retrievers: list[Any] = [kit.retriever(), kit.retriever(k=3)]
    return kit.chain(EnsembleRetriever(retrievers=retrievers, weights=[0.5, 0.5]))


@langchain(
    "a reranker that changes the order",
    remark="a chunk is stored once, whatever its place",
)
def reordering(kit: Kit) -> Asking:
    orders = iter([1, -1, 1, -1])
    retriever = kit.retriever()
    return kit.chain(RunnableLambda(lambda question: retriever.invoke(question)[:: next(orders)]))


@langchain("a document that is changed and added again", PART, "it is computed")
def upsert(kit: Kit) -> Asking:
    store, versions = kit.store(), iter(["", " It was painted white."])
    ask = kit.chain(store.as_retriever(search_kwargs={"k": 4}))

    def changed() -> Any:
        store.add_documents([Document(page_content=TEXTS[0] + next(versions), id="changed")])
        return ask()

    return changed


# ---------------------------------------------------------------------- conversations and graphs
@langchain("`RunnableWithMessageHistory`")
def message_history(kit: Kit) -> Asking:
    sessions, retriever = iter(range(9)), kit.retriever()
    chain = RunnablePassthrough.assign(
        context=lambda given: retriever.invoke(given["question"])
    ) | KVCacheRAG(llm=kit.llm)
    talking = RunnableWithMessageHistory(
        chain,
        lambda session_id: InMemoryChatMessageHistory(),
        input_messages_key="question",
        history_messages_key="chat_history",
    )

    def ask() -> Any:
        config = {"configurable": {"session_id": str(next(sessions))}}
        return talking.invoke({"question": QUESTION}, config).content

    return ask


@langchain("`create_history_aware_retriever`")
def history_aware(kit: Kit) -> Asking:
    prompt = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("user", "{input}")]
    )
    retriever = create_history_aware_retriever(kit.llm, kit.retriever(), prompt)
    chain = create_retrieval_chain(retriever, KVCacheRAG(llm=kit.llm))
    history = [("user", "Hello."), ("assistant", "Good day.")]
    return lambda: chain.invoke({"input": QUESTION, "chat_history": history})["answer"].content


@langchain("LangGraph with a checkpointer, document blocks in its state")
def graph(kit: Kit) -> Asking:
    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [kit.llm.invoke(state["messages"])]}

    built = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer")
    app_ = built.compile(checkpointer=MemorySaver())
    retriever, threads = kit.retriever(), iter(range(9))

    def ask() -> Any:
        blocks: list[Any] = [document_block(one) for one in retriever.invoke(QUESTION)]
        asked = HumanMessage(content=[*blocks, {"type": "text", "text": QUESTION}])
        config = {"configurable": {"thread_id": str(next(threads))}}
        return app_.invoke({"messages": [asked]}, config)["messages"][-1].content

    return ask


@langchain("`MessagesPlaceholder` with document blocks")
def placeholder(kit: Kit) -> Asking:
    prompt = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("documents"), ("user", "{question}")]
    )
    chain, retriever = prompt | kit.llm, kit.retriever()

    def ask() -> Any:
        blocks: list[Any] = [document_block(one) for one in retriever.invoke(QUESTION)]
        given = {"documents": [HumanMessage(content=blocks)], "question": QUESTION}
        return chain.invoke(given).content

    return ask


@langchain("`with_retry`, `with_fallbacks`")
def retries(kit: Kit) -> Asking:
    steady = KVCacheRAG(llm=kit.llm).with_retry().with_fallbacks([KVCacheRAG(llm=kit.llm)])
    return kit.chain(rag=steady)


@langchain("an LLM cache (`cache=InMemoryCache()`)", NONE, "the answer itself is kept")
def answer_cache(kit: Kit) -> Asking:
    cached = kit.llm.model_copy(update={"cache": InMemoryCache()})
    return kit.chain(rag=KVCacheRAG(llm=cached))


# ---------------------------------------------------------------------- agents
@langchain("`create_agent` with `create_retriever_tool`")
def agent(kit: Kit) -> Asking:
    llm = kit.scripted(native_call(("search", {"query": QUESTION})), "In the tower.")
    tool = create_retriever_tool(kit.retriever(), "search", "Finds facts.")
    made = create_agent(llm, [tool])
    return lambda: made.invoke({"messages": [HumanMessage(QUESTION)]})["messages"][-1].content


# ---------------------------------------------------------------------- what keeps less
_PASTED = "came without document blocks"


@langchain(
    "`create_stuff_documents_chain(llm, prompt)`",
    NONE,
    "documents are pasted into a text: give `KVCacheRAG(llm=llm)` in its place",
    _PASTED,
)
def stuff_chain(kit: Kit) -> Asking:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Use this:\n{context}"), ("user", "{input}")]
    )
    chain = create_retrieval_chain(
        kit.retriever(k=4), create_stuff_documents_chain(kit.llm, prompt)
    )
    return lambda: chain.invoke({"input": QUESTION})["answer"]


@langchain("`RetrievalQA`", NONE, "as above", _PASTED)
def retrieval_qa(kit: Kit) -> Asking:
    chain = RetrievalQA.from_llm(kit.llm, retriever=kit.retriever(k=4))
    return lambda: chain.invoke(QUESTION)["result"]


@langchain(
    "`LLMChainExtractor`",
    remark="what it writes is a chunk of its own; another question has it write another, from "
    "documents that it pastes into its prompts",
    warning=_PASTED,
)
def extractor(kit: Kit) -> Asking:
    short = LLMChainExtractor.from_llm(kit.llm)
    return kit.chain(
        ContextualCompressionRetriever(base_compressor=short, base_retriever=kit.retriever())
    )
