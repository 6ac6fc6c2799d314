# ruff: noqa: RUF001 (Chinese punctuation)
"""Question sets: files, hub schemas, the choice of documents, and splitting long ones."""

from __future__ import annotations

import json
import random
import re
import sys
import types
import zipfile
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
import pytest

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import MissingExtraError
from kvcache_rag_lab.evaluation import datasets
from kvcache_rag_lab.evaluation.datasets import (
    estimated_tokens,
    hotpot_questions,
    musique_questions,
    read_questions,
    rgb_questions,
    split_text,
    squad_questions,
)
from kvcache_rag_lab.scoring.question import Question, top_k

if TYPE_CHECKING:
    from pathlib import Path

ROW: dict[str, Any] = {
    "id": "q1",
    "question": "Who keeps the lighthouse?",
    "answers": ["Ada Brill", "Brill"],
    "documents": [
        {"id": "d1", "text": "The harbour has two ferries.", "relevant": False},
        {"id": "d2", "text": "Ada Brill keeps the lighthouse.", "relevant": True},
    ],
}


def written(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def words(text: str) -> int:
    return len(text.split())


def test_questions_are_read_as_they_stand(tmp_path: Path) -> None:
    groups = {**ROW, "id": "q2", "answers": ["a", "b", "c"], "answer_groups": [["a", "b"], ["c"]]}
    first, second = read_questions(written(tmp_path / "x.jsonl", ROW, "", groups), "zh")
    chunks = tuple(one["text"] for one in ROW["documents"])
    answers = ("Ada Brill", "Brill")
    assert first == Question("q1", ROW["question"], chunks, answers, relevant=(1,), language="zh")
    assert first.groups == (answers,)
    assert second.groups == second.answer_groups == (("a", "b"), ("c",))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ("{", "this is not JSON"),
        ("[1]", "the row is not a JSON object"),
        ({"id": ""}, 'the row needs a text as "id"'),
        ({"id": "q0"}, "has the id 'q0' of .*line 1"),
        ({"question": 3}, 'needs a text as "question"'),
        ({"answers": []}, 'needs one text or more in "answers"'),
        ({"answers": "Ada"}, 'needs a list as "answers"'),
        ({"answers": ["Ada", 3]}, 'needs one text or more in "answers"'),
        ({"answer_groups": []}, 'has empty "answer_groups"'),
        ({"answer_groups": [["a"], []]}, 'needs one text or more in "answer_groups"'),
        ({"documents": []}, "has no documents"),
        ({"documents": ["text"]}, "a document is not a JSON object"),
        ({"documents": [{"text": " ", "relevant": True}]}, 'a document needs a text as "text"'),
        ({"documents": [{"text": "x", "relevant": "yes"}]}, "neither true nor false"),
        ({"documents": [{"text": "x"}]}, "neither true nor false"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, change: object, wrong: str) -> None:
    row = {**ROW, **change} if isinstance(change, dict) else change
    path = written(tmp_path / "set.jsonl", {**ROW, "id": "q0"}, row)
    with pytest.raises(
        InvalidInputError,
        match=f"^{re.escape(str(path))}, line 2: .*{wrong}.*; correct or remove it$",
    ):
        read_questions(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"there is no file .*x\.jsonl"),
        (b'{"id": "caf\xe9"}\n', "line 1: this is not JSON in UTF-8"),
        (b"[" * 100_000 + b"\n", "line 1: this is not JSON in UTF-8"),
        (json.dumps({**ROW, "question": "\ud800"}).encode(), "line 1: .* half of a surrogate pair"),
    ],
    ids=["missing", "latin", "deep", "half a letter"],
)
def test_a_file_that_cannot_be_read_says_so(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=says):
        read_questions(path)


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROW).encode() + b"\r\n\r\n")
    assert len(read_questions(path)) == 1


