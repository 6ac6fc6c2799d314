"""`kvcache-rag rebuild` computes what LlamaIndex will put into prompts, metadata and all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.schema import TextNode
from small import make_model, make_tokenizer

from kvcache_rag import DiskStore, Engine, PromptTemplate, cli
from llama_index.kvcache_rag import KVCacheLLM, KVCacheVectorStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("words", [[], ["--text", "llama-index"]])
def test_rebuild_fills_the_chunks_that_the_new_engine_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def engine(system: str) -> Engine:
        template, store = PromptTemplate(system=system), DiskStore(tmp_path / "kv", durable=False)
        return Engine(make_model(), make_tokenizer(), store=store, template=template)

    def open_store(engine: Engine) -> KVCacheVectorStore:
        llm = KVCacheLLM(engine=engine)
        return KVCacheVectorStore.from_params("docs", persist_dir=str(tmp_path / "chroma"), llm=llm)

    def load(*_: Any, **__: Any) -> Any:
        return make_model(), make_tokenizer(), PromptTemplate(system="New.\n")

    node = TextNode(text="alpha", id_="0", metadata={"title": "shown"}, embedding=[0.0, 1.0])
    open_store(engine("Old.\n")).add([node])
    monkeypatch.setattr("kvcache_rag.models.pretrained.load", load)
    command = ["rebuild", str(tmp_path / "kv"), "--model", "x", "--collection", "docs"]
    assert cli.main([*command, "--persist-dir", str(tmp_path / "chroma"), "--yes", *words]) == 0

    new = engine("New.\n")
    (key,) = new.keys(["title: shown\n\nalpha"])
    assert new.store.contains(key)
    assert not new.store.contains(new.keys(["alpha"])[0])
    assert open_store(new).prefill_missing() == 0, "the row refers to it"
