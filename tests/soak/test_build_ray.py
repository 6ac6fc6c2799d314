"""`kvcache-rag build --engine ray`: half a minute is what Ray takes to begin and to end."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from corpus_traps import saved_model, write_lines

from kvcache_rag import DiskStore, Engine

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("ray", reason="ray is not installed")


def test_ray_data_builds_what_is_missing(tmp_path: Path) -> None:
    """In a process of its own, which is where Ray reads its settings."""
    model = saved_model(tmp_path / "model")
    store, corpus = tmp_path / "kv", tmp_path / "c.jsonl"
    texts = [f"chunk {number} about {number * 7} rivers" for number in range(40)]
    Engine.from_pretrained(model, store=DiskStore(store)).add(texts[:10])
    write_lines(corpus, [*texts, "long " * 2000])
    corpus.write_text(corpus.read_text() + "{broken\n")
    words = ["build", model, str(corpus), "--kv-dir", str(store), "--batch", "4"]
    words += ["--engine", "ray", "--workers", "2", "--report", str(tmp_path / "o.json")]
    done = subprocess.run(
        [sys.executable, "-m", "kvcache_rag.cli", *words],
        capture_output=True, text=True, timeout=280, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads((tmp_path / "o.json").read_text())
    assert (found["prefilled"], found["there"], found["engine"]) == (30, 10, "ray")
    assert found["is_complete"]
    assert [one["name"] for one in found["failures"]] == ["line 41"]
    assert [one["name"] for one in found["problems"]] == ["line 42"]
    engine = Engine.from_pretrained(model, store=DiskStore(store))
    assert found["spec"] == engine.spec
    answer = engine.generate("Which?", texts[10:14], max_new_tokens=1)
    assert (answer.metrics.misses, answer.metrics.prefilled_tokens) == (0, 0)
    assert all(map(engine.store.contains, engine.keys(texts)))
