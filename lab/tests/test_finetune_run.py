"""The folder of an unfinished run: nothing of anybody else is touched, and nothing is lost."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from reader_file import reader_data

from kvcache_rag import InvalidInputError
from kvcache_rag_lab.finetune import FinetuneConfig, JsonlData, Measure, Report
from kvcache_rag_lab.finetune.loop import RunFolder
from kvcache_rag_lab.finetune.run import finetune
from kvcache_rag_lab.finetune.sources import open_data

if TYPE_CHECKING:
    from pathlib import Path


def settings(out: Path, **changes: Any) -> FinetuneConfig:
    return FinetuneConfig(**{"model": "tiny", "out": out, "data": reader_data(), **changes})


def test_a_model_that_does_not_load_leaves_nothing_that_stops_the_next_one(tmp_path: Path) -> None:
    for name in ("first", "second"):  # the second is another setting
        missing = str(tmp_path / name)
        with pytest.raises(InvalidInputError, match=f"no model folder.*{name}"):
            finetune(settings(tmp_path / "out", model=missing))


def test_a_folder_with_other_files_is_not_worked_in(tmp_path: Path) -> None:
    mine = tmp_path / "work" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("years of work")
    with pytest.raises(InvalidInputError, match="holds other files"):
        finetune(settings(tmp_path / "out", work=mine.parent))
    assert [path.name for path in mine.parent.iterdir()] == ["thesis.txt"]


def test_only_our_files_are_removed(tmp_path: Path) -> None:
    work = RunFolder(tmp_path / "work")
    with work.open({}):
        (work.folder / "notes.txt").write_text("kept")
        (work.folder / "notes").mkdir()
        work.log.write_text("")
        work.remove()
    assert sorted(path.name for path in work.folder.iterdir()) == ["notes", "notes.txt"]
    empty = RunFolder(tmp_path / "empty")
    with empty.open({}):
        empty.remove()
    assert not empty.folder.exists()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path).open({"a": 1}),
        pytest.raises(InvalidInputError, match="another run is at work"),
    ):
        RunFolder(tmp_path).open({"a": 1}).__enter__()
    with RunFolder(tmp_path).open({"a": 2}) as unfinished:
        assert not unfinished, "a run without a checkpoint has done nothing"


@pytest.mark.parametrize("work", ["out", "out/work", "."])
def test_output_and_work_are_two_folders(tmp_path: Path, work: str) -> None:
    with pytest.raises(InvalidInputError, match="must be two folders"):
        finetune(settings(tmp_path / "out", work=tmp_path / work))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "7", "[1]"])
def test_damaged_settings_are_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "settings.json").write_text(content)
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    with pytest.raises(InvalidInputError, match=r"settings\.json is damaged"):
        RunFolder(tmp_path).open({"a": 1}).__enter__()


def test_damaged_lines_of_the_log_are_dropped(tmp_path: Path) -> None:
    work = RunFolder(tmp_path)
    work.log.write_text('{"step": 1}\nnonsense\n[]\n{"step": 2}\n{"step": 3}\n{"step"')
    work.cut_log(2)
    assert work.log.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize(
    ("name", "values"),
    [("rate", (math.inf, math.nan)), ("weight_decay", (math.nan, math.inf)), ("seed", (2**63, -1))],
)
def test_numbers_that_ruin_a_run_are_refused(
    tmp_path: Path, name: str, values: tuple[float, ...]
) -> None:
    for value in values:
        with pytest.raises(InvalidInputError, match=name):
            settings(tmp_path / "out", **{name: value})


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "qa.jsonl"
    rest = {"answers": ["a"], "documents": ["d"]}
    lines = [json.dumps({"question": f"{n}?", **rest, "documents": [n]}) for n in "12"]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n")
    data = open_data(JsonlData(path), None, seed=0, holdout=1)
    samples = (data.held_qa[0], data.qa.draw(0))
    assert {one.questions[0].question for one in samples} == {"1?", "2?"}


def test_one_held_out_sample_proves_nothing_and_the_report_is_json() -> None:
    before, after = Measure((1.0,), (True,)), Measure((2.0,), (False,))
    kinds = ("plain", "free", "full", "block")
    report = Report(
        dict.fromkeys(kinds, before), dict.fromkeys(kinds, after), 1, 1, 1.0, 0, "data", {}
    )
    written = json.loads(json.dumps(report.to_json(), allow_nan=False))
    change = {"mean": 1.0, "low": None, "high": None}
    assert written["measures"]["plain"]["loss_change"] == change
    assert "one held-out sample proves nothing" in report.verdict[0]
    assert "no regression" not in " ".join(report.verdict)
