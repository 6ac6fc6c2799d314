"""Compare the outcomes of LangChain's standard tests with the committed list.

A suite may add tests, drop them, or begin to skip some: none of that goes unseen.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

LIST: Final = Path(__file__).with_name("standard_tests.txt")
REWRITE: Final = "KVCACHE_RAG_WRITE_STANDARD"
_HEAD: Final = (
    "# Outcomes of LangChain's standard tests (langchain-tests), compared by every test run.\n"
    f"# Written by {REWRITE}=1 pytest integrations/langchain-kvcache-rag/tests -k standard\n"
)


class StandardOutcomes:
    """A pytest plugin; complete only where whole files were run in this process."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}
        self._collected: dict[str, int] = {}
        self._deselected = False

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            if item.path.name.startswith("test_standard_"):
                self._collected[item.path.name] = self._collected.get(item.path.name, 0) + 1

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._deselected |= any(item.path.name.startswith("test_standard_") for item in items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, test = report.nodeid.rpartition("/")[2].partition("::")
        if not file.startswith("test_standard_") or (report.when != "call" and report.passed):
            return
        self._seen[f"{file}::{test}"] = _outcome(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        whole = not self._deselected and not any("::" in one for one in session.config.args)
        ran = len(self._seen) == sum(self._collected.values())
        if not self._seen or not whole or not ran or hasattr(session.config, "workerinput"):
            return
        files = set(self._collected)
        found = sorted(f"{name}  {outcome}" for name, outcome in self._seen.items())
        known = [line for line in LIST.read_text(encoding="utf-8").splitlines() if "::" in line]
        listed = [line for line in known if line.partition("::")[0] in files]
        if os.environ.get(REWRITE):
            kept = [line for line in known if line not in listed]
            lines = "".join(f"{line}\n" for line in sorted([*kept, *found]))
            LIST.write_text(_HEAD + lines, encoding="utf-8")
            return
        changed = [f"- {one}" for one in listed if one not in found]
        changed += [f"+ {one}" for one in found if one not in listed]
        if changed:
            _say(session, [f"{LIST.name} is not what the standard tests gave:", *changed])
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"{'xfailed' if report.skipped else 'xpassed'}: {report.wasxfail}"
    if report.skipped:
        reason: Any = report.longrepr
        return f"skipped: {reason[2].removeprefix('Skipped: ')}"
    return str(report.outcome)


def _say(session: pytest.Session, lines: Sequence[str]) -> None:
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    reporter.ensure_newline()
    for line in lines:
        reporter.write_line(line, red=True)