def test_top_k_keeps_relevant_documents_and_the_order() -> None:
    question = Question("q", "?", tuple("abcdef"), ("x",), relevant=(1, 4))
    assert top_k(question, None) is question
    assert top_k(question, 6) is question
    kept = top_k(question, 3)  # b and e, then the first other, in the given order
    assert (kept.chunks, kept.relevant, kept.id) == (("a", "b", "e"), (1, 2), "q")
    assert top_k(question, 1).chunks == ("b",)
    assert top_k(question, 1).relevant == (0,)
    unknown = Question("q", "?", tuple("abc"), ("x",))
    assert top_k(unknown, 2).chunks == ("a", "b")
    with pytest.raises(InvalidInputError, match="at least 1"):
        top_k(question, 0)
    with pytest.raises(InvalidInputError, match="count from 0"):
        Question("q", "?", ("a",), ("x",), relevant=(1,))


def test_hotpotqa_rows_of_the_hub_and_of_the_original_file() -> None:
    paragraphs = [("Harbour", ["Two ferries.", " They are red."]), ("Tower", ["One keeper."])]
    titles, sentences = zip(*paragraphs, strict=True)
    asked = {"question": "What colour are the ferries?", "answer": "red"}
    hub_row = {
        "id": "h1",
        **asked,
        "supporting_facts": {"title": ["Harbour", "Harbour"], "sent_id": [0, 1]},
        "context": {"title": titles, "sentences": sentences},
    }
    facts = [["Harbour", 0], ["Harbour", 1]]
    original = {"_id": "h1", **asked, "supporting_facts": facts, "context": paragraphs}
    # 2WikiMultihopQA's columns are JSON texts, and its sentences have no space between them.
    encoded = {
        **original,
        "context": json.dumps([["Harbour", ["Two ferries.", "They are red."]], paragraphs[1]]),
        "supporting_facts": json.dumps(facts),
    }
    chunks = ("Harbour\nTwo ferries. They are red.", "Tower\nOne keeper.")
    expected = Question("h1", asked["question"], chunks, ("red",), relevant=(0,))
    assert list(hotpot_questions([hub_row, original, encoded])) == [expected] * 3


def test_musique_rows_have_aliases_and_marked_paragraphs() -> None:
    paragraphs = [
        {"title": title, "paragraph_text": title.lower(), "is_supporting": title == "B"}
        for title in "AB"
    ]
    row = {"id": "2hop__1_2", "paragraphs": paragraphs, "question": "Who?", "answer": "Ada"}
    row |= {"answer_aliases": ["Ada B."], "answerable": True}
    (one,) = musique_questions([row, {**row, "answerable": False}])
    assert (one.chunks, one.relevant) == (("A\na", "B\nb"), (1,))
    assert one.answers == ("Ada", "Ada B.")


def test_squad_rows_get_distractors_of_their_article_without_an_answer() -> None:
    def row(name: str, title: str, context: str, *answers: str) -> dict[str, Any]:
        asked = {"id": name, "title": title, "context": context, "question": f"{name}?"}
        return {**asked, "answers": {"text": list(answers), "answer_start": [0] * len(answers)}}

    rows = [
        row("q0", "Sea", "The sea is blue.", "blue", "Blue", "blue"),
        row("q1", "Sea", "Waves are high.", "high"),
        row("q2", "Sea", "Whales are BLUE and high.", "Whales"),
        *(row(f"q{3 + index}", "Sea", f"Fact {index}.", str(index)) for index in range(5)),
        row("q9", "Sky", "Clouds are blue.", "Clouds"),
    ]
    found = {one.id: one for one in squad_questions(rows)}
    # Of the others, the one that says "BLUE" is left out; four remain, in the article's order.
    facts = ("Fact 0.", "Fact 1.", "Fact 2.")
    assert found["q0"].chunks == ("The sea is blue.", "Waves are high.", *facts)
    assert found["q0"].answers == ("blue", "Blue")
    assert found["q4"].chunks[found["q4"].relevant[0]] == "Fact 1."
    assert found["q4"].relevant == (4,)
    assert found["q9"].chunks == ("Clouds are blue.",)


RGB = {"id": 7, "query": "Where?", "answer": [["Rome", "Roma"]]}
RGB |= {"positive": [f"p{index}" for index in range(4)]}
RGB |= {"negative": [f"n{index}" for index in range(6)]}


