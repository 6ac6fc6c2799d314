"""An auxiliary model by its name, in both frameworks: loaded, prefilled at ingestion, and used."""

from __future__ import annotations

import pickle
import uuid
from typing import TYPE_CHECKING, Any

import chromadb
import pytest
import torch
from langchain_core.documents import Document
from llama_index.core.schema import TextNode

from kvcache_rag import CacheClip, Engine, InvalidInputError
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.integration.engine import open_engine
from kvcache_rag.prefill import Prefiller
from kvcache_rag.settings import EngineSettings
from langchain_kvcache_rag import ChatKVCache, KVCacheRAG
from llama_index.kvcache_rag import KVCacheLLM, KVCacheVectorStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = ["The Mobrit costs 412 euros.", "Drenko was founded by Osha Grell.", "Teso is in Grabra."]
QUESTION = "How much does the Mobrit cost?"
POLICY = CacheClip(ratio=0.5, threshold=None)


def held(engine: Engine) -> list[bool]:
    """Which of the auxiliary model's own chunks its store holds."""
    scorer = engine.auxiliary
    assert isinstance(scorer, Auxiliary)
    return [scorer.engine.store.contains(key) for key in scorer.engine.keys(TEXTS)]


def by_llama_index(llm: KVCacheLLM) -> Engine:
    client = chromadb.EphemeralClient()
    store = KVCacheVectorStore.from_params(f"c-{uuid.uuid4().hex}", client=client, llm=llm)
    store.add([TextNode(text=text, embedding=[1.0, 0.0]) for text in TEXTS])
    return llm.engine


def by_langchain(llm: ChatKVCache) -> Engine:
    llm.prefill(TEXTS)
    return llm.engine


# Or the auxiliary model, which is the same, would find its chunks in the store that both have.
OTHER: Any = {"device_map": "cpu", "model_kwargs": {"dtype": torch.float32}}


def llama_index(**options: Any) -> Engine:
    return by_llama_index(KVCacheLLM(model_name="tiny", **OTHER, **options))


def langchain(**options: Any) -> Engine:
    kwargs = OTHER["model_kwargs"]
    return by_langchain(ChatKVCache(model="tiny", device="cpu", model_kwargs=kwargs, **options))


@pytest.mark.parametrize("ingest", [llama_index, langchain])
def test_ingestion_prefills_for_the_model_that_is_named(
    ingest: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ingest(auxiliary="tiny", kv_dir=tmp_path / "kv")
    assert isinstance(engine.auxiliary, Auxiliary)
    assert engine.auxiliary.engine.store is engine.store
    assert not {*engine.keys(TEXTS)} & {*engine.auxiliary.engine.keys(TEXTS)}
    assert held(engine) == [True] * len(TEXTS)
    again = ingest(auxiliary="tiny", kv_dir=tmp_path / "kv")
    monkeypatch.setattr(Prefiller, "compute", lambda *_: pytest.fail("computed"))
    metrics = again.generate(QUESTION, TEXTS, policy=POLICY, max_new_tokens=1).metrics
    assert (metrics.misses, metrics.auxiliary_misses) == (0, 0)
    assert metrics.recomputed_tokens > 0


@pytest.mark.parametrize("ingest", [llama_index, langchain])
def test_ingestion_prefills_for_the_scorer_of_the_policy(ingest: Callable[..., Engine]) -> None:
    scorer = Auxiliary.from_pretrained("tiny")
    engine = ingest(policy=CacheClip(scorer))
    assert engine.auxiliary is scorer
    assert held(engine) == [True] * len(TEXTS)
    assert engine.store is not scorer.engine.store


def test_an_app_answers_by_it() -> None:
    kwargs: Any = {**OTHER["model_kwargs"]}
    llm = ChatKVCache(
        model="tiny", model_kwargs=kwargs, max_tokens=4, auxiliary="tiny", policy=POLICY
    )
    documents = [Document(text) for text in TEXTS]
    message = KVCacheRAG(llm).invoke({"question": QUESTION, "context": documents})
    found = message.response_metadata["kv_cache"]
    assert found["policy"] == repr(POLICY)
    assert found["recomputed_tokens"] > 0
    assert found["answers"][0]["choose"] > 0
    assert found["auxiliary_misses"] == len(TEXTS)


def test_settings_hold_its_name() -> None:
    llm = ChatKVCache(model="tiny", auxiliary="tiny")
    assert pickle.loads(pickle.dumps(llm)).auxiliary == "tiny"
    assert llm._identifying_params["auxiliary"] == "tiny"
    assert "auxiliary" not in ChatKVCache(model="tiny")._identifying_params
    assert KVCacheLLM(model_name="tiny", auxiliary="tiny").to_dict()["auxiliary"] == "tiny"


def test_it_is_in_the_tenants_namespace() -> None:
    settings = EngineSettings(model="tiny", device="cpu", auxiliary="tiny")
    engine = settings.open_engine(namespace="one")
    engine.add(TEXTS)
    scorer = engine.auxiliary
    assert isinstance(scorer, Auxiliary)
    assert {key.namespace for key in scorer.engine.keys(TEXTS)} == {"one"}


@pytest.mark.parametrize(
    "opened",
    [
        lambda name: EngineSettings(model="tiny", auxiliary=name).open_engine(),
        lambda name: open_engine("tiny", auxiliary=name),
        lambda name: KVCacheLLM(model_name="tiny", auxiliary=name).engine,
        lambda name: ChatKVCache(model="tiny", auxiliary=name).engine,
    ],
)
def test_a_name_that_nobody_has_is_one_sentence(
    opened: Callable[[str], Engine], tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match="nowhere"):
        opened(str(tmp_path / "nowhere"))
