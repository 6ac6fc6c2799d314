"""What ingestion prefills, what it notes beside the rows, and what deletion lets go of."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import chromadb
import pytest
import torch
from llama_index.core import Document, Settings, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, MetadataMode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import VectorStoreQuery

from kvcache_rag import CacheClip, InvalidInputError, PromptTemplate
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.generation import StoredChunk
from kvcache_rag.integration import REFERENCE_KEYS, Reference
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheLLM,
    KVCachePrefill,
    KVCacheVectorStore,
)
from llama_index.kvcache_rag.references import chunks_of, llm_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag import Engine
    from kvcache_rag.kv import ChunkKey

    Count = Callable[[], int]


@pytest.fixture
def store(llm: KVCacheLLM) -> KVCacheVectorStore:
    name = f"c-{uuid.uuid4().hex}"
    return KVCacheVectorStore.from_params(name, client=chromadb.EphemeralClient(), llm=llm)


def node(id_: str, text: str, **metadata: Any) -> TextNode:
    return TextNode(id_=id_, text=text, metadata=metadata, embedding=[1.0, float(ord(id_[-1]))])


def keys_of(engine: Engine, *texts: str) -> list[ChunkKey]:
    return engine.keys(list(texts))


def row(store: KVCacheVectorStore, id_: str) -> dict[str, Any]:
    found = store.client.get(ids=[id_])["metadatas"]
    assert found
    return dict(found[0])


@pytest.fixture
def deleted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digest of every chunk that was deleted."""
    seen: list[str] = []
    delete = engine.store.delete

    def note(key: ChunkKey) -> bool:
        seen.append(key.digest)
        return delete(key)

    monkeypatch.setattr(engine.store, "delete", note)
    return seen


# ---------------------------------------------------------------------- references
def test_returned_node_carries_the_reference_out_of_sight(store: KVCacheVectorStore) -> None:
    mine = node("a", "The tower is tall.", page=3)
    store.add([mine])
    queried = store.query(VectorStoreQuery([1.0, 1.0], 1)).nodes or []
    for found in (*queried, *store.get_nodes()):
        assert Reference.from_metadata(found.metadata) is not None
        for mode in (MetadataMode.LLM, MetadataMode.EMBED, MetadataMode.NONE):
            assert found.get_content(mode) == mine.get_content(mode)


def test_node_read_back_can_be_added_again(store: KVCacheVectorStore, prefilled: Count) -> None:
    mine = node("a", "The tower is tall.", page=3)
    store.add([mine])
    (found,) = store.get_nodes()
    found.embedding = mine.embedding
    store.add([found])
    assert prefilled() == 1
    assert "kv_" not in row(store, "a")["_node_content"]
    (again,) = store.get_nodes()
    assert set(again.metadata) == {"page", *REFERENCE_KEYS}
    assert sorted(again.excluded_llm_metadata_keys) == sorted(REFERENCE_KEYS)


def test_without_engine_rows_have_no_reference(store: KVCacheVectorStore) -> None:
    plain = KVCacheVectorStore(store.client)
    plain.add([node("a", "Text.")])
    plain.delete_nodes(["a"])
    plain.add([node("b", "Text.")])
    assert "kv_key" not in row(store, "b")
    with pytest.raises(InvalidInputError, match="llm= or engine="):
        plain.prefill_missing()


def outdated(nodes: list[BaseNode], texts: list[str], engine: Engine) -> str:
    """Why the reference of a node does not count; its text stands beside it."""
    (chunk,) = chunks_of(nodes, texts, engine)
    assert isinstance(chunk, StoredChunk)
    assert [chunk.text] == texts
    return chunk.outdated


