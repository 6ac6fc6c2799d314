"""Right answers of the peers: what is asked, what is known, what is told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import peers, peers_answers
from benchmarks.answers_scores import Results
from benchmarks.answers_scores import Rows as KeptRows
from benchmarks.common import read, write
from benchmarks.peers_answers import KINDS, Rows, known, main, prompt_of
from benchmarks.peers_report import exact_side
from kvcache_rag.models.pretrained import load_tokenizer
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag.prompt.template import PromptTemplate
from kvcache_rag_lab.scoring.ask import Asked
from kvcache_rag_lab.scoring.question import Question

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

QUESTIONS = [
    Question(f"q{n}", "Who moved?", (f"Ann moved to {n}.", "Ben stayed.", "So."), ("Ann",))
    for n in range(3)
]


class _Task:
    name = "squad"
    instruction = "Be short."

    def score(self, answer: str, question: Question) -> dict[str, float]:
        right = float(question.answers[0] in answer)
        return {"containment": right, "wrong_document": float("Ben" in answer)}


class _Side:
    """Says what its kind is told to say."""

    def __init__(self, name: str, tokenizer: Any, jobs: list[dict[str, Any]]) -> None:
        self.name, self.tokenizer, self.jobs = name, tokenizer, jobs

    def facts(self) -> dict[str, Any]:
        return {"error": "no such engine"} if self.name == "kvboost" else {}

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        self.jobs.append(job)
        if len(self.jobs) == 2:
            raise ValueError("not this one")
        said = "Ann" if job["kind"] == "cold" else "Ben"
        end = self.tokenizer.eos_token_id
        return {"tokens": [*self.tokenizer(said)["input_ids"], end, end]}

    def close(self) -> None:
        pass


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer("tiny", {})


def test_a_peer_knows_the_documents_in_another_order(tokenizer: Any) -> None:
    renderer = PromptRenderer(PromptTemplate("Be short.\n\n"), tokenizer)
    made = prompt_of(renderer, Asked.from_question(QUESTIONS[0]))
    ids = renderer.tokenize("Who moved?", QUESTIONS[0].chunks, ())
    assert (made["context"], made["query"]) == ([*ids.context], [*ids.query])
    assert made["before"] != made["context"]
    assert sorted(made["before"]) == sorted(made["context"])
    assert made["before"][: len(made["prefix"])] == made["prefix"]


def test_every_side_is_compared_with_a_full_prefill_that_is_asked() -> None:
    for side in KINDS:
        full, kind = exact_side(side)
        assert kind in KINDS[full]


def test_what_was_found_of_ours_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [*map(Asked.from_question, QUESTIONS)]
    kept = KeptRows()
    kept.keep(asked[1], 1, "full", {"right": 1, "wrong_document": 0, "computed": 1})
    kept.keep(asked[1], 1, "bestfew", {"right": 0, "computed": 0})
    file = tmp_path / "llamacpp_answers.json"
    monkeypatch.setattr(peers_answers, "result_file", lambda name: tmp_path / f"{name}.json")
    for name, form in (("plain", ""), ("other", "word-user")):
        about = {"title": name, "identity": {"sha256": "12"}, "form": form}
        Results(about, sets={"squad": kept}).write(file, name)
    sets = [Rows(_Task(), asked)]  # type: ignore[arg-type]  # a fake
    found = [(one["side"], one["kind"], one["row"], one["right"]) for one in known("12", sets)]
    row = asked[1].digest
    assert found == [
        ("ours-llama", "full", row, 1),
        ("llama-file", "cold", row, 1),
        ("ours-llama", "few-reorder", row, 0),
    ]
    assert not [*known("34", sets)], "of another file"


@pytest.fixture
def asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> tuple[Callable[..., dict[str, Any]], list[dict[str, Any]]]:
    jobs: list[dict[str, Any]] = []

    class Starter(peers.Starter):
        def start(self, name: str, model: Any, threads: int, system: str) -> Any:
            assert system == "Be short.\n\n"
            return _Side(name, tokenizer, jobs)

    def prepared(options: argparse.Namespace, file: str, facts: Any, *, fresh: bool) -> Any:
        facts = {**facts, "peers": {}, "models": {"small": {"sha256": "12"}}}
        return Starter(options.work, peers.Journal(options.work / file, facts, fresh=fresh))

    class Small(peers.Model):
        def facts(self) -> dict[str, str]:
            return {"sha256": "12"}

    monkeypatch.setattr(Small, "tokenizer", tokenizer)
    monkeypatch.setattr(peers, "Model", Small)
    monkeypatch.setattr(peers_answers, "prepare", prepared)
    rows = [Rows(_Task(), [*map(Asked.from_question, QUESTIONS)])]  # type: ignore[arg-type]  # a fake
    monkeypatch.setattr(peers_answers, "rows_of", lambda options: rows)
    monkeypatch.setattr(peers_answers, "result_file", lambda name: tmp_path / f"{name}.json")

    def run(*words: str) -> dict[str, Any]:
        file = tmp_path / "peers_answers.json"
        options = ["--data", str(tmp_path), "--work", str(tmp_path), "--models", "small.gguf"]
        assert main([*options, *words, "--json", str(file)]) == 0
        return read(file)

    return run, jobs


def test_answers_are_kept_and_told_beside_full_prefill(
    asking: tuple[Callable[..., dict[str, Any]], list[dict[str, Any]]], tmp_path: Path
) -> None:
    run, jobs = asking
    table = {"model": "small", "side": "llama-file", "way": "--cache-reuse"}
    write(tmp_path / "peers.json", {"about": {}, "table": [table]})
    report = run("--sides", "llama-file", "kvboost")
    assert [job["kind"] for job in jobs] == ["shift", "cold"] * 3
    assert all(job["new"] == 32 for job in jobs)
    found = {one["kind"]: one for one in report["answers"]}
    assert found["cold"]["right"]["value"] == 1.0
    assert (found["shift"]["rows"], found["cold"]["rows"]) == (3, 2)
    assert found["shift"]["right"]["value"] == 0.0
    assert found["shift"]["from a wrong document"]["value"] == 1.0
    assert found["shift"]["against full"]["value"] == -1.0
    assert found["cold"]["against full"] is None
    assert report["failures"] == {"small llama-file cold: ValueError: not this one": 1}
    assert "Ann" not in json.dumps(report), "no text of a row is published"
    jobs.clear()
    assert run("--sides", "llama-file") == report
    assert not jobs, "what is known is not asked again"
