"""`kvcache-rag eval`: every policy answers the same questions, and the table says how well."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import pytest

from kvcache_rag import Engine, FullRecompute, Int4, Int8, InvalidInputError, Native, Reuse
from kvcache_rag.codecs import CODECS
from kvcache_rag.commands import evaluate
from kvcache_rag.evaluation.codec_task import evaluate_codecs
from kvcache_rag.evaluation.reader_task import evaluate_reader, examples

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ["single", "unanswerable"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("tiny")


def test_policies_answer_the_same_questions(engine: Engine) -> None:
    noted = []
    results = evaluate_reader(
        engine, [FullRecompute(), Reuse()], questions=12, kinds=KINDS, note=noted.append
    )
    assert noted == results
    assert [(one.kind, one.policy) for one in results] == [
        (kind, repr(policy)) for kind in KINDS for policy in (FullRecompute(), Reuse())
    ]
    assert len({one.right.trials for one in results if one.kind == "single"}) == 1
    assert all(one.right.trials >= 12 and one.right.value >= 0.8 for one in results)
    assert [one.refused.value > 0.8 for one in results] == [False, False, True, True]
    assert [one.reused_share for one in results] == [0, 1, 0, 1]


def test_a_wrong_answer_counts_as_wrong(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_rag.evaluation.reader_task.MAX_NEW_TOKENS", 1)
    (result,) = evaluate_reader(engine, [Reuse()], questions=8, kinds=["single"])
    assert result.right.value < 0.6, "one token is no whole answer as a rule"


def test_codecs_answer_the_same_questions_from_files(engine: Engine, tmp_path: Path) -> None:
    noted = []
    results = evaluate_codecs(
        engine,
        [Int4(), Int8(), Native()],
        Reuse(),
        tmp_path,
        questions=12,
        kinds=["single"],
        note=noted.append,
    )
    assert noted == results
    assert [one.codec for one in results] == ["native", "int4-g64", "int8-kc-vt"]
    assert all(one.loaded_share == 1 and one.right.value >= 0.8 for one in results)
    native, int4, int8 = results
    assert (native.divergence, native.largest, native.changed.value) == (0, 0, 0)
    assert 0 < 5 * int8.divergence < int4.divergence < int4.largest < 0.5
    assert not list(tmp_path.glob("native/*/*/*/*.safetensors"))[2:], "chunks were left over"


def test_another_seed_asks_other_questions() -> None:
    one, other = (examples("single", 4, seed, 6, 4) for seed in (0, 1))
    assert one != other
    assert one == examples("single", 4, 0, 6, 4)


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    return parser.parse_args(list(given))


def test_the_command_prints_intervals_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    assert evaluate.run(arguments("--n", "4", "--json", str(file), "--policies", "reordered")) == 0
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert [row["kind"] for row in rows] == [
        "single",
        "same_relation",
        "unanswerable",
        "two_hop",
        "multi_value",
    ]
    low, high = rows[0]["right"]["interval"]
    assert 0 <= low <= rows[0]["right"]["value"] <= high <= 1
    assert f"{100 * low:.1f}-{100 * high:.1f}" in printed


def test_the_command_compares_codecs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert evaluate.run(arguments("--n", "4", "--json", str(file), "--codec", "int8")) == 0
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert [row["codec"] for row in rows] == ["native", "int8-kc-vt"] * 5
    assert {row["policy"] for row in rows} == {"Reuse(positions='reordered')"}
    low, high = rows[1]["changed"]["interval"]
    assert f"{100 * low:.1f}-{100 * high:.1f}" in printed
    assert tuple(CODECS) == evaluate.CODECS


@pytest.mark.parametrize(
    "given",
    [
        ["--codec", "int8", "--policies", "full"],
        ["--n", "0"],
        ["--facts", "0"],
        ["--json", "no/such/folder/x.json"],
        ["--json", "."],
    ],
)
def test_settings_that_cannot_be_used_say_so_at_once(given: list[str]) -> None:
    with pytest.raises(InvalidInputError):
        evaluate.run(arguments(*given))
