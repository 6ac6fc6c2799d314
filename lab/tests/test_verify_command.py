"""`kvcache-rag verify`: a file of questions in, a table, a sentence and a verdict out."""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve_fakes import running, settings, tiny_backend
from test_verdict import IDENTITY
from verdicts import REUSE, make_verdict

from kvcache_rag import BestFew, DiskStore, Engine, FullRecompute, InvalidInputError, Reuse, cli
from kvcache_rag.codecs import Int8
from kvcache_rag.errors import FingerprintMismatchError
from kvcache_rag.models.rotation import KeyRotation
from kvcache_rag.policies.policy_registry import policy_by_name
from kvcache_rag.verdict import PolicyScore, Verdict
from kvcache_rag_lab.commands import verify
from kvcache_rag_lab.commands.verify import lines
from kvcache_rag_lab.evaluation import verification
from kvcache_rag_lab.evaluation.auxiliary import random_jaccard
from kvcache_rag_lab.evaluation.datasets import read_own_questions
from kvcache_rag_lab.evaluation.tasks import own_score
from kvcache_rag_lab.reader import examples
from kvcache_rag_lab.scoring.question import Question
from kvcache_rag_lab.scoring.statistics import trials_without_loss
from kvcache_rag_server.app import build_app
from kvcache_rag_server.keys import new_key


def write(path: Path, rows: list[Any]) -> Path:
    texts = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def reader_rows(contexts: int, *, answers: bool = True) -> list[dict[str, Any]]:
    rows = []
    for example in examples("single")[:contexts]:
        for question in example.questions:
            row = {"question": question.text, "documents": list(example.documents)}
            rows.append({**row, "answers": [question.answer]} if answers else row)
    return rows


def run(*given: object) -> int:
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    return verify.run(parser.parse_args([str(one) for one in given]))


def test_a_file_of_questions_becomes_a_verdict_that_opens_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "mine.jsonl", reader_rows(3))
    out = tmp_path / "verdict.json"
    policies = ("reuse", "legolink:2", "ape:0.3,0.3")
    options = ("--policies", *policies, "--out", out, "--keep", "0.6", "--max-new-tokens", "12")
    assert run("tiny", "--data", file, *options) == 0
    assert f'Wrote {out}; use it with Engine(..., gate="{out}").' in capsys.readouterr().out
    verdict = Verdict.load(out)
    assert verdict.questions == len(reader_rows(3))
    assert (verdict.measure, verdict.threshold, verdict.source) == ("f1", 0.6, "mine.jsonl")
    assert verdict.full.score > 0.6
    assert [row.policy for row in verdict.policies] == [
        "Reuse(positions='reordered')",
        "LegoLink(tokens=2, positions='reordered')",
        "Ape(temperature=0.3, scale=0.3)",
    ]

    engine = Engine.from_pretrained("tiny", gate=out)
    question = reader_rows(1)[0]
    reuse, ape = (
        engine.generate(
            question["question"], question["documents"], policy=policy, max_new_tokens=8
        ).metrics
        for policy in (Reuse(), policy_by_name("ape:0.3,0.3"))
    )
    assert (reuse.gate, reuse.policy) == ("", repr(Reuse()))
    assert ape.gate.startswith("fell back to FullRecompute(): Ape(temperature=0.3, scale=0.3) kept")


