# ruff: noqa: RUF001 (Chinese punctuation)
"""Tasks by name: where their rows come from, how they are drawn, and how answers are scored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag import InvalidInputError
from kvcache_rag_lab.evaluation.datasets import split_documents
from kvcache_rag_lab.evaluation.tasks import RGB, SETS, task_by_name, task_names
from kvcache_rag_lab.reader import REFUSAL
from kvcache_rag_lab.scoring.question import Question

if TYPE_CHECKING:
    from pathlib import Path


def row(index: int, answer: str = "Ada", relevant: int = 1) -> dict[str, Any]:
    return {
        "id": f"q{index}",
        "question": f"Who keeps tower {index}?",
        "answers": [answer],
        "documents": [
            {"id": f"d{place}", "text": f"Text {place} of {index}.", "relevant": place == relevant}
            for place in range(4)
        ],
    }


def folder(path: Path, name: str, *rows: object) -> Path:
    path.joinpath(name).write_text(
        "".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8"
    )
    return path


def asked(*answers: str, **more: Any) -> Question:
    return Question("q", "?", ("text",), answers, **{"relevant": (0,), **more})


def test_names_are_unique_and_told_to_who_misspells_one() -> None:
    names = task_names()
    assert len(set(names)) == len(names)
    assert {"reader_single", "niah_single_1", "rgb_zh_int_noise40", "hotpotqa"} <= set(names)
    assert not {"rgb_zh_int_noise80"} & set(names)  # a document per part leaves no room
    told = r"no task 'hotpot'; did you mean hotpotqa\? There are reader_single, "
    with pytest.raises(InvalidInputError, match=told):
        task_by_name("hotpot")


def test_rows_are_read_from_the_folder(tmp_path: Path) -> None:
    for name in SETS:
        data = folder(tmp_path, f"{name}.jsonl", row(0), row(1))
        task = task_by_name(name, data=data)
        assert task.name == name
        assert [one.id for one in task.questions()] == ["q0", "q1"]
        assert {one.language for one in task.questions()} == {SETS[name].language}
        assert task.score("Ada", task.questions()[0])[task.metric] == pytest.approx(1, abs=1e-7)
    assert task_by_name("2wikimultihopqa", data=tmp_path).name == "2wiki"


def test_what_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"no file .*musique\.jsonl; name the folder"):
        task_by_name("musique", data=tmp_path)
    with pytest.raises(InvalidInputError, match=r"no file .*rgb_zh\.jsonl; name the folder"):
        task_by_name("rgb_zh", data=tmp_path)
    for name in RGB:
        with pytest.raises(InvalidInputError, match="RGB is not on the hub"):
            task_by_name(name)
    with pytest.raises(InvalidInputError, match="nq is not on the hub"):
        task_by_name("nq").questions()


def test_draws_are_nested_and_paired(tmp_path: Path) -> None:
    task = task_by_name(
        "musique", data=folder(tmp_path, "musique.jsonl", *(row(one) for one in range(40)))
    )
    few, more = (task.questions(n, seed=3) for n in (5, 12))
    assert set(few) < set(more)
    order = [int(one.id[1:]) for one in more]
    assert order == sorted(order) != list(range(12))
    assert task.questions(5, seed=4) != few
    assert len(task.questions(100)) == len(task.questions()) == 40
    narrow = task.questions(12, seed=3, k=1)
    assert [one.id for one in narrow] == [one.id for one in more]
    assert all(one.chunks == (f"Text 1 of {one.id[1:]}.",) for one in narrow)
    for wrong in ({"n": 0}, {"k": 0}, {"seed": -1}):
        with pytest.raises(InvalidInputError, match="must be at least"):
            task.questions(**wrong)


def test_the_first_rows_of_a_file_are_asked_where_order_is_wanted(tmp_path: Path) -> None:
    rows = [row(one) for one in range(12)]
    task = task_by_name("musique", data=folder(tmp_path, "musique.jsonl", *rows)).in_order()
    assert [one.id for one in task.questions(5, seed=3)] == [str(one["id"]) for one in rows[:5]]
    assert len(task.questions(100)) == len(task.questions()) == 12
    assert all(len(one.chunks) == 1 for one in task.questions(5, k=1))
    generator = task_by_name("reader_single")
    assert generator.in_order().questions(210) == generator.questions(210)


def test_who_has_no_documents_is_not_told_of_them(tmp_path: Path) -> None:
    for name in ("hotpotqa", "2wiki", "musique", "squad", "nq", "rgb_en", "rgb_en_noise40"):
        task = task_by_name(name, data=folder(tmp_path, f"{name}.jsonl", row(0)))
        assert "document" in task.instruction
        assert task.closed_instruction
        assert "document" not in task.closed_instruction


TWO_THIRDS = pytest.approx(2 / 3)
FOUR_SEVENTHS = pytest.approx(4 / 7, abs=2e-8)


@pytest.mark.parametrize(
    ("name", "said", "answers", "scores"),
    [
        # P 1/2, R 1 against the second answer: F 2/3
        (
            "hotpotqa",
            "Ada Brill",
            ("Bo", "Ada"),
            {"containment": 1, "f1": TWO_THIRDS, "exact_match": 0, "f1_longbench": TWO_THIRDS},
        ),
        # closed answers: HotpotQA gives nothing, LongBench P 1/2, R 1
        (
            "hotpotqa",
            "yes, both",
            ("yes",),
            {"containment": 1, "f1": 0, "exact_match": 0, "f1_longbench": TWO_THIRDS},
        ),
        # SQuAD has no rule for them
        ("squad", "no fire", ("no",), {"containment": 1, "f1": TWO_THIRDS, "exact_match": 0}),
        ("nq", "In the U.S.A.", ("The USA",), {"containment": 1, "substring_match": 1}),
        ("nq", "Canada", ("The USA", "Mexico"), {"containment": 0, "substring_match": 0}),
        # "us" stands in "because", which lost-in-the-middle counts
        ("nq", "Because.", ("US",), {"containment": 0, "substring_match": 1}),
        # see test_scoring_metrics: 4/7 against the second answer
        ("dureader", "今天天气很好。", ("明天", "今天天气不好。"), {"rouge_l": FOUR_SEVENTHS}),
        (
            "longbench_multifieldqa_zh",
            "今天天气很好。",
            ("今天天气不好。",),
            {"f1": pytest.approx(2 / 5)},
        ),
    ],
)
def test_answers_are_scored_by_the_sets_own_rules(
    tmp_path: Path, name: str, said: str, answers: tuple[str, ...], scores: dict[str, Any]
) -> None:
    task = task_by_name(name, data=folder(tmp_path, f"{name}.jsonl", row(0)))
    found = task.score(said, asked(*answers))
    assert found.pop("wrong_document", 0) == 0
    assert found == scores
    assert task.metric == next(iter(scores))


@pytest.mark.parametrize("name", ["squad", "nq", "hotpotqa", "2wiki", "musique"])
def test_only_a_wrong_answer_is_from_a_wrong_document(tmp_path: Path, name: str) -> None:
    task = task_by_name(name, data=folder(tmp_path, f"{name}.jsonl", row(0)))
    question = Question(
        "q", "Who keeps it?", ("Ada does.", "Bo Lund does."), ("Ada",), relevant=(0,)
    )
    assert task.score("Bo Lund", question)["wrong_document"] == 1
    assert task.score("Ada and Bo", question)["wrong_document"] == 0
    right = replace(question, answers=("Bo",))  # of a document that is not marked
    assert task.score("Bo Lund", right)["wrong_document"] == 0
    assert "wrong_document" not in task.score("Bo Lund", replace(question, relevant=()))


def test_parts_stay_relevant_where_no_part_has_the_letters_of_an_answer() -> None:
    question = Question("q", "?", ("a b", "c d", "e f"), ("zz",), relevant=(1, 2))
    assert split_documents(question, str.split).relevant == (2, 3, 4, 5)
    found = split_documents(Question("q", "?", ("x D", "c d"), ("D",), relevant=(1,)), str.split)
    assert (found.chunks, found.relevant) == (("x", "D", "c", "d"), (3,))


def test_rgb_reads_files_in_either_form(tmp_path: Path) -> None:
    published: dict[str, Any] = {"id": 1, "query": "Who?", "answer": ["Ada"]}
    for kind in ("positive", "negative"):
        published[kind] = [f"{kind} {index}" for index in range(6)]
    data = folder(tmp_path, "en.json", published)
    assert len(task_by_name("rgb_en", data=data).questions()[0].chunks) == 12
    (mixed,) = task_by_name("rgb_en_noise40", data=data).questions()
    assert (len(mixed.chunks), len(mixed.relevant)) == (5, 3)
    (noise,) = task_by_name("rgb_en_noise100", data=data).questions()
    assert noise.relevant == ()
    folder(tmp_path, "en_refine.json", {**published, "query": "Corrected?"})
    assert task_by_name("rgb_en", data=data).questions()[0].question == "Corrected?"
    folder(tmp_path, "rgb_en_noise40.jsonl", row(0))  # the project's own form comes first
    assert task_by_name("rgb_en_noise40", data=data).questions()[0].id == "q0"
    parts = {"answer": [["Ada", "Ada B."], ["Bo"]], "positive": [["Ada keeps it."], ["Bo does."]]}
    whole = task_by_name("rgb_zh_int", data=folder(tmp_path, "zh_int.json", {**published, **parts}))
    (question,) = whole.questions()
    assert (len(question.chunks), len(question.relevant), question.language) == (8, 2, "zh")
    assert whole.score("Ada B., Bo", question)["accuracy"] == 1
    assert whole.score("Ada", question)["accuracy"] == 0, "one part of two"
    folder(tmp_path, "en_refine.json", {"query": "?"})
    with pytest.raises(InvalidInputError, match=r"en_refine\.json has another schema"):
        task_by_name("rgb_en", data=data).questions()


def test_rgb_scores_groups_rejections_and_noise(tmp_path: Path) -> None:
    task = task_by_name("rgb_zh", data=folder(tmp_path, "rgb_zh.jsonl", row(0)))
    assert "信息不足" in task.instruction
    groups = asked("巴黎", "1912", answer_groups=(("巴黎", "Paris"), ("1912",)), language="zh")
    assert task.score("PARIS， 19 12年", groups) == {"accuracy": 1, "rejected": 0, "containment": 1}
    assert task.score("巴黎", groups) == {"accuracy": 0, "rejected": 0, "containment": 0}
    refused = {"accuracy": 0, "rejected": 1, "containment": 1}
    assert task.score("信息不足，巴黎1912", groups) == refused
    noise = asked("巴黎", relevant=(), language="zh")
    assert task.score("信息不足", noise) == {"accuracy": 1, "rejected": 1, "containment": 0}


def test_reader_answers_are_compared_letter_for_letter() -> None:
    task, single = (task_by_name(f"reader_{kind}") for kind in ("unanswerable", "single"))
    (question,), (other,) = task.questions(1), single.questions(1)
    assert question.answers == (REFUSAL,)
    assert task.score(f" {REFUSAL}\n", question) == {"exact_match": 1, "refused": 1}
    assert task.score(REFUSAL.title(), question) == {"exact_match": 0, "refused": 0}
    assert single.score(REFUSAL, other) == {"exact_match": 0, "refused": 1}
    assert single.score(f"{other.answers[0]}.", other) == {"exact_match": 0, "refused": 0}
