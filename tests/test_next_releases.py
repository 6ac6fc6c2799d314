"""What the job on untried releases says."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

TOOL = Path(__file__).parent.parent / "tools" / "next_releases.py"

TESTS = """
import pytest

def test_good(): pass

@pytest.mark.parametrize("number", [1, 2])
def test_bad(number):
    raise TypeError("forward() has no argument 'cache'")

@pytest.fixture
def gone():
    raise AttributeError("no DynamicCache")

def test_worse(gone): pass
"""


def test_versions_and_failures_are_told_in_a_few_lines(tmp_path: Path) -> None:
    (tmp_path / "test_calls.py").write_text(TESTS)
    (tmp_path / "test_imports.py").write_text("import no_such_module_of_theirs\n")
    summary = tmp_path / "summary"
    words = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "."]
    done = subprocess.run(
        [sys.executable, TOOL, "--dists", "pytest,no-such-dist", *words],
        cwd=tmp_path,
        env={"GITHUB_STEP_SUMMARY": str(summary)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    told = summary.read_text().splitlines()
    assert told[0] == told[-1] == "```"
    assert told[1].startswith(f"pytest {version('pytest')}")
    assert told[2:-1] == [
        "no-such-dist is not installed, tested with another",
        "test_calls.py: 3 failed",
        "    TypeError: forward() has no argument 'cache'",
        "    AttributeError: no DynamicCache",
        "test_imports.py: 1 failed",
        "    ModuleNotFoundError: No module named 'no_such_module_of_theirs'",
        "1 passed, 4 failed",
    ]
    assert done.stdout.endswith("\n".join(told[1:-1]) + "\n")
