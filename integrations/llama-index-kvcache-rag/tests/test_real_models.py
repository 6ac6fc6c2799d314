"""GGUF files and adapters, as LlamaIndex's users name them and on command lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from peft import LoraConfig, get_peft_model

from kvcache_rag import Engine
from kvcache_rag.cli import main
from llama_index.kvcache_rag import KVCacheLLM
from llama_index.kvcache_rag.commands.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("gguf", reason="pip install 'kvcache-rag[gguf]'")

from gguf_files import write_gguf

# peft asks transformers by a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_llm_takes_a_tokenizer_of_a_gguf_file_and_a_model_with_an_adapter(
    tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    by_tokenizer = KVCacheLLM(model_name=str(path), tokenizer_name=str(path))
    assert by_tokenizer.engine.spec == Engine.from_pretrained(path).spec
    inner = Engine.from_pretrained(path, weight_format="plain").model  # as PEFT needs it
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    given = KVCacheLLM(
        model=get_peft_model(inner, settings), tokenizer=by_tokenizer.engine.tokenizer
    )
    assert given.complete("who?", max_new_tokens=2).raw["usage"]["completion_tokens"]
    named = KVCacheLLM(model_name=str(path), adapter=tmp_path / "adapter")
    assert json.loads(named.to_json())["adapter"] == str(tmp_path / "adapter")
    for adapter, kept in (("block", "block"), ("./block", str(tmp_path / "block"))):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            (tmp_path / "block").mkdir(exist_ok=True)
            assert json.loads(Settings(adapter=adapter).to_text())["adapter"] == kept


def test_ingest_and_ask_take_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("abc de f")
    assert main(["ingest", "docs", "--model", "model.gguf", "--embed", "hash"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    place = ["--chroma", str(tmp_path / "chroma")]
    capsys.readouterr()
    assert main(["ask", "who?", *place, "--json", "--max-new-tokens", "2"]) == 0
    assert '"misses": 0' in capsys.readouterr().out
