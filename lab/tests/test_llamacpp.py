"""`verify`, `eval` and `bench --quick` of a GGUF file in llama.cpp."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING

import llama_smollm2 as llama
import pytest

from kvcache_rag import FullRecompute
from kvcache_rag.cli import main
from kvcache_rag.verdict import Verdict
from kvcache_rag_lab.commands.verify import OF_LLAMA
from kvcache_rag_lab.evaluation.cost.quick import LLAMA, QuickPlan
from kvcache_rag_lab.evaluation.verification import check_numerics

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag import Engine

llama.needed()
LlamaCppModel = pytest.importorskip("kvcache_rag_llamacpp.model").LlamaCppModel


@pytest.fixture(scope="module")
def engine() -> Engine:
    return llama.engine()


def test_stitched_chunks_are_compared_with_those_computed_in_their_places(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = check_numerics(engine, llama.QUESTION, llama.TEXTS)
    assert [check.name for check in checks] == [
        "full prefill and the model's own forward pass",
        "one cached chunk and a plain prefill",
        "cached chunks (reordered) and chunks computed in their places",
    ]
    assert all(check.passed and check.error < 0.1 for check in checks)
    # Another text is noticed.
    real = LlamaCppModel.logits_in_place

    def other(
        self: LlamaCppModel, prefix: list[int], chunks: list[list[int]], query: list[int]
    ) -> object:
        return real(self, prefix, [chunks[1]] * len(chunks), query)

    monkeypatch.setattr(LlamaCppModel, "logits_in_place", other)
    assert not check_numerics(engine, llama.QUESTION, llama.TEXTS)[-1].passed


def test_verify_compares_what_llama_cpp_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": llama.QUESTION, "documents": llama.TEXTS, "answers": ["Ann Miller"]}]
    (tmp_path / "q.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["verify", llama.NAME, "--backend", "llama.cpp", "--adapter", "none"]
    words += ["--data", str(tmp_path / "q.jsonl"), "--max-new-tokens", "4"]
    assert main([*words, "--out", str(tmp_path / "v.json")]) == 0
    assert "llama.cpp, kept as float16" in capsys.readouterr().out
    verdict = Verdict.load(tmp_path / "v.json")
    assert len(verdict.policies) == len(OF_LLAMA)
    gated = llama.engine(gate=tmp_path / "v.json")  # it is about this engine
    answer = gated.generate(llama.QUESTION, llama.TEXTS, max_new_tokens=2)
    assert answer.metrics.gate


def test_eval_asks_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", llama.NAME, "--backend", "llama.cpp", "--adapter", "none"]
    words += ["--task", "reader_single", "--questions", "1"]
    words += ["--policies", "full", "reuse", "--timed", "0", "--report", str(tmp_path / "e.json")]
    assert main(words) == 0
    assert "reuse" in capsys.readouterr().out
    assert main(["eval", "tiny", *words[2:]]) == 2
    assert "runs GGUF files, and 'tiny' is none" in capsys.readouterr().err


def test_quick_asks_for_llama_cpps_own_full_prefill(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcache_rag_lab.evaluation.cost.quick.PLAN", QuickPlan(1, 100, 4))
    assert main(["bench", llama.NAME, "--quick", "--adapter", "none", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["quick"]
    full, *_, last = found["sides"]
    assert (last["side"], found["missing"]) == (LLAMA, [])
    assert report["machine"]["versions"].endswith(version("llama-cpp-python"))
    assert last["computed_tokens"] == full["computed_tokens"]
    (row,) = found["asked"]
    how = {"policy": FullRecompute(), "max_new_tokens": 4}
    own = engine.generate(row["question"], row["documents"], **how)
    assert row["answers"][-1]["answer"] == own.text.strip()
