"""Vector stores of other kinds: FAISS, Qdrant, and LlamaIndex's own in memory."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import access
import chromadb
import faiss
import pytest
from llama_index.core import Document, Settings, StorageContext, VectorStoreIndex
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode, QueryBundle, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.simple import SimpleVectorStore
from llama_index.vector_stores.faiss import FaissMapVectorStore, FaissVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from llama_index_framework import LlamaIndex
from qdrant_client import QdrantClient

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.integration import REFERENCE_KEYS
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheLLM,
    KVCachePrefill,
    KVCacheQueryEngine,
    KVCacheVectorStore,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag import Engine

    Count = Callable[[], int]

# Qdrant in this process says that a server would have indexes.
pytestmark = pytest.mark.filterwarnings("ignore:Payload indexes have no effect:UserWarning")

DIMENSIONS = 64


def faiss_store() -> FaissVectorStore:
    return FaissVectorStore(faiss_index=faiss.IndexFlatL2(DIMENSIONS))


def faiss_map_store() -> FaissMapVectorStore:
    return FaissMapVectorStore(faiss_index=faiss.IndexIDMap2(faiss.IndexFlatL2(DIMENSIONS)))


def qdrant_store() -> QdrantVectorStore:
    return QdrantVectorStore("docs", client=QdrantClient(":memory:"))


def chroma_store(llm: KVCacheLLM | None) -> KVCacheVectorStore:
    name = f"c-{uuid.uuid4().hex}"
    return KVCacheVectorStore.from_params(name, client=chromadb.EphemeralClient(), llm=llm)


def documents() -> list[Document]:
    texts = ["The tower is tall.", "A cat sleeps on the mat.", "Green lakes are deep."]
    return [
        Document(id_=f"d{number}", text=text, metadata={"page": number})
        for number, text in enumerate(texts)
    ]


def index_over(store: Any, embedding: HashEmbedding) -> VectorStoreIndex:
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex.from_documents(
        documents(), context, embed_model=embedding, transformations=[SentenceSplitter()]
    )


# ---------------------------------------------------------------------- prefill
@pytest.mark.parametrize("opened", [faiss_store, faiss_map_store, qdrant_store, SimpleVectorStore])
def test_prefilled_nodes_are_reused_from_any_store(
    opened: Callable[[], Any], llm: KVCacheLLM, embedding: HashEmbedding, prefilled: Count
) -> None:
    llm.prefill(SentenceSplitter().get_nodes_from_documents(documents()))
    assert prefilled() == 3
    index = index_over(opened(), embedding)
    response: Any = KVCacheQueryEngine.from_index(index, llm, similarity_top_k=2).query("A cat?")
    found = response.metadata["kv_cache"]
    assert (found["misses"], found["references"], prefilled()) == (0, 0, 0)


def test_a_pipeline_prefills_for_any_store(
    llm: KVCacheLLM, embedding: HashEmbedding, prefilled: Count
) -> None:
    store = SimpleVectorStore()
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(), embedding, KVCachePrefill(llm=llm)],
        vector_store=store,
        cache=IngestionCache(),
    )
    nodes = pipeline.run(documents=documents())
    assert prefilled() == 3
    assert all(not {*REFERENCE_KEYS} & {*node.metadata} for node in nodes)
    assert len(store.to_dict()["embedding_dict"]) == 3
    assert len(pipeline.run(documents=documents())) == 3  # from the pipeline's cache
    assert prefilled() == 0


class Meeting(HashEmbedding):
    """Embeds when somebody prefills at the same time."""

    _barrier: threading.Barrier = PrivateAttr(default_factory=lambda: threading.Barrier(2))

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        self._barrier.wait(20)
        return super()._get_text_embeddings(texts)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        await asyncio.to_thread(self._barrier.wait, 20)
        return await super()._aget_text_embeddings(texts)


@pytest.fixture
def meeting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Meeting:
    found, compute = Meeting(dimensions=DIMENSIONS), access.prefiller(engine).compute

    def computing(ids: Any) -> Any:
        found._barrier.wait(20)
        return compute(ids)

    monkeypatch.setattr(access.prefiller(engine), "compute", computing)
    return found


@pytest.mark.parametrize("way", ["run", "arun", "index"])
async def test_nodes_are_embedded_while_they_are_prefilled(
    llm: KVCacheLLM, embedding: HashEmbedding, meeting: Meeting, prefilled: Count, way: str
) -> None:
    steps = [SentenceSplitter(), KVCachePrefill(llm=llm, embed_model=meeting)]
    store = SimpleVectorStore()
    pipeline = IngestionPipeline(transformations=steps, vector_store=store)
    if way == "run":
        pipeline.run(documents=documents())
    elif way == "arun":
        await pipeline.arun(documents=documents())
    else:
        context = StorageContext.from_defaults(vector_store=store)
        nobody = MockEmbedding(1)  # the index has nothing left to embed
        VectorStoreIndex.from_documents(
            documents(), context, embed_model=nobody, transformations=steps
        )
    assert prefilled() == 3
    texts = [one.get_content(MetadataMode.EMBED) for one in documents()]
    assert [*store.data.embedding_dict.values()] == embedding.get_text_embedding_batch(texts)
    assert [*store.data.text_id_to_ref_doc_id.values()] == ["d0", "d1", "d2"]


@pytest.mark.parametrize("way", ["run", "arun"])
async def test_an_embedding_that_fails_adds_nothing(llm: KVCacheLLM, way: str) -> None:
    class Failing(HashEmbedding):
        def _get_text_embedding(self, text: str) -> list[float]:
            raise OSError("no embedding today")

    store = SimpleVectorStore()
    step = KVCachePrefill(llm=llm, embed_model=Failing())
    pipeline = IngestionPipeline(transformations=[step], vector_store=store)
    run: Any = pipeline.arun if way == "arun" else partial(asyncio.to_thread, pipeline.run)
    with pytest.raises(OSError, match="no embedding today"):
        await run(documents=documents())
    assert store.data.embedding_dict == {}


async def test_a_step_that_is_no_use_ends_an_embedding_that_waits() -> None:
    class Waiting(HashEmbedding):
        async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            await asyncio.Event().wait()
            return []

    step = KVCachePrefill(llm=None, embed_model=Waiting())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Settings, "_llm", MockLLM())
        with pytest.raises(InvalidInputError, match="need a KVCacheLLM"):
            await step.acall([TextNode(id_="long", text="A cat.")])


# ---------------------------------------------------------------------- an error costs no row
NEW = {"too long": "new " * 9999, "no model": "A new cat.", "no server": "A new cat."}
SAID = {"too long": "it has 40007 tokens", "no model": "nowhere", "no server": "localhost:1"}


def failing(why: str, llm: KVCacheLLM) -> KVCacheLLM:
    """An LLM of which prefilling a text of `NEW` fails."""
    if why == "no model":
        return KVCacheLLM(model_name="nowhere/nothing", max_new_tokens=4)
    return llm if why == "too long" else KVCacheLLM(base_url="http://localhost:1")


@pytest.mark.parametrize(
    ("way", "why"),
    [
        *((way, "too long") for way in ("refresh", "upserts", "upserts and delete")),
        *((way, why) for way in ("update", "step") for why in NEW),
    ],
)
def test_law_the_new_version_stands_where_the_old_one_was_deleted(
    why: str, way: str, llm: KVCacheLLM, embedding: HashEmbedding
) -> None:
    """LlamaIndex deletes the old version first; a stock store keeps the new row."""
    store, other = chroma_store(None), failing(why, llm)
    splitter = SentenceSplitter(chunk_size=50_000)
    old, new = documents()[0], Document(id_="d0", text=NEW[why])
    write: Callable[[], Any]
    if way in ("update", "refresh"):
        context = StorageContext.from_defaults(vector_store=store)
        index = VectorStoreIndex.from_documents(
            [old], context, embed_model=embedding, transformations=[splitter]
        )
        store._llm = other
        write = partial(index.update_ref_doc, new)
        if way == "refresh":
            write = partial(index.refresh_ref_docs, [new])
    else:
        strategies = {"upserts and delete": DocstoreStrategy.UPSERTS_AND_DELETE}
        pipeline = IngestionPipeline(
            transformations=[splitter, embedding],
            vector_store=store,
            docstore=SimpleDocumentStore(),
            docstore_strategy=strategies.get(way, DocstoreStrategy.UPSERTS),
        )
        pipeline.run(documents=[old])
        if way == "step":
            pipeline.transformations = [splitter, embedding, KVCachePrefill(llm=other)]
        else:
            store._llm = other
        write = partial(pipeline.run, documents=[new])
    with pytest.warns(UserWarning, match=SAID[why]) as seen:
        write()
    assert len([one for one in seen if "reference" in str(one.message)]) == 1
    (row,) = store.client.get()["metadatas"] or []
    (text,) = store.client.get()["documents"] or []
    assert text.split() == NEW[why].split()
    assert not {*REFERENCE_KEYS} & {*row}
    assert str(seen[0].message).startswith("row '")


@pytest.mark.parametrize("overflow", ["error", "drop_lowest", "refine"])
def test_a_question_over_a_row_that_is_too_long_is_treated_as_overflow_says(
    llm: KVCacheLLM, overflow: str
) -> None:
    rows = LlamaIndex().rows(llm)
    with pytest.warns(UserWarning, match="row 'long'"):
        rows.add({"long": "cat " * 9999, "short": "A cat."})
    found = rows.index.as_retriever().retrieve("A cat?")
    if overflow == "drop_lowest":
        said = LlamaIndex().ask(llm, "A cat?", found, overflow=overflow)
        assert said.cost["dropped_chunks"] == 1
        return
    with pytest.raises(ContextTooLongError, match="split it into smaller chunks"):
        LlamaIndex().ask(llm, "A cat?", found, overflow=overflow)


@pytest.mark.parametrize(
    "steps",
    [
        [KVCachePrefill(embed_model=HashEmbedding(dimensions=size)) for size in (8, 16)],
        [KVCachePrefill(llm=KVCacheLLM(model_name=name)) for name in ("tiny", "smollm2")],
    ],
    ids=["embeddings", "models"],
)
def test_two_steps_that_differ_do_not_share_a_pipelines_cache(steps: list[KVCachePrefill]) -> None:
    one, two = (json.dumps(step.to_dict(), default=str) for step in steps)
    assert one != two


def test_a_step_takes_the_llm_of_the_settings(
    llm: KVCacheLLM, prefilled: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [TextNode(text="A cat.")]
    monkeypatch.setattr(Settings, "_llm", llm)
    assert KVCachePrefill()(nodes) == nodes
    assert prefilled() == 1
    monkeypatch.setattr(Settings, "_llm", MockLLM())
    with pytest.raises(InvalidInputError, match="need a KVCacheLLM, not a MockLLM"):
        KVCachePrefill()(nodes)


# ---------------------------------------------------------------------- what an answer says
def test_a_node_that_was_edited_misses_for_its_text(
    llm: KVCacheLLM, embedding: HashEmbedding
) -> None:
    store = chroma_store(llm)
    index = index_over(store, embedding)
    nodes = index.as_retriever(similarity_top_k=1).retrieve("A cat?")
    nodes[0].node.metadata["page"] = 77
    response: Any = KVCacheQueryEngine.from_index(index, llm).synthesize(QueryBundle("A?"), nodes)
    (missed,) = response.metadata["kv_cache"]["missed"]
    assert (missed["chunk"], missed["reason"]) == (0, "other text")


def test_usage_has_the_cached_tokens(llm: KVCacheLLM) -> None:
    rows = LlamaIndex().rows(llm)
    rows.add({"a": "A cat sleeps on the mat."})
    (found,) = rows.find(1)
    raw: Any = llm.complete(f"{found.node.get_content()}\n\nA cat?").raw
    cost, usage = raw["kv_cache"], raw["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": cost["reused_tokens"]}
    assert usage["prompt_tokens"] == cost["prompt_tokens"] > cost["reused_tokens"] > 0