def test_reference_of_another_prefix_or_wrapper_is_not_used(
    make_engine: Callable[..., Engine], engine: Engine, store: KVCacheVectorStore
) -> None:
    store.add([node("a", "The tower is tall.")])
    found = store.get_nodes()
    texts = [one.get_content(MetadataMode.LLM) for one in found]
    (chunk,) = chunks_of(found, texts, engine)
    assert isinstance(chunk, StoredChunk)
    assert not chunk.outdated
    # As many tokens as the engine's own prefix, so its length does not give it away.
    other = make_engine(store=engine.store, template=PromptTemplate(system="Rest.\n"))
    assert outdated(found, texts, other) == "other model"
    wrapped = make_engine(template=PromptTemplate(system="Read.\n", chunk_start="<|DOC_start|>"))
    assert outdated(found, texts, wrapped) == "other text"
    assert outdated(found, ["changed"], engine) == "other text"
    assert chunks_of([], ["text", " \n"], engine) == ["text"]


# ---------------------------------------------------------------------- deleting and updating
def test_what_is_written_again_keeps_its_kv_while_documents_are_replaced(
    store: KVCacheVectorStore, engine: Engine, deleted: list[str], prefilled: Count
) -> None:
    store.add([node("a", "First."), node("b", "Second.")])
    assert prefilled() == 2
    with store.replacing():
        store.clear()
        assert deleted == []
        store.add([node("c", "First."), node("d", "Third.")])
    first, second, third = keys_of(engine, "First.", "Second.", "Third.")
    assert prefilled() == 1
    assert deleted == [second.digest]
    assert all(map(engine.store.contains, [first, third]))
    with store.replacing():
        with store.replacing():
            store.clear()
        assert deleted == [second.digest], "the outer block has not ended"
        store.add([node("c", "First."), node("d", "Third.")])
    assert prefilled() == 0
    with suppress(KeyError), store.replacing():
        store.delete_nodes(["c", "d"])
        raise KeyError
    assert sorted(deleted[1:]) == sorted([first.digest, third.digest]), "nobody has them any more"
    store.add([node("c", "First.")])
    store.clear()
    assert deleted[3:] == [first.digest], "outside the block KV goes at once"


def test_replacing_nothing_loads_no_model(store: KVCacheVectorStore) -> None:
    KVCacheVectorStore(store.client).add([node("a", "First.")])
    unloaded = KVCacheVectorStore(store.client, llm=KVCacheLLM(model_name="there-is-none"))
    with unloaded.replacing():
        unloaded.delete_nodes(["a"])
    assert unloaded.get_nodes() == []


def test_text_is_that_of_the_node_read_back(store: KVCacheVectorStore, engine: Engine) -> None:
    store.add([node("a", "First.", pages=(1, 2), share=float("nan"), names={1: "x"})])
    (found,) = store.get_nodes(["a"])
    (chunk,) = chunks_of([found], [llm_text(found)], engine)
    assert isinstance(chunk, StoredChunk)
    assert engine.store.contains(chunk.key)


def test_node_without_embedding_prefills_nothing(
    store: KVCacheVectorStore, prefilled: Count
) -> None:
    with pytest.raises(ValueError, match="embedding"):
        store.add([node("a", "First."), TextNode(text="Second.")])
    assert prefilled() == 0


