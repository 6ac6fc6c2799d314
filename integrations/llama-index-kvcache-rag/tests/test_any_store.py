"""Vector stores of other kinds: FAISS, Qdrant, and LlamaIndex's own in memory."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import access
import faiss
import pytest
from kv_cache_fields import FIELDS
from llama_index.core import Document, Settings, StorageContext, VectorStoreIndex
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode, QueryBundle, TextNode
from llama_index.core.vector_stores import FilterCondition, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.simple import SimpleVectorStore
from llama_index.vector_stores.faiss import FaissMapVectorStore, FaissVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import AsyncQdrantClient, QdrantClient
from small import make_model

from kvcache_rag import ContextTooLongError, DiskStore, InvalidInputError, Metrics
from kvcache_rag.integration import REFERENCE_KEYS
from kvcache_rag.integration.record import OwnerRecord
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheLLM,
    KVCachePrefill,
    KVCacheQueryEngine,
    KVCacheVectorStore,
    prefill,
)
from llama_index.kvcache_rag.wrapped_store import WrappedVectorStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llama_index.core.vector_stores.types import BasePydanticVectorStore

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


STORES: dict[str, Callable[[], BasePydanticVectorStore]] = {
    "faiss": faiss_store,
    "faiss-map": faiss_map_store,
    "qdrant": qdrant_store,
    "simple": SimpleVectorStore,
}
DELETING = [name for name in STORES if name != "faiss"]  # whose LlamaIndex store cannot


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


def ask(index: VectorStoreIndex, llm: KVCacheLLM) -> dict[str, Any]:
    response: Any = KVCacheQueryEngine.from_index(index, llm, similarity_top_k=2).query("A cat?")
    found: dict[str, Any] = response.metadata["kv_cache"]
    return found


@pytest.fixture
def disk_llm(make_engine: Callable[..., Engine], tmp_path: Path) -> KVCacheLLM:
    """Over a folder in which what is released is dropped by the next sweep."""
    store = DiskStore(tmp_path / "kv", release_grace=0.0, durable=False)
    return KVCacheLLM(engine=make_engine(store=store), max_new_tokens=4)


def held(llm: KVCacheLLM) -> set[str]:
    """Which of the documents' texts are stored after a sweep."""
    llm.engine.store.sweep()
    texts = [one.get_content(MetadataMode.LLM) for one in documents()]
    keys = llm.engine.keys(texts)
    return {f"d{at}" for at, key in enumerate(keys) if llm.engine.store.contains(key)}


# ---------------------------------------------------------------------- wrap
@pytest.mark.parametrize("kind", STORES)
def test_the_first_question_reuses_what_was_added(
    kind: str, llm: KVCacheLLM, embedding: HashEmbedding, prefilled: Count
) -> None:
    store = KVCacheVectorStore.wrap(STORES[kind](), llm=llm)
    index = index_over(store, embedding)
    assert prefilled() == 3
    found = ask(index, llm)
    assert found["misses"] == 0
    assert found["reused_tokens"] > 0
    # By reference where the node comes back with its metadata, else by its text.
    assert found["references"] == (2 if store.stores_text else 0)
    assert prefilled() == 0


@pytest.mark.parametrize("kind", STORES)
def test_questions_get_what_the_store_itself_gives(
    kind: str, llm: KVCacheLLM, embedding: HashEmbedding
) -> None:
    def found(store: Any) -> list[Any]:
        retriever = index_over(store, embedding).as_retriever(similarity_top_k=3)
        nodes = retriever.retrieve("A cat?")
        modes = (MetadataMode.LLM, MetadataMode.EMBED, MetadataMode.NONE)
        return [(round(one.score or 0.0, 5), *map(one.node.get_content, modes)) for one in nodes]

    assert found(KVCacheVectorStore.wrap(STORES[kind](), llm=llm)) == found(STORES[kind]())


@pytest.mark.parametrize("kind", DELETING)
def test_deleting_a_document_releases_its_chunk(
    kind: str, disk_llm: KVCacheLLM, embedding: HashEmbedding
) -> None:
    index = index_over(
        KVCacheVectorStore.wrap(STORES[kind](), llm=disk_llm, name="docs"), embedding
    )
    assert held(disk_llm) == {"d0", "d1", "d2"}
    index.delete_ref_doc("d1", delete_from_docstore=True)
    assert held(disk_llm) == {"d0", "d2"}