def test_a_system_prompt_and_a_codec_are_part_of_the_verdict(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", reader_rows(1, answers=False))
    out = tmp_path / "verdict.json"
    changes = ("--system-prompt", "Say something else.\n", "--kv-codec", "int8")
    limits = ("--max-new-tokens", "4", "--questions", "2", "--policies", "reuse", "--out", out)
    assert run("tiny", "--data", file, *changes, *limits) == 0
    verdict = Verdict.load(out)
    assert (verdict.questions, verdict.measure) == (2, "agreement_f1")
    plain = Engine.from_pretrained("tiny")
    template = replace(plain.template, system="Say something else.\n")
    options: dict[str, Any] = {"store": DiskStore(tmp_path / "kv", codec=Int8()), "gate": out}
    engine = Engine(plain.model, plain.tokenizer, template=template, **options)
    assert engine.identity == verdict.identity
    with pytest.raises(FingerprintMismatchError, match="another instruction"):
        Engine(plain.model, plain.tokenizer, template=plain.template, **options)


def test_the_reader_and_an_auxiliary_model(tmp_path: Path) -> None:
    out = tmp_path / "verdict.json"
    options = ("--questions", "5", "--policies", "reuse", "--auxiliary", "tiny", "--out", out)
    assert run("tiny", "--task", "reader", *options) == 0
    verdict = Verdict.load(out)
    assert verdict.questions == 5
    found = verdict.auxiliary
    assert found is not None
    assert 0 <= found.divergence_low <= found.divergence
    assert found.random_jaccard == pytest.approx(0.11, abs=0.01)
    assert found.jaccard > 3 * found.random_jaccard, "the model itself"
    assert found.name == f"reader/model@{verdict.identity.revision[:12]}"
    assert found.first_layer_divergence > found.divergence, "the paper's reason, on the reader"
    assert 0 <= found.first_layer_divergence_low <= found.first_layer_divergence_high
    clip = verdict.policies[-1]
    assert clip.policy.startswith("CacheClip(auxiliary=None, ratio=0.2")
    assert clip.auxiliary == found.name
    assert [row.auxiliary for row in verdict.policies[:-1]] == [""]


def test_chance_is_the_mean_of_random_choices() -> None:
    draw = random.Random(3)
    seen = []
    for _ in range(20_000):
        first, second = (set(draw.sample(range(30), 6)) for _ in range(2))
        seen.append(len(first & second) / len(first | second))
    assert random_jaccard(30, 6) == pytest.approx(sum(seen) / len(seen), abs=2e-3)
    assert random_jaccard(3, 2) == pytest.approx((1 / 3) * 1 + (2 / 3) * (1 / 3))


def test_broken_numerics_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyRotation, "copy_rotated", lambda _, place, chunk: place.copy_from(chunk))
    file = write(tmp_path / "mine.jsonl", reader_rows(1))
    out = tmp_path / "verdict.json"
    options = ("--questions", "2", "--policies", "reuse", "--max-new-tokens", "4", "--out", out)
    assert run("tiny", "--data", file, *options) == 1
    verdict = Verdict.load(out)
    assert not all(check.passed for check in verdict.checks)
    assert verdict.recommended == repr(FullRecompute())


def weak(score: float, questions: int, keep: float, *rows: PolicyScore) -> Verdict:
    """A verdict on a model that is right in so many questions."""
    needed = float(trials_without_loss((1 - keep) * score)) if score and keep < 1 else math.nan
    plain = make_verdict(IDENTITY, {}, questions=questions)
    full = replace(plain.full, score=score, needed=needed, kept=1.0 if score else math.nan)
    return replace(plain, threshold=keep, full=full, policies=rows, notes=())


def policy(name: str, kept: float, low: float, high: float, **more: float) -> PolicyScore:
    known = {"first_divergence": 0.5, "same_answer": 0.25, "ttft_ratio": 0.2, **more}
    return PolicyScore(name, kept=kept, kept_low=low, kept_high=high, **known)


NEAR = {"first_divergence": 0.0125, "same_answer": 0.875}


