"""Whether tests notice a wrong law: the core with one at a time, at which a named test must fail.

    python tests/mutants.py                      # all of `mutants.toml`
    python tests/mutants.py signing "the query"  # those with such words in law, area or file

A survivor is a law without a test: write the test, then name it there.  The checkout is never
written to: a copy of `src` is, and tests run against that in a process of its own, forked from this
one, which has loaded the libraries, as that takes longer than the tests.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

ROOT: Final = Path(__file__).resolve().parent.parent
TABLE: Final = Path(__file__).with_suffix(".toml")
PACKAGE: Final = "kvcache_rag"
FORKED: Final = multiprocessing.get_context("fork")
SECONDS: Final = 300  # of one test: a mutant that hangs was not noticed by a test

# What is loaded once; nothing of ours may be among it.
LIBRARIES: Final = (
    "hypothesis",
    "torch",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)


OPTIONS: Final = (
    *("-q", "--no-header", "-p", "no:cacheprovider"),
    *("--hypothesis-seed=0", f"--timeout={SECONDS}"),
    "-Wignore::pytest.PytestAssertRewriteWarning",  # of plugins that libraries have loaded
)


class UnusableError(Exception):
    """A row of the table that says nothing about the tests: stale, misspelt or no Python."""


@dataclass(frozen=True)
class Mutant:
    """A wrong law.

    Attributes:
        law: What is wrong then, in a sentence.
        area: What it is about.
        file: Of the package.
        old: What stands there, exactly once.
        new: What stands there instead.
        tests: Ids of tests, at least one of which has to fail.
        mended: The commit that mended it, if it was like that once.
    """

    law: str
    area: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    mended: str = ""

    def text(self, package: Path) -> str:
        """The file as it is with the wrong law."""
        path = package / self.file
        found = path.read_text("utf-8").count(self.old) if path.is_file() else 0
        if found != 1:
            raise UnusableError(f"stale: its text stands {found} times in {self.file}: {self.law}")
        text = path.read_text("utf-8").replace(self.old, self.new)
        try:
            compile(text, self.file, "exec")
        except SyntaxError as error:
            raise UnusableError(f"no Python ({error}): {self.law}") from error
        return text

    def write(self, package: Path) -> None:
        text, path = self.text(package), package / self.file
        path.write_text(text, "utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()

    def has(self, part: str) -> bool:
        return part.casefold() in f"{self.law}\n{self.area}\n{self.file}".casefold()


@dataclass(frozen=True)
class Outcome:
    """How tests ended against a copy.

    Attributes:
        seconds: How long they took.
        words: The end of what pytest said.
        passed: Ids of those that passed.
        failures: What went wrong otherwise: test, phase, kind of error, its first line, and whether
            it is an assertion or an error of ours in the test itself.
    """

    seconds: float
    words: str
    passed: Sequence[str] = ()
    failures: Sequence[dict[str, Any]] = ()

    @property
    def is_noticed(self) -> bool:
        return any(failure["is_about_the_law"] for failure in self.failures)


def table() -> list[Mutant]:
    """All mutants."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    rows = tomllib.loads(TABLE.read_text("utf-8"))["mutant"]
    mutants = [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]
    twice = {one.law for one in mutants if sum(one.law == other.law for other in mutants) > 1}
    if twice:
        raise UnusableError(f"two rows have one name: {', '.join(twice)}")
    return mutants


