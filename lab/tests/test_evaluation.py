"""`kvcache-rag eval`: every cell answers the same questions, and the table says how well."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag import InvalidInputError, cli
from kvcache_rag.codecs import CODECS
from kvcache_rag_lab.commands import evaluate
from kvcache_rag_lab.evaluation import tasks
from kvcache_rag_lab.reader import KINDS, examples

if TYPE_CHECKING:
    from pathlib import Path


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    return parser.parse_args(list(given))


def groups(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["groups"]
    return found


def test_the_reader_is_asked_all_its_kinds(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    given = ("--questions", "4", "--report", str(file), "--policies", "reuse", "--timed", "0")
    assert evaluate.run(arguments(*given)) == 0
    assert [group["task"] for group in groups(file)] == [f"reader_{kind}" for kind in KINDS]


def test_the_packaged_reader_answers_and_refuses(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    given = ("--task", "reader_single", "reader_unanswerable", "--questions", "12", "--timed", "0")
    assert evaluate.run(arguments(*given, "--report", str(file))) == 0
    for group, refuses in zip(groups(file), (False, True), strict=True):
        assert group["scored"] is True
        for row in group["rows"][:2]:
            assert row["quality"]["value"] >= 0.8
            assert (row["scores"]["refused"]["value"] > 0.8) is refuses
        closed = group["rows"][-1]
        assert (closed["policy"], closed["scores"]["refused"]["value"]) == ("closed book", 1)


def test_codecs_stand_beside_native(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    given = ("--task", "reader_single", "--questions", "8", "--timed", "0", "--report", str(file))
    assert evaluate.run(arguments(*given, "--kv-codec", "int8", "--policies", "reuse")) == 0
    (group,) = groups(file)
    native, int8, closed = group["rows"]
    assert closed["policy"] == "closed book"
    assert (native["codec"], int8["codec"]) == ("native", "int8")
    assert (native["reused_share"], int8["reused_share"]) == (1, 1)
    assert native["changed"] is None
    assert 0 < int8["divergence"][0] <= int8["divergence"][1] < 0.5
    assert tuple(CODECS) == evaluate.CODECS


def test_a_folder_of_results_takes_more_policies_and_more_k(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "folder"
    given = ("--task", "reader_single", "--questions", "4", "--timed", "2", "--out", str(out))
    assert evaluate.run(arguments(*given, "--policies", "full", "--k", "2")) == 0
    first = (out / "records.jsonl").read_bytes()
    wider = ("--policies", "full", "legolink:2", "cacheblend:0.3", "--k", "2", "6")
    assert evaluate.run(arguments(*given, *wider)) == 0
    assert (out / "records.jsonl").read_bytes().startswith(first)
    assert "<svg" in (out / "plot.svg").read_text(encoding="utf-8")
    assert (out / "report.md").read_text(encoding="utf-8") in capsys.readouterr().out
    found = groups(out / "report.json")
    assert [group["k"] for group in found] == [2, 6]
    shares = {row["policy"]: row["recomputed_share"] for row in found[1]["rows"]}
    assert shares["full"] == 1
    assert 0 < shares["legolink:2"] < shares["cacheblend:0.3"] == pytest.approx(0.3, abs=0.05)
    monkeypatch.setattr(tasks, "examples", lambda _: examples("alias"))
    with pytest.raises(InvalidInputError, match="other questions"):
        evaluate.run(arguments(*given, "--policies", "full", "--k", "2"))


def test_a_set_is_cut_alike_under_both_of_its_names(tmp_path: Path) -> None:
    text = "".join(f"Zeile {index} steht hier. " for index in range(400))
    documents = [{"id": "d", "text": text, "relevant": True}]
    row = {"id": "1", "question": "Wo?", "answers": ["hier"], "documents": documents}
    (tmp_path / "longbench_multifieldqa_zh.jsonl").write_text(json.dumps(row), encoding="utf-8")
    cut = [
        evaluate._tasks(arguments("--task", name, "--data", str(tmp_path)))[0].questions()[0].chunks
        for name in ("multifieldqa_zh", "longbench_multifieldqa_zh")
    ]
    assert cut[0] == cut[1]
    assert len(cut[0]) > 2, "by the reader's tokens, which are more than the estimate"


def test_an_auxiliary_model_scores_chunks(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    given = ("--task", "reader_single", "--questions", "4", "--timed", "1", "--report", str(file))
    clip = ("--policies", "cacheclip:0.4", "--auxiliary", "tiny")
    assert evaluate.run(arguments(*given, *clip)) == 0
    assert 0 < groups(file)[0]["rows"][0]["recomputed_share"] < 0.5


def test_differences_are_told_below_the_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reader cannot read plain English; what it loses by stitching is there all the same."""
    documents = [{"id": "d", "text": "Ada keeps the keys.", "relevant": True}]
    row = {"question": "Who keeps the keys?", "answers": ["Ada"], "documents": documents}
    rows = [json.dumps({**row, "id": str(number)}) + "\n" for number in range(4)]
    (tmp_path / "squad.jsonl").write_text("".join(rows), encoding="utf-8")
    file = tmp_path / "out.json"
    given = ("--task", "squad", "--data", str(tmp_path), "--timed", "0", "--report", str(file))
    assert evaluate.run(arguments(*given, "--in-order", "--questions", "3")) == 0
    (group,) = groups(file)
    assert (group["n"], group["scored"], group["metric"]) == (3, False, "containment")
    full, reuse, closed = group["rows"]
    assert full["difference"] is None
    above = full["quality"]["value"] - closed["quality"]["value"]
    assert full["above_closed"]["difference"] == above
    for name in ("difference", "above_closed"):
        assert reuse[name]["low"] <= reuse[name]["difference"] <= reuse[name]["high"]
        assert closed[name] is None
    assert "Not scored" in capsys.readouterr().out
    assert evaluate.run(arguments(*given, "--questions", "1", "--metric", "f1")) == 0
    assert groups(file)[0]["metric"] == "f1"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--kv-codec int8 --policies full", "reuses chunks"),
        ("--questions 0", "--questions must"),
        ("--length 0", "--length must"),
        ("--batch 0", "--batch must"),
        ("--timed -1", "--timed must be at least 0, not -1"),
        ("--seed -1", "--seed must be at least 0, not -1"),
        ("--report no/such/folder/x.json", "cannot be a file"),
        ("--report .", "cannot be a file"),
        (f"--out {__file__}", "is a file; name a folder"),
        ("--plot x.txt", "must end in"),
        ("--plot x.png --timed 0", "--timed"),
        ("--data no/such/folder", "no folder"),
        ("--task hotpotqa --data .", "hotpotqa"),
        ("./no/such/model --task reader_single", "no model folder"),
        ("./no/such/model --task niah_single_1", "no model folder"),
        ("--policies cacheclip --auxiliary ./no/such/model", "no model folder"),
        ("no/such --task reader_single", "cannot load the model 'no/such'"),
    ],
)
def test_settings_that_cannot_be_used_say_so_at_once(
    given: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", *given.split()]) == cli.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