UNKNOWN = policy("a", math.nan, math.nan, math.nan)
NONE_RIGHT = weak(0.2, 99, 0.9, policy("a", 1.0, math.nan, 1.1))
GOOD = make_verdict(IDENTITY, {REUSE: 0.99})
SENTENCES = {
    "a policy is chosen": (replace(GOOD, recommended=REUSE), f"{REUSE}, which keeps 99.0 % of"),
    "none is sooner": (GOOD, "because no policy that passes is sooner"),
    "with a full score of 0.9": (
        make_verdict(IDENTITY, {REUSE: 0.96}, questions=40),
        "40 questions prove only 94.0 % where 95 % is asked: give more questions (82 if none is",
    ),
    "too low": (
        weak(0.08, 40, 0.9, policy("far", 1.0, 0.1, 1.0), policy("near", 1.0, 0.1, 1.0, **NEAR)),
        "scores too low itself (8.0 % on 40 questions) to judge others by: proving that 90 % is "
        "kept takes at least 477 questions like these, none of them lost",
    ),
    "low, but passes": (weak(0.08, 477, 0.9, policy("a", 1.0, 0.91, 1.1)), "passes is sooner"),
    "low, and 500 x 2²": (
        weak(0.183, 500, 0.9, policy("a", 0.8, 0.4, 1.2), policy("b", 1.02, 0.82, 1.2)),
        "could prove 90 %, before about 2,000 questions like these",
    ),
    "surely not kept": (weak(0.29, 500, 0.9, policy("a", 0.74, 0.66, 0.82)), "a, keeps 74.0 %."),
    "low, 1.4² x 500": (
        weak(0.29, 500, 0.9, policy("a", 0.85, 0.78, 0.92)),
        "do not rule out 92.0 %: about 980 like these would.",
    ),
    "low, kept so far": (
        weak(0.29, 500, 0.9, policy("a", 0.95, 0.87, 1.03, needed=1234.0)),
        "prove only 87.0 % where 90 % is asked: give more questions (about 1,300 like these)",
    ),
    "all is asked": (weak(0.2, 99, 1.0, policy("a", 1.0, 0.5, 1.1)), "questions proves 100 % (ask"),
    # Of 99 it may be right in 3.74 %: 3.8416 x (1 / 0.00374 - 1).
    "none of 99 is right": (
        replace(NONE_RIGHT, full=replace(NONE_RIGHT.full, needed=math.nan)),
        "it is right in none of them, so 90 % takes at least 1,025 like these",
    ),
    "nothing is right": (weak(0.0, 99, 0.9, UNKNOWN), "because it scores nothing itself"),
    "countless": (weak(0.3, 500, 0.9, policy("a", 0.8999, 0.85, 0.95)), "more than 100,000 like"),
    "broken": (make_verdict(IDENTITY, {REUSE: 1.0}, error=1.0), "do not give the numbers that"),
}


@pytest.mark.parametrize(("verdict", "says"), SENTENCES.values(), ids=SENTENCES)
def test_the_sentence_says_why(verdict: Verdict, says: str) -> None:
    printed = list(lines(verdict, "v.json"))
    (start,) = (i for i, line in enumerate(printed) if line.startswith("Recommended"))
    assert says in printed[start]
    # Where right answers say nothing, how near each policy comes is told, the nearest first.
    assert printed[start].endswith("the same:") == (len(printed) > start + 2)


def test_who_scores_too_low_is_told_which_policy_is_nearest() -> None:
    *_, near, far, _ = lines(SENTENCES["too low"][0], "v.json")
    assert [near.split(), far.split()] == [["0.013", "87.5", "near"], ["0.5", "25.0", "far"]]


def test_the_docs_have_the_formulas_numbers() -> None:
    root = Path(__file__).parents[2]
    table = (root / "docs" / "verify.md").read_text("utf-8")
    rows = [line.strip("|").split("|") for line in table.splitlines() if re.match(r"\| [01]", line)]
    assert len(rows) == 4
    for score, *counts in ([float(cell) for cell in row] for row in rows):
        assert counts == [trials_without_loss((1 - keep) * score) for keep in (0.9, 0.95)]