# ---------------------------------------------------------------------- filling up
def test_prefill_missing_fills_and_writes_references(
    store: KVCacheVectorStore,
    engine: Engine,
    prefilled: Count,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcache_rag.progress._PAUSE", 0.0)  # lines of what is soon over, too
    KVCacheVectorStore(store.client).add([node("a", "First.", page=1), node("b", "Second.")])
    store.add([node("c", "Third.")])
    assert prefilled() == 1
    assert store.prefill_missing(show_progress=True) == 2
    assert "prefill" in capfd.readouterr().err
    assert prefilled() == 2
    assert row(store, "a")["page"] == 1
    assert row(store, "a")["kv_key"] == keys_of(engine, "page: 1\n\nFirst.")[0].digest
    assert store.prefill_missing() == 0
    assert prefilled() == 0


# ---------------------------------------------------------------------- LlamaIndex's ingestion
def test_an_index_inserts_updates_and_deletes(
    store: KVCacheVectorStore,
    embedding: HashEmbedding,
    prefilled: Count,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcache_rag.progress._PAUSE", 0.0)
    documents = [Document(text=f"Fact {index}.", id_=f"d{index}") for index in range(3)]
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex.from_documents(
        documents, storage_context=context, embed_model=embedding
    )
    assert "prefill" not in capfd.readouterr().err
    assert prefilled() == 3
    store.show_progress = True
    index.insert(Document(text="Fact 3.", id_="d3"))
    assert "prefill" in capfd.readouterr().err
    index.update_ref_doc(Document(text="Fact three.", id_="d3"))
    assert prefilled() == 2
    index.delete_ref_doc("d0")
    assert len(store.get_nodes()) == 3


def sentences(changed: int | None = None) -> str:
    """Ten sentences of which the splitter makes ten chunks."""
    words = [f"Sentence {index} has " + "quite some words here " * 3 for index in range(10)]
    if changed is not None:
        words[changed] = words[changed].replace("some", "many")
    return " ".join(f"{text.strip()}." for text in words)


def test_editing_a_document_prefills_it_anew(
    store: KVCacheVectorStore, embedding: HashEmbedding, prefilled: Count
) -> None:
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=20, chunk_overlap=0), embedding],
        docstore=SimpleDocumentStore(),
        vector_store=store,
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    kept = Document(text="Untouched.", id_="kept")
    pipeline.run(documents=[Document(text=sentences(), id_="d"), kept])
    assert prefilled() == 11
    pipeline.run(documents=[Document(text=sentences(), id_="d"), kept])
    assert prefilled() == 0
    # The pipeline deletes a document before it writes it, and its KV goes with it.
    pipeline.run(documents=[Document(text=sentences(changed=4), id_="d"), kept])
    assert prefilled() == 10
    assert len(store.get_nodes()) == 11
    pipeline.run(documents=[kept])
    assert [found.get_content() for found in store.get_nodes()] == ["Untouched."]


def test_custom_nodes_are_no_problem(store: KVCacheVectorStore) -> None:
    class Marked(TextNode):
        pass

    nodes: list[BaseNode] = [Marked(id_="m", text="Marked.", embedding=[1.0, 0.0])]
    store.add(nodes)
    assert [found.get_content() for found in store.get_nodes()] == ["Marked."]


# ---------------------------------------------------------------------- a pipeline's cache
def test_a_pipelines_cache_tells_models_apart(make_engine: Callable[..., Engine]) -> None:
    pipeline = IngestionPipeline(transformations=[])
    nodes = [TextNode(id_="a", text="The tower is tall.")]

    def run(**options: Any) -> int:
        engine = make_engine(**options)
        before = engine.store.stats().puts
        pipeline.transformations = [KVCachePrefill(llm=KVCacheLLM(engine=engine))]
        pipeline.run(nodes=nodes)
        return int(engine.store.stats().puts - before)

    template = PromptTemplate(system="Another instruction.\n")
    assert [run() > 0, run(template=template) > 0, run(namespace="b") > 0] == [True] * 3
    assert run() == 0, "it is known"


def test_a_pipelines_cache_follows_weights_and_the_llm_of_the_settings(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, hashes = KVCachePrefill(), []
    engine = make_engine()
    for llm in (
        KVCacheLLM(engine=engine),
        KVCacheLLM(model_name="tiny"),
        KVCacheLLM(model_name="tiny", template=PromptTemplate(chunk_end="\n")),
        KVCacheLLM(model_name="tiny", policy=CacheClip(Auxiliary(engine))),
    ):
        monkeypatch.setattr(Settings, "_llm", llm)
        hashes.append(get_transformation_hash([], step))
    assert len({*hashes}) == 4
    given = KVCachePrefill(llm=KVCacheLLM(engine=engine))
    before = get_transformation_hash([], given)
    assert get_transformation_hash([], given) == before
    weight = engine.model.lm_head.weight
    with torch.no_grad():
        weight.mul_(2)
    try:
        assert get_transformation_hash([], given) != before
    finally:
        with torch.no_grad():
            weight.div_(2)