def documents(question: Question) -> tuple[set[str], set[str]]:
    relevant = {question.chunks[index] for index in question.relevant}
    return relevant, set(question.chunks) - relevant


@pytest.mark.parametrize(
    ("noise", "positive", "negative"),
    [
        (0.0, "p0 p1 p2 p3", "n0"),  # only four can help: one is filled up
        (0.2, "p0 p1 p2 p3", "n0"),
        (0.5, "p0 p1", "n0 n1 n2"),  # 2.5 is rounded up
        (0.8, "p0", "n0 n1 n2 n3"),
        (1.0, "", "n0 n1 n2 n3 n4"),
        (None, "p0 p1 p2 p3", "n0 n1 n2 n3 n4 n5"),
    ],
)
def test_rgb_rows_are_mixed_by_rgbs_rule(noise: float | None, positive: str, negative: str) -> None:
    (one,) = rgb_questions([RGB], "en", noise)
    assert documents(one) == (set(positive.split()), set(negative.split()))
    assert (one.id, one.answers, one.answer_groups) == ("7", ("Rome", "Roma"), ())
    assert list(rgb_questions([RGB], "en", noise)) == [one]


def test_rgb_fills_up_from_the_helpful_side_when_noise_is_short() -> None:
    (one,) = rgb_questions([{**RGB, "negative": ["n0"], "answer": ["Rome"]}], "en", 0.8)
    assert documents(one) == ({"p0", "p1", "p2", "p3"}, {"n0"})
    with pytest.raises(InvalidInputError, match="noise is 0 to 1"):
        list(rgb_questions([RGB], "en", 1.2))


def test_rgb_integration_takes_one_document_of_each_part_first() -> None:
    parts = {"answer": [["1912"], ["Rome", "Roma"]], "positive": [["a0", "a1", "a2"], ["b0"]]}
    row = {**RGB, **parts}
    (one,) = rgb_questions([row], "zh", 0.4)  # three may help: one a, b0, another a
    relevant, noise = documents(one)
    assert len(relevant) == 3
    assert "b0" in relevant
    assert noise == {"n0", "n1"}
    assert one.answer_groups == (("1912",), ("Rome", "Roma"))
    assert one.answers == ("1912", "Rome", "Roma")
    (noisy,) = rgb_questions([row], "zh", 0.8)  # never fewer than one of each part
    assert len(noisy.relevant) == 2


def hub_module(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    module = None if load is None else types.SimpleNamespace(load_dataset=load)
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hotpotqa", ("hotpotqa/hotpot_qa", "distractor")),
        ("musique", ("dgslibisey/MuSiQue", None)),
        ("squad", ("rajpurkar/squad", None)),
    ],
)
def test_the_hub_is_asked_for_published_names(
    monkeypatch: pytest.MonkeyPatch, name: str, asked: tuple[str, str | None]
) -> None:
    def load(*names: str, split: str) -> list[dict[str, Any]]:
        assert (names, split) == (asked, "validation")
        return []

    hub_module(monkeypatch, load)
    assert datasets.load_hub(name) == []


def offline(*_: object, **__: object) -> None:
    raise ConnectionError("a long story")


@pytest.mark.parametrize(
    ("name", "load", "error", "says"),
    [
        (
            "hotpotqa",
            offline,
            InvalidInputError,
            r"be loaded \(ConnectionError\); go online, or name",
        ),
        (
            "hotpotqa",
            lambda *_, **__: [{"query": "x"}],
            InvalidInputError,
            "another schema than it",
        ),
        ("hotpotqa", None, MissingExtraError, r"kvcache-rag\[eval\]"),
        ("nq", None, InvalidInputError, "nq is not on the hub; .* --data"),
    ],
    ids=["offline", "schema", "extra", "not there"],
)
def test_what_cannot_be_loaded_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, name: str, load: Any, error: type[Exception], says: str
) -> None:
    hub_module(monkeypatch, load)
    with pytest.raises(error, match=says):
        datasets.load_hub(name)