# ------------------------------------------------------------------ in a process of its own
class Watcher:
    """Notes how tests end."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failures: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_exception_interact(self, call: Any, report: Any) -> None:
        from kvcache_rag.errors import KVCacheRagError

        error = call.excinfo.value
        # Hypothesis raises what several examples failed for as one.
        first = getattr(error, "exceptions", (error,))[0]
        says = str(first).strip().partition("\n")[0][:200]
        phase = getattr(report, "when", "collection")
        is_of_test = isinstance(first, (AssertionError, pytest.fail.Exception, KVCacheRagError))
        self.failures.append(
            {
                "test": report.nodeid,
                "phase": phase,
                "kind": type(first).__name__,
                "says": says,
                "is_about_the_law": phase == "call" and is_of_test and "Timeout" not in says,
            }
        )


def within(source: Path, tests: Sequence[str]) -> None:
    """Run tests against a copy, and write beside it how they ended."""
    output = os.open(source.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of processes that tests begin
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(source.parent / "hypothesis")
    os.chdir(ROOT)
    sys.path.insert(0, str(source))  # before what is installed, which is the checkout
    import kvcache_rag

    if not Path(kvcache_rag.__file__).is_relative_to(source):
        raise UnusableError(f"tests would import {kvcache_rag.__file__}, not the copy")
    watcher = Watcher()
    pytest.main([*OPTIONS, *tests], plugins=[watcher])
    (source.parent / "report.json").write_text(json.dumps(vars(watcher)), "utf-8")


# ------------------------------------------------------------------ all of them
def ended(original: Path, tests: Sequence[str], mutant: Mutant | None = None) -> Outcome:
    """How tests end against a copy of `src` with a mutant, in a child; the copy goes."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=original.parent) as name:
        folder = Path(name)
        # With what Python compiled; its files keep their times.
        shutil.copytree(original / PACKAGE, folder / "src" / PACKAGE)
        if mutant is not None:
            mutant.write(folder / "src" / PACKAGE)
        child = FORKED.Process(target=within, args=(folder / "src", tests))
        child.start()
        child.join()
        words = (folder / "output.txt").read_text("utf-8", "replace").strip().splitlines()[-15:]
        report = folder / "report.json"
        ends = json.loads(report.read_text("utf-8")) if report.is_file() else {}
    return Outcome(time.perf_counter() - started, "\n".join(words), **ends)


def plain_failures(
    source: Path, mutants: Sequence[Mutant], pool: Executor, workers: int
) -> list[str]:
    """What is wrong with the named tests as the code is."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    parts = filter(None, (tests[first::workers] for first in range(workers)))
    ends = list(pool.map(lambda part: ended(source, part), parts))
    passed = {test for outcome in ends for test in outcome.passed}
    wrong = {
        test
        for test in tests
        if not any(one == test or one.startswith((f"{test}[", f"{test}::")) for one in passed)
    }
    wrong |= {failure["test"] for outcome in ends for failure in outcome.failures}
    return [*(outcome.words for outcome in ends if wrong), *sorted(wrong)]


def survivor(mutant: Mutant, outcome: Outcome) -> str:
    """Why a mutant counts as not noticed."""
    lines = ["SURVIVED"]
    for failure in outcome.failures:
        what = "{phase} of {test}: {kind}: {says}".format(**failure)
        lines.append(f"  that is no test of a law: {what}")
    if not outcome.passed and not outcome.failures:
        lines.append(outcome.words)
    return "\n".join([*lines, *(f"  should have failed: {test}" for test in mutant.tests)])


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Try mutants; 1 if one survives or cannot be tried."""
    parser = argparse.ArgumentParser(prog="tests/mutants.py", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="NAME-PART", help="of a law, an area, a file")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default 2)")
    given = parser.parse_args()
    parts, workers = given.parts, max(1, given.workers)
    mutants = [one for one in table() if not parts or any(map(one.has, parts))]
    if not mutants:
        parser.error(f"no mutant has {' or '.join(parts)}")
    for mutant in mutants:
        mutant.text(ROOT / "src" / PACKAGE)
    started, survivors = time.perf_counter(), 0
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    for library in LIBRARIES:
        import_module(library)
    with (
        tempfile.TemporaryDirectory(prefix="kvcache-rag-mutants-") as name,
        ThreadPoolExecutor(workers) as pool,
    ):
        source = Path(name).resolve() / "src"
        shutil.copytree(ROOT / "src" / PACKAGE, source / PACKAGE)
        wrong = plain_failures(source, mutants, pool, workers)
        if wrong:
            say("\n".join(["these do not pass as the code is:", *wrong]))
            return 1
        say(f"the tests pass, {time.perf_counter() - started:.0f} s")
        outcomes = pool.map(lambda mutant: ended(source, mutant.tests, mutant), mutants)
        for number, (mutant, outcome) in enumerate(zip(mutants, outcomes, strict=True), 1):
            survivors += not outcome.is_noticed
            said = "noticed" if outcome.is_noticed else survivor(mutant, outcome)
            place = f"{number:3}/{len(mutants)} {outcome.seconds:4.0f} s"
            say(f"{place} {mutant.area}: {mutant.law}: {said}")
    minutes = (time.perf_counter() - started) / 60
    say(f"{len(mutants) - survivors} of {len(mutants)} noticed, {minutes:.1f} minutes")
    return int(survivors > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UnusableError as problem:
        sys.exit(str(problem))
