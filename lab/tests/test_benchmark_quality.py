"""The packaged reader's part of docs/quality.md is that of the results, and has no hole."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.quality_document import ANSWERS, PARTS, READER, lowered, parts, put
from benchmarks.quality_page import MODELS, page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "benchmarks" / "results" / "quality.json"


def test_the_part_is_that_of_the_results() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    file = ROOT / "docs" / "quality.md"
    assert parts(file)[READER] == lowered(page(results))
    assert all(f"<!-- {name} -->" in file.read_text(encoding="utf-8") for name in PARTS)


def test_a_policy_that_not_every_model_was_asked_under_has_empty_cells() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    text = page(results)
    assert "{" not in text
    full, union = (
        next(line for line in text.splitlines() if line.startswith(start))
        for start in ("| full prefill |", "| LegoLink \\| CacheBlend |")
    )
    assert full.startswith("| full prefill | 100 % | 95.0 | ")
    assert full.count(" | ") == union.count(" | ") == 1 + 2 * len(MODELS)
    assert "|  |  |" in union


def test_parts_of_the_page_leave_each_other_alone(tmp_path: Path) -> None:
    file = tmp_path / "quality.md"
    put(file, READER, "# One\n\n## Two\n")
    put(file, ANSWERS, "# Three\n")
    put(file, ANSWERS, "# Four\n")
    assert parts(file) == {ANSWERS: "## Four\n", READER: "## One\n\n### Two\n"}
    assert file.read_text(encoding="utf-8").startswith("# Quality\n\n<!-- public questions")
    assert lowered("no\n# yes\n") == "no\n## yes\n"
