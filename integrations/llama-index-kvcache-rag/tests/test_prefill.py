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
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import VectorStoreQuery

from kvcache_rag import CacheClip, InvalidInputError, PromptTemplate
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.generation import StoredChunk
from kvcache_rag.integration import REFERENCE_KEYS, Reference
from llama_index.kvcache_rag import HashEmbedding, KVCacheLLM, KVCachePrefill, KVCacheVectorStore
from llama_index.kvcache_rag.references import llm_text, source_of

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
class Marked(TextNode):
    """A node of somebody's own."""


@pytest.mark.parametrize("kind", [TextNode, Marked])
def test_returned_node_carries_the_reference_out_of_sight(
    store: KVCacheVectorStore, kind: type[TextNode], prefilled: Count
) -> None:
    mine = kind(id_="a", text="The tower is tall.", metadata={"page": 3}, embedding=[1.0, 1.0])
    store.add([mine])
    queried = store.query(VectorStoreQuery([1.0, 1.0], 1)).nodes or []
    for found in (*queried, *store.get_nodes()):
        assert Reference.from_metadata(found.metadata) is not None
        for mode in (MetadataMode.LLM, MetadataMode.EMBED, MetadataMode.NONE):
            assert found.get_content(mode) == mine.get_content(mode)
    # It can be added again.
    found.embedding = mine.embedding
    store.add([found])
    assert prefilled() == 1
    assert "kv_" not in row(store, "a")["_node_content"]
    (again,) = store.get_nodes()
    assert set(again.metadata) == {"page", *REFERENCE_KEYS}
    assert sorted(again.excluded_llm_metadata_keys) == sorted(REFERENCE_KEYS)


def test_without_engine_rows_have_no_reference(store: KVCacheVectorStore) -> None:
    plain = KVCacheVectorStore(store.client)
    plain.add([node("b", "Text.")])
    assert "kv_key" not in row(store, "b")
    with pytest.raises(InvalidInputError, match="llm= or engine="):
        plain.prefill_missing()


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
    first, second, third = engine.keys(["First.", "Second.", "Third."])
    assert (prefilled(), deleted) == (1, [second.digest])
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
    chunk = source_of(found, llm_text(found)).chunk(engine)
    assert isinstance(chunk, StoredChunk)
    assert engine.store.contains(chunk.key)


# ---------------------------------------------------------------------- filling up


# ---------------------------------------------------------------------- LlamaIndex's ingestion
def test_an_index_inserts_updates_and_deletes(
    store: KVCacheVectorStore,
    embedding: HashEmbedding,
    prefilled: Count,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcache_rag.progress._PAUSE", 0.0)  # lines of what is soon over, too
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
    bare = TextNode(id_="a", text="First.", metadata={"page": 1}, embedding=[1.0] * 64)
    KVCacheVectorStore(store.client).add([bare])
    capfd.readouterr()
    assert (store.prefill_missing(show_progress=True), prefilled()) == (1, 1)
    assert "prefill" in capfd.readouterr().err
    (key,) = store.engine.keys(["page: 1\n\nFirst."])
    assert (row(store, "a")["page"], row(store, "a")["kv_key"]) == (1, key.digest)


def test_editing_a_document_prefills_it_anew(
    store: KVCacheVectorStore, embedding: HashEmbedding, prefilled: Count
) -> None:
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=20, chunk_overlap=0), embedding],
        docstore=SimpleDocumentStore(),
        vector_store=store,
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    sentences = " ".join(f"Sentence {at} has {'quite some words here ' * 3}." for at in range(10))
    kept = Document(text="Untouched.", id_="kept")
    edited = sentences.replace("Sentence 4 has quite some", "Sentence 4 has quite many")
    # The pipeline deletes a document before it writes it, and its KV goes with it.
    for text, fresh in ((sentences, 11), (sentences, 0), (edited, 10)):
        pipeline.run(documents=[Document(text=text, id_="d"), kept])
        assert (prefilled(), len(store.get_nodes())) == (fresh, 11)
    pipeline.run(documents=[kept])
    assert [found.get_content() for found in store.get_nodes()] == ["Untouched."]


# ---------------------------------------------------------------------- a pipeline's cache


def test_a_pipelines_cache_tells_models_apart_and_follows_weights_and_settings(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = make_engine(), PromptTemplate(system="Another instruction.\n")

    def hashed(**options: Any) -> str:
        """Of a step that has the LLM of the settings."""
        monkeypatch.setattr(Settings, "_llm", KVCacheLLM(**options))
        return get_transformation_hash([], KVCachePrefill())

    hashes = [
        hashed(engine=engine),
        hashed(engine=make_engine(template=other)),
        hashed(engine=make_engine(namespace="b")),
        hashed(model_name="tiny"),
        hashed(model_name="tiny", template=PromptTemplate(chunk_end="\n")),
        hashed(model_name="tiny", policy=CacheClip(Auxiliary(engine))),
    ]
    assert len({*hashes}) == len(hashes)
    assert hashed(engine=make_engine()) == hashes[0]
    weight = engine.model.lm_head.weight
    with torch.no_grad():
        weight.mul_(2)
    try:
        assert hashed(engine=engine) not in hashes
    finally:
        with torch.no_grad():
            weight.div_(2)
