"""Run tests on releases that nobody has tried, and say in a few lines what broke.

    python tools/next_releases.py --dists transformers,chromadb tests/test_models.py -n 2

What stands behind is pytest's.  The lines are also the summary of a job of GitHub's.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parent.parent
_LONGEST: Final = 160  # characters of an error


class Broken:
    """Collects what failed, by pytest's hooks.

    Attributes:
        errors: First line of what was raised, by the test's id, or a file's that does not import.
        passed: How many tests did.
    """

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        self.passed = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.passed and report.when == "call"
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed:
            lines = report.longreprtext.splitlines()
            errors = (line.removeprefix("E") for line in lines if line.startswith("E  "))
            why = next(errors, lines[-1] if lines else "").strip()
            self.errors[report.nodeid] = why[:_LONGEST]


def main() -> int:
    """Run and tell; returns pytest's exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dists", required=True, metavar="NAME,...", help="to say versions of")
    arguments, words = parser.parse_known_args()
    broken = Broken()
    code = int(pytest.main(words, plugins=[broken]))
    told = "\n".join([*versions(arguments.dists.split(",")), *outcome(broken)])
    print(f"\n{told}")
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(f"```\n{told}\n```\n")
    return code


def versions(dists: list[str]) -> Iterator[str]:
    """A line for each: what is installed, and what the project is tested with."""
    pins = tested()
    for name in dists:
        try:
            now = version(name)
        except PackageNotFoundError:
            now = "is not installed"
        known = pins.get(name, "another")
        yield f"{name} {now}" + ("" if now == known else f", tested with {known}")


def tested() -> dict[str, str]:
    """Versions of `constraints.txt`."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition("#")[0] for line in lines]
    asked = [Requirement(pin) for pin in pins if pin.strip()]
    asked = [one for one in asked if one.marker is None or one.marker.evaluate()]
    return {one.name: str(one.specifier).removeprefix("==") for one in asked}


def outcome(broken: Broken) -> Iterator[str]:
    """What broke, by file, and how much did not."""
    files: dict[str, list[str]] = {}
    for name in broken.errors:
        files.setdefault(name.partition("::")[0], []).append(name)
    for file, names in sorted(files.items()):
        yield f"{file}: {len(names)} failed"
        for why in dict.fromkeys(broken.errors[name] for name in names):
            yield f"    {why}"
    yield f"{broken.passed} passed, {len(broken.errors)} failed"


if __name__ == "__main__":
    sys.exit(main())