def downloaded(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[tuple[str, str, str]]:
    asked = []

    def download(repo: str, file: str, repo_type: str) -> str:
        asked.append((repo, file, repo_type))
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return asked


def test_longbench_is_read_from_its_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"input": "谁？", "context": "一个文本。", "answers": ["艾达"], "_id": "l"}
    row |= {"dataset": "dureader", "language": "zh"}
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as file:
        file.writestr("data/dureader.jsonl", json.dumps(row, ensure_ascii=False) + "\n")
    asked = downloaded(monkeypatch, tmp_path / "data.zip")
    (one,) = datasets.load_hub("longbench_dureader")
    assert (one.chunks, one.answers, one.language) == (("一个文本。",), ("艾达",), "zh")
    assert asked == [("THUDM/LongBench", "data.zip", "dataset")]
    with pytest.raises(InvalidInputError, match="could not be loaded"):
        datasets.load_hub("longbench_multifieldqa_zh")  # the archive does not hold it


def test_2wiki_is_read_from_its_parquet_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    row = {"_id": "w", "question": "Who?", "answer": "Ada"}
    row["context"] = json.dumps([["Harbour", ["Two ferries."]], ["Tower", ["One keeper."]]])
    row["supporting_facts"] = json.dumps([["Tower", 0]])
    path = tmp_path / "dev.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    asked = downloaded(monkeypatch, path)
    (one,) = datasets.load_hub("2wiki")
    assert (one.chunks[1], one.relevant) == ("Tower\nOne keeper.", (1,))
    assert asked == [("xanhho/2WikiMultihopQA", "dev.parquet", "dataset")]


@pytest.mark.parametrize("name", ["musique", "2wiki", "longbench_dureader"])
def test_a_hub_that_is_out_of_reach_is_one_sentence(name: str) -> None:
    with pytest.raises(InvalidInputError, match="go online, or name a folder"):
        datasets.load_hub(name)


def test_chunks_hold_the_whole_text_and_overlap() -> None:
    rng = random.Random(0)
    sentences = [
        " ".join(f"w{rng.randrange(10**6)}" for _ in range(rng.randrange(1, 30))) + "."
        for _ in range(200)
    ]
    text = " ".join(sentences)
    chunks = split_text(text, words, tokens=100, overlap=10)
    position = 0
    for before, chunk in zip([None, *chunks], chunks, strict=False):
        assert words(chunk) <= 100
        assert chunk.endswith(".")  # every sentence here is short enough to end a chunk
        begin = text.index(chunk)
        if before is not None:
            assert begin <= position  # nothing left out
            assert words(text[begin:position]) == 10
        position = begin + len(chunk)
    assert position == len(text)
    apart = split_text(text, words, tokens=100, overlap=0)
    assert " ".join(apart) == text
    # One more sentence would not have fitted.
    assert all(words(f"{chunk} {after.split('. ')[0]}") > 100 for chunk, after in pairwise(apart))


def test_long_sentences_are_cut_between_words_and_long_words_between_letters() -> None:
    text = " ".join(f"w{index}" for index in range(25))
    assert [words(chunk) for chunk in split_text(text, words, tokens=10, overlap=2)] == [10, 10, 9]
    assert split_text("abcdefgh", len, tokens=3, overlap=0) == ["abc", "def", "gh"]
    assert split_text("ab", lambda text: 5 * len(text), tokens=1, overlap=0) == ["a", "b"]
    chinese = "今天天气很好。明天下雨。后天晴。"
    sentences = ["今天天气很好。", "明天下雨。", "后天晴。"]
    assert split_text(chinese, len, tokens=8, overlap=0) == sentences
    assert split_text(chinese, len, tokens=8, overlap=2)[1] == "好。明天下雨。"
    assert split_text(" \n ", words) == []
    for tokens, overlap in ((0, 0), (5, 5), (5, -1)):
        with pytest.raises(InvalidInputError, match="overlap"):
            split_text("x", words, tokens=tokens, overlap=overlap)


def test_estimated_tokens_count_wide_letters_whole() -> None:
    assert estimated_tokens("今天好") == 3
    assert estimated_tokens("abcdefgh") == 2
    assert estimated_tokens("abcdefghi 今天") == 5  # ten others are 2.5, rounded up