def test_both_forms_of_documents_are_read(tmp_path: Path) -> None:
    rows = [
        {"question": "Who?", "documents": ["a", {"id": "d", "text": "b", "relevant": True}]},
        "",
        {"id": 7, "question": "谁?", "documents": ["c"], "answers": "王"},
        {"question": "x", "documents": ["c"], "answers": ["a"], "answer_groups": [["a"], ["b"]]},
    ]
    first, second, third = read_own_questions(write(tmp_path / "q.jsonl", rows))
    assert (first.id, first.chunks, first.answers) == ("line 1", ("a", "b"), ())
    assert (first.relevant, second.relevant) == ((1,), ())
    assert (second.id, second.answers, second.language) == ("7", ("王",), "zh")
    met, missed = (
        dict.fromkeys(("f1", "exact_match", "containment"), score) for score in (1.0, 0.0)
    )
    assert own_score("A and b", third) == met
    assert own_score("only a", third) == missed
    english = Question("e", "x", ("c",), ("the red cat", "a dog"))
    assert own_score("Red cat!", english) == met
    assert own_score("red house", english) == {**missed, "f1": 0.5}
    marked = Question("m", "x", ("a dog", "a house"), ("dog",), relevant=(0,))
    assert own_score("It is a house.", marked)["wrong_document"] == 1.0
    assert own_score("It is a dog.", marked)["wrong_document"] == 0.0


ROW = {"question": "Who?", "documents": ["a"]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "this is not JSON in UTF-8"),
        ("[1]", "this is not an object"),
        ({"documents": ["a"]}, '"question" needs a text'),
        ({"question": " ", "documents": ["a"]}, '"question" needs a text'),
        ({"question": "x"}, '"documents" must be a list of at least one text'),
        ({"question": "x", "documents": []}, '"documents" must be a list'),
        ({"question": "x", "documents": "one text"}, '"documents" must be a list'),
        ({"question": "x", "documents": [{"id": 1}]}, '"documents" needs a text'),
        ({**ROW, "answers": 7}, '"answers" must be a list of texts'),
        ({**ROW, "answers": [""]}, '"answers" needs a text'),
        ({**ROW, "answer_groups": "a"}, '"answer_groups" must be a list of lists'),
        ({**ROW, "answer_groups": [[]]}, 'a group of "answer_groups" is empty'),
        ('{"question": "\\ud800", "documents": ["a"]}', '"question" holds half of'),
        ('{"question": "x", "documents": ["\\udfff"]}', '"documents" holds half of'),
        ({**ROW, "id": "line 1"}, "another line has the id 'line 1'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read_own_questions(write(tmp_path / "q.jsonl", [ROW, row]))
    assert f"line 2: {said}" in str(caught.value)
    assert "q.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--task reader", "give a MODEL to verify, or --base-url URL"),
        ("tiny", "give --data FILE"),
        ("tiny --task reader --questions 0", "--questions must be at least 1"),
        ("tiny --task reader --max-new-tokens 0", "--max-new-tokens must"),
        ("tiny --task reader --keep 1.2", "--keep must be above 0"),
        ("tiny --task reader --keep nan", "--keep must be above 0"),
        ("tiny --task reader --seed -1", "--seed must be at least 0, not -1"),
        ("tiny --task reader --policies cacheclip", "name --auxiliary"),
        ("tiny --task reader --out .", "cannot be a file"),
        ("tiny --task reader --out no/such/folder/v.json", "cannot be a file"),
        ("tiny --task no_such_task", "no_such_task"),
        ("tiny --task reader --policies bland", "no policy 'bland'"),
        ("tiny --task reader --policies full", "nothing to verify"),
        ("tiny --data missing.jsonl", "cannot be read"),
        ("tiny --data empty.jsonl", "has no questions; write one JSON object a line"),
        ("tiny --data mine.jsonl --out ./mine.jsonl", "--out would replace the questions"),
        ("tiny --base-url http://server --kv-codec int8", "--kv-codec is the server's to say"),
        ("tiny --base-url http://server --adapter a", "--adapter is the server's to say"),
    ],
)
def test_settings_that_cannot_be_used_say_so_before_the_model_is_loaded(
    given: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.jsonl", [ROW])
    write(tmp_path / "empty.jsonl", [""])

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("kvcache_rag.models.pretrained.load", load)
    assert cli.main(["verify", *given.split()]) == cli.REFUSED
    assert said in capsys.readouterr().err
    assert len((tmp_path / "mine.jsonl").read_text().splitlines()) == 1


def test_a_folder_that_takes_no_files_is_found_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert cli.main(["verify", "x", "--task", "reader", "--out", str(tmp_path / "v.json")]) == 2
    assert "v.json cannot be written (Permission denied)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("language", "measure", "score"),
    [
        ("en", "agreement_f1", 0.0),
        ("zh", "agreement_f1", 0.75),
        ("zh", "f1", 0.0),  # not decisive: no package is needed for it
    ],
)
def test_chinese_answers_are_compared_by_words(
    language: Any, measure: str, score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "f1_chinese", lambda *_: 0.75)
    counts = {"query_tokens": 1, "recomputed_tokens": 0, "fresh_tokens": 0}
    cost = SimpleNamespace(prompt_tokens=2, ttft=0.1, **counts)
    mine, theirs = (SimpleNamespace(text=text, metrics=cost) for text in ("ab", "ac"))
    logits = torch.zeros(1, 2, dtype=torch.float64).log_softmax(-1)
    asked = Question("q", "?", ("a",), (), language=language)
    planned: Any = verification.Verification([asked], measure=measure)
    found = planned._outcome(asked, mine, theirs, logits, logits)
    assert found.metrics["agreement_f1"] == score


