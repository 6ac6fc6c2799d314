"""How linear layers keep their weights, as LlamaIndex's users and commands say it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvcache_rag import Engine
from kvcache_rag.cli import main
from llama_index.kvcache_rag import KVCacheLLM
from llama_index.kvcache_rag.commands.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_loaded_model_is_packed_where_that_is_asked_for() -> None:
    plain = Engine.from_pretrained("tiny")
    spec = plain.spec
    common = {"model": plain.model, "tokenizer": plain.tokenizer, "template": plain.template}
    assert KVCacheLLM(**common).engine.spec == spec
    assert KVCacheLLM(**common, weight_format="int8").engine.spec != spec


def test_ingest_notes_the_format_for_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("The cat sat on the mat.")
    how = ("--model", "tiny", "--embed", "hash", "--weight-format", "int8")
    assert main(["ingest", "docs", *how]) == 0

    def missed(*words: str) -> int:
        capsys.readouterr()
        assert main(["ask", "who?", "--json", "--max-new-tokens", "1", *words]) == 0
        found: int = json.loads(capsys.readouterr().out)["metrics"]["misses"]
        return found

    assert missed() == 0
    assert missed("--weight-format", "plain") > 0


def test_the_default_is_not_noted() -> None:
    for weight_format in ("auto", "plain", "int4"):
        settings = Settings(model="tiny", weight_format=weight_format)
        text = settings.to_text()
        assert ("weight_format" in json.loads(text)) == (weight_format != "auto")
        assert Settings.of_text(text, "chroma", "docs") == settings