def test_deleting_nodes_releases_their_chunks(
    disk_llm: KVCacheLLM, embedding: HashEmbedding
) -> None:
    store = KVCacheVectorStore.wrap(qdrant_store(), llm=disk_llm, name="docs")
    index_over(store, embedding)
    (one,) = store.get_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="page", value=0)]))
    store.delete_nodes([one.node_id])
    assert held(disk_llm) == {"d1", "d2"}
    of_two = [MetadataFilter(key="page", value=1), MetadataFilter(key="page", value=7)]
    store.delete_nodes(filters=MetadataFilters(filters=of_two, condition=FilterCondition.OR))
    assert held(disk_llm) == {"d2"}
    store.clear()
    assert held(disk_llm) == set()


def test_what_another_node_or_another_store_wants_stays(
    disk_llm: KVCacheLLM, embedding: HashEmbedding
) -> None:
    first = KVCacheVectorStore.wrap(qdrant_store(), llm=disk_llm, name="first")
    second = KVCacheVectorStore.wrap(SimpleVectorStore(), llm=disk_llm, name="second")
    vector = embedding.get_text_embedding("x")
    twins = [TextNode(id_=f"0000000{n}-0000-0000-0000-000000000000") for n in (1, 2)]
    for twin in twins:
        twin.text, twin.metadata, twin.embedding = "The tower is tall.", {"page": 0}, vector
    first.add(twins)
    first.delete_nodes([twins[0].node_id])
    assert held(disk_llm) == {"d0"}
    index_over(second, embedding)
    first.delete_nodes([twins[1].node_id])
    assert held(disk_llm) == {"d0", "d1", "d2"}


def test_replacing_a_node_releases_what_it_said_before(
    disk_llm: KVCacheLLM, embedding: HashEmbedding
) -> None:
    store = KVCacheVectorStore.wrap(SimpleVectorStore(), llm=disk_llm, name="docs")
    old, new, blank = documents()
    for node, text in ((old, old.text), (new, new.text), (blank, " ")):
        node.embedding = embedding.get_text_embedding("x")
        row = TextNode(id_="row", text=text, metadata=node.metadata, embedding=node.embedding)
        store.add([row])
        if node is old:
            assert held(disk_llm) == {"d0"}
        if node is new:
            assert held(disk_llm) == {"d1"}


def test_without_a_name_nothing_is_claimed(
    disk_llm: KVCacheLLM, embedding: HashEmbedding, tmp_path: Path
) -> None:
    index = index_over(KVCacheVectorStore.wrap(qdrant_store(), llm=disk_llm), embedding)
    index.delete_ref_doc("d1")
    assert held(disk_llm) == {"d0", "d1", "d2"}
    assert not [*tmp_path.glob("kv/*/records"), *tmp_path.rglob("*.owner-*")]


def test_nodes_of_the_caller_stay_as_they_are(llm: KVCacheLLM, embedding: HashEmbedding) -> None:
    mine = TextNode(text="The tower is tall.", metadata={"page": 0})
    mine.embedding = embedding.get_text_embedding("x")
    before = copy.deepcopy(mine)
    store = KVCacheVectorStore.wrap(qdrant_store(), llm=llm)
    store.add([mine])
    assert mine == before
    (back,) = store.get_nodes([mine.node_id])
    assert set(back.metadata) == {"page", *REFERENCE_KEYS}
    for mode in MetadataMode.LLM, MetadataMode.EMBED:
        assert back.get_content(mode) == mine.get_content(mode)


def test_a_node_that_is_too_long_is_named_and_nothing_is_added(
    llm: KVCacheLLM, embedding: HashEmbedding
) -> None:
    store = KVCacheVectorStore.wrap(SimpleVectorStore(), llm=llm)
    nodes = [TextNode(id_="short", text="A cat."), TextNode(id_="long", text="cat " * 9999)]
    for node in nodes:
        node.embedding = embedding.get_text_embedding("x")
    with pytest.raises(ContextTooLongError, match="row 'long'"):
        store.add(nodes)
    assert not store.store.to_dict()["embedding_dict"]


def test_a_store_that_refuses_claims_nothing(disk_llm: KVCacheLLM, tmp_path: Path) -> None:
    store = KVCacheVectorStore.wrap(qdrant_store(), llm=disk_llm, name="docs")
    with pytest.raises(ValueError, match="embedding not set"):
        store.add([TextNode(text="The tower is tall.")])
    assert not [*tmp_path.rglob("*.owner-*")]


