"""Apps of LlamaIndex, as its documentation writes them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import chromadb
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
llama_index = partial(app, FRAMEWORK)


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

    def index(self, **options: Any) -> VectorStoreIndex:
        options = {"embed_model": self.embedding, **options}
        return VectorStoreIndex.from_documents(self.documents(), **options)

    def stock(self, **options: Any) -> Asking:
        """LlamaIndex's own engine over an index."""
        return asking(self.index().as_query_engine(**{"llm": self.llm, **options}))

    def ours(self, index: VectorStoreIndex | None = None, **options: Any) -> Asking:
        """Ours over an index."""
        return asking(KVCacheQueryEngine.from_index(index or self.index(), self.llm, **options))

    def over(self, store: Any, **options: Any) -> Asking:
        """Ours over a vector store."""
        context = StorageContext.from_defaults(vector_store=store)
        return self.ours(self.index(storage_context=context, **options))

    def tools(self, *descriptions: str, llm: Any = None) -> list[QueryEngineTool]:
        engines = (self.index().as_query_engine(llm=llm or self.llm) for _ in descriptions)
        return [
            QueryEngineTool.from_defaults(one, name=f"tool-{number}", description=text)
            for number, (one, text) in enumerate(zip(engines, descriptions, strict=True))
        ]


def asking(engine: Any) -> Asking:
    return lambda: engine.query(QUESTION)


def chatting(engine: Any) -> Asking:
    def ask() -> Any:
        engine.reset()
        return engine.chat(QUESTION)

    return ask


# ---------------------------------------------------------------------- nothing but the LLM
@llama_index("only the LLM: `index.as_query_engine()`")
def stock_query_engine(kit: Kit) -> Asking:
    return kit.stock()


@llama_index('only the LLM: `response_mode="tree_summarize"`')
def tree_summarize(kit: Kit) -> Asking:
    return kit.stock(response_mode="tree_summarize")


@llama_index("only the LLM: `get_response_synthesizer()`, streaming")
def stock_synthesizer(kit: Kit) -> Asking:
    synthesizer = get_response_synthesizer(
        kit.llm, response_mode=ResponseMode.REFINE, streaming=True
    )
    retriever = kit.index().as_retriever()
    return lambda: str(synthesizer.synthesize(QUESTION, retriever.retrieve(QUESTION)))


@llama_index("only the LLM: a prompt of the app's own")
def own_prompt(kit: Kit) -> Asking:
    retriever = kit.index().as_retriever()

    def ask() -> Any:
        context = "\n\n".join(one.get_content() for one in retriever.retrieve(QUESTION))
        said = ChatMessage(role=MessageRole.USER, content=f"{context}\n\nAnswer: {QUESTION}")
        return kit.llm.chat([said])

    return ask


@llama_index("a template with words before the context", remark="they begin the question")
def own_template(kit: Kit) -> Asking:
    template = PromptTemplate("You are a guide.\n{context_str}\nVisitor: {query_str}\nGuide: ")
    return kit.stock(text_qa_template=template)


def _chat(kit: Kit, mode: ChatMode) -> Asking:
    memory = ChatMemoryBuffer.from_defaults(token_limit=500)
    return chatting(kit.index().as_chat_engine(mode, llm=kit.llm, memory=memory))


@llama_index('only the LLM: `as_chat_engine("context")`')
def context_chat(kit: Kit) -> Asking:
    return _chat(kit, ChatMode.CONTEXT)


@llama_index('only the LLM: `as_chat_engine("condense_plus_context")`, `"best"`')
def condense_plus_context_chat(kit: Kit) -> Asking:
    return _chat(kit, ChatMode.CONDENSE_PLUS_CONTEXT)


@llama_index('only the LLM: `as_chat_engine("condense_question")`')
def condense_question_chat(kit: Kit) -> Asking:
    return _chat(kit, ChatMode.CONDENSE_QUESTION)


# ---------------------------------------------------------------------- our classes
@llama_index("LLM and `KVCacheSynthesizer` over any index")
def two_lines(kit: Kit) -> Asking:
    return kit.stock(response_synthesizer=KVCacheSynthesizer(kit.llm))