def test_a_server_is_verified_by_its_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, out = tmp_path / "keys", tmp_path / "verdict.json"
    monkeypatch.setenv("KVCACHE_RAG_API_KEY", new_key(keys, "judge"))
    file = write(tmp_path / "mine.jsonl", reader_rows(2))
    options = ("--data", file, "--out", out, "--keep", "0.5", "--max-new-tokens", "12")
    with (
        tiny_backend(tmp_path / "kv") as backend,
        running(build_app(backend, settings(api_keys=keys))) as url,
    ):
        assert run("--base-url", url, *options) == 0
    assert f"use it with `kvcache-rag serve --gate {out}`" in capsys.readouterr().out
    verdict = Verdict.load(out)
    assert [row.policy for row in verdict.policies] == [
        repr(policy) for policy in (BestFew(), Reuse(), Reuse("composite"))
    ]
    assert Engine.from_pretrained("tiny", gate=out).gate is not None


def test_agreement_and_right_answers_stand_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = reader_rows(1)
    for row in rows:
        texts = row["documents"]
        row["documents"] = [
            {"text": text, "relevant": row["answers"][0] in text} for text in reversed(texts)
        ]
    # Nobody says this, and what everybody says stands in a document that is not relevant.
    rows[-1]["answers"] = ["none of them"]
    for one in rows[-1]["documents"]:
        one["relevant"] = not one["relevant"]
    out = tmp_path / "v.json"
    options = ("--policies", "bestfew:1", "reuse", "--max-new-tokens", "6", "--out", out)
    assert run("tiny", "--data", write(tmp_path / "q.jsonl", rows), *options) == 0
    assert "Agreement understates" not in capsys.readouterr().out
    verdict = Verdict.load(out)
    few, reuse = verdict.policies
    assert (few.policy, few.recomputed) == ("BestFew(count=1)", 0)
    assert [(row.right, row.wrong_document) for row in (few, reuse)] == [(0.75, 0.25)] * 2

    plain = [{**row, "documents": [one["text"] for one in row["documents"]]} for row in rows]
    for row in plain:
        del row["answers"]
    assert run("tiny", "--data", write(tmp_path / "p.jsonl", plain), *options) == 0
    assert "Agreement understates BestFew(count=1): documents that" in capsys.readouterr().out
    assert math.isnan(Verdict.load(out).full.right)