async def test_async_ways_do_the_same(disk_llm: KVCacheLLM, embedding: HashEmbedding) -> None:
    client = AsyncQdrantClient(":memory:")
    store = KVCacheVectorStore.wrap(
        QdrantVectorStore("docs", aclient=client), llm=disk_llm, name="docs"
    )
    nodes = [
        TextNode(text=one.text, metadata=one.metadata, embedding=embedding.get_text_embedding("x"))
        for one in documents()
    ]
    await store.async_add(nodes)
    assert held(disk_llm) == {"d0", "d1", "d2"}
    await store.adelete_nodes([nodes[0].node_id])
    assert held(disk_llm) == {"d1", "d2"}
    page = MetadataFilters(filters=[MetadataFilter(key="page", value=1)])
    await store.adelete_nodes(filters=page)
    assert held(disk_llm) == {"d2"}
    assert len(await store.aget_nodes(filters=MetadataFilters(filters=[]))) == 1
    await store.aclear()
    assert held(disk_llm) == set()
    await client.close()


def test_the_rest_is_the_stores_own(llm: KVCacheLLM, tmp_path: Path) -> None:
    inner = faiss_store()
    store = KVCacheVectorStore.wrap(inner, llm=llm)
    assert isinstance(store, WrappedVectorStore)
    assert (store.store, store.client, store.stores_text) == (inner, inner.client, False)
    store.persist(str(tmp_path / "index"))
    assert (tmp_path / "index").is_file()
    assert KVCacheVectorStore.wrap(qdrant_store(), llm=llm).collection_name == "docs"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = store.no_such_thing
    second = copy.deepcopy(store)
    assert (second.store, second.engine) == (inner, llm.engine)


def test_settings_have_the_llm(llm: KVCacheLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "_llm", llm)
    assert KVCacheVectorStore.wrap(SimpleVectorStore()).engine is llm.engine


def test_what_cannot_be_wrapped_says_so(llm: KVCacheLLM, engine: Engine) -> None:
    with pytest.raises(InvalidInputError, match="a vector store of LlamaIndex, not a dict"):
        KVCacheVectorStore.wrap({}, llm=llm)  # type: ignore[arg-type]
    store = KVCacheVectorStore.wrap(SimpleVectorStore(), llm=llm)
    with pytest.raises(InvalidInputError, match="prefills already"):
        KVCacheVectorStore.wrap(store, llm=llm)
    with pytest.raises(InvalidInputError, match="not both"):
        KVCacheVectorStore.wrap(SimpleVectorStore(), llm=llm, engine=engine)


# ---------------------------------------------------------------------- prefill
@pytest.mark.parametrize("kind", STORES)
def test_prefilled_nodes_are_reused_from_any_store(
    kind: str, llm: KVCacheLLM, embedding: HashEmbedding, prefilled: Count
) -> None:
    nodes = SentenceSplitter().get_nodes_from_documents(documents())
    assert prefill([*nodes, nodes[0], TextNode(text=" ")], llm) == 3
    assert prefilled() == 3
    found = ask(index_over(STORES[kind](), embedding), llm)
    assert (found["misses"], found["references"], prefilled()) == (0, 0, 0)


def test_prefill_claims_under_a_name(disk_llm: KVCacheLLM) -> None:
    nodes = SentenceSplitter().get_nodes_from_documents(documents())
    prefill(nodes, disk_llm, name="docs")
    store = KVCacheVectorStore.wrap(SimpleVectorStore(), llm=disk_llm, name="docs")
    store.delete("d0")
    assert held(disk_llm) == {"d1", "d2"}


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