@llama_index("`KVCacheVectorStore`: prefilled at ingestion")
def vector_store(kit: Kit) -> Asking:
    client = chromadb.EphemeralClient()
    return kit.over(KVCacheVectorStore.from_params(kit.collection, client=client, llm=kit.llm))


@llama_index("FAISS, as it is")
def faiss_store(kit: Kit) -> Asking:
    return kit.over(FaissVectorStore(faiss.IndexFlatL2(64)))


@llama_index("Qdrant with `KVCachePrefill`: prefilled at ingestion")
def qdrant_store(kit: Kit) -> Asking:
    store = QdrantVectorStore(kit.collection, client=QdrantClient(":memory:"))
    return kit.over(store, transformations=[SentenceSplitter(), KVCachePrefill(llm=kit.llm)])


@llama_index("`IngestionPipeline` with `KVCachePrefill`")
def pipeline(kit: Kit) -> Asking:
    steps = [SentenceSplitter(), kit.embedding, KVCachePrefill(llm=kit.llm)]
    nodes = IngestionPipeline(transformations=steps).run(documents=kit.documents())
    return kit.ours(VectorStoreIndex(nodes, embed_model=kit.embedding))


@llama_index("`KVCacheQueryEngine`, streaming")
def streaming(kit: Kit) -> Asking:
    engine = KVCacheQueryEngine.from_index(kit.index(), kit.llm, streaming=True)
    return lambda: str(engine.query(QUESTION))


@llama_index("`KVCacheQueryEngine`, `aquery`")
def asynchronous(kit: Kit) -> Asking:
    engine = KVCacheQueryEngine.from_index(kit.index(), kit.llm)
    return lambda: asyncio.run(engine.aquery(QUESTION))


@llama_index("`KVCacheChatEngine`")
def chat_engine(kit: Kit) -> Asking:
    return chatting(KVCacheChatEngine.from_index(kit.index(), kit.llm))


@llama_index("metadata filters")
def filters(kit: Kit) -> Asking:
    wanted = MetadataFilters(filters=[MetadataFilter(key="part", value=0)])
    return kit.ours(filters=wanted)


@llama_index("`LongContextReorder`, `SimilarityPostprocessor`")
def reordering(kit: Kit) -> Asking:
    chosen = [SimilarityPostprocessor(similarity_cutoff=0.0), LongContextReorder()]
    return kit.stock(node_postprocessors=chosen)


@llama_index(
    "a reranker that changes the order",
    remark="a chunk is stored once, whatever its place",
)
def turned_round(kit: Kit) -> Asking:
    retriever = kit.index().as_retriever(similarity_top_k=3)
    synthesizer = KVCacheSynthesizer(kit.llm)
    orders = iter([1, -1, 1, -1])
    return lambda: synthesizer.synthesize(QUESTION, retriever.retrieve(QUESTION)[:: next(orders)])


@llama_index("sentence windows (`MetadataReplacementPostProcessor`)")
def sentence_window(kit: Kit) -> Asking:
    nodes = SentenceWindowNodeParser(window_size=1).get_nodes_from_documents(kit.documents())
    whole = MetadataReplacementPostProcessor(target_metadata_key="window")
    index = VectorStoreIndex(nodes, embed_model=kit.embedding)
    return asking(index.as_query_engine(llm=kit.llm, node_postprocessors=[whole]))


@llama_index("`AutoMergingRetriever`", remark="parents are chunks of their own")
def auto_merging(kit: Kit) -> Asking:
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[64, 24], chunk_overlap=0)
    nodes = parser.get_nodes_from_documents(kit.documents())
    context = StorageContext.from_defaults()
    context.docstore.add_documents(nodes)
    index = VectorStoreIndex(
        get_leaf_nodes(nodes), storage_context=context, embed_model=kit.embedding
    )
    retriever = AutoMergingRetriever(index.as_retriever(similarity_top_k=4), context)
    return asking(RetrieverQueryEngine.from_args(retriever, llm=kit.llm))


@llama_index("`SummaryIndex`")
def summary_index(kit: Kit) -> Asking:
    return asking(SummaryIndex.from_documents(kit.documents()).as_query_engine(llm=kit.llm))


