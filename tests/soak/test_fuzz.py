"""Every target for fifteen seconds, side by side; `--long` as many inputs as a release wants."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.fuzz import fuzzing
from tests.fuzz.targets import TARGETS
from tests.reliability import record

if TYPE_CHECKING:
    from tests.soak.conftest import Amount

SECONDS = 15
EXECUTIONS = {"header": 1_000_000, "keys": 1_000_000, "scanner": 1_000_000, "schema": 100_000}
LAWS = {
    "header": "inputs as the file of a chunk, unsigned and signed",
    "keys": "inputs as the file of API keys",
    "scanner": "inputs as JSON of a body, looked at for its structure",
    "schema": "inputs as the body of a chat, through the whole application",
}


@pytest.mark.timeout(3600)
def test_no_input_breaks_a_law(amount: Amount, capsys: pytest.CaptureFixture[str]) -> None:
    engine = fuzzing.best_engine()

    def run(name: str) -> fuzzing.Run:
        if amount.is_long:
            return fuzzing.fuzz(name, engine, executions=EXECUTIONS[name])
        return fuzzing.fuzz(name, engine, seconds=SECONDS)

    with ThreadPoolExecutor(2 if amount.is_long else len(TARGETS)) as pool:
        runs = list(pool.map(run, TARGETS))
    with capsys.disabled():
        print("", *runs, sep="\n")  # noqa: T201 - what `make soak` is to show
    for done in runs:
        seen = {"laws_broken": 0, "made_by": done.engine, "branches_seen": done.covered or "-"}
        record(f"fuzz-{done.target}", "fuzzing", LAWS[done.target], done.executions, **seen)
    if amount.is_long:
        assert all(done.executions >= EXECUTIONS[done.target] for done in runs)
    assert all(done.executions > 500 for done in runs), runs
