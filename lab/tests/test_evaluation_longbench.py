# ruff: noqa: RUF001 (Chinese punctuation)
"""LongBench's sets: which name leads to which form, how contexts are cut, how answers score."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag import InvalidInputError
from kvcache_rag_lab.evaluation.longbench import LONGBENCH
from kvcache_rag_lab.evaluation.tasks import task_by_name, task_names
from kvcache_rag_lab.scoring.ask import as_asked, closed_cell
from kvcache_rag_lab.scoring.question import Question

if TYPE_CHECKING:
    from pathlib import Path

PASSAGES = "Passage 1:\nHarbour\nTwo ferries.\n\nPassage 2:\nTower\nAda keeps it.\n"


def row(name: str, **changed: Any) -> dict[str, Any]:
    asked = {"input": "Who keeps the tower?", "context": PASSAGES, "answers": ["Ada Brill", "Ada"]}
    told = {"length": 12, "dataset": name, "language": "en", "all_classes": None, "_id": "a1b2"}
    return {**asked, **told, **changed}


def folder(path: Path, file: str, *rows: dict[str, Any]) -> Path:
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)
    path.joinpath(file).write_text(text, encoding="utf-8")
    return path


def original(**changed: Any) -> dict[str, Any]:
    """A row in the project's own form."""
    documents = [{"id": "d", "text": "Ada keeps the tower.", "relevant": True}]
    return {"id": "q", "question": "Who?", "answers": ["Ada"], "documents": documents, **changed}


def count(text: str) -> int:
    return len(text.split())


def test_a_name_of_two_forms_leads_to_the_original_and_its_prefix_to_longbench(
    tmp_path: Path,
) -> None:
    for name in ("hotpotqa", "musique", "dureader"):
        assert task_by_name(name).name == name
        assert task_by_name(f"longbench_{name}").name == f"longbench_{name}"
    for name in ("2wikimqa", "narrativeqa", "qasper", "multifieldqa_en", "triviaqa"):
        assert task_by_name(name).name == f"longbench_{name}"
    assert task_by_name("2wiki").name == task_by_name("2wikimultihopqa").name == "2wiki"
    assert set(LONGBENCH) <= set(task_names())

    data = folder(tmp_path, "2wikimqa.jsonl", row("2wikimqa"))
    folder(data, "2wiki.jsonl", original(id="theirs"))
    assert [one.id for one in task_by_name("2wikimqa", data=data).questions()] == ["a1b2"]
    assert [one.id for one in task_by_name("2wiki", data=data).questions()] == ["theirs"]


@pytest.mark.parametrize("name", ["hotpotqa", "2wikimqa", "musique"])
def test_passages_are_chunks_without_their_headings(tmp_path: Path, name: str) -> None:
    data = folder(tmp_path, f"{name}.jsonl", row(name), row(f"{name}_e", _id="e"))
    task = task_by_name(f"longbench_{name}", data=data)
    first, second = task.questions()
    assert first.chunks == ("Harbour\nTwo ferries.", "Tower\nAda keeps it.")
    assert (first.relevant, first.answers, first.language) == ((), ("Ada Brill", "Ada"), "en")
    assert second.id == "e", "a row of LongBench-E"
    assert (task.metrics, task.max_new_tokens) == (("f1",), 32)
    # P 1/3, R 1/1 against "Ada": F 1/2; P 1/3, R 1/2 against "Ada Brill": F 2/5
    assert task.score("the Ada of Lispan", first) == {"f1": pytest.approx(1 / 2)}
    # LongBench has no rule for yes and no: P 1/2, R 1
    assert task.score("yes, both", replace(first, answers=("yes",))) == {"f1": pytest.approx(2 / 3)}


def test_chinese_passages_have_headings_of_their_own(tmp_path: Path) -> None:
    context = "文章1\n标题：港口\n内容：两艘船。\n\n文章2\n标题：塔"
    of_set = row(
        "dureader", context=context, language="zh", input="谁？", answers=["今天天气不好。"]
    )
    task = task_by_name("longbench_dureader", data=folder(tmp_path, "dureader.jsonl", of_set))
    (question,) = task.questions()
    assert question.chunks == ("标题：港口\n内容：两艘船。", "标题：塔")
    assert (question.language, task.max_new_tokens) == ("zh", 128)
    # See test_scoring_metrics: 4/7
    said = task.score("今天天气很好。", question)
    assert said == {"rouge_l": pytest.approx(4 / 7, abs=2e-8)}


