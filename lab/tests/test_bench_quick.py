"""`kvcache-rag bench --quick`: every side is asked the same, and what is told is what was done."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvcache_rag import BestFew, Engine, FullRecompute, Reuse, cli
from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from kvcache_rag.settings import EngineSettings
from kvcache_rag_lab.articles import read_articles, read_questions
from kvcache_rag_lab.commands.bench import quick_lines
from kvcache_rag_lab.evaluation.cost.quick import (
    LLAMA,
    QuickBench,
    QuickCorpus,
    QuickPlan,
    QuickSide,
    llama_side,
    packaged_questions,
    quick_sides,
)
from kvcache_rag_lab.reader import collection
from kvcache_rag_lab.scoring.metrics import containment

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.policies import ReusePolicy

PLAN = QuickPlan(questions=3, context=200, tokens=8)
TINY = ("bench", "tiny", "--quick")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return EngineSettings.from_source(None, model="tiny").open_engine()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three questions over few documents, wherever a command asks."""
    monkeypatch.setattr("kvcache_rag_lab.evaluation.cost.quick.PLAN", PLAN)


def bench_of(engine: Engine, policy: ReusePolicy) -> QuickBench:
    questions = packaged_questions(engine, PLAN, "tiny")
    return QuickBench(quick_sides(engine, policy), questions, PLAN.tokens)


def asked(bench: QuickBench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, list[str]]]:
    """Policy, question and documents of every answer, in order."""
    real, calls = Engine.generate, []

    def generate(self: Engine, question: str, chunks: Any, **how: Any) -> Any:
        calls.append((repr(how["policy"]), question, list(chunks)))
        return real(self, question, chunks, **how)

    monkeypatch.setattr(Engine, "generate", generate)
    bench.measure()
    return calls


