"""What `benchmarks.reading` keeps of a row, and what its tables make of rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.household import LANGUAGES
from benchmarks.reading import auroc, gain, main, record_of
from kvcache_rag import Engine

if TYPE_CHECKING:
    from pathlib import Path

NOTES = [
    "Osha Grell is the director of Savo.",
    "The Mobrit costs 412 euros.",
    "The library of Runo is in Bran.",
]


def test_a_record_has_what_the_engine_reads() -> None:
    engine = Engine.from_pretrained("tiny")
    found = record_of(
        engine, "What does the Mobrit cost?", NOTES, (0.3, 0.2, 0.1), (1,), pairs=True
    )
    again = engine.read("What does the Mobrit cost?", NOTES)
    assert found["likelihoods"] == again.likelihoods
    assert found["without"] == again.without
    assert max(range(3), key=lambda place: found["likelihoods"][place]) == 1
    assert found["pairs"][1] == pytest.approx(found["likelihoods"][1], abs=0.02)
    assert json.loads(json.dumps(found))["relevant"] == [1]


def test_gain_and_area_by_hand() -> None:
    assert gain([0, 1, 2], {0}) == 1
    assert gain([1, 0, 2], {0}) == pytest.approx(0.63093, abs=1e-5)
    assert gain([0, 2, 1], {0, 1}) == pytest.approx(1.5 / 1.63093, abs=1e-5)
    assert gain([*range(20)], {15}) == 0
    assert auroc([2, 3], [1, 2]) == 0.875
    assert auroc([1], [1]) == 0.5


def test_tables_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row: dict[str, Any] = {"relevant": [0], "scores": [0.2, 0.9, 0.1], "words": [0.0] * 3}
    row |= {"ranked_by": [0.0, 1.0, -1.0], "likelihoods": [-10.0, -20.0, -30.0]}
    row |= {"without": -25.0, "question_tokens": 5, "read_tokens": 30}
    names = ("squad", "hotpotqa")
    rows = [{**row, "set": name, "id": str(number)} for name in names for number in range(4)]
    for number, (_, relevant) in enumerate(LANGUAGES["German"].asked):
        of_set = {"set": "household German", "id": str(number), "relevant": list(relevant)}
        likely = -5.0 if relevant else -24.0
        rows.append({**row, **of_set, "scores": [], "likelihoods": [likely] * 6})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "some.jsonl").write_text(text, encoding="utf-8")
    options = ["--name", "some", "--data", str(tmp_path), "--work", str(tmp_path), "--table"]
    assert main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| squad | 4 | scores | 0 | 100 | 100 | 0.631 |" in lines
    assert "| squad | 4 | reading | 100 | 100 | 100 | 1.000 |" in lines
    assert "| household German, other things | 20, 10 | 1.000 | 1.000 | 1.000 |  |" in lines
    assert "| squad, nq without their documents | 4, 4 | 1.000 | 1.000 | 1.000 | 0.500 |" in lines


def test_households_have_as_many_questions_in_both_languages() -> None:
    english, german = LANGUAGES.values()
    assert len(english.asked) == len(german.asked) == 40
    assert [note for _, note in english.answered] == [note for _, note in german.answered]
