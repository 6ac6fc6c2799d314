"""LlamaIndex over a GGUF file in llama.cpp, and the commands that begin with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import llama_smollm2 as llama
from contracts_frameworks import LlamaCppContract
from llama_index_framework import LlamaIndex

from kvcache_rag.cli import main
from llama_index.kvcache_rag import KVCacheLLM

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

llama.needed()


class TestLlamaCpp(LlamaCppContract):
    framework = LlamaIndex()

    def test_the_backend_is_one_of_the_settings(self, llm: KVCacheLLM) -> None:
        written = json.loads(llm.to_json())
        assert written["backend"] == llama.BACKEND
        assert KVCacheLLM.from_dict(written).backend == llama.BACKEND


def test_ask_and_chat_know_the_backend_of_ingest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for number, text in enumerate(llama.TEXTS):
        (tmp_path / "docs" / f"{number}.txt").write_text(text)
    how = ("--model", llama.NAME, "--backend", "llama.cpp", "--adapter", "none")
    assert main(["ingest", "docs", "--embed", "hash", *how]) == 0
    assert "3 chunks prefilled" in capsys.readouterr().out
    words = ["--policy", "reuse", "--max-new-tokens", "8"]
    assert main(["ask", llama.QUESTION, "--json", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["answer"]
    assert said["model"] == f"{llama.NAME}, adapter none, by llama.cpp"
    assert (said["metrics"]["misses"], said["metrics"]["hits"]) == (0, 3)
    assert main(["ask", llama.QUESTION, "--policy", "prophetkv"]) == 2
    printed = capsys.readouterr().err
    assert "llama.cpp gives neither attention nor keys of single layers" in printed
    assert printed.count("\n") == 1