def test_every_side_is_asked_the_same_in_turns_and_every_question_has_another_order(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(engine, BestFew())
    names = [repr(side.policy) for side in bench.sides]
    assert names == [repr(FullRecompute()), repr(BestFew()), repr(Reuse())]
    warm_up, *rounds = [
        calls[at : at + 3]
        for calls in [asked(bench, monkeypatch)]
        for at in range(0, len(calls), 3)
    ]
    assert [[policy for policy, *_ in one] for one in rounds] == [
        [*names[turn:], *names[:turn]] for turn in range(3)
    ]
    assert {question for _, question, _ in warm_up} == {rounds[0][0][1]}
    known = collection()
    answers = {one.text: one for one in known.questions}
    orders = []
    for one in rounds:
        ((question, texts),) = {(text, tuple(chunks)) for _, text, chunks in one}
        assert known.documents[answers[question].documents[0]] in texts
        lengths = [len(engine.brought_ids(text)) for text in texts]
        assert PLAN.context - max(lengths) <= sum(lengths) <= PLAN.context
        orders.append([known.documents.index(text) for text in texts])
    assert len({question for one in rounds for _, question, _ in one}) == PLAN.questions
    assert len(set(map(tuple, orders))) == PLAN.questions
    assert all(order != sorted(order) for order in orders)


def test_full_prefill_is_the_models_own_and_counts_are_the_engines(engine: Engine) -> None:
    bench = bench_of(engine, Reuse())
    bench.prefill()
    bench.measure()
    full, ours = bench.report()["sides"]
    assert (full["policy"], ours["policy"]) == (repr(FullRecompute()), repr(Reuse()))
    right, counts = 0, []
    for row in bench.report()["asked"]:
        ids = engine.tokenize(row["question"], row["documents"])
        prompt = torch.tensor([ids.all])
        own = engine.model.generate(prompt, do_sample=False, max_new_tokens=PLAN.tokens)
        text = engine.tokenizer.decode(own[0, prompt.shape[1] :], skip_special_tokens=True)
        ((of_full, of_ours),) = [row["answers"]]
        assert of_full["answer"] == text.strip()
        assert of_full["computed_tokens"] == len(ids.all)
        assert of_ours["computed_tokens"] == len(ids.query)
        assert of_full["right"] == containment(text, row["expected"])
        right += of_full["right"]
        counts.append(len(ids.all))
    assert right == full["right"] > 0
    assert full["computed_tokens"] == sorted(counts)[1]
    assert full["sooner"] is None
    pairs = [[one["seconds"] for one in row["answers"]] for row in bench.report()["asked"]]
    assert ours["sooner"]["value"] == pytest.approx(sorted(a / b for a, b in pairs)[1])


def test_every_article_question_has_its_answer_among_its_chunks() -> None:
    def count(text: str) -> int:
        return len(text.split())

    corpus = QuickCorpus.from_articles(20, count)
    known = {one.text: one for one in read_questions()}
    articles = {one.name: one.text for one in read_articles()}
    questions = corpus.questions(600, count)
    assert len({one.question for one in questions}) == 20
    assert any(len(one.groups) > 1 for one in questions)
    for one in questions:
        told = known[one.question]
        assert one.groups == told.answers
        # The whole of each article is there, so one that needs two has both.
        for name in told.articles:
            words = Counter(articles[name].split())
            assert words <= Counter(" ".join(one.chunks).split())
        # What scores answers takes what the articles say for right.
        assert containment(" ".join(one.chunks), one.groups) == 1
        assert 500 < sum(map(count, one.chunks)) <= 600


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main([*TINY, "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_prints_one_object_or_a_table_of_it(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "quick.json"
    found = report(capsys, "--policy", "bestlast", "--report", str(file))
    assert json.loads(file.read_text()) == found
    sides = [(one["side"], one["policy"].partition("(")[0]) for one in found["quick"]["sides"]]
    assert sides == [
        ("full prefill", "FullRecompute"),
        ("BestLast(share=0.2, positions='reordered')", "BestLast"),
        ("Reuse(positions='reordered')", "Reuse"),
    ]
    # Nobody has the packaged reader as a GGUF file.
    ((missing, why),) = [tuple(one.values()) for one in found["quick"]["missing"]]
    assert (missing, "GGUF" in why) == (LLAMA, True)
    shown = list(quick_lines(found))
    assert found["machine"]["versions"] in shown[1]
    (head,) = [at for at, line in enumerate(shown) if line.startswith("answered by")]
    for line, side in zip(shown[head + 1 :], found["quick"]["sides"], strict=False):
        assert line.startswith(side["side"])
        assert line.endswith(str(side["right"]))
        assert f" {side['computed_tokens']:,.0f} " in line
    assert any(line == f"not asked: {LLAMA}: {why}" for line in shown)


def test_what_is_to_be_installed_for_llama_cpp_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache_rag.models.backends.entry_points", lambda **_: [])
    (tmp_path / "model.gguf").touch()  # nobody gets to read it
    side = llama_side(EngineSettings.from_source(None, model=str(tmp_path / "model.gguf")))
    assert isinstance(side, str)
    assert "pip install 'kvcache-rag[llama-cpp]'" in side


def test_the_default_is_told_and_asked_once(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)["quick"]["sides"]
    assert [one["side"] for one in found] == [
        "full prefill",
        "Reuse(positions='reordered'), the default",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--contexts 1024", "--contexts is not for --quick, which asks packaged questions; leave"),
        ("--chunk-size 64", "--chunk-size is not for --quick"),
        ("--kv-dir kv", "--kv-dir is not for --quick"),
        ("--rounds 3", "--rounds is not for --quick"),
        ("--corpus texts", "--corpus is not for --quick"),
        ("--plot x.svg", "--plot is not for --quick"),
    ],
)
def test_options_that_mean_nothing_here_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*TINY, *words.split()]) == cli.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_without_a_model_only_quick_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == cli.REFUSED
    assert "MODEL" in capsys.readouterr().err.splitlines()[-1]


def test_a_window_that_is_too_small_is_one_sentence(engine: Engine) -> None:
    small = Engine(engine.model, engine.tokenizer, template=engine.template, context_window=150)
    with pytest.raises(InvalidInputError, match="fit the model's window of 150"):
        bench_of(small, Reuse())


def test_chunks_that_cannot_be_stitched_are_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "refusal", property(lambda self: "its keys are learned"))
    with pytest.raises(UnsupportedModelError, match="no stitching of its chunks to measure"):
        quick_sides(engine, Reuse())


def test_an_interrupt_leaves_nothing(
    few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: QuickSide, *_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(QuickSide, "ask", interrupted)
    monkeypatch.chdir(tmp_path)
    words = ("--report", str(tmp_path / "quick.json"))
    assert cli.main([*TINY, *words]) == cli.INTERRUPTED
    assert not [*tmp_path.iterdir()]
    assert capsys.readouterr().err.splitlines()[-1] == "kvcache-rag: stopped; nothing of it is kept"
