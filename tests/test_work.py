"""The work of scripted questions does not grow: counted without a clock, by `tools/work.py`."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tools import work
from tools.scripted import Ear

if TYPE_CHECKING:
    from pathlib import Path

HINT = "python tools/work.py --write"
# On a busy machine threads meet in another order, and what clocks said decides some calls.
ATTEMPTS = 4
SLACK = {"calls": 1.01}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    work.warm_up()


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(work.GOLDEN.read_text(encoding="utf-8"))
    return found


def hint(text: str) -> None:
    """A line of the summary; a warning as such would be an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(text, stacklevel=2)


@pytest.mark.parametrize("name", work.SCRIPTS)
def test_work_does_not_grow(name: str, golden: dict[str, Any]) -> None:
    before = golden["work"][name]
    held = work.comparable(golden["versions"])
    for _ in range(ATTEMPTS):
        least, runs = work.measured(name)
        now = asdict(least)
        most = {key: before[key] * SLACK.get(key, 1) for key in held}
        grown = {key: (before[key], now[key]) for key in held if now[key] > most[key]}
        if not grown:
            break
    assert not grown, f"{name} does more than before (was, is): {grown}; runs: {runs}"
    fallen = {key: (before[key], now[key]) for key in held if now[key] < before[key]}
    if fallen:
        hint(f"{name} does less than before (was, is): {fallen}; keep that by `{HINT}`")


def test_every_script_is_recorded(golden: dict[str, Any]) -> None:
    assert set(golden["work"]) == set(work.SCRIPTS)


def test_what_is_done_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(100))
    (tmp_path.parent / "other").write_bytes(bytes(7))
    values = torch.zeros(1 << 19)

    def run() -> None:
        file.read_bytes()
        (tmp_path.parent / "other").read_bytes()
        values.clone()
        values[:10].contiguous().view(2, 5)

    found = work.counted(Ear(), tmp_path, run)
    # None of it was done by the package.
    assert found == work.Work(opens=1, read=100, all_copied=4 << 19, all_large=1)
