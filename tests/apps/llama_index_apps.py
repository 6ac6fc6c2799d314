"""Apps of LlamaIndex, as its documentation writes them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import faiss
from apps.catalogue import NONE, PART, QUESTION, TEXTS, app
from llama_index.core import Document, SummaryIndex, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.evaluation import FaithfulnessEvaluator
from llama_index.core.indices.query.query_transform.base import HyDEQueryTransform
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    SentenceSplitter,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.postprocessor import (
    LongContextReorder,
    MetadataReplacementPostProcessor,
    SentenceEmbeddingOptimizer,
    SimilarityPostprocessor,
)
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import AutoMergingRetriever, QueryFusionRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.selectors import EmbeddingSingleSelector, LLMSingleSelector
from llama_index.core.storage import StorageContext
from llama_index.core.tools import QueryEngineTool, RetrieverTool, ToolMetadata
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index.vector_stores.faiss import FaissVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from pydantic import BaseModel
from qdrant_client import QdrantClient
from scripted import native_call

from llama_index.kvcache_rag import (
    KVCacheChatEngine,
    KVCacheLLM,
    KVCachePrefill,
    KVCacheQueryEngine,
    KVCacheSynthesizer,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_index.core.embeddings import BaseEmbedding

    Asking = Callable[[], Any]

FRAMEWORK = "LlamaIndex"


@dataclass(frozen=True)
class Kit:
    """What an app of LlamaIndex begins with.

    Attributes:
        llm: Ours.
        embedding: Needs no model.
        collection: Name of a collection that nobody has.
        scripted: Makes an LLM that says what it is told to.
    """

    llm: KVCacheLLM
    embedding: BaseEmbedding
    collection: str
    scripted: Callable[..., KVCacheLLM]

    def documents(self) -> list[Document]:
        return [
            Document(text=text, doc_id=str(number), metadata={"part": number % 2})
            for number, text in enumerate(TEXTS)
        ]

    def index(self) -> VectorStoreIndex:
        return VectorStoreIndex.from_documents(self.documents(), embed_model=self.embedding)


# ---------------------------------------------------------------------- nothing but the LLM
@app(FRAMEWORK, "only the LLM: `index.as_query_engine()`")
def stock_query_engine(kit: Kit) -> Asking:
    engine = kit.index().as_query_engine(llm=kit.llm)
    return lambda: engine.query(QUESTION)


@app(FRAMEWORK, 'only the LLM: `response_mode="tree_summarize"`')
def tree_summarize(kit: Kit) -> Asking:
    engine = kit.index().as_query_engine(llm=kit.llm, response_mode="tree_summarize")
    return lambda: engine.query(QUESTION)


@app(FRAMEWORK, "only the LLM: `get_response_synthesizer()`, streaming")
def stock_synthesizer(kit: Kit) -> Asking:
    synthesizer = get_response_synthesizer(
        kit.llm, response_mode=ResponseMode.REFINE, streaming=True
    )
    retriever = kit.index().as_retriever()
    return lambda: str(synthesizer.synthesize(QUESTION, retriever.retrieve(QUESTION)))


@app(FRAMEWORK, "only the LLM: a prompt of the app's own")
def own_prompt(kit: Kit) -> Asking:
    retriever = kit.index().as_retriever()

    def ask() -> Any:
        context = "\n\n".join(one.get_content() for one in retriever.retrieve(QUESTION))
        said = ChatMessage(role=MessageRole.USER, content=f"{context}\n\nAnswer: {QUESTION}")
        return kit.llm.chat([said])

    return ask


@app(FRAMEWORK, "a template with words before the context", remark="they begin the question")
def own_template(kit: Kit) -> Asking:
    template = PromptTemplate("You are a guide.\n{context_str}\nVisitor: {query_str}\nGuide: ")
    engine = kit.index().as_query_engine(llm=kit.llm, text_qa_template=template)
    return lambda: engine.query(QUESTION)


def _chat(kit: Kit, mode: ChatMode) -> Asking:
    memory = ChatMemoryBuffer.from_defaults(token_limit=500)
    engine = kit.index().as_chat_engine(mode, llm=kit.llm, memory=memory)

    def ask() -> Any:
        engine.reset()
        return engine.chat(QUESTION)

    return ask


@app(FRAMEWORK, 'only the LLM: `as_chat_engine("context")`')
def context_chat(kit: Kit) -> Asking:
    return _chat(kit, ChatMode.CONTEXT)


@app(FRAMEWORK, 'only the LLM: `as_chat_engine("condense_plus_context")`, `"best"`')
def condense_plus_context_chat(kit: Kit) -> Asking:
    return _chat(kit, ChatMode.CONDENSE_PLUS_CONTEXT)


@app(FRAMEWORK, 'only the LLM: `as_chat_engine("condense_question")`')
def condense_question_chat(kit: Kit) -> Asking:
    return _chat(kit, ChatMode.CONDENSE_QUESTION)


# ---------------------------------------------------------------------- our classes
@app(FRAMEWORK, "LLM and `KVCacheSynthesizer` over any index")
def two_lines(kit: Kit) -> Asking:
    synthesizer = KVCacheSynthesizer(kit.llm)
    engine = kit.index().as_query_engine(llm=kit.llm, response_synthesizer=synthesizer)
    return lambda: engine.query(QUESTION)


@app(FRAMEWORK, "`KVCacheVectorStore`: prefilled at ingestion")
def vector_store(kit: Kit) -> Asking:
    import chromadb

    client = chromadb.EphemeralClient()
    store = KVCacheVectorStore.from_params(kit.collection, client=client, llm=kit.llm)
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex.from_documents(
        kit.documents(), storage_context=context, embed_model=kit.embedding
    )
    engine = KVCacheQueryEngine.from_index(index, kit.llm)
    return lambda: engine.query(QUESTION)


def _over(kit: Kit, store: Any, **options: Any) -> Asking:
    index = VectorStoreIndex.from_documents(
        kit.documents(),
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=kit.embedding,
        **options,
    )
    engine = KVCacheQueryEngine.from_index(index, kit.llm)
    return lambda: engine.query(QUESTION)


@app(FRAMEWORK, "FAISS, as it is")
def faiss_store(kit: Kit) -> Asking:
    return _over(kit, FaissVectorStore(faiss.IndexFlatL2(64)))


@app(FRAMEWORK, "Qdrant with `KVCachePrefill`: prefilled at ingestion")
def qdrant_store(kit: Kit) -> Asking:
    store = QdrantVectorStore(kit.collection, client=QdrantClient(":memory:"))
    return _over(kit, store, transformations=[SentenceSplitter(), KVCachePrefill(llm=kit.llm)])


@app(FRAMEWORK, "`IngestionPipeline` with `KVCachePrefill`")
def pipeline(kit: Kit) -> Asking:
    steps = [SentenceSplitter(), kit.embedding, KVCachePrefill(llm=kit.llm)]
    nodes = IngestionPipeline(transformations=steps).run(documents=kit.documents())
    engine = KVCacheQueryEngine.from_index(
        VectorStoreIndex(nodes, embed_model=kit.embedding), kit.llm
    )
    return lambda: engine.query(QUESTION)


@app(FRAMEWORK, "`KVCacheQueryEngine`, streaming")
def streaming(kit: Kit) -> Asking:
    engine = KVCacheQueryEngine.from_index(kit.index(), kit.llm, streaming=True)
    return lambda: str(engine.query(QUESTION))


@app(FRAMEWORK, "`KVCacheQueryEngine`, `aquery`")
def asynchronous(kit: Kit) -> Asking:
    engine = KVCacheQueryEngine.from_index(kit.index(), kit.llm)
    return lambda: asyncio.run(engine.aquery(QUESTION))


@app(FRAMEWORK, "`KVCacheChatEngine`")
def chat_engine(kit: Kit) -> Asking:
    engine = KVCacheChatEngine.from_index(kit.index(), kit.llm)

    def ask() -> Any:
        engine.reset()
        return engine.chat(QUESTION)

    return ask


@app(FRAMEWORK, "metadata filters")
def filters(kit: Kit) -> Asking:
    wanted = MetadataFilters(filters=[MetadataFilter(key="part", value=0)])
    engine = KVCacheQueryEngine.from_index(kit.index(), kit.llm, filters=wanted)
    return lambda: engine.query(QUESTION)


@app(FRAMEWORK, "`LongContextReorder`, `SimilarityPostprocessor`")
def reordering(kit: Kit) -> Asking:
    chosen = [SimilarityPostprocessor(similarity_cutoff=0.0), LongContextReorder()]
    engine = kit.index().as_query_engine(llm=kit.llm, node_postprocessors=chosen)
    return lambda: engine.query(QUESTION)


@app(
    FRAMEWORK,
    "a reranker that changes the order",
    remark="a chunk is stored once, whatever its place",
)
def turned_round(kit: Kit) -> Asking:
    retriever, synthesizer = (
        kit.index().as_retriever(similarity_top_k=3),
        KVCacheSynthesizer(kit.llm),
    )
    orders = iter([1, -1, 1, -1])
    return lambda: synthesizer.synthesize(QUESTION, retriever.retrieve(QUESTION)[:: next(orders)])


@app(FRAMEWORK, "sentence windows (`MetadataReplacementPostProcessor`)")
def sentence_window(kit: Kit) -> Asking:
    nodes = SentenceWindowNodeParser(window_size=1).get_nodes_from_documents(kit.documents())
    engine = VectorStoreIndex(nodes, embed_model=kit.embedding).as_query_engine(
        llm=kit.llm,
        node_postprocessors=[MetadataReplacementPostProcessor(target_metadata_key="window")],
    )
    return lambda: engine.query(QUESTION)


@app(FRAMEWORK, "`AutoMergingRetriever`", remark="parents are chunks of their own")
def auto_merging(kit: Kit) -> Asking:
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[64, 24], chunk_overlap=0)
    nodes = parser.get_nodes_from_documents(kit.documents())
    context = StorageContext.from_defaults()
    context.docstore.add_documents(nodes)
    index = VectorStoreIndex(
        get_leaf_nodes(nodes), storage_context=context, embed_model=kit.embedding
    )
    retriever = AutoMergingRetriever(index.as_retriever(similarity_top_k=4), context)
    engine = RetrieverQueryEngine.from_args(retriever, llm=kit.llm)
    return lambda: engine.query(QUESTION)


@app(FRAMEWORK, "`SummaryIndex`")
def summary_index(kit: Kit) -> Asking:
    engine = SummaryIndex.from_documents(kit.documents()).as_query_engine(llm=kit.llm)
    return lambda: engine.query(QUESTION)


@app(
    FRAMEWORK,
    "an upsert: `index.refresh_ref_docs`",
    PART,
    "the changed document is computed; of a long one, `with store.replacing():` around it keeps "
    "the chunks that did not change",
)
def upsert(kit: Kit) -> Asking:
    index = kit.index()
    engine = index.as_query_engine(llm=kit.llm, similarity_top_k=4)
    versions = iter(["", " It was painted white."])

    def ask() -> Any:
        first, *rest = kit.documents()
        first.set_content(first.text + next(versions))
        index.refresh_ref_docs([first, *rest])
        return engine.query(QUESTION)

    return ask


@app(FRAMEWORK, "`CitationQueryEngine`", remark="each source with its number is a chunk")
def citations(kit: Kit) -> Asking:
    engine = CitationQueryEngine.from_args(kit.index(), llm=kit.llm)
    return lambda: engine.query(QUESTION)


@app(FRAMEWORK, "`HyDEQueryTransform`")
def hyde(kit: Kit) -> Asking:
    engine = KVCacheQueryEngine.from_index(kit.index(), kit.llm, similarity_top_k=4)
    transformed = TransformQueryEngine(engine, HyDEQueryTransform(kit.llm))
    return lambda: transformed.query(QUESTION)


@app(FRAMEWORK, "`QueryFusionRetriever`")
def fusion(kit: Kit) -> Asking:
    retrievers = [kit.index().as_retriever(similarity_top_k=top) for top in (1, 2)]
    retriever = QueryFusionRetriever(retrievers, llm=kit.llm, num_queries=1, use_async=False)
    engine = RetrieverQueryEngine.from_args(retriever, llm=kit.llm)
    return lambda: engine.query(QUESTION)


class TwoQuestions:
    """A generator of sub-questions that needs no LLM."""

    def generate(self, tools: Any, query: Any) -> list[SubQuestion]:
        asked = (QUESTION, "What does the lamp burn?")
        return [SubQuestion(sub_question=one, tool_name=tools[0].name) for one in asked]


@app(FRAMEWORK, "`SubQuestionQueryEngine`")
def sub_questions(kit: Kit) -> Asking:
    tool = QueryEngineTool.from_defaults(kit.index().as_query_engine(llm=kit.llm), name="village")
    generator: Any = TwoQuestions()
    engine = SubQuestionQueryEngine(
        question_gen=generator,
        response_synthesizer=get_response_synthesizer(kit.llm),
        query_engine_tools=[tool],
        use_async=False,
    )
    return lambda: engine.query(QUESTION)


@app(FRAMEWORK, "`RouterQueryEngine` with an embedding selector")
def router(kit: Kit) -> Asking:
    engine = RouterQueryEngine(
        selector=EmbeddingSingleSelector.from_defaults(kit.embedding),
        query_engine_tools=[
            QueryEngineTool.from_defaults(kit.index().as_query_engine(llm=kit.llm), description=one)
            for one in ("the village", "its school")
        ],
        llm=kit.llm,
    )
    return lambda: engine.query(QUESTION)


# ---------------------------------------------------------------------- objects and agents
class Place(BaseModel):
    """Where something is."""

    place: str


@app(FRAMEWORK, "`output_cls=` of `KVCacheQueryEngine`")
def output_class(kit: Kit) -> Asking:
    llm = kit.scripted('{"place": "the tower"}')
    engine = KVCacheQueryEngine.from_index(kit.index(), llm, output_cls=Place)
    return lambda: engine.query(QUESTION)


@app(FRAMEWORK, "`RouterQueryEngine` with an LLM selector")
def llm_router(kit: Kit) -> Asking:
    llm = kit.scripted('[{"choice": 1, "reason": "It is asked."}]', "In the tower.")
    tools = [
        QueryEngineTool.from_defaults(kit.index().as_query_engine(llm=llm), description=one)
        for one in ("the village", "its school")
    ]
    selector = LLMSingleSelector.from_defaults(llm)
    engine = RouterQueryEngine(selector=selector, query_engine_tools=tools, llm=llm)
    return lambda: engine.query(QUESTION)


@app(FRAMEWORK, "`FunctionAgent` with a retriever's tool")
def agent(kit: Kit) -> Asking:
    llm = kit.scripted(native_call(("search", {"input": QUESTION})), "In the tower.")
    about = ToolMetadata(name="search", description="Finds facts.")
    made = FunctionAgent(
        tools=[RetrieverTool(kit.index().as_retriever(), about)], llm=llm, streaming=False
    )

    async def ask() -> Any:
        return await made.run(QUESTION)

    return lambda: asyncio.run(ask())


# ---------------------------------------------------------------------- what keeps less
@app(
    FRAMEWORK,
    "metadata that changes (a date, a score) in what the LLM reads of a node",
    NONE,
    "exclude the field: `node.excluded_llm_metadata_keys`",
    "retrieved",
)
def changing_metadata(kit: Kit) -> Asking:
    synthesizer, dates = KVCacheSynthesizer(kit.llm), iter(["Monday", "Tuesday", "Wednesday"])

    def ask() -> Any:
        node = TextNode(text=TEXTS[0], id_="node", metadata={"retrieved": next(dates)})
        return synthesizer.synthesize(QUESTION, [NodeWithScore(node=node, score=1.0)])

    return ask


@app(
    FRAMEWORK,
    "`SentenceEmbeddingOptimizer`",
    remark="shortened nodes are chunks of their own; another question may shorten them otherwise",
)
def optimizer(kit: Kit) -> Asking:
    shorter = SentenceEmbeddingOptimizer(embed_model=kit.embedding, percentile_cutoff=0.5)
    engine = kit.index().as_query_engine(llm=kit.llm, node_postprocessors=[shorter])
    return lambda: engine.query(QUESTION)


@app(
    FRAMEWORK,
    "evaluators (`FaithfulnessEvaluator`, `RelevancyEvaluator`)",
    NONE,
    "a judgement is no approximation: they are asked by full prefill",
)
def evaluator(kit: Kit) -> Asking:
    judge = FaithfulnessEvaluator(kit.llm)
    return lambda: (
        judge.evaluate(query=QUESTION, response="In the tower.", contexts=list(TEXTS)).feedback
    )


@app(
    FRAMEWORK,
    "a context of texts that no retriever gave",
    NONE,
    "give the nodes to `KVCacheSynthesizer`",
    "nothing in the context of this prompt",
)
def foreign_context(kit: Kit) -> Asking:
    llm = KVCacheLLM(engine=kit.llm.engine, max_new_tokens=4)
    template = PromptTemplate("{context_str}\n{query_str}")
    context = "\n".join(text.upper() for text in TEXTS + TEXTS)
    return lambda: llm.predict(template, context_str=context, query_str=QUESTION)


@app(
    FRAMEWORK,
    "a prompt form of the user's own (`messages_to_prompt=`, `completion_to_prompt=`)",
    NONE,
    "the prompt stays in that form; leave it out, or use `KVCacheSynthesizer`",
)
def own_form(kit: Kit) -> Asking:
    llm = KVCacheLLM(
        engine=kit.llm.engine, max_new_tokens=4, completion_to_prompt=lambda text: f"[{text}]"
    )
    engine = kit.index().as_query_engine(llm=llm)
    return lambda: engine.query(QUESTION)