async def test_a_pipeline_prefills_without_blocking(
    llm: KVCacheLLM, prefilled: Count, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = IngestionPipeline(transformations=[SentenceSplitter(), KVCachePrefill(llm=llm)])
    loop.watch(monkeypatch, make_model(), "forward")
    await pipeline.arun(documents=documents())
    assert prefilled() == 3
    assert loop.turns


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
    inner = SimpleVectorStore()
    store = KVCacheVectorStore.wrap(inner, llm=llm)
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
    assert [*inner.data.embedding_dict.values()] == embedding.get_text_embedding_batch(texts)
    assert [*inner.data.text_id_to_ref_doc_id.values()] == ["d0", "d1", "d2"]


@pytest.mark.parametrize("way", ["run", "arun"])
async def test_an_embedding_that_fails_claims_and_adds_nothing(
    disk_llm: KVCacheLLM, way: str
) -> None:
    class Failing(HashEmbedding):
        def _get_text_embedding(self, text: str) -> list[float]:
            raise OSError("no embedding today")

    store = SimpleVectorStore()
    step = KVCachePrefill(llm=disk_llm, embed_model=Failing(), name="docs")
    pipeline = IngestionPipeline(transformations=[step], vector_store=store)
    run: Any = pipeline.arun if way == "arun" else partial(asyncio.to_thread, pipeline.run)
    with pytest.raises(OSError, match="no embedding today"):
        await run(documents=documents())
    assert store.data.embedding_dict == {}
    record = OwnerRecord.beside(disk_llm.engine.store, disk_llm.engine.namespace, "docs")
    assert record.chunks() == set()


async def test_a_text_too_long_ends_an_embedding_that_waits(llm: KVCacheLLM) -> None:
    class Waiting(HashEmbedding):
        async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            await asyncio.Event().wait()
            return []

    step = KVCachePrefill(llm=llm, embed_model=Waiting())
    with pytest.raises(ContextTooLongError, match="row 'long'"):
        await step.acall([TextNode(id_="long", text="x" * 5000)])


def test_two_embeddings_do_not_share_a_pipelines_cache() -> None:
    one, two = (KVCachePrefill(embed_model=HashEmbedding(dimensions=size)) for size in (8, 16))
    assert json.dumps(one.to_dict(), default=str) != json.dumps(two.to_dict(), default=str)


def test_two_models_do_not_share_a_pipelines_cache(llm: KVCacheLLM) -> None:
    one, two = (KVCachePrefill(llm=KVCacheLLM(model_name=name)) for name in ("tiny", "smollm2"))
    assert json.dumps(one.to_dict(), default=str) != json.dumps(two.to_dict(), default=str)


def test_prefill_needs_an_llm_that_reuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_index.core.llms import MockLLM

    with pytest.raises(InvalidInputError, match="need a KVCacheLLM, not a MockLLM"):
        prefill([TextNode(text="A cat.")], MockLLM())


# ---------------------------------------------------------------------- what an answer says
def test_kv_cache_has_the_documented_fields_and_reasons(
    disk_llm: KVCacheLLM, embedding: HashEmbedding
) -> None:
    engine = disk_llm.engine
    index = index_over(KVCacheVectorStore.wrap(qdrant_store(), llm=disk_llm), embedding)
    first = ask(index, disk_llm)
    assert ({*first}, first["missed"], first["references"]) == (FIELDS, [], 2)
    texts = [one.get_content(MetadataMode.LLM) for one in documents()]
    for key in engine.keys(texts):
        engine.store.delete(key)
    second = ask(index, disk_llm)
    assert [one["reason"] for one in second["missed"]] == ["evicted", "evicted"]
    assert {**Metrics.from_dict(second).to_dict(), "prompt": second["prompt"]} == second
    assert {*disk_llm.complete("Hello").raw["kv_cache"]} == FIELDS


def test_a_node_that_was_edited_misses_for_its_text(
    llm: KVCacheLLM, embedding: HashEmbedding
) -> None:
    store = KVCacheVectorStore.wrap(qdrant_store(), llm=llm)
    index = index_over(store, embedding)
    nodes = index.as_retriever(similarity_top_k=1).retrieve("A cat?")
    nodes[0].node.metadata["page"] = 77
    response: Any = KVCacheQueryEngine.from_index(index, llm).synthesize(QueryBundle("A?"), nodes)
    (missed,) = response.metadata["kv_cache"]["missed"]
    assert (missed["chunk"], missed["reason"]) == (0, "other text")


def test_usage_has_the_cached_tokens(llm: KVCacheLLM, embedding: HashEmbedding) -> None:
    index = index_over(KVCacheVectorStore.wrap(SimpleVectorStore(), llm=llm), embedding)
    found: list[Any] = []
    answer = KVCacheLLM.answer

    def seen(self: Any, prompt: str, request: Any, **options: Any) -> Any:
        found.append(answer(self, prompt, request, **options))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheLLM, "answer", seen)
        metrics = ask(index, llm)
    usage = found[0].raw["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": metrics["reused_tokens"]}
    assert usage["prompt_tokens"] == metrics["prompt_tokens"]