@llama_index(
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


@llama_index("`CitationQueryEngine`", remark="each source with its number is a chunk")
def citations(kit: Kit) -> Asking:
    return asking(CitationQueryEngine.from_args(kit.index(), llm=kit.llm))


@llama_index("`HyDEQueryTransform`")
def hyde(kit: Kit) -> Asking:
    engine = KVCacheQueryEngine.from_index(kit.index(), kit.llm, similarity_top_k=4)
    return asking(TransformQueryEngine(engine, HyDEQueryTransform(kit.llm)))


@llama_index("`QueryFusionRetriever`")
def fusion(kit: Kit) -> Asking:
    retrievers = [kit.index().as_retriever(similarity_top_k=top) for top in (1, 2)]
    retriever = QueryFusionRetriever(retrievers, llm=kit.llm, num_queries=1, use_async=False)
    return asking(RetrieverQueryEngine.from_args(retriever, llm=kit.llm))


PLACES = ("the village", "its school")


class TwoQuestions:
    """A generator of sub-questions that needs no LLM."""

    def generate(self, tools: Any, query: Any) -> list[SubQuestion]:
        asked = (QUESTION, "What does the lamp burn?")
        return [SubQuestion(sub_question=one, tool_name=tools[0].name) for one in asked]


@llama_index("`SubQuestionQueryEngine`")
def sub_questions(kit: Kit) -> Asking:
    generator: Any = TwoQuestions()
    engine = SubQuestionQueryEngine(
        question_gen=generator,
        response_synthesizer=get_response_synthesizer(kit.llm),
        query_engine_tools=kit.tools("the village"),
        use_async=False,
    )
    return asking(engine)


@llama_index("`RouterQueryEngine` with an embedding selector")
def router(kit: Kit) -> Asking:
    selector, tools = EmbeddingSingleSelector.from_defaults(kit.embedding), kit.tools(*PLACES)
    return asking(RouterQueryEngine(selector=selector, query_engine_tools=tools, llm=kit.llm))


# ---------------------------------------------------------------------- objects and agents
class Place(BaseModel):
    """Where something is."""

    place: str


@llama_index("`output_cls=` of `KVCacheQueryEngine`")
def output_class(kit: Kit) -> Asking:
    llm = kit.scripted('{"place": "the tower"}')
    return asking(KVCacheQueryEngine.from_index(kit.index(), llm, output_cls=Place))


@llama_index("`RouterQueryEngine` with an LLM selector")
def llm_router(kit: Kit) -> Asking:
    llm = kit.scripted('[{"choice": 1, "reason": "It is asked."}]', "In the tower.")
    selector, tools = LLMSingleSelector.from_defaults(llm), kit.tools(*PLACES, llm=llm)
    return asking(RouterQueryEngine(selector=selector, query_engine_tools=tools, llm=llm))


@llama_index("`FunctionAgent` with a retriever's tool")
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
@llama_index(
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


@llama_index(
    "`SentenceEmbeddingOptimizer`",
    remark="shortened nodes are chunks of their own; another question may shorten them otherwise",
)
def optimizer(kit: Kit) -> Asking:
    shorter = SentenceEmbeddingOptimizer(embed_model=kit.embedding, percentile_cutoff=0.5)
    return kit.stock(node_postprocessors=[shorter])


@llama_index(
    "evaluators (`FaithfulnessEvaluator`, `RelevancyEvaluator`)",
    NONE,
    "a judgement is no approximation: they are asked by full prefill",
)
def evaluator(kit: Kit) -> Asking:
    judge = FaithfulnessEvaluator(kit.llm)
    return lambda: (
        judge.evaluate(query=QUESTION, response="In the tower.", contexts=list(TEXTS)).feedback
    )


@llama_index(
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


@llama_index(
    "a prompt form of the user's own (`messages_to_prompt=`, `completion_to_prompt=`)",
    NONE,
    "the prompt stays in that form; leave it out, or use `KVCacheSynthesizer`",
)
def own_form(kit: Kit) -> Asking:
    llm = KVCacheLLM(
        engine=kit.llm.engine, max_new_tokens=4, completion_to_prompt=lambda text: f"[{text}]"
    )
    return kit.stock(llm=llm)