@pytest.mark.parametrize(
    ("name", "tokens"), [("narrativeqa", 128), ("qasper", 128), ("multifieldqa_en", 64)]
)
def test_one_document_is_split_whatever_headings_it_quotes(
    tmp_path: Path, name: str, tokens: int
) -> None:
    lines = [f"Line {index} is plain." for index in range(30)]
    context = " ".join(lines[:15]) + "\nPassage 7: a heading. " + " ".join(lines[15:]) + " Ada did."
    data = folder(tmp_path, f"{name}.jsonl", row(name, context=context))
    task = task_by_name(name, data=data, count=count, chunk_tokens=20, overlap=4)
    (question,) = task.questions()
    assert len(question.chunks) > 6
    assert all(count(chunk) <= 20 for chunk in question.chunks)
    assert any("Passage 7:" in chunk for chunk in question.chunks)
    assert question.relevant == (len(question.chunks) - 1,)
    assert task.max_new_tokens == tokens


def test_worked_examples_are_chunks_and_only_the_first_line_of_an_answer_counts(
    tmp_path: Path,
) -> None:
    context = "Passage:\nA text.\nQuestion:\nWho?\nAnswer:\nBo\n\nPassage:\nMore.\nAnswer:\nCy\n"
    data = folder(tmp_path, "triviaqa.jsonl", row("triviaqa", context=context))
    task = task_by_name("triviaqa", data=data)
    (question,) = task.questions()
    first, second = question.chunks
    assert first == "Passage:\nA text.\nQuestion:\nWho?\nAnswer:\nBo"
    assert second == "Passage:\nMore.\nAnswer:\nCy"
    assert question.question == "Who keeps the tower?"
    assert task.score("\nAda\n\nPassage:\nAnd so on", question) == {"f1": 1}
    assert task.score("Passage\nAda", question) == {"f1": 0}


def test_prompts_are_longbenchs_with_the_documents_between_them(tmp_path: Path) -> None:
    data = folder(tmp_path, "2wikimqa.jsonl", row("2wikimqa"))
    task = task_by_name("2wikimqa", data=data)
    (question,) = task.questions()
    told = (
        "Answer the question based on the given passages. "
        "Only give me the answer and do not output any other words."
    )
    assert task.instruction == f"{told}\n\nThe following are given passages."
    assert question.question == f"{told}\n\nQuestion: Who keeps the tower?\nAnswer:"
    for name, one in LONGBENCH.items():
        assert one.before, name
        assert one.behind.count("{input}") == 1
        assert one.ask("{input}?") == one.behind.replace("{input}", "{input}?"), "put in once"


def test_who_has_no_documents_is_not_told_of_them(tmp_path: Path) -> None:
    for name, one in LONGBENCH.items():
        data = folder(tmp_path, f"{one.name}.jsonl", row(one.name, language=one.language))
        task = task_by_name(name, data=data)
        (question,) = task.questions()
        closed = as_asked(closed_cell(), question)
        assert closed.question == "Who keeps the tower?"
        assert closed.chunks == closed.relevant == ()
        assert task.closed_instruction
        for word in ("passage", "text", "article", "story", "文章"):
            assert word not in task.closed_instruction.lower()
    plain = Question("q", "Who?", ("text",), ("Ada",))
    assert as_asked(closed_cell(), plain).question == "Who?"


def test_the_projects_own_form_is_read_under_the_longbench_name_alone(tmp_path: Path) -> None:
    data = folder(tmp_path, "longbench_hotpotqa.jsonl", original())
    (question,) = task_by_name("longbench_hotpotqa", data=data).questions()
    assert (question.id, question.relevant) == ("q", (0,))
    assert question.question.endswith("Question: Who?\nAnswer:")
    assert question.closed_question == "Who?"
    folder(data, "longbench_hotpotqa.jsonl", row("hotpotqa"))
    (question,) = task_by_name("longbench_hotpotqa", data=data).questions()
    assert question.id == "a1b2"
    # hotpotqa.jsonl in the project's form is HotpotQA itself.
    folder(data, "musique.jsonl", original())
    with pytest.raises(InvalidInputError, match=r"musique\.jsonl has another schema"):
        task_by_name("longbench_musique", data=data).questions()


def test_rows_of_another_set_or_form_are_refused(tmp_path: Path) -> None:
    data = folder(tmp_path, "2wikimqa.jsonl", row("hotpotqa"))
    with pytest.raises(InvalidInputError, match=r"another schema .*rows of hotpotqa, not of 2wik"):
        task_by_name("2wikimqa", data=data).questions()
    folder(data, "hotpotqa.jsonl", row("hotpotqa"))
    with pytest.raises(
        InvalidInputError, match=r"LongBench's file; ask for the task longbench_hotpotqa"
    ):
        task_by_name("hotpotqa", data=data).questions()
    folder(data, "qasper.jsonl", {"input": "?"})
    with pytest.raises(InvalidInputError, match=r"qasper\.jsonl has another schema"):
        task_by_name("qasper", data=data).questions()
    with pytest.raises(InvalidInputError, match=r"no file .*longbench_triviaqa\.jsonl"):
        task_by_name("triviaqa", data=data)
