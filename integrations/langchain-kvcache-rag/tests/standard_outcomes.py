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
    f"# Written by {REWRITE}=1 pytest integrations/langchain-kvcache-rag/tests/test_standard_*\n"
)
_NAME: Final = "standard-outcomes"
_SELECTIONS: Final = ("keyword", "markexpr", "deselect", "lf", "stepwise")


def pytest_configure(config: pytest.Config) -> None:
    """For conftests: of those that have it, a process may meet one alone."""
    if not config.pluginmanager.has_plugin(_NAME):
        config.pluginmanager.register(StandardOutcomes(), _NAME)


class StandardOutcomes:
    """A pytest plugin of the process that hears of all reports; under xdist it collects nothing."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path, _, test = report.nodeid.partition("::")
        file = path.rpartition("/")[2]
        if file.startswith("test_standard_") and (report.when == "call" or not report.passed):
            self._seen[f"{file}::{test}"] = _outcome(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._seen or hasattr(session.config, "workerinput") or _is_partial(session):
            return
        lines = [f"{name}  {outcome}" for name, outcome in self._seen.items()]
        known = [line for line in LIST.read_text(encoding="utf-8").splitlines() if "::" in line]
        files = {line.partition("::")[0] for line in (*lines, *known)}
        files = {file for file in files if _is_whole(file, session.config)}
        found = sorted(line for line in lines if line.partition("::")[0] in files)
        listed = [line for line in known if line.partition("::")[0] in files]
        if os.environ.get(REWRITE):
            kept = [line for line in known if line not in listed]
            text = "".join(f"{line}\n" for line in sorted([*kept, *found]))
            LIST.write_text(_HEAD + text, encoding="utf-8")
            return
        changed = [f"- {one}" for one in listed if one not in found]
        changed += [f"+ {one}" for one in found if one not in listed]
        if changed:
            _say(session, [f"{LIST.name} is not what the standard tests gave:", *changed])
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_partial(session: pytest.Session) -> bool:
    """Whether tests were chosen one by one, or the run was ended early."""
    if any(session.config.getoption(name, None) for name in _SELECTIONS):
        return True
    stopped = session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return stopped or bool(session.shouldfail or session.shouldstop)


def _is_whole(file: str, config: pytest.Config) -> bool:
    """Whether a file, or a folder around it, was asked for."""
    path = LIST.with_name(file).resolve()
    asked = {(config.invocation_params.dir / one).resolve() for one in config.args}
    return not asked.isdisjoint((path, *path.parents))


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"{'xfailed' if report.skipped else 'xpassed'}: {report.wasxfail}"
    if report.skipped:
        reason: Any = report.longrepr
        return f"skipped: {reason[2].removeprefix('Skipped: ')}"
    return str(report.outcome)


def _say(session: pytest.Session, lines: Sequence[str]) -> None:
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    reporter.line("")  # ends that of the last dots
    for line in lines:
        reporter.write_line(line, red=True)
