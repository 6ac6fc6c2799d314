"""Answers to public questions: what is asked again, what is kept of them, what tables say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks import answers
from benchmarks.answers import SETS, in_first_half
from benchmarks.answers_scores import (
    Results,
    Rows,
    by_retriever,
    columns,
    common,
    halves,
    report_of,
    scores,
    sizes,
    sooner,
    sooner_on_average,
)
from benchmarks.common import RAW, read, result_file
from benchmarks.kvshift import KVShift
from kvcache_rag import Engine, InvalidInputError
from kvcache_rag_lab.scoring.ask import CLOSED_BOOK, Asked, Place, Record
from kvcache_rag_lab.scoring.question import Question

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TWO = ("squad", "nq")
NAMES = ("Ada", "Bo", "Cy", "Di")
THINGS = ("keys", "map", "boat", "lamp")
ROWS = 16


def row(number: int, name: str) -> dict[str, Any]:
    """A row of our own, with the shape of the data sets."""
    documents = [
        {"id": f"d{place}", "text": f"{who} keeps the {thing}.", "relevant": place == number % 4}
        for place, (who, thing) in enumerate(zip(NAMES, THINGS, strict=True))
    ]
    return {
        "id": f"{name}-{number}",
        "question": f"Who keeps the {THINGS[number % 4]}, number {number}?",
        "answers": [NAMES[number % 4]],
        "documents": documents,
    }


def embedded(_: object, texts: Sequence[str]) -> Any:
    """Texts that name the same thing are alike."""
    return np.asarray([[float(thing in text) for thing in THINGS] for text in texts])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in SETS:
        rows = [row(number, name) for number in range(ROWS)]
        write(folder / f"{name}.jsonl", rows)
    corpus = [{"id": f"p{number}", "text": f"It is the {number}. " * 20} for number in range(60)]
    write(folder / "squad_corpus.jsonl", corpus)
    queries = [
        {"id": f"q{n}", "question": f"Is it {n}?", "answers": [str(n)], "gold": f"p{n}"}
        for n in range(60)
    ]
    write(folder / "squad_queries.jsonl", queries)
    return folder


def write(file: Path, rows: Sequence[Any]) -> None:
    file.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")


@pytest.fixture
def run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, over the packaged reader."""
    monkeypatch.setattr(answers.Retriever, "_embedded", embedded)

    def asked(*more: str, work: str = "work") -> Results | None:
        given = ["--model", "tiny", "--name", "tiny", "--data", str(data), "--sets", "squad", "nq"]
        given += ["--work", str(tmp_path / work), "--json", str(tmp_path / "answers.json")]
        given += ["--rows", "3"]
        assert answers.main([*given, *more]) == 0
        return Results.read(tmp_path / "answers.json", "tiny")

    return asked


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Questions that a model was asked."""
    asked: list[str] = []
    answered = Engine.generate_batch

    def count(engine: Engine, questions: Sequence[Any], **options: Any) -> Any:
        asked.extend(question for question, *_ in questions)
        return answered(engine, questions, **options)

    monkeypatch.setattr(Engine, "generate_batch", count)
    return asked


def test_the_halves_share_no_row_and_stay() -> None:
    ids = [f"squad-{number}" for number in range(1000)]
    first = [name for name in ids if in_first_half(name)]
    assert 450 < len(first) < 550
    assert first[:3] == ["squad-4", "squad-5", "squad-6"]


def test_the_best_document_is_asked_first(run: Any, tmp_path: Path, data: Path) -> None:
    retriever = answers.Retriever(tmp_path)
    (question,) = answers.task_by_name("squad", data=data).in_order().questions(3)[2:]
    (ranked,) = retriever.ranked([question])
    assert ranked.chunks[0] == "Cy keeps the boat."
    assert ranked.relevant == (0,)
    assert sorted(ranked.chunks) == sorted(question.chunks)


def test_a_run_goes_on_from_its_answers_and_from_results_alone(
    run: Any, tmp_path: Path, counted: list[str]
) -> None:
    run("--policies", "full", "reuse")
    found = run("--collect", "--title", "Tiny")
    assert len(counted) == 2 * 2 * 3
    text = (tmp_path / "answers.json").read_text(encoding="utf-8")
    assert not any(word in text for word in ("keeps", "Ada", "boat", "number", "squad-"))
    assert found.about["title"] == "Tiny"
    squad = found.sets["squad"]
    assert squad.half == [1, 1, 1]
    assert squad.clusters[0] == squad.clusters[1], "the same documents in another order"
    assert squad.found["full"]["computed"] == [1, 1, 1]
    assert "kl" not in squad.found["full"]
    assert "f1" not in found.sets["nq"].found["full"]
    assert min(squad.found["reuse"]["kl"]) >= 0
    assert all(len(one) == 3 for columns in squad.found.values() for one in columns.values())

    counted.clear()
    run("--policies", "full", "reuse")
    assert not counted, "its own answers are there"
    again = run("--collect", work="lost")
    assert again == found, "results alone are left, and none of them is lost"
    run("--policies", "full", "reuse", work="lost")
    assert not counted, "and what they hold is not asked"
    run("--policies", "full", "reuse", "pced", CLOSED_BOOK, work="lost")
    # But what they do not hold: a row for each of four documents and one without, and one alone.
    assert len(counted) == 2 * 3 * (5 + 1)
    more = run("--collect", work="lost").sets
    assert more["squad"].rows == squad.rows
    assert more["squad"].found["reuse"] == squad.found["reuse"]
    assert set(more["nq"].found) == {"full", "reuse", "pced", CLOSED_BOOK}
    assert more["nq"].found["pced"]["computed"] == [0, 0, 0]


def test_what_is_not_computed_again_may_be_shifted(run: Any) -> None:
    assert answers.candidate("kvshift:0.2,1") == KVShift(0.2, 1)
    run("--policies", "full", "reuse", "kvshift", "kvshift:0.1,1")
    squad = run("--collect").sets["squad"]
    assert set(squad.found) == {"full", "reuse", "kvshift", "kvshift:0.1,1"}
    for label in ("kvshift", "kvshift:0.1,1"):
        assert all(0.1 < share < 0.3 for share in squad.found[label]["computed"])
        assert squad.found[label]["kl"] != squad.found["reuse"]["kl"]


def test_results_of_other_weights_or_questions_are_refused(
    run: Any, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--policies", "full")
    found = run("--collect")
    with pytest.raises(InvalidInputError, match=r"weights .*, not other; take another --name"):
        found.check(tmp_path, {**found.about["identity"], "weights": "other"})
    for name in ("squad", "nq"):
        rows = [{**row(number, name), "answers": ["Flo"]} for number in range(ROWS)]
        write(tmp_path / f"{name}.jsonl", rows)
    given = ["--model", "tiny", "--name", "tiny", "--data", str(tmp_path), "--collect"]
    given += ["--work", str(tmp_path / "work"), "--json", str(tmp_path / "answers.json")]
    assert answers.main(given) == 1
    assert "was another question of" in capsys.readouterr().err


def test_times_are_of_sets_and_of_two_lengths(run: Any) -> None:
    some = ("--part", "times", "--timed", "2", "--policies", "full", "reuse")
    found = run(*some, "--sets", "squad")
    assert set(found.times) == {"squad", "1k", "4k"}
    for name, least, most in (("1k", 800, 1100), ("4k", 3700, 4200)):
        assert least < found.times[name]["tokens"] < most
        assert set(found.times[name]["ms"]) == {"full", "reuse"}
        assert all(min(values) > 0 for values in found.times[name]["ms"].values())
    assert found.sittings[0]["part"] == "times"
    assert run(*some, "--sets", "squad").times == found.times, "what is timed is not timed again"
    assert run("--collect").times == found.times


def test_an_answer_takes_the_place_of_an_older_one() -> None:
    rows = Rows()
    asked = [
        Asked.from_question(Question(str(n), f"Who {n}?", ("a", "b"), ("x",))) for n in range(3)
    ]
    for place, half, found in ((2, 1, {"right": 1}), (0, 2, {"right": 0, "kl": 0.5})):
        rows.keep(asked[place], half, "full", found)
    rows.keep(asked[2], 1, "full", {"right": 0})
    assert (rows.column("full", "right"), rows.column("full", "kl")) == ([0, 0], [None, 0.5])
    assert rows.column("reuse", "right") == [None, None]
    assert len(set(rows.clusters)) == 1


def test_what_is_kept_of_an_answer() -> None:
    place = Place("squad", "1", "tiny", "reuse", "", None)
    tokens = {"chunk_tokens": 300, "reused_tokens": 200, "recomputed_tokens": 100}
    record = Record(
        place, "d", "c", {"containment": 1.0}, "The Cat.", generated_tokens=3,
        divergence=0.0123456, **tokens,
    )  # fmt: skip
    kept = columns(record, {"containment": 0.0, "exact_match": 1.0, "wrong_document": 1.0})
    same = columns(replace(record, answer="cat"), {"containment": 1})
    assert kept.pop("answer") == same["answer"]
    assert kept == {"right": 0, "wrong_document": 1, "kl": 0.01235, "computed": 0.3333}


SITTING = {"began": "now", "part": "answers", "date": "2026-11-25", "machine": "Z80, 1 core"}
SITTING |= {"versions": "torch 2", "commit": "abc", "threads": 1, "batch": 4, "load": 0.5}


def measured(**more: list[Any]) -> Results:
    """Twelve rows of two sets, of which the last two are of the second half."""
    full = {"right": [1, 1, 1, 0, 1, 1], "wrong_document": [0, 0, 0, 1, 0, 0]}
    less = {"right": [1, 0, 1, 0, 0, 1], "wrong_document": [0, 1, 0, 1, 0, 0]}
    kept = {"answer": list("abcdef"), "computed": [1] * 6}
    reused = {"answer": list("axcdxf"), "computed": [0] * 6, "kl": [0.1, 0.4, 0.2, 0.3, 9, 9]}
    reused["f1"] = [0.2, 0.2, 0.6, 0.6, 0, 0]
    found = {"full": {**full, **kept}, "reuse": {**less, **reused}}
    about = {"title": "Tiny", "identity": {"sha256": "12", "dtype": "float32"}}
    results = Results(about, [SITTING])
    for name in ("squad", "nq"):
        names = [f"{name}{number}" for number in range(6)]
        results.sets[name] = Rows(names, [1, 1, 1, 1, 2, 2], list("aabbcc"), found)
    for label, column in more.items():
        results.sets["nq"].found = {**found, label: {**found["reuse"], "right": column}}
    ms = {"full": [900.0, 1100.0], "reuse": [100.0, 100.0]}
    results.times = {
        name: {"rows": ["x", "y"], "tokens": 1000, "ms": ms} for name in ("squad", "1k")
    }
    return results


def test_policies_are_compared_row_by_row(tmp_path: Path) -> None:
    measured(other=[1, 1, 1, None, 1, 1]).write(tmp_path / "answers.json", "tiny")
    results = Results.read(tmp_path / "answers.json", "tiny")
    assert halves(results) == [1, 2]
    assert sizes(results, 1) == {"squad": 4, "nq": 4}
    found = scores(results, 1)
    assert list(found) == ["full", "reuse"], "what not every row was asked has no mean"
    full, reuse = found["full"], found["reuse"]
    assert (full["right"].value, reuse["right"].value) == (0.75, 0.5)
    assert reuse["minus_full"].difference == -0.25
    assert (reuse["same"], reuse["kl"], reuse["f1"].value) == (0.75, 0.25, 0.4)
    assert (full["f1"], full["kl"]) == (None, None), "what a set does not score"
    assert (full["ms"].value, reuse["ms"].value) == (1000, 100)
    assert (full["wrong"].value, reuse["wrong"].value) == (0.25, 0.5)
    assert reuse["wrong_minus_full"].difference == 0.25
    assert (full["computed"], reuse["computed"]) == (1, 0)
    assert list(scores(results, 2, ["nq"])) == ["full", "reuse", "other"], "all of these were"
    assert scores(results, 2)["reuse"]["same"] == 0.5


def test_some_policies_are_compared_over_rows_that_all_of_them_answered() -> None:
    results = measured(other=[1, None, 0, None, 1, 1])
    few = common(results, ["full", "other"])
    assert {name: len(rows.rows) for name, rows in few.sets.items()} == {"squad": 0, "nq": 4}
    assert few.sets["nq"].clusters == list("abcc")
    assert few.sets["nq"].found["other"]["right"] == [1, 0, 1, 1]
    assert few.sets["nq"].found["other"]["kl"] == [0.1, 0.2, 9, 9]
    found = scores(few, 1)
    assert list(found) == ["full", "other"]
    assert (found["full"]["right"].value, found["other"]["right"].value) == (1, 0.5)


def test_right_answers_are_told_apart_by_the_retrievers_best() -> None:
    found: dict[str, dict[str, list[Any]]] = {
        "full": {"right": [1, 0, 1, 1], "hit": [1.0, 1.0, 0.0, None]},
        "reuse": {"right": [0, 0, 1]},
        "late": {"right": [1, None, 0]},
    }
    rows = Rows(list("abcd"), [1, 2, 1, 1], list("abcd"), found)
    results = replace(measured(), sets={"squad": rows})
    assert by_retriever(results, "squad") == {
        True: {"full": (2, 0.5), "reuse": (2, 0.0)},
        False: {"full": (1, 1.0), "reuse": (1, 1.0), "late": (1, 0.0)},
    }
    assert by_retriever(measured(), "nq") == {}, "results of before do not say it"


def test_times_are_told_as_medians_and_as_means() -> None:
    results = replace(measured(), sets={})
    # One row costs much: the median hides it, the mean does not.
    ms = {"full": [900.0, 1000.0, 1100.0], "bestfew": [100.0, 100.0, 550.0]}
    results.times["1k"]["ms"] = ms
    assert sooner(results, ["4k"], "bestfew") is sooner_on_average(results, ["4k"], "bestfew")
    found = report_of({"tiny": vars(results)})["first tokens"]
    (row,) = [row for row in found if (row["length"], row["policy"]) == ("1k", "bestfew")]
    assert (row["ms"]["value"], row["mean ms"]["value"]) == (100, 250)
    assert (row["sooner"]["value"], row["mean, sooner"]["value"]) == (9, 4)


def test_the_committed_tables_are_those_of_the_committed_rows() -> None:
    report = read(result_file("answers"))
    made = report_of({"qwen05": report[RAW]["qwen05"]})  # others take as long again
    for name in ("scores", "first tokens"):
        of_model = [one for one in report[name] if one["model"] == "qwen05"]
        for kept, fresh in zip(of_model, made[name], strict=True):
            assert [kept["model"], kept["policy"]] == [fresh["model"], fresh["policy"]]
            if name == "scores":
                assert kept["right"]["value"] == pytest.approx(fresh["right"]["value"], abs=1e-4)
